"""Device orders and micro-batch pairs of the outer loop of LLM-PQ (Algorithm 1).

Devices of one group (equal devices of one node) are interchangeable. So are *twins*: groups of as
many devices whose costs and links are equal, each to each. Orders that differ in the places of such
devices cost the same, and one of them is searched.

``build_pairs`` computes the costs of every pair. ``lower_bounds`` computes a lower bound of the
objective for every pair and first group, in one numpy sweep: the integer program is relaxed until
it decomposes by layer. Contiguity is dropped, the slowest stage of a group is replaced by the
group's average, and memory, slowest stage and quality budget get Lagrange multipliers. Any
non-negative multipliers give a valid bound; a fixed number of Adam steps (Kingma & Ba, 2015)
improves them.

Array legend of the bounds: ``M`` candidates (pair and first group), ``T`` groups, ``K`` kinds,
``B`` widths, ``U`` classes of equal layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from llmpq.assigner.objective import FloatArray, IntArray, PairCosts, SearchSpace
from llmpq.costmodel import ClusterCosts
from llmpq.errors import SpecError
from llmpq.options.plan import OrderMode
from llmpq.spec.cluster import Cluster, Device
from llmpq.spec.plan import Formula, MicroBatching, OrderSet
from llmpq.spec.precision import Phase, Variant
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS
from llmpq.spec.workload import Workload

MAX_ORDERS = 5040
"""Most orders that are listed, for integer programs."""
FEW_ORDERS = 6
"""Orders up to which integer programs try all by default: each has programs of its own."""
MAX_COUNT = 10**18
"""Where counting orders stops."""


def device_orders(
    counts: Sequence[int], mode: OrderSet, twins: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return one order of device groups of every kind of symmetric ones.

    Args:
        counts: devices of each group.
        mode: a set of orders.
        twins: the first twin of each group, as ``GroupTables.twins`` returns them; by default no
            group has a twin.

    Raises:
        SpecError: more than ``MAX_ORDERS``.
    """
    twins = range(len(counts)) if twins is None else twins
    number = num_orders(counts, mode, twins)
    if number > MAX_ORDERS:
        hint = "--orders types" if mode == "all" else "--solver exact"
        raise SpecError(
            f"device orders: found {number} of mode '{mode}' for groups of {list(counts)} devices, "
            f"expected at most {MAX_ORDERS}; use {hint}"
        )
    if mode == "all":
        return tuple(_interleavings(list(counts), (), twins))
    if mode == "leading":
        return leading_orders(counts, twins)
    return tuple(
        tuple(group for group in blocks for _ in range(counts[group]))
        for blocks in _interleavings([1] * len(counts), (), twins)
    )


def leading_orders(
    counts: Sequence[int], twins: Sequence[int] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return one order for each group as the master's, the others in file order behind it."""
    order = [group for group, count in enumerate(counts) for _ in range(count)]
    firsts = range(len(counts)) if twins is None else dict.fromkeys(twins)
    return tuple(
        (*(group for group in order if group == first), *(g for g in order if g != first))
        for first in firsts
    )


def num_orders(counts: Sequence[int], mode: OrderSet, twins: Sequence[int] | None = None) -> int:
    """Return the number of orders of all devices up to symmetry, at most ``MAX_COUNT``."""
    twins = range(len(counts)) if twins is None else twins
    if mode == "given":
        return 1
    if mode == "leading":
        return len(set(twins))
    symmetric = math.prod(math.factorial(size) for size in Counter(twins).values())
    if mode == "types":
        found = math.factorial(len(counts)) // symmetric
    else:
        equal = math.prod(math.factorial(count) for count in counts)
        found = math.factorial(sum(counts)) // equal // symmetric
    return min(found, MAX_COUNT)


def listed_orders(counts: Sequence[int], wanted: OrderMode, twins: Sequence[int]) -> OrderSet:
    """Return the orders that integer programs try: few enough to list, unless all are wanted."""
    every, blocks = (num_orders(counts, mode, twins) for mode in ("all", "types"))
    if wanted == "all" or (wanted == "auto" and every <= FEW_ORDERS):
        return "all"
    if blocks > MAX_ORDERS:
        return "leading"
    return "all" if only_blocks(counts) else "types"


def only_blocks(counts: Sequence[int]) -> bool:
    """Whether every order of these devices keeps the devices of a group together."""
    return len(counts) == 1 or max(counts) == 1


def _interleavings(
    left: list[int], prefix: tuple[int, ...], twins: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    if not any(left):
        yield prefix
        return
    for group, count in enumerate(left):
        # Of twins, the first one is used first.
        waits = group not in prefix and any(
            twins[one] == twins[group] and one not in prefix for one in range(group)
        )
        if count and not waits:
            left[group] -= 1
            yield from _interleavings(left, (*prefix, group), twins)
            left[group] += 1


_VECTORS = (
    "prefill_s",
    "decode_s",
    "layer_bytes",
    "host_bytes",
    "host_capacity_bytes",
    "stream_bytes",
    "stream_prefill_s",
    "stream_decode_s",
    "capacity_bytes",
    "first_capacity_bytes",
    "master_prefill_s",
    "master_decode_s",
)
_MATRICES = ("send_prefill_s", "send_decode_s", "return_prefill_s", "return_decode_s")


class GroupTables:
    """All costs of groups over all pairs: ``own`` is ``[T, F]``, those of links ``[T, T, F]``."""

    def __init__(self, space: SearchSpace) -> None:
        self.counts = space.group_counts
        size = space.num_groups

        def stacked(names: tuple[str, ...], shape: tuple[int, ...]) -> FloatArray:
            tables = [
                np.asarray(getattr(pair, name), dtype=np.float64).reshape(*shape, -1)
                for name in names
                for pair in space.pairs
            ]
            return np.concatenate(tables, axis=-1)

        used = set() if space.limits is None else set(space.limits.used)
        self.own = np.concatenate(
            [
                stacked(_VECTORS, (size,)),
                space.allowed.reshape(size, -1),
                np.array([[group in used] for group in range(size)]),
            ],
            axis=-1,
        )
        self.links = stacked(_MATRICES, (size, size))
        self.sends = stacked(_MATRICES[:2], (size, size))
        self.returns = stacked(_MATRICES[2:], (size, size))

    def twins(self) -> tuple[int, ...]:
        """Return for every group the first one that it may be exchanged with: itself, or a twin."""
        found: list[int] = []
        for group in range(len(self.counts)):
            firsts = dict.fromkeys(found)
            twin = next((one for one in firsts if self._are_interchangeable(one, group)), group)
            found.append(twin)
        return tuple(found)

    def _are_interchangeable(self, one: int, other: int) -> bool:
        """Whether exchanging two groups changes no cost."""
        if self.counts[one] != self.counts[other]:
            return False
        if not (self.own[one] == self.own[other]).all():
            return False
        swapped = list(range(len(self.counts)))
        swapped[one], swapped[other] = other, one
        return bool((self.links[np.ix_(swapped, swapped)] == self.links).all())

    def master_classes(self, *, skip_own: bool) -> tuple[int, ...]:
        """Return for every group the first one with equal return links from every last group.

        ``skip_own`` ignores those from the groups themselves, as where groups stand together.
        """
        returns, size = self.returns, len(self.counts)
        members: dict[int, list[int]] = {}

        def is_member(group: int, others: list[int]) -> bool:
            return all(
                (returns[last, group] == returns[last, other]).all()
                for last in range(size)
                for other in others
                if not (skip_own and last in (group, other))
            )

        names = []
        for group in range(size):
            name = next((key for key, others in members.items() if is_member(group, others)), group)
            members.setdefault(name, []).append(group)
            names.append(name)
        return tuple(names)

    def inner_links_matter(self) -> bool:
        """Whether a link inside a group of several devices is slower than all other links."""
        several = [group for group, count in enumerate(self.counts) if count > 1]
        inner = self.sends[several, several]
        outer = self.sends[~np.eye(len(self.counts), dtype=bool)]
        if not several:
            return False
        return not outer.size or bool((inner.max(axis=0) > outer.max(axis=0)).any())


MAX_SIZES = 32
"""Micro-batch sizes tried a phase; a batch of 256 still has every distinct one."""


def micro_batch_sizes(batch: int, most: int = MAX_SIZES) -> tuple[int, ...]:
    """Return the smallest size for every distinct number of micro-batches, at most ``most``.

    A larger size with as many micro-batches only makes each slower. Of more than ``most`` (a batch
    beyond 272 by default), a selection even in the logarithm is returned.
    """
    sizes: list[int] = []
    size = 1
    while size <= batch:
        sizes.append(size)
        # The next size that needs fewer micro-batches than ceil(batch / size).
        number = -(-batch // size)
        if number == 1:
            break
        size = -(-batch // (number - 1))
    if len(sizes) <= most:
        return tuple(sizes)
    wanted = np.geomspace(1, sizes[-1], most)
    near = {min(sizes, key=lambda item: abs(math.log(item / goal))) for goal in wanted}
    return tuple(sorted(near))


def micro_batch_pairs(batch: int, most: int = MAX_SIZES) -> tuple[MicroBatching, ...]:
    """Return every pair of a prefill and a decode size, of at most ``most`` sizes each."""
    sizes = micro_batch_sizes(batch, most)
    return tuple(MicroBatching(prefill=eta, decode=xi) for eta, xi in product(sizes, sizes))


def layers_that_fit(costs: PairCosts, counts: IntArray) -> IntArray:
    """Return ``[T]`` how many of the smallest layers the devices hold, by group of the master.

    -1 where the master itself does not fit. With one kind of layers this is exact for every order;
    with several it is an upper bound.
    """
    smallest = np.maximum(1, costs.held_bytes.min(axis=(1, 2)))
    each = np.maximum(0, costs.capacity_bytes) // smallest
    first = costs.first_capacity_bytes // smallest
    total = (counts * each).sum() - each + np.maximum(0, first)
    return np.where(costs.first_capacity_bytes < 0, -1, total)


HOST_PRICES = (0.0, *np.geomspace(0.01, 100.0, 33).tolist())
"""Prices of all memory of hosts, over that of all memory of devices."""


def most_layers(costs: PairCosts, counts: IntArray, kinds: Sequence[int]) -> int:
    """Return how many of the first layers fit in all devices and hosts together, at most.

    At any prices of both memories, layers that fit cost no more than the memories.
    """
    free = np.maximum(0, costs.capacity_bytes)
    room = (counts * free).sum() - (free - np.maximum(0, costs.first_capacity_bytes)).min()
    of_hosts = (counts * costs.host_capacity_bytes).sum()
    own = np.where(costs.host_bytes > costs.host_capacity_bytes[:, None, None], np.inf, 1.0)
    own *= costs.held_bytes / max(1, room)
    most = len(kinds)
    for price in HOST_PRICES if of_hosts else (0.0,):
        least = (own + price * costs.host_bytes / max(1, of_hosts)).min(axis=(0, 2))
        total = least[list(kinds)].cumsum()
        most = min(most, int(np.searchsorted(total, (1 + price) * (1 + 1e-12), side="right")))
    return most


def device_groups(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """Return the device indices of every group, in file order."""
    groups: dict[int, list[int]] = {}
    for index, device in enumerate(cluster.devices):
        groups.setdefault(device.group, []).append(index)
    return tuple(tuple(groups[group]) for group in sorted(groups))


def build_pairs(
    costs: ClusterCosts,
    workload: Workload,
    bits: Sequence[int],
    pairs: Sequence[MicroBatching],
    apart: Sequence[Variant] = (),
) -> tuple[PairCosts, ...]:
    """Return the costs of every pair of micro-batch sizes.

    Args:
        costs: cost models.
        workload: requests.
        bits: of the columns ``B``.
        pairs: micro-batch sizes.
        apart: of further columns: layers with routed experts on the host.
    """
    return _PairBuilder(costs, workload, [*map(Variant, bits), *apart]).build(pairs)


class _PairBuilder:
    def __init__(
        self, costs: ClusterCosts, workload: Workload, variants: Sequence[Variant]
    ) -> None:
        devices = costs.cluster.devices
        self.costs = costs
        self.workload = workload
        self.variants = variants
        groups = device_groups(costs.cluster)
        self.devices = [devices[members[0]] for members in groups]
        # The far end of a link inside a group is another device of it, where there is one.
        self.others = [devices[members[-1]] for members in groups]
        self.kinds = range(len(costs.model.layer_types))

    def build(self, pairs: Sequence[MicroBatching]) -> tuple[PairCosts, ...]:
        workload, costs, devices = self.workload, self.costs, self.devices
        prefill = {
            size: self._phase(Phase.PREFILL, size, workload.prompt_tokens)
            for size in {pair.prefill for pair in pairs}
        }
        decode = {
            size: self._phase(Phase.DECODE, size, workload.mean_context_tokens)
            for size in {pair.decode for pair in pairs}
        }
        slots, tokens = workload.batch, workload.max_context_tokens
        kv_bytes = _integers(lambda kind: costs.layer_kv_bytes(kind, slots, tokens), self.kinds)
        own_kv = _integers(
            lambda device, kind: costs.layer_kv_bytes(kind, slots, tokens, device),
            devices,
            self.kinds,
        )
        master = _integers(costs.master_bytes, devices)
        weights = _integers(self._weight_bytes, devices, self.kinds, self.variants)
        on_host = _integers(self._host_bytes, devices, self.kinds, self.variants)
        streamed = _integers(self._stream_bytes, devices, self.kinds, self.variants)
        stream_s = [
            _floats(partial(self._stream_s, tokens=length), devices)
            for length in (workload.prompt_tokens, 1)
        ]
        total = _integers(costs.capacity_bytes, devices)
        runtime = _integers(costs.runtime_bytes, devices)
        found = []
        for pair in pairs:
            layer_p, master_p, send_p, return_p = prefill[pair.prefill]
            layer_d, master_d, send_d, return_d = decode[pair.decode]
            temporary = self._temporary(pair, is_master=False)
            # The last stage and its bits are not known yet: enough for any.
            on_master = np.maximum(temporary, self._temporary(pair, is_master=True))
            found.append(
                PairCosts(
                    micro_batching=pair,
                    prefill_batches=-(-workload.batch // pair.prefill),
                    decode_batches=-(-workload.batch // pair.decode),
                    prefill_s=layer_p,
                    decode_s=layer_d,
                    temporary_bytes=temporary,
                    master_bytes=master + on_master - temporary,
                    master_prefill_s=master_p,
                    master_decode_s=master_d,
                    send_prefill_s=send_p,
                    send_decode_s=send_d,
                    return_prefill_s=return_p,
                    return_decode_s=return_d,
                    new_tokens=workload.new_tokens,
                    layer_bytes=weights + own_kv[:, :, None],
                    host_bytes=on_host,
                    host_capacity_bytes=_integers(partial(self._host_capacity, pair), devices),
                    stream_bytes=streamed,
                    stream_prefill_s=stream_s[0],
                    stream_decode_s=stream_s[1],
                    kv_bytes=kv_bytes,
                    total_bytes=total,
                    runtime_bytes=runtime,
                )
            )
        return tuple(found)

    def _phase(self, phase: Phase, size: int, tokens: float) -> tuple[FloatArray, ...]:
        """Return seconds of layers ``[T, K, B]``, master ``[T]``, sends and returns ``[T, T]``.

        A stage's seconds outside its layers are added to the master's own work, and to the link
        into every other stage. Workers that share cores count as if all computed at once.
        """
        costs, devices = self.costs, self.devices
        whole = round(tokens) if phase is Phase.PREFILL else 1

        def layer_s(device: Device, kind: int, variant: Variant) -> float:
            if not self._is_possible(device, kind, variant):
                variant = Variant(variant.bits)
            return costs.layer_steps_s(device, phase, variant, size, tokens, kind)

        def links(sent: int) -> FloatArray:
            def send_s(source: Device, target: Device) -> float:
                return costs.send_s(source, target, phase, size, sent)

            return _floats(send_s, devices, self.others)

        crowding = _floats(costs.crowding, devices)
        passes = -(-whole // PROMPT_CHUNK_TOKENS)
        apart = passes * crowding * _floats(lambda item: costs.stage_s(item, phase), devices)
        masters = _floats(lambda item: costs.master_s(item, phase, size, whole), devices)
        return (
            _floats(layer_s, devices, self.kinds, self.variants) * crowding[:, None, None],
            crowding * masters + apart,
            links(whole) + apart,
            links(1),
        )

    def _is_possible(self, device: Device, kind: int, variant: Variant) -> bool:
        """Whether a device and its host compute a layer so; where not, no memory is enough."""
        is_whole = variant.resident is None
        return is_whole or self.costs.has_experts_apart(device, kind, variant.bits)

    def _weight_bytes(self, device: Device, kind: int, variant: Variant) -> int:
        if not self._is_possible(device, kind, variant):
            return self.costs.capacity_bytes(device) + 1
        return self.costs.variant_bytes(device, kind, variant)[0]

    def _host_bytes(self, device: Device, kind: int, variant: Variant) -> int:
        if variant.resident is None or not self._is_possible(device, kind, variant):
            return 0
        return self.costs.variant_bytes(device, kind, variant)[1]

    def _host_capacity(self, pair: MicroBatching, device: Device) -> int:
        """Return what a device's host has beside the buffers of any layers."""
        possible = [
            (kind, variant.bits)
            for kind in self.kinds
            for variant in self.variants
            if variant.resident is not None and self._is_possible(device, kind, variant)
        ]
        if device.host is None or not possible:
            return 0
        buffers = self.costs.host_buffer_bytes(device, self.workload, pair, possible)
        return max(0, device.host.memory_bytes - buffers)

    def _stream_bytes(self, device: Device, kind: int, variant: Variant) -> int:
        costs = self.costs
        is_known = variant.bits in costs.specs[device.group].bits
        if not costs.streams(device) or not is_known or variant.resident is not None:
            return 0
        return costs.layer_weight_bytes(device, kind, variant.bits)

    def _stream_s(self, device: Device, tokens: float) -> float:
        return self.costs.stream_s(device, 1, tokens) if self.costs.streams(device) else 0.0

    def _temporary(self, pair: MicroBatching, *, is_master: bool) -> IntArray:
        def temporary_bytes(item: Device) -> int:
            # Which layers a stage has is not known yet: enough for the copies of any.
            work = self.workload
            copies = self.costs.copied_kv_bytes(work.batch, work.max_context_tokens, item)
            return copies + self.costs.temporary_bytes(item, work, pair, is_master)

        return _integers(temporary_bytes, self.devices)


def _floats(function: Callable[..., float], *axes: Sequence[Any]) -> FloatArray:
    """Return the table of a function over all combinations of its arguments."""
    values = [function(*cell) for cell in product(*axes)]
    return np.array(values, dtype=np.float64).reshape([len(axis) for axis in axes])


def _integers(function: Callable[..., int], *axes: Sequence[Any]) -> IntArray:
    values = [function(*cell) for cell in product(*axes)]
    return np.array(values, dtype=np.int64).reshape([len(axis) for axis in axes])


BOUND_STEPS = 250
LEARNING_RATE = 0.25
MAX_CELLS = 2_000_000
"""Array cells of one sweep; more candidates are computed in several."""


def lower_bounds(space: SearchSpace) -> FloatArray:
    """Return ``[P, T]`` bounds, one for every pair and first group.

    Infinite where that group cannot hold the master.
    """
    groups, kinds, widths = space.pairs[0].prefill_s.shape
    cells = groups * (groups * kinds + space.num_layers) * widths
    chunk = max(1, MAX_CELLS // cells)
    parts = [
        _LagrangianDual(space, space.pairs[start : start + chunk]).maximize()
        for start in range(0, len(space.pairs), chunk)
    ]
    return np.concatenate(parts)


class _LagrangianDual:
    def __init__(self, space: SearchSpace, pairs: Sequence[PairCosts]) -> None:
        groups = space.num_groups
        self.shape = len(pairs), groups
        self.first = np.tile(np.arange(groups), len(pairs))  # [M]
        self.rows = np.arange(self.first.size)
        own = self.rows, self.first

        def stacked(name: str) -> FloatArray:
            table = np.stack([getattr(pair, name) for pair in pairs]).astype(np.float64)
            return np.repeat(table, groups, axis=0)

        self.prefill, self.decode = stacked("prefill_s"), stacked("decode_s")  # [M, T, K, B]
        self.count = np.array(space.group_counts, dtype=np.float64)
        device, master = stacked("capacity_bytes"), stacked("first_capacity_bytes")  # [M, T]
        memory = self.count * np.maximum(device, 0.0)
        memory[own] += master[own] - np.maximum(device[own], 0.0)
        self.impossible = master[own] < 0
        # Bytes relative to a typical group's memory, so that all multipliers have one scale.
        scale = max(1.0, float(np.median(memory)))
        self.memory = np.maximum(memory, 0.0) / scale
        self.layer = stacked("held_bytes") / scale
        self.master_prefill = stacked("master_prefill_s")[own]  # [M]
        self.master_decode = stacked("master_decode_s")[own]
        # [M, 1] seconds of latency per second of: the slowest prefill stage; the slowest decode
        # stage; a decode pass where the pass is the longer side of a round; a decode pass always.
        self.prefill_weight, self.max_weight, self.pass_weight, self.once_weight = (
            np.repeat(weight, groups)[:, None] for weight in _weights(pairs, space.formula)
        )
        penalties = space.theta_s * space.omega  # [L, B] seconds
        if space.limits is not None:
            penalties = np.where(space.limits.layer_widths, penalties, np.inf)
        table = np.column_stack([space.kinds, penalties, space.omega])
        classes, numbers = np.unique(table, axis=0, return_counts=True)
        widths = space.omega.shape[1]
        self.kinds = classes[:, 0].astype(int)  # [U]
        self.penalties = classes[:, 1 : 1 + widths]  # [U, B]
        self.omega = classes[:, 1 + widths :]
        self.numbers = numbers.astype(np.float64)
        self.budget = space.quality_budget

    def maximize(self) -> FloatArray:
        size, groups = self.first.size, self.shape[1]
        share = np.zeros((size, groups))  # logits: which group is slowest in prefill
        decode = np.zeros((size, groups + 1))  # the same in decode; last: the pass is longer
        start = self._value(share, decode, np.zeros((size, groups)), np.zeros(size))[0]
        unit = np.maximum(start, 1e-12)  # [M] seconds
        memory = np.full((size, groups), -3.0)  # log multiplier, in units
        budget = np.full((size, 1), -3.0 if self.budget is not None else -np.inf)
        logits = [share, decode, memory, budget]
        moments = [np.zeros_like(item) for item in logits]
        squares = [np.zeros_like(item) for item in logits]
        best = start
        for step in range(1, BOUND_STEPS + 1):
            multipliers = np.exp(logits[2]) * unit[:, None], np.exp(logits[3][:, 0]) * unit
            value, gradients = self._value(logits[0], logits[1], *multipliers)
            best = np.maximum(best, value)
            rate = LEARNING_RATE * min(1.0, 2.0 * (1 - step / (BOUND_STEPS + 1)))
            for index, gradient in enumerate(gradients):
                slope = gradient / unit[:, None]
                moments[index] += 0.1 * (slope - moments[index])
                squares[index] += 0.05 * (slope**2 - squares[index])
                mean = moments[index] / (1 - 0.9**step)
                deviation = np.sqrt(squares[index] / (1 - 0.95**step))
                logits[index] += rate * mean / (deviation + 1e-12)
        best[self.impossible] = np.inf
        return best.reshape(self.shape)

    def _value(
        self, share: FloatArray, decode: FloatArray, memory: FloatArray, budget: FloatArray
    ) -> tuple[FloatArray, list[FloatArray]]:
        """Return the bound at these multipliers and its gradients in the four logits."""
        slow = _softmax(share)  # [M, T]
        slow_decode = _softmax(decode)  # [M, T + 1]
        prefill_factor = 1 + self.prefill_weight * slow / self.count
        passing = self.once_weight + self.pass_weight * slow_decode[:, -1:]
        decode_factor = passing + self.max_weight * slow_decode[:, :-1] / self.count
        cost = (
            self.prefill * prefill_factor[:, :, None, None]
            + self.decode * decode_factor[:, :, None, None]
            + self.layer * memory[:, :, None, None]
        )  # [M, T, K, B]
        group = cost.argmin(axis=1)  # [M, K, B]
        cheapest = np.take_along_axis(cost, group[:, None], axis=1)[:, 0]
        total = cheapest[:, self.kinds] + self.penalties + budget[:, None, None] * self.omega
        width = total.argmin(axis=2)  # [M, U]
        chosen = np.take_along_axis(total, width[:, :, None], axis=2)[:, :, 0]
        own = self.rows, self.first
        value = (
            chosen @ self.numbers
            + self.master_prefill * prefill_factor[own]
            + self.master_decode * decode_factor[own]
            - (memory * self.memory).sum(axis=1)
        )
        spent = np.zeros((len(value), 1))
        if self.budget is not None:
            value = value - budget * self.budget
            lost = self.omega[np.arange(len(self.omega)), width] @ self.numbers  # [M]
            spent = (budget * (lost - self.budget))[:, None]
        prefill, decode_s, load = self._loads(group, width)
        gain = self.prefill_weight * prefill / self.count
        rounds = np.concatenate(
            [
                self.max_weight * decode_s / self.count,
                self.pass_weight * decode_s.sum(axis=1, keepdims=True),
            ],
            axis=1,
        )
        return value, [
            slow * (gain - (slow * gain).sum(axis=1, keepdims=True)),
            slow_decode * (rounds - (slow_decode * rounds).sum(axis=1, keepdims=True)),
            memory * (load - self.memory),
            spent,
        ]

    def _loads(self, group: IntArray, width: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return ``[M, T]`` prefill seconds, decode seconds and bytes of every group's layers."""
        size, _, kinds, widths = self.prefill.shape
        held = np.zeros((size, kinds, widths))  # [M, K, B] layers of a kind at a width
        for index, (kind, number) in enumerate(zip(self.kinds, self.numbers, strict=True)):
            held[self.rows, kind, width[:, index]] += number
        groups = np.arange(self.shape[1])[None, :, None, None]
        placed = held[:, None] * (group[:, None] == groups)  # [M, T, K, B]
        prefill, decode, load = (
            np.einsum("mtkb,mtkb->mt", placed, table)
            for table in (self.prefill, self.decode, self.layer)
        )
        prefill[self.rows, self.first] += self.master_prefill
        decode[self.rows, self.first] += self.master_decode
        return prefill, decode, load


def _weights(pairs: Sequence[PairCosts], formula: Formula) -> tuple[FloatArray, ...]:
    """Return four weights ``[P]`` of the latency formula; see ``_LagrangianDual``."""
    rounds = np.array([pair.new_tokens - 1.0 for pair in pairs])
    batches = np.array([float(pair.decode_batches) for pair in pairs])
    prefill = np.array([pair.prefill_batches - 1.0 for pair in pairs])
    if formula == "paper":
        return prefill, rounds * (batches - 1), np.zeros(len(pairs)), np.ones(len(pairs))
    return prefill, rounds * batches, rounds, np.zeros(len(pairs))


def _softmax(logits: FloatArray) -> FloatArray:
    raised = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: FloatArray = raised / raised.sum(axis=1, keepdims=True)
    return shares
