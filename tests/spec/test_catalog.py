import json
from pathlib import Path

import pytest

from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.devices.figures import DeviceSpec
from llmpq.spec.precision import DTYPE_BYTES

DATA = Path(catalog.__file__).parents[1] / "data"
MODELS = json.loads((DATA / "models.json").read_text())["models"]
MODEL_FIELDS = {"name", "published_parameters", "source", "config"}
COUNTED = [entry for entry in MODELS if "published_parameters" in entry]
"""The models of which a source states the count."""
DEVICE_ENTRIES = json.loads((DATA / "devices.json").read_text())["devices"]
DEVICES = (
    "P100-12G", "T4-16G", "V100-32G", "A100-40G", "A100-80G", "A800-80G", "L4", "L40S", "RTX3090",
    "RTX4090", "H100", "H200", "cpu",
)  # fmt: skip


@pytest.mark.parametrize("entry", COUNTED, ids=lambda entry: entry["name"])
def test_parameters_are_within_one_percent_of_the_published_count(entry):
    published = entry["published_parameters"]
    assert catalog.model(entry["name"]).parameters == pytest.approx(published, rel=0.01)


def test_every_model_has_a_source_and_is_read():
    for entry in MODELS:
        assert {*entry, "published_parameters"} == MODEL_FIELDS
        assert entry["source"]
        assert catalog.model(entry["name"]).parameters > 0


def test_each_model_and_device_has_one_entry():
    assert [entry["name"] for entry in MODELS] == list(catalog.model_names())
    assert [entry["type"] for entry in DEVICE_ENTRIES] == list(catalog.device_types())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("facebook/opt-30b", 30.0), ("facebook/opt-175b", 175.0), ("bigscience/bloom", 176.2),
        ("meta-llama/Llama-3.1-405B", 405.9), ("Qwen/Qwen3-32B", 32.8),
        ("mistralai/Mixtral-8x7B-v0.1", 46.7), ("Qwen/Qwen3-30B-A3B", 30.5),
        ("google/gemma-2-9b", 9.24), ("EleutherAI/gpt-neox-20b", 20.6), ("microsoft/phi-2", 2.78),
    ],
)  # fmt: skip
def test_known_totals(name, billions):
    assert catalog.model(name).parameters / 1e9 == pytest.approx(billions, rel=0.004)


@pytest.mark.parametrize(
    ("name", "billions"), [("mistralai/Mixtral-8x7B-v0.1", 12.9), ("Qwen/Qwen3-30B-A3B", 3.3)]
)
def test_active_parameters_of_mixtures(name, billions):
    model = catalog.model(name)
    active = sum(layer.active_weight_parameters for layer in model.layers) + model.master_parameters
    assert active / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "cached"),
    [
        ("Qwen/Qwen3-4B", 36 * 2 * 8 * 128 * 2),  # heads of 128, not of hidden size / heads
        ("deepseek-ai/DeepSeek-V2-Lite", 27 * (512 + 64) * 2),  # the latent vector, for all heads
    ],
)
def test_a_token_leaves_what_its_layers_keep(name, cached):
    layers = catalog.model(name).layers
    assert sum(layer.kv_bytes_per_token(2) for layer in layers) == cached


def test_the_promised_families_and_sizes_are_there():
    names = set(catalog.model_names())
    assert len(names) >= 45
    for size in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b", "175b"):
        assert f"facebook/opt-{size}" in names
    for size in ("-560m", "-1b1", "-1b7", "-3b", "-7b1", ""):
        assert f"bigscience/bloom{size}" in names


@pytest.mark.parametrize(
    ("family", "size", "name"),
    [
        ("opt", "30b", "facebook/opt-30b"),
        ("OPT", "125M", "facebook/opt-125m"),
        ("bloom", "176b", "bigscience/bloom"),
        ("bloom", "7b1", "bigscience/bloom-7b1"),
    ],
)
def test_names_of_the_paper(family, size, name):
    assert catalog.paper_model_name(family, size) == name


def test_an_unknown_paper_size_offers_the_nearest():
    with pytest.raises(SpecError, match=r"facebook/opt-30b"):
        catalog.paper_model_name("opt", "31b")


@pytest.mark.parametrize(
    ("asked", "offered"), [("opt-31b", "facebook/opt-30b"), ("Llama-3.1-405", "Llama-3.1-405B")]
)
def test_an_unknown_model_offers_the_nearest(asked, offered):
    with pytest.raises(SpecError, match=rf"found '{asked}'.*{offered}"):
        catalog.model(asked)


def test_an_unknown_device_offers_the_nearest():
    with pytest.raises(SpecError, match=r"found 'V100'.*V100-32G"):
        catalog.device("V100")


def test_a_name_like_nothing_shows_some_names_and_offers_none():
    with pytest.raises(SpecError, match=r"catalogue, such as P100-12G, T4-16G, V100-32G$"):
        catalog.device("zzzzzz")
    with pytest.raises(SpecError, match=r"catalogue, such as facebook/opt-125m, [^?]*$"):
        catalog.model("my-model")


def test_a_directory_wins_over_the_catalogue(tmp_path):
    config = {
        "model_type": "opt", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "ffn_dim": 16, "vocab_size": 30,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, source = catalog.resolve_model(tmp_path)
    assert (model.name, source) == (tmp_path.name, tmp_path)
    model, source = catalog.resolve_model("facebook/opt-125m")
    assert (model.num_layers, source) == (12, None)


def test_neither_directory_nor_name_says_both(tmp_path):
    with pytest.raises(
        SpecError, match=r"expected a name of the catalogue, such as.*directory of that name"
    ):
        catalog.resolve_model(tmp_path / "none")


def test_all_promised_devices_are_there():
    assert set(catalog.device_types()) >= set(DEVICES)


@pytest.mark.parametrize("entry", DEVICE_ENTRIES, ids=lambda entry: entry["type"])
def test_every_figure_of_a_device_has_a_source_and_makes_sense(entry):
    spec = catalog.device(entry["type"])
    figures = set(DeviceSpec.__dataclass_fields__) - {"type", "kind"}
    # Every figure stated has its own source, every figure of the whole one that was followed.
    assert set(entry["source"]) == set(entry) - {"type", "kind", "like", "source"}
    sources = catalog.device_sources(entry["type"])
    known = {name for name in figures - {"bits"} if getattr(spec, name) is not None}
    assert set(sources) >= known
    for source in sources.values():
        assert len(source) > 10
        assert "://" not in source
    assert {cost.bits for cost in spec.precision_costs} == {3, 4, 8}
    assert set(dict(spec.flops)) <= set(DTYPE_BYTES)
    assert spec.peak_flops("bfloat16") > 1e10
    assert spec.runtime_bytes < spec.memory_bytes / 4


def test_published_memory_of_devices():
    gib = 1024**3
    sizes = {name: catalog.device(name).memory_bytes / gib for name in DEVICES[:9]}
    assert list(sizes.values()) == [12, 16, 32, 40, 80, 80, 24, 48, 24]


def test_a_device_without_a_format_answers_with_the_nearest():
    v100 = catalog.device("V100-32G")
    assert v100.peak_flops("bfloat16") == v100.peak_flops("float16")
