"""Checkpoints: shards, prefixes, single layers and broken files."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from helpers.tiny_models import load_reference
from safetensors.torch import load_file, save_file

from llmpq.errors import SpecError
from llmpq.models import Checkpoint, TensorFiles
from llmpq.spec.huggingface.families import load_model_dir

INDEX = "model.safetensors.index.json"


@pytest.fixture
def copy_of(tiny_model, tmp_path):
    def copy(family="llama", **options):
        return shutil.copytree(tiny_model(family, **options), tmp_path / family)

    return copy


def _rewrite(model_dir, change):
    """Save the single file again under other names or values."""
    path = model_dir / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, metadata={"format": "pt"})
    return model_dir


def _edit_index(model_dir, change):
    path = model_dir / INDEX
    fields = json.loads(path.read_text())
    change(fields["weight_map"])
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gpt_neox", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_layers_equal_those_of_transformers(tiny_model, family, max_shard_size):
    model_dir = tiny_model(family, max_shard_size=max_shard_size)
    assert (model_dir / INDEX).exists() == (max_shard_size == "20KB")
    checkpoint = Checkpoint(model_dir)
    reference = load_reference(model_dir).state_dict()
    for index in range(checkpoint.config.num_hidden_layers):
        for key, tensor in checkpoint.layer_state_dict(index).items():
            (name,) = [
                n for n in reference if n.endswith(f".{index}.{key}") and "experts." + key not in n
            ]
            assert torch.equal(tensor, reference[name])


def test_layer_reads_only_its_own_file(copy_of):
    model_dir = copy_of("llama", max_shard_size="20KB")
    checkpoint = Checkpoint(model_dir)
    prefix = "model.layers.1."
    weight_map = json.loads((model_dir / INDEX).read_text())["weight_map"]
    needed = {file for name, file in weight_map.items() if name.startswith(prefix)}
    unneeded = set(weight_map.values()) - needed
    assert unneeded
    for file in unneeded:
        (model_dir / file).unlink()
    assert len(checkpoint.layer_state_dict(1)) == 9
    with pytest.raises(SpecError, match="cannot be read"):
        checkpoint.master_state_dict()


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("opt", "model.decoder.", "decoder."),
        ("opt", "model.decoder.", ""),
        ("bloom", "transformer.", ""),
        ("gpt_neox", "gpt_neox.", ""),
        ("llama", "model.", ""),
        ("llama", "model.", "model.model."),
    ],
)
def test_prefix_of_the_checkpoint_does_not_matter(copy_of, family, old, new):
    model_dir = copy_of(family)
    expected = Checkpoint(model_dir)
    layer, master = expected.layer_state_dict(2), expected.master_state_dict()
    _rewrite(
        model_dir,
        lambda tensors: {
            (new + n.removeprefix(old) if n.startswith(old) else n): t for n, t in tensors.items()
        },
    )
    renamed = Checkpoint(model_dir)
    assert renamed.layer_state_dict(2).keys() == layer.keys()
    found = renamed.master_state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in master.items())


def test_mixtral_block_under_its_old_name_is_read(copy_of):
    model_dir = copy_of("mixtral")
    expected = Checkpoint(model_dir).layer_state_dict(0)
    _rewrite(
        model_dir,
        lambda ts: {n.replace(".mlp.", ".block_sparse_moe."): t for n, t in ts.items()},
    )
    found = Checkpoint(model_dir).layer_state_dict(0)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_tied_head_is_not_read(tiny_model):
    assert set(Checkpoint(tiny_model("gemma")).master_state_dict()) == {
        "embed_tokens.weight",
        "norm.weight",
    }


@pytest.mark.parametrize(("dtype"), [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_equals_that_of_the_stored_weights(tiny_model, dtype):
    assert Checkpoint(tiny_model("llama", dtype=dtype)).dtype == dtype


def test_dtype_of_a_checkpoint_without_floats_raises_an_error(copy_of):
    model_dir = copy_of()
    _rewrite(model_dir, lambda ts: {n: t.to(torch.int8) for n, t in ts.items()})
    with pytest.raises(SpecError, match="no floating-point weights"):
        _ = Checkpoint(model_dir).dtype


def test_digest_follows_configuration_and_layout_only(copy_of):
    model_dir = copy_of()
    digest = Checkpoint(model_dir).digest()
    assert Checkpoint(model_dir).digest() == digest
    config = model_dir / "config.json"
    config.write_text(config.read_text() + "\n")
    assert Checkpoint(model_dir).digest() != digest


def test_unknown_tensor_of_a_layer_is_logged(copy_of, caplog):
    model_dir = copy_of()
    layer = "model.layers.0.self_attn."
    extra = {layer + "q_proj.bias": torch.zeros(32), layer + "rotary_emb.inv_freq": torch.zeros(4)}
    _rewrite(model_dir, lambda ts: ts | extra)
    assert "self_attn.q_proj.bias" not in Checkpoint(model_dir).layer_state_dict(0)
    assert [r.message.count("q_proj.bias' is not part of the layer") for r in caplog.records] == [1]


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "gpt_neox", "opt", "bloom"])
def test_complete_layer_logs_nothing(tiny_model, family, caplog):
    Checkpoint(tiny_model(family)).layer_state_dict(0)
    assert not caplog.records


def test_missing_tensor_is_named(copy_of):
    model_dir = copy_of()
    name = "model.layers.1.mlp.up_proj.weight"
    _rewrite(model_dir, lambda ts: {n: t for n, t in ts.items() if n != name})
    checkpoint = Checkpoint(model_dir)
    checkpoint.layer_state_dict(0)
    with pytest.raises(SpecError, match=f"no tensor '{name}'"):
        checkpoint.layer_state_dict(1)


def test_misshaped_tensor_is_named_with_its_file(copy_of):
    model_dir = copy_of()
    name = "model.layers.1.mlp.up_proj.weight"
    _rewrite(model_dir, lambda ts: ts | {name: ts[name].T.contiguous()})
    with pytest.raises(SpecError, match=rf"model.safetensors: tensor '{name}'.*\[32, 64\].*64, 32"):
        Checkpoint(model_dir).layer_state_dict(1)


@pytest.mark.parametrize(("family", "part"), [("mixtral", "w1"), ("qwen3_moe", "down_proj")])
def test_missing_or_misshaped_expert_is_named(copy_of, family, part):
    model_dir = copy_of(family)
    names = TensorFiles(model_dir).names
    name = next(n for n in names if f".1.{part}" in n and "layers.0" in n)
    _rewrite(model_dir, lambda ts: ts | {name: ts[name].T.contiguous()})
    with pytest.raises(SpecError, match=f"tensor '{name}': found shape"):
        Checkpoint(model_dir).layer_state_dict(0)
    _rewrite(model_dir, lambda ts: {n: t for n, t in ts.items() if n != name})
    with pytest.raises(SpecError, match=f"no tensor '{name}'"):
        Checkpoint(model_dir).layer_state_dict(0)


def test_weights_of_another_model_raise_an_error(copy_of):
    model_dir = copy_of()
    _rewrite(model_dir, lambda ts: {"vision." + n: t for n, t in ts.items()})
    with pytest.raises(SpecError, match=r"no tensors of 'model\.layers'"):
        Checkpoint(model_dir)


def test_missing_shard_is_named(copy_of):
    model_dir = copy_of("llama", max_shard_size="20KB")
    shard = sorted(model_dir.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(SpecError, match=f"{shard.name}: found no such file"):
        Checkpoint(model_dir)


def test_tensor_that_is_not_where_the_index_says_is_named(copy_of):
    model_dir = copy_of("llama", max_shard_size="20KB")
    _edit_index(model_dir, lambda m: m.update(ghost=next(iter(m.values()))))
    with pytest.raises(SpecError, match="tensor 'ghost' is not in"):
        TensorFiles(model_dir)


@pytest.mark.parametrize("file", ["../other.safetensors", "/etc/passwd", "..", ".", "", "a\\b", 7])
def test_index_that_leaves_the_directory_raises_an_error(copy_of, file):
    model_dir = copy_of("llama", max_shard_size="20KB")
    _edit_index(model_dir, lambda m: m.update({"model.norm.weight": file}))
    with pytest.raises(SpecError, match="weight_map"):
        TensorFiles(model_dir)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}'])
def test_invalid_index_raises_an_error(copy_of, text):
    model_dir = copy_of("llama", max_shard_size="20KB")
    (model_dir / INDEX).write_text(text)
    with pytest.raises(SpecError, match=INDEX):
        TensorFiles(model_dir)


def test_link_out_of_the_directory_is_followed(copy_of, tmp_path):
    model_dir = copy_of()
    weights = model_dir / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    weights.symlink_to(tmp_path / "elsewhere")
    assert Checkpoint(model_dir).layer_state_dict(0)


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_weights_without_an_index_are_those_with_one(copy_of, max_shard_size):
    model_dir = copy_of("llama", max_shard_size=max_shard_size)
    expected = Checkpoint(model_dir).layer_state_dict(2)
    if max_shard_size == "20KB":
        (model_dir / INDEX).unlink()
    else:
        (model_dir / "model.safetensors").rename(model_dir / "consolidated.safetensors")
    found = Checkpoint(model_dir).layer_state_dict(2)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_an_index_counts_before_a_single_file_unless_a_shard_is_missing(copy_of, tiny_model):
    model_dir = copy_of("llama", max_shard_size="20KB")
    expected = Checkpoint(model_dir).layer_state_dict(1)
    other = tiny_model("llama", seed=1)
    shutil.copy(other / "model.safetensors", model_dir)
    found = Checkpoint(model_dir).layer_state_dict(1)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    next(model_dir.glob("*-of-*.safetensors")).unlink()
    found, expected = (Checkpoint(one).layer_state_dict(1) for one in (model_dir, other))
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_tensors_that_the_index_has_elsewhere_do_not_count(copy_of):
    # A shard of a new checkpoint replaces tensors that the old shards still hold.
    model_dir = copy_of("llama", max_shard_size="20KB")
    expected = Checkpoint(model_dir).layer_state_dict(0)
    weight_map = json.loads((model_dir / INDEX).read_text())["weight_map"]
    name = "model.layers.0.mlp.down_proj.weight"
    file = model_dir / next(one for one in weight_map.values() if one != weight_map[name])
    stale = {name: torch.zeros(3), "model.layers.0.old": torch.zeros(1 << 16, dtype=torch.half)}
    save_file(load_file(file) | stale, file)
    checkpoint = Checkpoint(model_dir)
    found = checkpoint.layer_state_dict(0)
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert checkpoint.dtype == torch.float32


def test_layers_for_drafts_behind_the_model_are_left_out(copy_of):
    model_dir = copy_of("qwen3_moe")
    expected, count = Checkpoint(model_dir), Checkpoint(model_dir).config.num_hidden_layers

    def with_drafts(tensors):
        drafts = {
            name.replace(".layers.0.", f".layers.{count}."): value[:1].clone()
            for name, value in tensors.items()
            if ".layers.0." in name
        }
        return tensors | drafts | {"mtp.fc.weight": torch.zeros(2, 2)}

    layers = [expected.layer_state_dict(index) for index in range(count)]
    found = Checkpoint(_rewrite(model_dir, with_drafts))
    for index, layer in enumerate(layers):
        state = found.layer_state_dict(index)
        assert all(torch.equal(state[key], tensor) for key, tensor in layer.items())
    assert load_model_dir(model_dir).num_layers == count


def test_link_into_the_blobs_of_a_hub_cache_is_followed(copy_of, tmp_path):
    cached = tmp_path / "models--a--b"
    blobs, snapshot = cached / "blobs", cached / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    copy_of().rename(snapshot)
    (snapshot / "model.safetensors").rename(blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert Checkpoint(snapshot).layer_state_dict(0)


def test_pickled_weights_are_never_read(copy_of):
    model_dir = copy_of()
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(SpecError, match=r"only pickled weights \(pytorch_model.bin\)"):
        TensorFiles(model_dir)


def test_directory_without_weights_raises_an_error(tmp_path):
    with pytest.raises(SpecError, match="found no weights"):
        TensorFiles(tmp_path)


def test_tensor_that_does_not_exist_raises_an_error(tiny_model):
    with pytest.raises(SpecError, match="no tensor 'ghost'"):
        TensorFiles(tiny_model("llama")).source("ghost")
