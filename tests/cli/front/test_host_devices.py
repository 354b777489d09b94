"""The figures of this host's devices: measured once, kept, or those of the catalogue."""

import json
import subprocess

import pytest

from llmpq.cli.commands import profile
from llmpq.cli.front import host_devices as module
from llmpq.cli.front.host_devices import (
    cache_folder,
    host_devices,
    with_kept_figures,
    with_measured_figures,
)
from llmpq.spec.catalog import device
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.devices.figures import DeviceEntry, DeviceFile
from llmpq.spec.fields import dump_json, to_json

CPU = DeviceGroup(type="cpu", count=1, threads=2, memory_bytes=2**32, instruction_set="avx2")
GPUS = [DeviceGroup(type=name, count=1) for name in ("RTX3090", "T4-16G")]


def cluster(*groups):
    return Cluster(name="this host", nodes=(Node(name="here", devices=groups or (CPU,)),))


class Measuring:
    """Stands for the processes that measure; ``outcome`` is what the next ones end with."""

    def __init__(self):
        self.options = []
        self.cpu_taken = 0.0
        self.outcome = None

    def __call__(self, command, *, env, stdout, timeout, check):
        assert (stdout, check) == (subprocess.PIPE, True)
        assert timeout <= module.MEASURING_S
        assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        options = profile._parser().parse_args(command[3:])
        self.options.append(options)
        if self.outcome is not None:
            raise self.outcome
        kind = options.device.partition(":")[0]
        entry = DeviceEntry(
            type=options.name,
            kind=kind,
            memory_bytes=2**33,
            memory_bytes_per_s=5e9,
            flops=(("float32", 7e9),),
            cores=options.threads if kind == "cpu" else None,
        )
        record = to_json(DeviceFile(devices=(entry,)))
        options.output.write_text(dump_json(record))
        printed = json.dumps({**record, "cpu_taken": self.cpu_taken})
        return subprocess.CompletedProcess(command, 0, stdout=printed.encode())


@pytest.fixture
def measuring(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = Measuring()
    monkeypatch.setattr(module.subprocess, "run", found)
    return found


def bytes_per_s(found):
    return device("cpu", found).memory_bytes_per_s


def test_a_device_is_measured_once_and_kept(measuring, tmp_path, capsys):
    assert with_kept_figures(cluster()) == cluster()
    found = with_measured_figures(cluster())
    assert bytes_per_s(found) == 5e9
    assert measuring.options[0].threads == 2
    assert "measuring cpu" in capsys.readouterr().err
    assert with_measured_figures(cluster()) == with_kept_figures(cluster()) == found
    assert len(measuring.options) == 1
    (file,) = (tmp_path / "cache" / "llmpq" / "devices").iterdir()
    assert file.parent == cache_folder("devices")


def test_another_version_or_number_of_threads_is_measured_anew(measuring, monkeypatch):
    with_measured_figures(cluster())
    with_measured_figures(cluster(DeviceGroup(type="cpu", count=1, threads=3)))
    monkeypatch.setattr(module, "__version__", "another")
    with_measured_figures(cluster())
    assert len(measuring.options) == 3


def test_a_busy_machine_is_said_and_its_figures_are_not_kept(measuring, capsys):
    measuring.cpu_taken = 0.5
    assert with_measured_figures(cluster()) == cluster()
    said = capsys.readouterr().err
    assert "busy with other programs while measuring: cpu 50%" in said
    assert "catalogue" in said
    assert list(cache_folder("devices").iterdir()) == []
    measuring.cpu_taken = 0.0
    assert bytes_per_s(with_measured_figures(cluster())) == 5e9


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (subprocess.TimeoutExpired("x", 30.0), "took too long"),
        (subprocess.CalledProcessError(1, "x"), "failed"),
    ],
)
def test_what_cannot_be_measured_has_the_figures_of_the_catalogue(
    outcome, message, measuring, capsys
):
    measuring.outcome = outcome
    assert with_measured_figures(cluster()) == cluster()
    assert message in capsys.readouterr().err
    assert list(cache_folder("devices").iterdir()) == []


def test_ctrl_c_while_measuring_ends_the_command(measuring):
    measuring.outcome = subprocess.CalledProcessError(130, "x")
    with pytest.raises(KeyboardInterrupt):
        with_measured_figures(cluster())


def test_a_broken_file_of_the_cache_is_replaced(measuring):
    found = with_measured_figures(cluster())
    (file,) = cache_folder("devices").iterdir()
    file.write_text("{")
    assert with_kept_figures(cluster()) == cluster()
    assert with_measured_figures(cluster()) == found


def test_every_type_of_device_is_measured_by_its_place_on_the_host(measuring):
    found = with_measured_figures(cluster(GPUS[0], GPUS[0], GPUS[1], CPU))
    assert [one.device for one in measuring.options] == ["cuda:0", "cuda:2", "cpu"]
    assert [entry.type for entry in found.device_types] == ["RTX3090", "T4-16G", "cpu"]
    assert len({one.file for one in host_devices(found)}) == 3
