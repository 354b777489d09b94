"""Random small requests: different devices and links, from far too little memory to plenty."""

from __future__ import annotations

import numpy as np
from helpers.brute_force import brute_force
from helpers.builders import cluster_of, model_spec, plan_request, sensitivity

from llmpq.assigner.enumeration import device_orders
from llmpq.assigner.request import PlanningTask, PlanRequest
from llmpq.spec.cluster import LinkSpec
from llmpq.spec.workload import Workload

TYPES = ("V100-32G", "T4-16G", "P100-12G", "A100-40G")


def small_request(seed: int, *, max_layers: int = 9, max_devices: int = 5) -> PlanRequest:
    """Draw a request; with three layers and three devices brute force takes some 50 ms."""
    rng = np.random.default_rng([7, seed])
    layers = int(rng.integers(2, max_layers + 1))
    model = model_spec(layers=layers, kinds=int(rng.choice([1, 1, 2])))
    names = rng.choice(TYPES, size=int(rng.integers(1, 4)), replace=False).tolist()
    counts = rng.multinomial(max(0, max_devices - len(names)), [1 / len(names)] * len(names))
    # A layer takes 25 to 40 MB at 16 bits and 5 to 7 MB at 3 bits.
    share = 40 * layers / max_devices
    groups = [
        (str(name), 1 + int(extra), int(rng.uniform(0.2, 1.6) * share + 8))
        for name, extra in zip(names, counts, strict=True)
    ]
    links = tuple(
        LinkSpec(
            between=(f"node{a}", f"node{b}"),
            bytes_per_s=float(rng.choice([1e8, 1e9, 1e10])),
            latency_s=1e-4,
        )
        for a in range(len(groups))
        for b in range(a)
    )
    return plan_request(
        model=model,
        cluster=cluster_of(*groups, links=links),
        workload=Workload(
            batch=int(rng.integers(1, 3 if layers <= 3 else 9)),
            prompt_tokens=int(rng.integers(8, 200)),
            new_tokens=int(rng.integers(1, 40)),
        ),
        bits=((16, 8, 4, 3), (16, 8, 4), (16, 4, 3), (8, 3))[int(rng.integers(4))],
        sensitivity=sensitivity(model, seed) if rng.random() < 0.7 else None,
        theta_s=float(rng.choice([0.0, 0.01, 1.0])) if rng.random() < 0.6 else None,
        quality_budget=float(rng.choice([0.05, 0.5, 2.0])) if rng.random() < 0.2 else None,
        formula=str(rng.choice(["steady", "paper"])),
    )


def tiny_request(seed: int) -> PlanRequest:
    """Draw a request that brute force settles."""
    return small_request(seed, max_layers=3, max_devices=3)


def optimum_s(task: PlanningTask) -> float:
    """Return the least objective over all orders, pairs and assignments, infinite without one."""
    mode = "types" if task.request.orders == "types" else "all"
    found = [
        brute_force(task.problem(pair, order))
        for pair in task.pairs
        for order in device_orders(task.group_counts.tolist(), mode)
    ]
    return min((item[1].objective_s for item in found if item is not None), default=float("inf"))
