"""The switch is measured once a machine, kept, and never trusted blindly."""

import json
from pathlib import Path

import pytest

from llmpq.kernels import switch
from llmpq.kernels.native import has_bf16_products, library

pytestmark = pytest.mark.skipif(
    library() is None or not has_bf16_products(), reason="no bf16 kernels here"
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own for what is measured."""
    monkeypatch.setattr(switch, "kernels_path", lambda _: tmp_path / "kernels.so")
    switch.few_rows_limit.cache_clear()
    yield tmp_path / "kernels.json"
    switch.few_rows_limit.cache_clear()


@pytest.mark.parametrize("bits", [3, 4])
def test_the_switch_is_one_of_the_counts_tried(kept, bits):
    assert switch.few_rows_limit(bits) in (1, *switch.TRIED_ROWS)


def test_what_was_measured_is_kept_for_the_next_process(kept, monkeypatch):
    monkeypatch.setattr(switch, "_measure", lambda _: 12)
    assert switch.few_rows_limit(4) == 12
    switch.few_rows_limit.cache_clear()
    monkeypatch.setattr(switch, "_measure", lambda _: pytest.fail("measured again"))
    assert switch.few_rows_limit(4) == 12
    assert [key.rpartition(", ")[2] for key in json.loads(kept.read_text())] == ["4 bits"]


def test_what_another_process_measured_meanwhile_counts(kept, monkeypatch):
    read = switch._read

    def look_too_early(path: Path) -> dict[str, int]:
        found = read(path)
        path.write_text(json.dumps({f"{switch._processor()}, 4 bits": 20}))
        return found

    monkeypatch.setattr(switch, "_read", look_too_early)
    monkeypatch.setattr(switch, "_measure", lambda _: pytest.fail("measured again"))
    assert switch.few_rows_limit(4) == 20


@pytest.mark.parametrize(
    "found", ["", "[1]", '{"other": 4, "worse": "x"}', '{"a": -1, "b": 10000}']
)
def test_a_file_that_is_not_ours_is_measured_anew(kept, found, monkeypatch):
    kept.write_text(found)
    monkeypatch.setattr(switch, "_measure", lambda _: 8)
    assert switch.few_rows_limit(3) == 8
    known = json.loads(kept.read_text())
    assert all(value in (4, 8) for value in known.values())


def test_eight_bits_are_always_decoded_first(kept):
    assert switch.few_rows_limit(8) == 0
    assert not kept.exists()
