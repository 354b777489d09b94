"""docs/reference/support.md shows the capability table as it is; run this file to write it anew."""

from pathlib import Path

from llmpq.kernels import BACKENDS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "support.md"
BEGIN = "<!-- capabilities: python tests/kernels/test_capability_docs.py writes what follows -->\n"
END = "<!-- end of capabilities -->\n"
HEAD = ("kernel", "device", "bits", "default in", "weights it takes", "bytes it keeps", "time")


def short(dtypes):
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def table():
    rows = [HEAD, ("---",) * len(HEAD)]
    for name, backend in BACKENDS.items():
        row = backend.capability
        default = short(row.default_dtypes) or "by name only"
        device = ", ".join(row.device_types) or "any"
        bits = ", ".join(map(str, row.bits))
        rows.append((f"`{name}`", device, bits, default, row.shapes, row.stored, row.cost))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def parts():
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    shown, after = rest.split(END)
    return before, shown, after


def test_the_page_shows_the_table_as_it_is():
    assert parts()[1] == table()


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
