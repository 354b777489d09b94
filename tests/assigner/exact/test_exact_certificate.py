"""The certificate, checked by arithmetic that is independent of the core."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from exact_cases import Shape, best_value, random_space

from llmpq.assigner.constraints.resolve import Deadline
from llmpq.assigner.exact import search
from llmpq.assigner.exact.search import PairProof, solve_exact
from llmpq.assigner.objective import PairCosts, SearchSpace

SHAPES = (
    Shape(counts=(2, 1), layers=5, pairs=6, memory=0.6),
    Shape(counts=(1, 1, 1), layers=5, pairs=6, memory=1.5, formula="paper"),
    Shape(counts=(2, 2), layers=4, pairs=6, memory=0.8, link=3.0),
    Shape(counts=(2, 1), layers=5, pairs=6, memory=1.5, budget=0.5),
)


def weights(space: SearchSpace, pair: PairCosts) -> tuple[float, float, float, float]:
    """Weights of the largest prefill and decode times, of the decode sum, and of its branch."""
    rounds = pair.new_tokens - 1
    if space.formula == "paper":
        return pair.prefill_batches - 1, rounds * (pair.decode_batches - 1), 1.0, 0.0
    return pair.prefill_batches - 1, rounds * pair.decode_batches, 0.0, pair.decode_batches


def noncontiguous_bound(space: SearchSpace, pair: PairCosts, multipliers: np.ndarray) -> float:
    """The Lagrangian without contiguity and links: the cheapest group and width of each layer."""
    size, counts = space.num_groups, np.array(space.group_counts)
    peak_prefill, peak_decode, sums, branch = weights(space, pair)
    mu, nu = multipliers[:size], multipliers[2 * size : 3 * size]
    links = multipliers[size : 2 * size].sum(), multipliers[3 * size : 4 * size].sum()
    alpha, memory = multipliers[4 * size], multipliers[4 * size + 1 : 5 * size + 1]
    kappa = multipliers[7 * size + 1]
    assert (multipliers >= 0).all()
    assert (counts * mu).sum() + links[0] <= peak_prefill * (1 + 1e-9) + 1e-12
    spent = (counts * nu).sum() + links[1] + branch * alpha
    assert spent <= peak_decode * (1 + 1e-9) + 1e-12
    unit = pair.layer_bytes.mean()
    price = (
        (1 + mu)[:, None, None] * pair.prefill_s
        + (sums + alpha + nu)[:, None, None] * pair.decode_s
        + memory[:, None, None] * pair.layer_bytes / unit
    )
    price[pair.layer_bytes.min(axis=(1, 2)) > pair.capacity_bytes] = np.inf
    layers = price[:, space.kinds] + (space.theta_s + kappa) * space.omega
    held = pair.capacity_bytes.clip(0)
    master = (
        (1 + mu) * pair.master_prefill_s
        + (sums + alpha + nu) * pair.master_decode_s
        + memory * (held - pair.first_capacity_bytes) / unit
    )
    master[pair.first_capacity_bytes < 0] = np.inf
    bound = layers.min(axis=(0, 2)).sum() + master.min() - (counts * memory * held / unit).sum()
    if space.quality_budget is not None:
        bound -= kappa * space.quality_budget
    return float(bound)


def proofs(shape: Shape, seed: int) -> list[tuple[SearchSpace, PairCosts, PairProof, float]]:
    space = random_space(np.random.default_rng(seed), shape)
    result = solve_exact(space, orders="types")
    return [
        (space, pair, proof, result.value_s)
        for pair, proof in zip(space.pairs, result.proofs, strict=True)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_no_plan_of_a_pair_is_below_its_proof(shape: Shape, seed: int) -> None:
    for space, pair, proof, _ in proofs(shape, seed):
        best = best_value(replace(space, pairs=(pair,)), "types")
        assert best >= proof.bound_s * (1 - 1e-9) or math.isinf(best)
        assert proof.reason != "memory" or math.isinf(best)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_pair_is_closed_above_the_answer(shape: Shape) -> None:
    for _, _, proof, value_s in proofs(shape, 1):
        assert proof.reason != "open"
        assert proof.bound_s >= value_s * (1 - 1e-6)


def test_multipliers_of_a_noncontiguous_proof_attain_its_bound_by_plain_arithmetic() -> None:
    checked = 0
    for seed in range(6):
        for shape in SHAPES:
            for space, pair, proof, _ in proofs(replace(shape, link=0.0), seed):
                if proof.reason == "noncontiguous":
                    found = noncontiguous_bound(space, pair, np.array(proof.multipliers))
                    # The budget is held with the slack of objective.within_budget.
                    assert found == pytest.approx(proof.bound_s, rel=1e-7)
                    checked += 1
    assert checked >= 10


@pytest.mark.parametrize("seed", range(6))
def test_at_the_time_limit_the_incumbent_has_a_valid_gap(seed: int) -> None:
    space = random_space(np.random.default_rng(seed), SHAPES[seed % 3])
    best = best_value(space, "types")
    result = solve_exact(space, orders="types", deadline=Deadline(0.0, lambda: 1.0))
    assert result.bound_s <= best * (1 + 1e-9)
    assert best <= result.value_s * (1 + 1e-9)
    assert any(proof.reason == "open" for proof in result.proofs)


@pytest.mark.parametrize("cap", ["MAX_COLUMNS", "MAX_LABELS"])
@pytest.mark.parametrize("seed", range(4))
def test_over_a_limit_the_incumbent_has_a_valid_gap(
    monkeypatch: pytest.MonkeyPatch, cap: str, seed: int
) -> None:
    space = random_space(np.random.default_rng(seed), SHAPES[seed % 3])
    best = best_value(space, "types")
    monkeypatch.setattr(search, cap, 2)
    result = solve_exact(space, orders="types")
    assert result.bound_s <= best * (1 + 1e-9)
    assert best <= result.value_s * (1 + 1e-9)
    assert result.gap > 0


def test_the_requested_gap_is_kept() -> None:
    space = random_space(np.random.default_rng(5), Shape(counts=(2, 2), layers=8, pairs=4))
    result = solve_exact(space, orders="all", gap=0.05)
    assert result.gap <= 0.05
    assert result.value_s <= solve_exact(space, orders="all").value_s / 0.95


def test_progress_ends_with_every_pair_settled() -> None:
    space = random_space(np.random.default_rng(5), Shape(counts=(2, 1), layers=5, pairs=4))
    seen: list[tuple[int, int, float | None]] = []
    result = solve_exact(space, orders="types", progress=lambda *now: seen.append(now))
    assert seen[-1] == (4, 4, result.value_s)
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
