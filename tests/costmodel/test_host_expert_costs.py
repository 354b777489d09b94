"""The law of experts in the host's memory, against draws and brute force."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmpq.costmodel.host_experts import HostExperts, distinct_experts
from llmpq.errors import SpecError

LAW = HostExperts(
    experts=128,
    chosen=8,
    on_host=100,
    expert_bytes=9_000_000,
    gather_bytes_per_s=2e10,
    host_row_s=2e-5,
    device_row_s=1e-7,
    link_bytes_per_s=1.2e10,
    hop_s=1e-5,
)


@pytest.mark.parametrize(("rows", "chosen", "experts"), [(1, 2, 8), (5, 8, 128), (64, 4, 32)])
def test_distinct_experts_are_those_of_random_choices(rows, chosen, experts):
    rng = np.random.default_rng(0)
    counts = [
        len({e for _ in range(rows) for e in rng.choice(experts, chosen, replace=False)})
        for _ in range(400)
    ]
    spread = np.std(counts) / 20
    assert distinct_experts(rows, chosen, experts) == pytest.approx(
        np.mean(counts), abs=4 * spread + 1e-9
    )


@given(st.integers(1, 512), st.integers(0, 300), st.data())
def test_distinct_experts_have_bounds_and_grow(experts, rows, data):
    chosen = data.draw(st.integers(1, experts))
    found = distinct_experts(rows, chosen, experts)
    assert 0 <= found <= min(experts, rows * chosen) + 1e-9
    assert found <= distinct_experts(rows + 1, chosen, experts) + 1e-9


@pytest.mark.parametrize("chosen", [0, 9])
def test_more_chosen_than_there_are_is_an_error(chosen):
    with pytest.raises(SpecError, match=f"found {chosen} chosen of 8, expected 1 to 8"):
        distinct_experts(1, chosen, 8)


def test_decode_by_hand():
    read_s = 100 / 128 * 8 * 9e6 / 2e10
    assert LAW.decode_s(1, 1e-3, 0.0) == pytest.approx(1e-3 + 2e-5 + read_s)
    assert LAW.decode_s(1, 1e-3, 1.0) == pytest.approx(1 + 1e-3)
    assert replace(LAW, on_host=0).decode_s(1, 1e-3, 2e-3) == pytest.approx(3e-3)


@given(st.integers(1, 4096))
def test_best_share_is_that_of_brute_force(tokens):
    shares = np.linspace(0, 1, 2001)
    best = min(LAW.prompt_s(tokens, share) for share in shares)
    found = LAW.prompt_s(tokens, LAW.best_share(tokens))
    assert found <= best * (1 + 1e-12)
    assert best <= found * 1.01


@given(st.floats(1e9, 1e11), st.floats(1e-7, 1e-4))
def test_threshold_is_the_first_prompt_that_is_faster_on_the_device(link, row_s):
    law = replace(LAW, link_bytes_per_s=link, host_row_s=row_s)
    found = law.threshold()
    if found is None:
        assert law.streamed_s(4096) >= law.host_s(4096)
    else:
        assert law.streamed_s(found) < law.host_s(found)
        assert found == 1 or law.streamed_s(found - 1) >= law.host_s(found - 1)


@given(st.integers(1, 64))
def test_more_speed_never_takes_longer(rows):
    for name in ("gather_bytes_per_s", "link_bytes_per_s"):
        faster = replace(LAW, **{name: 2 * getattr(LAW, name)})
        assert faster.decode_s(rows, 1e-3, 1e-4) <= LAW.decode_s(rows, 1e-3, 1e-4)
        share = LAW.best_share(rows)
        assert faster.prompt_s(rows, share) <= LAW.prompt_s(rows, share)
