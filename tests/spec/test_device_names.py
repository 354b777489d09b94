"""Names that people and drivers give to devices and models, and the type or model they mean."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.devices.names import folded
from llmpq.spec.fields import Fields, from_json

DATA = json.loads((Path(catalog.__file__).parents[1] / "data" / "devices.json").read_text())
DRIVERS = {
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "NVIDIA GeForce RTX 4070 SUPER": "RTX4070S",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "RTX4070TiS",
    "NVIDIA GeForce GTX 1060 6GB": "GTX1060-6G",
    "NVIDIA GeForce GTX 1080 Ti": "GTX1080Ti",
    "NVIDIA A100-SXM4-80GB": "A100-80G-SXM",
    "NVIDIA A100 80GB PCIe": "A100-80G",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA L40S": "L40S",
    "NVIDIA RTX A6000": "RTX-A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX-6000-Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000",
    "Quadro RTX 6000": "Quadro-RTX6000",
    "Tesla T4": "T4-16G",
    "Tesla V100-SXM2-32GB": "V100-SXM2-32G",
    "AMD Instinct MI300X": "MI300X",
    "AMD Radeon RX 7900 XTX": "RX7900XTX",
    "Intel(R) Arc(TM) A770 Graphics": "Arc-A770",
    "Intel(R) Arc(TM) Pro B60 Graphics": "Arc-Pro-B60",
    "AMD Ryzen 9 7950X 16-Core Processor": "Ryzen-9-7950X",
    "AMD Ryzen 7 7840HS w/ Radeon 780M Graphics": "Ryzen-7-7840HS",
    "13th Gen Intel(R) Core(TM) i7-13700K": "Core-i7-13700K",
    "13th Gen Intel(R) Core(TM) i7-13700KF": "Core-i7-13700K",
    "Intel(R) Core(TM) Ultra 7 265K": "Core-Ultra-7-265K",
    "Intel(R) Xeon(R) Platinum 8380 CPU @ 2.30GHz": "Xeon-8380",
    "AMD EPYC 7763 64-Core Processor": "EPYC-7763",
}
"""What torch and /proc/cpuinfo print."""
SHORT = {
    "rtx3090": "RTX3090", "rtx 3090": "RTX3090", "3090": "RTX3090", "RTX3060": "RTX3060-12G",
    "gtx1060": "GTX1060-6G", "1080ti": "GTX1080Ti", "t4": "T4-16G", "a6000": "RTX-A6000",
    "h100": "H100", "b60": "Arc-Pro-B60", "7950x": "Ryzen-9-7950X", "CPU": "cpu",
    "mi250": "MI250-GCD", "i9-13900k": "Core-i9-13900K",
}  # fmt: skip
SEVERAL = {
    "A100": "A100-40G, A100-80G, A100-80G-SXM",
    "NVIDIA GeForce RTX 4060 Ti": "RTX4060Ti-8G, RTX4060Ti-16G",
    "rtx 6000": "Quadro-RTX6000, RTX-6000-Ada",
    "P100": "P100-12G, P100-16G",
}


@pytest.mark.parametrize(("name", "kind"), (DRIVERS | SHORT).items())
def test_a_usual_name_is_the_type(name, kind):
    assert catalog.device_type(name) == kind
    assert catalog.device(name) == catalog.device(kind)


@pytest.mark.parametrize(("name", "candidates"), SEVERAL.items())
def test_a_name_of_several_types_lists_them(name, candidates):
    with pytest.raises(SpecError, match=rf"did you mean {candidates}\?"):
        catalog.device(name)


@pytest.mark.parametrize(
    ("name", "first"),
    [("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX4090"), ("NVIDIA A10G", "A10"), ("RTX40", "RTX4")],
)
def test_an_unknown_name_offers_the_nearest_first(name, first):
    with pytest.raises(SpecError, match=rf"did you mean {first}"):
        catalog.device(name)


@pytest.mark.parametrize("kind", catalog.device_types())
def test_every_type_is_found_in_any_spelling(kind):
    for spelling in (kind, kind.lower(), kind.replace("-", " "), f" {kind.upper()} "):
        assert catalog.device_type(spelling) == kind


def test_no_two_types_read_alike():
    names = [folded(one) for one in (*catalog.device_types(), *DATA["other_names"])]
    assert len(set(names)) == len(names)
    assert set(DATA["other_names"].values()) <= set(catalog.device_types())


def test_a_cluster_keeps_the_types_of_its_devices():
    given = cluster_of_types({"NVIDIA GeForce RTX 3090": 2, "tesla t4": 1})
    found = catalog.with_known_types(given, "c.json")
    assert [device.type for device in found.devices] == ["RTX3090", "RTX3090", "T4-16G"]
    assert found.name == "rtx3090x2-t4-16gx1"
    named = catalog.with_known_types(replace(given, name="mine"), "c.json")
    assert named == replace(found, name="mine")


def test_a_type_that_a_file_describes_is_not_taken_for_another():
    own = {
        "type": "RTX3060", "kind": "cuda", "memory_bytes": 7, "memory_bytes_per_s": 1e9,
        "flops": {"float32": 1e12},
    }  # fmt: skip
    entry = from_json(DeviceEntry, Fields(own, "file.json"))
    cluster = catalog.with_device_types(cluster_of_types({"RTX3060": 1}), (entry,))
    found = catalog.with_known_types(cluster, "c.json")
    assert catalog.device(found.devices[0].type, found).memory_bytes == 7


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"), ("OPT-30B", "facebook/opt-30b"),
        ("gemma-3-4b-it", "google/gemma-3-4b-it"), ("QWEN/qwen3-32b", "Qwen/Qwen3-32B"),
    ],
)  # fmt: skip
def test_a_model_needs_no_owner_and_no_case(name, model):
    assert catalog.model(name).name == model


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("Llama-3.3-70B", "meta-llama/Llama-3.3-70B-Instruct"),
        ("gemma-3-", "google/gemma-3-1b-it, google/gemma-3-4b-it, google/gemma-3-12b-it"),
        ("opt-31b", "facebook/opt-30b"),
    ],
)
def test_an_unknown_model_offers_beginnings_before_the_nearest(name, first):
    with pytest.raises(SpecError, match=rf"did you mean {first}"):
        catalog.model(name)


@pytest.mark.parametrize("name", ["gpu", "GPUs", "cuda", "cuda:0", "nvidia"])
def test_any_gpu_is_asked_for_its_name(name):
    with pytest.raises(SpecError, match=rf"found '{name}', expected the name of a GPU, such as"):
        catalog.device_type(name)
