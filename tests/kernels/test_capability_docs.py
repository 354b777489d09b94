"""The support matrix shows the capability of every kernel."""

from pathlib import Path

from llmpq.kernels import BACKENDS
from scripts.docs_site import hooks, kernels

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "support.md"


def test_built_page_shows_every_kernel_with_its_capability():
    text = PAGE.read_text(encoding="utf-8")
    assert kernels.MARKER in text
    lines = hooks.on_page_markdown(text).splitlines()
    for name, backend in BACKENDS.items():
        (row,) = (line for line in lines if line.startswith(f"| `{name}` |"))
        capability = backend.capability
        assert row.count("|") == len(kernels.HEAD) + 1
        for said in (capability.shapes, capability.stored, capability.cost):
            assert said in row
        for width in capability.bits:
            assert str(width) in row.split("|")[3]
