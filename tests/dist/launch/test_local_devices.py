"""Cores of devices that run side by side on one host."""

from __future__ import annotations

from helpers.ranks import make_plan

from llmpq.dist.launch.process_environment import cores_of_devices
from llmpq.dist.launch.ranks import rank_environment
from llmpq.spec.cluster import Cluster, DeviceGroup, Node


def cluster_of(*threads: int | None) -> Cluster:
    groups = tuple(DeviceGroup(type="cpu", count=1, threads=count) for count in threads)
    return Cluster(name="here", nodes=(Node(name="here", devices=groups),))


def test_devices_get_cores_of_their_own_in_order():
    found = cores_of_devices(cluster_of(1, 2), [3, 5, 6, 9])
    assert found == {"here/cpu#0": (3,), "here/cpu#1": (5, 6)}


def test_too_few_cores_are_shared_by_all():
    assert cores_of_devices(cluster_of(2, 2), [0, 1, 2]) == {}
    assert cores_of_devices(cluster_of(2, None), [0, 1, 2, 3]) == {}


def test_ranks_divide_the_cores_of_their_pipeline():
    plan = make_plan((0, 1, 3), cluster=cluster_of(None, None))
    found = rank_environment(plan, 1, [0, 1], [4, 5, 6, 7])
    assert found["OMP_NUM_THREADS"] == "2"
