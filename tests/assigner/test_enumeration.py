from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.builders import cluster_of, model_spec, pair_costs

from llmpq.assigner.enumeration import (
    MAX_SIZES,
    build_pairs,
    device_groups,
    layers_that_fit,
    micro_batch_pairs,
    micro_batch_sizes,
)
from llmpq.costmodel import build_costs
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase
from llmpq.spec.workload import Workload


@pytest.mark.parametrize("batch", [1, 2, 7, 32, 100, 256])
def test_sizes_are_the_smallest_for_every_number_of_micro_batches(batch: int) -> None:
    expected = {}
    for size in range(1, batch + 1):
        expected.setdefault(math.ceil(batch / size), size)
    assert micro_batch_sizes(batch) == tuple(sorted(expected.values()))


def test_a_batch_of_32_has_121_pairs() -> None:
    assert len(micro_batch_sizes(32)) == 11
    assert len(micro_batch_pairs(32)) == 121


def test_a_huge_batch_is_thinned_but_keeps_its_ends() -> None:
    sizes = micro_batch_sizes(100_000)
    assert len(sizes) <= MAX_SIZES
    assert (sizes[0], sizes[-1]) == (1, 100_000)


def test_layers_that_fit_counts_whole_layers_by_device_and_first_group() -> None:
    costs = pair_costs(
        prefill_s=np.ones((2, 1, 2)),
        decode_s=np.ones((2, 1, 2)),
        layer_bytes=[[[8, 4]], [[8, 4]]],
        capacity_bytes=[15, 9],
        master_bytes=[4, 10],
    )
    # Groups of two and one devices: 3 layers each on the first two, 2 on the third.
    assert layers_that_fit(costs, np.array([2, 1])).tolist() == [3 + 2 + 2, -1]


def test_build_pairs_returns_the_figures_of_the_cost_models() -> None:
    model = model_spec(layers=4, kinds=2)
    cluster = cluster_of(("V100-32G", 2, 500), ("T4-16G", 1, 300))
    costs = build_costs(model, cluster, dtype="float16", kv_bits=16)
    work = Workload(batch=6, prompt_tokens=32, new_tokens=8)
    (pair,) = build_pairs(costs, work, (16, 4), [MicroBatching(prefill=4, decode=3)])
    assert device_groups(cluster) == ((0, 1), (2,))
    assert (pair.prefill_batches, pair.decode_batches) == (2, 2)
    device = cluster.devices[2]
    assert pair.prefill_s[1, 1, 1] == costs.layer_s(device, Phase.PREFILL, 4, 4, 32, 1)
    assert pair.decode_s[1, 0, 0] == costs.layer_s(device, Phase.DECODE, 16, 3, 36.0, 0)
    kv_bytes = costs.layer_kv_bytes(1, 6, 40)
    assert pair.layer_bytes[0, 1, 0] == costs.layer_weight_bytes(device, 1, 16) + kv_bytes
    assert pair.first_capacity_bytes[0] < pair.capacity_bytes[0] - costs.master_bytes()
    assert pair.send_prefill_s[0, 0] > 0.0  # between the two devices of the first group
    assert pair.send_prefill_s[0, 1] > pair.return_prefill_s[0, 1]
