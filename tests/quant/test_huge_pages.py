"""Large pages lie within the weights, and nothing of these changes."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from llmpq.quant.loading.loader import PAGE_BYTES, huge_ranges, use_huge_pages

SMAPS = Path("/proc/self/smaps_rollup")


def huge_kib() -> int:
    return int(re.search(r"AnonHugePages: +(\d+) kB", SMAPS.read_text()).group(1))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=8))
def test_ranges_are_whole_pages_of_the_spans(drawn):
    half = PAGE_BYTES // 2
    spans = [(first * half, (first + count) * half) for first, count in drawn]
    covered = {place for first, end in spans for place in range(first // half, end // half)}
    ranges = huge_ranges(iter(spans))
    found = [page for first, end in ranges for page in range(first, end, PAGE_BYTES)]
    assert len(found) == len(set(found))
    assert all(page % PAGE_BYTES == 0 for page in found)
    # Every page of which both halves are covered, and no other.
    wanted = {place // 2 for place in covered if place % 2 == 0 and place + 1 in covered}
    assert {page // PAGE_BYTES for page in found} == wanted


def test_spans_that_malloc_put_side_by_side_are_one():
    third = PAGE_BYTES // 3
    spans = [(0, third), (third + 4096, 2 * third), (2 * third + 16, PAGE_BYTES + 5)]
    assert huge_ranges(iter(spans)) == [(0, PAGE_BYTES)]
    assert huge_ranges(iter([(0, third), (2 * third, PAGE_BYTES)])) == []


def test_weights_keep_their_numbers():
    module = nn.Linear(2048, 2048)  # 16 MiB
    before = module.weight.detach().clone()
    use_huge_pages(module)
    assert torch.equal(module.weight, before)


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux reports large pages")
def test_loaded_weights_lie_on_large_pages():
    modes = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = re.match(r"(\d+)\.(\d+)", Path("/proc/sys/kernel/osrelease").read_text())
    if not modes.exists() or "[never]" in modes.read_text() or int(release.group(1)) < 7 - 1:
        pytest.skip("this kernel has no large pages, or gives them in its own time")
    module = nn.Linear(4096, 4096, bias=False)  # 64 MiB
    module.weight.data.fill_(1.0)
    before = huge_kib()
    use_huge_pages(module)
    gained = huge_kib() - before
    assert gained >= 56 * 1024 or before >= 56 * 1024
