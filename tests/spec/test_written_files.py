"""Files that several writers replace at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from llmpq.spec.fields import write_text

WRITES = 300


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path):
    file = tmp_path / "health.json"

    def write(text: str) -> None:
        for _ in range(WRITES):
            write_text(file, text)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, "abcd"))
    assert file.read_text() in set("abcd")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
