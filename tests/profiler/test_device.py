"""What the profiler says of this machine agrees with the operating system."""

from __future__ import annotations

import os

import pytest

from llmpq.dist.metrics import control_groups
from llmpq.dist.metrics.control_groups import available_memory_bytes
from llmpq.profiler import device
from llmpq.profiler.device import (
    HostCpu,
    available_cores,
    cpu_isas,
    cpu_name,
    cpu_quota,
    host_cluster,
    host_cpu,
    host_memory_bytes,
    instruction_set,
    nvidia_gpus,
    with_host_cpu,
)
from llmpq.spec import catalog
from llmpq.spec.cluster import (
    BF16_SETS,
    CPU_ISAS,
    INSTRUCTION_SETS,
    Cluster,
    DeviceGroup,
    Node,
    host_text,
)
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.units import GIB, MIB


def test_available_cores_are_those_of_this_process():
    assert set(available_cores()) == set(os.sched_getaffinity(0))


def test_cpu_isas_are_known_and_in_order():
    found = cpu_isas()
    assert [isa for isa in CPU_ISAS if isa in found] == list(found)
    assert cpu_name()


@pytest.mark.parametrize("newest", INSTRUCTION_SETS)
def test_the_instruction_set_is_the_newest_that_the_limit_leaves(newest):
    flags = {"sse4_1", *device._FLAGS[newest]}
    if newest.startswith("a"):
        flags |= set(device._FLAGS["avx2"])
    if newest.startswith(("amx", "avx512")):
        flags |= set(device._FLAGS["avx512"])
    text = f"processor : 0\nflags : {' '.join(flags)}\n\nprocessor : 1\nflags : none\n"
    assert instruction_set(None, text) == newest
    order = list(INSTRUCTION_SETS)
    for cpu_isa, limit in (("avx512", "avx512"), ("avx2", "avx2"), ("sse4", "baseline")):
        expected = max(newest, limit, key=order.index)
        assert instruction_set(cpu_isa, text) == expected


def test_instruction_sets_are_those_of_the_kernels():
    native = pytest.importorskip("llmpq.kernels.cpu.native")
    assert list(INSTRUCTION_SETS) == list(native.FLAGS) == list(device._FLAGS)
    assert BF16_SETS == native.WITH_BF16


ZEN_3 = "fpu sse4_1 sse4_2 fma f16c avx avx2 bmi2 vaes"
SKYLAKE = f"{ZEN_3} avx512f avx512dq avx512cd avx512bw avx512vl"
SAPPHIRE_RAPIDS = f"{SKYLAKE} avx512_vnni avx_vnni avx512_bf16 amx_bf16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("flags", "name"),
    [(ZEN_3, "avx2"), (SKYLAKE, "avx512"), (SAPPHIRE_RAPIDS, "amx"), ("fpu sse4_1", "baseline")],
)
def test_processors_have_the_instructions_of_their_flags(flags, name):
    assert instruction_set(None, f"model name\t: X\nflags\t\t: {flags}\n") == name


@pytest.mark.parametrize(
    ("files", "groups", "expected"),
    [
        ({}, "0::/a\n", 2**30),
        ({"a/memory.max": "max\n"}, "0::/a\n", 2**30),
        ({"a/memory.max": "1000000\n"}, "0::/a/b\n", 1000000),
        ({"memory/a/memory.limit_in_bytes": "2000000\n"}, "3:memory:/a\n1:cpu:/b\n", 2000000),
        ({"memory/a/memory.limit_in_bytes": f"{2**63 - 4096}\n"}, "3:memory:/a\n", 2**30),
    ],
)
def test_memory_is_that_of_the_host_or_of_a_smaller_group(
    tmp_path, monkeypatch, files, groups, expected
):
    monkeypatch.setattr(control_groups, "CGROUPS", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").write_text(groups)
    meminfo = f"MemTotal:  {2**20} kB\nMemFree: 5 kB\n"
    assert host_memory_bytes(meminfo, tmp_path / "self") == expected


def test_this_host_has_cores_and_memory():
    found = host_cpu()
    assert found.cores == len(os.sched_getaffinity(0))
    assert 0 < found.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


HOST = HostCpu(cores=8, memory_bytes=24 * 2**30, instruction_set="avx2")


def cluster_of(*groups, cores=None, types=None):
    return Cluster(name="c", nodes=(Node(name="n", devices=groups, cores=cores),),
                   device_types=types)  # fmt: skip


def test_a_cpu_has_what_it_does_not_state_from_the_host():
    open_group = DeviceGroup(type="cpu", count=2)
    gpu = DeviceGroup(type="T4-16G", count=1)
    (found, other), = (node.devices for node in
                       with_host_cpu(cluster_of(open_group, gpu), HOST).nodes)  # fmt: skip
    assert (found.threads, found.memory_bytes, found.instruction_set) == (4, 12 * 2**30, "avx2")
    assert other == gpu
    assert host_text(found) == "4 threads, AVX2, 12.0 GiB"


def test_what_a_cpu_states_stays():
    stated = DeviceGroup(
        type="cpu", count=1, threads=1, memory_bytes=5, instruction_set="amx", cpu_isa="sse4"
    )
    assert with_host_cpu(cluster_of(stated), HOST) == cluster_of(stated)
    (node,) = with_host_cpu(cluster_of(DeviceGroup(type="cpu", count=1), cores=2), HOST).nodes
    assert node.devices[0].threads == 2


def test_more_workers_than_cores_share_the_cores_of_the_host():
    (node,) = with_host_cpu(cluster_of(DeviceGroup(type="cpu", count=12)), HOST).nodes
    assert (node.cores, node.devices[0].threads) == (8, 1)
    # These may be on another host.
    stated = cluster_of(DeviceGroup(type="cpu", count=12, threads=1))
    (node,) = with_host_cpu(stated, HOST).nodes
    assert node.cores is None


@pytest.mark.parametrize("has_tables", [True, False])
def test_threads_that_a_table_decides_stay_open(has_tables):
    group = DeviceGroup(type="cpu", count=1, profile=None if has_tables else "cpu.csv")
    (node,) = with_host_cpu(cluster_of(group), HOST, has_tables=has_tables).nodes
    assert node.devices[0].threads is None
    assert node.devices[0].memory_bytes == HOST.memory_bytes


def test_a_type_that_the_cluster_describes_is_not_the_host():
    own = DeviceEntry(type="cpu", like="cpu", memory_bytes=7)
    cluster = cluster_of(DeviceGroup(type="cpu", count=1), types=(own,))
    assert with_host_cpu(cluster, HOST) == cluster


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu/a/cpu.cfs_quota_us": "5000\n", "cpu/a/cpu.cfs_period_us": "10000\n"}, 0.5),
        ({"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "10000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "15000\n", "cpu/cpu.cfs_period_us": "10000\n"}, 1.5),
        ({}, None),
    ],
)
def test_a_quota_is_that_of_the_group_or_of_one_around_it(tmp_path, monkeypatch, files, quota):
    check_quota(tmp_path, monkeypatch, files, "4:memory:/b\n1:cpu:/a\n", quota)


@pytest.mark.parametrize(("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None)])
def test_a_quota_of_version_two(tmp_path, monkeypatch, text, quota):
    check_quota(tmp_path, monkeypatch, {"a/cpu.max": text}, "0::/a\n", quota)


def check_quota(tmp_path, monkeypatch, files, groups, quota):
    monkeypatch.setattr(control_groups, "CGROUPS", tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").write_text(groups)
    assert cpu_quota(tmp_path / "self") == quota


def test_a_host_has_its_gpus_by_the_drivers_names_and_its_cpu(caplog):
    cluster = host_cluster([("NVIDIA GeForce RTX 4090", 20 * GIB), ("Unheard-of 1", GIB)])
    gpu, cpu = cluster.devices
    spec = catalog.device(gpu.type)
    assert gpu.type == catalog.device_type("RTX4090")
    assert gpu.memory_bytes == 20 * GIB - spec.reserve_bytes
    assert cpu.type == "cpu"
    assert cpu.threads == len(os.sched_getaffinity(0))
    assert 0 < cpu.memory_bytes < available_memory_bytes()
    assert "Unheard-of 1" in caplog.text


def test_the_driver_lists_gpus_for_a_torch_that_can_use_them(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Tesla T4, 14000'\necho 'NVIDIA A10, 20000'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.11.0+cu128")
    assert nvidia_gpus() == [("Tesla T4", 14000 * MIB), ("NVIDIA A10", 20000 * MIB)]
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.13.0+cpu")
    assert nvidia_gpus() == []
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.11.0")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert nvidia_gpus() == []
