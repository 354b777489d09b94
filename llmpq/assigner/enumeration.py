"""Micro-batch pairs of the outer loop of LLM-PQ (Algorithm 1), and the costs of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from llmpq.assigner.problem import FloatArray, IntArray, PairCosts
from llmpq.costmodel import ClusterCosts
from llmpq.spec.cluster import Cluster, Device
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS
from llmpq.spec.workload import Workload

MAX_SIZES = 32
"""Micro-batch sizes tried a phase; a batch of 256 still has every distinct one."""


def micro_batch_sizes(batch: int) -> tuple[int, ...]:
    """Return the smallest size for every distinct number of micro-batches, at most ``MAX_SIZES``.

    A larger size with as many micro-batches only makes each slower. Of more than ``MAX_SIZES`` (a
    batch beyond 272), a selection even in the logarithm is returned.
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
    if len(sizes) <= MAX_SIZES:
        return tuple(sizes)
    wanted = np.geomspace(1, sizes[-1], MAX_SIZES)
    near = {min(sizes, key=lambda item: abs(math.log(item / goal))) for goal in wanted}
    return tuple(sorted(near))


def micro_batch_pairs(batch: int) -> tuple[MicroBatching, ...]:
    """Return every pair of a prefill and a decode size."""
    sizes = micro_batch_sizes(batch)
    return tuple(MicroBatching(prefill=eta, decode=xi) for eta, xi in product(sizes, sizes))


def layers_that_fit(costs: PairCosts, counts: IntArray) -> IntArray:
    """Return ``[T]`` how many of the smallest layers the devices hold, by group of the master.

    -1 where the master itself does not fit. With one kind of layers this is exact for every order;
    with several it is an upper bound.
    """
    smallest = np.maximum(1, costs.layer_bytes.min(axis=(1, 2)))
    each = np.maximum(0, costs.capacity_bytes) // smallest
    first = costs.first_capacity_bytes // smallest
    total = (counts * each).sum() - each + np.maximum(0, first)
    return np.where(costs.first_capacity_bytes < 0, -1, total)


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
) -> tuple[PairCosts, ...]:
    """Return the costs of every pair of micro-batch sizes."""
    return _PairBuilder(costs, workload, bits).build(pairs)


class _PairBuilder:
    def __init__(self, costs: ClusterCosts, workload: Workload, bits: Sequence[int]) -> None:
        devices = costs.cluster.devices
        self.costs = costs
        self.workload = workload
        self.bits = bits
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
        weights = _integers(costs.layer_weight_bytes, devices, self.kinds, self.bits)
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

        def layer_s(device: Device, kind: int, bits: int) -> float:
            return costs.layer_steps_s(device, phase, bits, size, tokens, kind)

        def links(sent: int) -> FloatArray:
            def send_s(source: Device, target: Device) -> float:
                return costs.send_s(source, target, phase, size, sent)

            return _floats(send_s, devices, self.others)

        crowding = _floats(costs.crowding, devices)
        passes = -(-whole // PROMPT_CHUNK_TOKENS)
        apart = passes * crowding * _floats(lambda item: costs.stage_s(item, phase), devices)
        masters = _floats(lambda item: costs.master_s(item, phase, size, whole), devices)
        return (
            _floats(layer_s, devices, self.kinds, self.bits) * crowding[:, None, None],
            crowding * masters + apart,
            links(whole) + apart,
            links(1),
        )

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
