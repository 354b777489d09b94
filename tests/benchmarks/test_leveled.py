"""What benchmarks make of cores on two levels, and of memory that neighbours take."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cores import DISTURBED, disturbed_share, state_shares
from benchmarks.leveled import (
    at_share,
    busy_level,
    mixed,
    share_of,
    slowdown_key,
    slowdown_of,
    slowdown_words,
)
from llmpq.profiler.levels import Slowdown
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

DECODE = Slowdown(((1, 1.5), (16, 1.1)))


def table_of(share: str = "40%") -> LatencyTable:
    samples = tuple(
        LatencySample(phase=phase, bits=bits, batch=batch, tokens=8, seconds=1.0)
        for phase in Phase for bits in (0, 4) for batch in (1, 4, 16)
    )  # fmt: skip
    slowdowns = [
        (slowdown_key(phase, bits), slowdown_words(DECODE)) for phase in Phase for bits in (0, 4)
    ]
    return LatencyTable(
        samples=samples,
        provenance=(
            ("stage_s", "prefill 0.5 decode 0.25"),
            ("disturbed", "prefill 1.2 decode 1.4"),
            ("disturbed share", f"{share} of the timings"),
            *slowdowns,
        ),
    )


def test_a_table_tells_how_rows_suffer():
    assert slowdown_of(table_of(), Phase.DECODE, 4) == DECODE
    assert share_of(table_of()) == 0.4
    found = {
        (one.phase, one.batch): one.seconds for one in at_share(table_of(), 1.0).samples if one.bits
    }
    assert found[Phase.DECODE, 1] == pytest.approx(1.5)
    assert found[Phase.DECODE, 4] == pytest.approx(1.3)  # half way in octaves
    assert found[Phase.DECODE, 16] == pytest.approx(1.1)
    assert found[Phase.PREFILL, 1] == pytest.approx(1.2)  # eight rows
    assert dict(at_share(table_of(), 0.5).provenance)["stage_s"] == "prefill 0.55 decode 0.3"


@given(share=st.floats(0, 1))
def test_a_table_is_brought_back_to_the_calm_level(share):
    there_and_back = at_share(at_share(table_of(), share), -share)
    for one in there_and_back.samples:
        assert one.seconds == pytest.approx(1.0)


@given(
    loops=st.lists(
        st.lists(st.sampled_from([1.0, 2.0]), min_size=1, max_size=40), min_size=1, max_size=3
    )
)
def test_states_of_cores_fill_the_time(loops):
    shares = state_shares(loops, 1.0)
    assert sum(shares.values()) == pytest.approx(1.0)
    if len({len(own) for own in loops}) == 1:
        alone = [sum(s for state, s in shares.items() if state[core]) for core in range(len(loops))]
        assert sum(alone) / len(alone) == pytest.approx(disturbed_share(loops, 1.0))


def test_looks_at_the_same_moment_are_one_state():
    slow = 1.1 * DISTURBED
    assert state_shares([[1, 1, slow, slow], [1, slow, slow, slow]], 1.0) == {
        (False, False): 0.25, (False, True): 0.25, (True, True): 0.5,
    }  # fmt: skip
    # One of them looked half as often.
    assert state_shares([[1, 1, slow, slow], [1, slow]], 1.0) == {
        (False, False): 0.5, (True, True): 0.5,
    }  # fmt: skip


@given(rates=st.lists(st.floats(1, 100), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_rates_add_up_and_times_are_their_inverse(rates, seed):
    chance = random.Random(seed)
    weights = [chance.random() + 0.01 for _ in rates]
    by_state = {(bool(n & 1), bool(n & 2)): {"tokens_per_s": rate, "seconds": 1000.0 / rate}
                for n, rate in enumerate(rates)}  # fmt: skip
    shares = {s: w / sum(weights) for s, w in zip(by_state, weights, strict=True)}
    found = mixed(by_state, shares)
    assert found["seconds"] == pytest.approx(1000.0 / found["tokens_per_s"])
    assert min(rates) - 1e-9 <= found["tokens_per_s"] <= max(rates) + 1e-9


def test_a_busy_core_makes_fewer_steps_in_disturbed_time():
    # In half of the time a step takes twice as long: of three steps, one.
    assert busy_level(2.0, 0.5) == pytest.approx(4 / 3)
    assert busy_level(2.0, 0.0) == 1.0
    assert busy_level(2.0, 1.0) == 2.0
