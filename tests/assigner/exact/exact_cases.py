"""Random small problems, and an oracle that tries everything with plain array arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from llmpq.assigner.enumeration import device_orders
from llmpq.assigner.objective import PairCosts, SearchSpace
from llmpq.spec.plan import MicroBatching
from llmpq.spec.runtime_constants import STREAM_BUFFERS


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a random problem is like."""

    counts: tuple[int, ...] = (2, 1)
    layers: int = 4
    widths: int = 3
    kinds: int = 1
    pairs: int = 2
    formula: str = "steady"
    memory: float = 0.7  # share of "every layer at the widest" that all devices hold together
    link: float = 1.0  # sends relative to a layer's time
    theta: float = 1.0
    budget: float | None = None  # share of the degradation of "all at the narrowest"
    equal_links: bool = False


def random_space(rng: np.random.Generator, shape: Shape) -> SearchSpace:
    groups, widths = len(shape.counts), shape.widths
    kinds = np.sort(rng.integers(0, shape.kinds, shape.layers))
    rng.shuffle(kinds)
    kinds[: shape.kinds] = np.arange(shape.kinds)
    speed = np.exp(rng.normal(0, 0.6, (groups, 1, 1)))
    size = 1000 * np.linspace(1.0, 0.25, widths) * rng.uniform(0.7, 1.4, (shape.kinds, 1))
    size = np.tile(np.round(size + rng.uniform(0, 100))[None], (groups, 1, 1)).astype(np.int64)
    total = size[0, kinds, 0].sum() * shape.memory
    share = rng.dirichlet(np.full(sum(shape.counts), 4.0))
    capacity = np.array(
        [share[sum(shape.counts[:t]) : sum(shape.counts[: t + 1])].mean() for t in range(groups)]
    )
    omega = np.sort(rng.exponential(1.0, (shape.layers, widths)), axis=1)
    omega[:, 0] = 0.0
    omega /= omega.sum()
    space = SearchSpace(
        pairs=tuple(
            _random_pair(rng, shape, speed, size, (total * capacity).astype(np.int64))
            for _ in range(shape.pairs)
        ),
        group_counts=shape.counts,
        kinds=kinds.astype(np.int64),
        bits=tuple(range(16, 16 - widths, -1)),
        omega=omega,
        theta_s=shape.theta * shape.layers * float(rng.uniform(0.5, 20)),
        quality_budget=None,
        formula=shape.formula,
    )
    if shape.budget is None:
        return space
    return replace(space, quality_budget=shape.budget * float(omega[:, -1].sum()))


def _random_pair(
    rng: np.random.Generator,
    shape: Shape,
    speed: np.ndarray,
    size: np.ndarray,
    capacity: np.ndarray,
) -> PairCosts:
    groups, kinds, _ = size.shape
    prefill = speed * rng.uniform(0.5, 2.0, (1, kinds, 1)) * rng.uniform(0.6, 1.6, size.shape)
    decode = 0.3 * speed * rng.uniform(0.5, 2.0, (1, kinds, 1)) * rng.uniform(0.6, 1.6, size.shape)

    def links() -> np.ndarray:
        if shape.equal_links:
            return np.full((groups, groups), shape.link * rng.uniform(0.1, 1.0))
        return shape.link * rng.exponential(0.5, (groups, groups))

    runtime, temporary = rng.integers(10, 50, groups), rng.integers(0, 30, groups)
    return PairCosts(
        micro_batching=MicroBatching(prefill=int(rng.integers(1, 9)), decode=1),
        prefill_batches=int(rng.integers(1, 6)),
        decode_batches=int(rng.integers(1, 6)),
        new_tokens=int(rng.integers(1, 12)),
        prefill_s=prefill,
        decode_s=decode,
        layer_bytes=size,
        host_bytes=np.zeros_like(size),
        host_capacity_bytes=np.zeros(groups, dtype=np.int64),
        stream_bytes=np.zeros_like(size),
        stream_prefill_s=np.zeros(groups),
        stream_decode_s=np.zeros(groups),
        kv_bytes=np.zeros(kinds, dtype=np.int64),
        total_bytes=capacity + runtime + temporary,
        runtime_bytes=runtime,
        temporary_bytes=temporary,
        master_bytes=(capacity * rng.uniform(0, 0.6, groups)).astype(np.int64),
        master_prefill_s=rng.uniform(0, 1.0, groups),
        master_decode_s=rng.uniform(0, 0.4, groups),
        send_prefill_s=links(),
        send_decode_s=0.3 * links(),
        return_prefill_s=links(),
        return_decode_s=0.3 * links(),
    )


def with_disks(rng: np.random.Generator, space: SearchSpace) -> SearchSpace:
    """The same problem where weights of some groups may rest on disks of any speed."""
    kept = rng.uniform(0, 0.2)
    has_disk = rng.random(space.num_groups) < 0.85
    speed = np.exp(rng.normal(0, 1.5, space.num_groups))  # of reading, relative to computing
    pairs = []
    for pair in space.pairs:
        byte_s = pair.decode_s.mean() / pair.layer_bytes.mean() / speed
        passes = float(rng.integers(1, 4))
        pairs.append(
            replace(
                pair,
                stream_bytes=(pair.layer_bytes * (1 - kept)).astype(np.int64)
                * has_disk[:, None, None],
                stream_prefill_s=passes * byte_s * has_disk,
                stream_decode_s=byte_s * has_disk,
            )
        )
    return replace(space, pairs=tuple(pairs))


def with_hosts(rng: np.random.Generator, space: SearchSpace) -> SearchSpace:
    """The same problem where hosts of some groups may hold a part of layers, as further widths."""
    kept = rng.uniform(0.05, 0.5)
    has_host = rng.random(space.num_groups) < 0.85
    is_possible = (rng.random(space.pairs[0].layer_bytes.shape[:2]) < 0.85) & has_host[:, None]
    # From room for less than a layer of a device to room for all layers at all widths.
    room = np.exp(rng.uniform(-1, 2.5, space.num_groups)) * has_host
    slower = np.exp(rng.normal(0, 1.0, space.num_groups))[:, None, None]
    pairs = []
    for pair in space.pairs:
        own = np.where(is_possible[:, :, None], (kept * pair.layer_bytes).astype(np.int64), 10**9)
        apart = np.where(is_possible[:, :, None], pair.layer_bytes - own, 0)
        pairs.append(
            replace(
                pair,
                prefill_s=np.concatenate([pair.prefill_s, slower * pair.prefill_s], axis=2),
                decode_s=np.concatenate([pair.decode_s, slower * pair.decode_s], axis=2),
                layer_bytes=np.concatenate([pair.layer_bytes, own], axis=2),
                stream_bytes=np.tile(pair.stream_bytes, 2),
                host_bytes=np.concatenate([0 * apart, apart], axis=2),
                host_capacity_bytes=(room * pair.layer_bytes.mean()).astype(np.int64),
            )
        )
    limits = (
        None if space.limits is None else space.limits.of_columns([*range(len(space.bits))] * 2)
    )
    return replace(
        space,
        pairs=tuple(pairs),
        bits=(*space.bits, *space.bits),
        omega=np.tile(space.omega, 2),
        limits=limits,
    )


def best_value(space: SearchSpace, orders: str) -> float:
    """Try every order, placement and choice of bitwidths; infinite when nothing is feasible."""
    return min(
        _best_of_order(space, pair, order)
        for pair in space.pairs
        for order in device_orders(space.group_counts, orders)
    )


def _best_of_order(space: SearchSpace, pair: PairCosts, order: tuple[int, ...]) -> float:
    layers = space.num_layers
    # Of each layer a width, and where there are disks whether its weights rest there.
    variants = len(space.bits) * (1 + bool(pair.stream_bytes.any()))
    variants_of = np.array(list(itertools.product(range(variants), repeat=layers)))
    choices, on_disk = variants_of % len(space.bits), variants_of >= len(space.bits)
    every = np.arange(layers)
    quality = space.omega[every, choices].sum(axis=1)
    best = np.inf
    for places in itertools.combinations_with_replacement(range(len(order)), layers):
        value, fits = _values(space, pair, order, (np.array(places), choices, on_disk))
        if space.quality_budget is not None:
            fits &= quality <= space.quality_budget * (1 + 1e-9) + 1e-15
        fits &= _obeys(space, np.array(order)[list(places)], choices)
        value = np.where(fits, value + space.theta_s * quality, np.inf)
        best = min(best, float(value.min()))
    return best


def _obeys(space: SearchSpace, groups: np.ndarray, choices: np.ndarray) -> np.ndarray:
    """Which choices of bitwidths keep the manual decisions, for the group of every layer."""
    if space.limits is None:
        return np.ones(len(choices), dtype=bool)
    limits, every = space.limits, np.arange(space.num_layers)
    kept = limits.layer_widths[every, choices] & limits.group_widths[groups, choices]
    ranges = all(
        np.flatnonzero(groups == group).tolist() == list(range(first, end))
        for group, first, end in limits.ranges
    )
    used = set(limits.used) <= set(groups.tolist())
    return kept.all(axis=1) & ranges & used


def _values(
    space: SearchSpace,
    pair: PairCosts,
    order: tuple[int, ...],
    plans: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> tuple[np.ndarray, np.ndarray]:
    """Latency and fit of one placement at every choice of variants: the formulas once more."""
    places, choices, on_disk = plans
    used = sorted({0, *places.tolist()})
    fits = np.ones(len(choices), dtype=bool)
    prefill, decode = [], []
    for position in used:
        group = order[position]
        mine = np.flatnonzero(places == position)
        cell = (group, space.kinds[mine], choices[:, mine])
        first = position == 0
        read = pair.stream_bytes[cell] * on_disk[:, mine]
        fits &= (read > 0).sum(axis=1) == on_disk[:, mine].sum(axis=1)
        computed = pair.prefill_s[cell].sum(axis=1) + first * pair.master_prefill_s[group]
        prefill.append(np.maximum(computed, read.sum(axis=1) * pair.stream_prefill_s[group]))
        computed = pair.decode_s[cell].sum(axis=1) + first * pair.master_decode_s[group]
        decode.append(np.maximum(computed, read.sum(axis=1) * pair.stream_decode_s[group]))
        room = (pair.first_capacity_bytes if first else pair.capacity_bytes)[group]
        held = pair.layer_bytes[cell].sum(axis=1) - read.sum(axis=1)
        held += STREAM_BUFFERS * read.max(axis=1, initial=0)
        fits &= held <= room
        fits &= pair.host_bytes[cell].sum(axis=1) <= pair.host_capacity_bytes[group]
    hops = [(order[a], order[b]) for a, b in itertools.pairwise(used)]
    back = (order[used[-1]], order[0])
    alone = len(used) == 1
    sends = [[pair.send_prefill_s[hop] for hop in hops], [pair.send_decode_s[hop] for hop in hops]]
    sends[0] += [] if alone else [pair.return_prefill_s[back]]
    sends[1] += [] if alone else [pair.return_decode_s[back]]
    slowest = [
        np.max([*times, *(np.full(len(choices), s) for s in send)], axis=0)
        for times, send in zip((prefill, decode), sends, strict=True)
    ]
    value = (pair.prefill_batches - 1) * slowest[0] + sum(prefill)
    rounds = pair.new_tokens - 1
    if space.formula == "paper":
        return value + rounds * (pair.decode_batches - 1) * slowest[1] + sum(decode), fits
    once = sum(decode) + sum(sends[1])
    value = value + sum(sends[0])
    return value + rounds * np.maximum(pair.decode_batches * slowest[1], once), fits
