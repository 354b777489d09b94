"""What the files of a model directory say together: head, dtype, windows, shards, links."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from llmpq.errors import SpecError
from llmpq.spec import catalog
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.config import absolute_model_path, model_fields
from llmpq.spec.model_files.tokenizer import end_token_ids, missing_tokenizer, tokenizer_arguments
from llmpq.spec.model_files.weight_headers import find_weights, read_headers

LLAMA = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16, "vocab_size": 10, "dtype": "float16", "tie_word_embeddings": True,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}  # fmt: skip
"""As published: the 4B model leaves heads, their size and the vocabulary to the class."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += values
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(folder: Path, config: dict, tensors=None, name="model.safetensors") -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        (folder / name).write_bytes(safetensors(tensors))
    return folder


def matrix(first: int, dtype: str = "BF16") -> tuple[str, list[int], bytes]:
    return dtype, [10, 8], bytes([first]) * (10 * 8 * (2 if dtype == "BF16" else 4))


@pytest.mark.parametrize(
    ("stored", "parameters"),
    [
        ({EMBEDDING: matrix(1), HEAD: matrix(2)}, 80),
        ({EMBEDDING: matrix(1), HEAD: matrix(1)}, 0),
        ({EMBEDDING: matrix(1)}, 0),
        ({HEAD: matrix(1)}, 0),
        (None, 0),
    ],
    ids=["differs", "equal", "no head", "no embedding", "no weights"],
)
@pytest.mark.parametrize("tied", [True, None])
def test_a_stored_head_is_planned(tmp_path, stored, parameters, tied):
    config = dict(LLAMA, model_type="gemma", head_dim=4, tie_word_embeddings=tied)
    if tied is None:
        del config["tie_word_embeddings"]  # gemma's class ties by default
    assert load_model_dir(write(tmp_path, config, stored)).head_parameters == parameters


def test_an_own_head_of_a_language_part_is_planned(tmp_path, caplog):
    names = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    config = {"model_type": "x", "tie_word_embeddings": True, "text_config": LLAMA}
    stored = {names[0]: matrix(1), names[1]: matrix(2)}
    assert load_model_dir(write(tmp_path, config, stored)).head_parameters == 80
    assert "the stored head differs" in caplog.text


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ({EMBEDDING: matrix(1)}, "bfloat16"),
        ({EMBEDDING: matrix(1, "F32")}, "float32"),
        ({"codes": ("U8", [400], bytes(400)), EMBEDDING: matrix(1)}, "bfloat16"),
        (None, "bfloat16"),
    ],
    ids=["bfloat16", "float32", "codes", "no weights"],
)
def test_a_missing_dtype_is_that_of_the_weights(tmp_path, stored, expected):
    config = {key: value for key, value in LLAMA.items() if key != "dtype"}
    assert load_model_dir(write(tmp_path, config, stored)).dtype == expected


@pytest.mark.parametrize(
    "name",
    [
        "openai/gpt-oss-20b",
        "openai/gpt-oss-120b",
        "MiniMaxAI/MiniMax-M2.5",
        "bigcode/starcoder2-3b",
        "EleutherAI/gpt-j-6b",
    ],
)
def test_catalogue_entries_without_a_dtype_are_bfloat16(name):
    assert catalog.model(name).dtype == "bfloat16"


def test_layers_with_a_window_by_name_have_it_without_the_flag(tmp_path):
    kinds = ["sliding_attention", "full_attention"]
    config = LLAMA | {
        "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 8,
    }  # fmt: skip
    assert model_fields(write(tmp_path, config))["use_sliding_window"] is True
    assert [one.sliding_window for one in load_model_dir(tmp_path).layers] == [8, None]
    inner = {"model_type": "x", "text_config": config}
    assert model_fields(write(tmp_path, inner))["text_config"]["use_sliding_window"] is True


@pytest.mark.parametrize(
    ("field", "value"), [("use_sliding_window", False), ("sliding_window", None)]
)
def test_windows_that_contradict_each_other_raise_an_error(tmp_path, field, value):
    config = LLAMA | {
        "model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 8,
    }  # fmt: skip
    with pytest.raises(SpecError, match=rf"config\.json: field '{field}': found .*layer_types"):
        model_fields(write(tmp_path, config | {field: value}))


def test_a_language_part_may_leave_sizes_to_its_class(tmp_path):
    model = load_model_dir(write(tmp_path, GEMMA3))
    layer = model.layers[0]
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (8, 4, 256)
    assert (model.vocab_size, model.dtype) == (262_208, "bfloat16")
    assert [one.sliding_window for one in model.layers[:6]] == [1024] * 5 + [None]
    alone = GEMMA3["text_config"]
    with pytest.raises(SpecError, match="field 'num_attention_heads'"):
        load_model_dir(write(tmp_path, alone))


SHARD = "model-0000{}-of-00002.safetensors"


def test_null_heads_of_full_attention_are_those_of_the_others(tmp_path):
    # As Gemma 4 E2B and E4B are published.
    text = {
        "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 100, "vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0, "attention_k_eq_v": False,
    }  # fmt: skip
    found = [
        load_model_dir(write(tmp_path, {"model_type": "gemma4", "text_config": text | more})).layers
        for more in ({}, {"num_global_key_value_heads": None})
    ]
    assert found[0] == found[1]
    assert {layer.num_kv_heads for layer in found[1]} == {2}


def test_shards_without_an_index_are_found(tmp_path):
    write(tmp_path, LLAMA, {EMBEDDING: matrix(1)}, SHARD.format(1))
    write(tmp_path, LLAMA, {HEAD: matrix(2)}, SHARD.format(2))
    files = find_weights(tmp_path)
    assert files.names == (SHARD.format(1), SHARD.format(2))
    owners = {EMBEDDING: files.names[0], HEAD: files.names[1]}
    assert files.assign(read_headers(files)) == owners
    assert load_model_dir(tmp_path).head_parameters == 80


def test_one_file_of_another_name_is_found(tmp_path):
    write(tmp_path, LLAMA, {EMBEDDING: matrix(1)}, "consolidated.safetensors")
    assert find_weights(tmp_path).names == ("consolidated.safetensors",)
    write(tmp_path, LLAMA, {EMBEDDING: matrix(1)}, "model-00001-of-00001.safetensors")
    assert find_weights(tmp_path).names == ("model-00001-of-00001.safetensors",)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([SHARD.format(1)], "found 1 of 2 shards, 'model-00002-of-00002.safetensors' is missing"),
        (["a.safetensors", "b.safetensors"], "found the weights a.safetensors, b.safetensors"),
        (["adapter_model.safetensors"], "found only an adapter"),
        ([SHARD.format(1), "model-00001-of-00003.safetensors"], "expected shards of one"),
    ],
)
def test_incomplete_or_several_checkpoints_raise_an_error(tmp_path, names, message):
    for name in names:
        write(tmp_path, LLAMA, {EMBEDDING: matrix(1)}, name)
    with pytest.raises(SpecError, match=message):
        find_weights(tmp_path)


def test_a_tensor_in_two_files_without_an_index_raises_an_error(tmp_path):
    for number in (1, 2):
        write(tmp_path, LLAMA, {EMBEDDING: matrix(number)}, SHARD.format(number))
    files = find_weights(tmp_path)
    with pytest.raises(SpecError, match=f"tensor '{EMBEDDING}' is in .*1-of-.* and in .*2-of-"):
        files.assign(read_headers(files))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "x.gguf"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    write(tmp_path, LLAMA)
    (tmp_path / name).write_text(POINTER)
    read = {
        "config.json": load_model_dir,
        "model.safetensors": lambda folder: read_headers(find_weights(folder)),
        "tokenizer.json": tokenizer_arguments,
        "x.gguf": lambda folder: load_model_dir(folder / name),
    }
    with pytest.raises(SpecError, match=rf"{name}: found a pointer of Git LFS.*git lfs pull"):
        read[name](tmp_path)


def test_a_path_keeps_the_name_of_its_link(tmp_path, monkeypatch):
    blob = tmp_path / "blobs" / "0a1b2c"
    blob.parent.mkdir()
    blob.write_bytes(b"")
    (tmp_path / "snapshots").mkdir()
    link = tmp_path / "snapshots" / "x.gguf"
    link.symlink_to("../blobs/0a1b2c")
    assert absolute_model_path(link) == link
    monkeypatch.chdir(tmp_path)
    assert absolute_model_path("snapshots/../snapshots/x.gguf") == link
    assert absolute_model_path(".") == absolute_model_path("blobs/..") == tmp_path


def test_a_file_that_is_no_model_is_named(tmp_path):
    (tmp_path / "notes").write_text("x")
    with pytest.raises(SpecError, match="found a file, expected a model directory or a GGUF file"):
        load_model_dir(tmp_path / "notes")


@pytest.mark.parametrize(
    "name", ["tekken.json", "tekken_240911.json", "tokenizer.model.v3", "tiktoken.model"]
)
def test_a_tokenizer_in_another_format_is_named(tmp_path, name):
    assert missing_tokenizer(tmp_path) == "the model has no tokenizer"
    (tmp_path / name).write_text("{}")
    assert tokenizer_arguments(tmp_path) is None
    assert f"{name} needs a tokenizer.json" in missing_tokenizer(tmp_path)


TOKENIZER = {
    "added_tokens": [{"id": 7, "content": "<end>"}],
    "model": {"vocab": {"a": 0, "</s>": 2}},
}
UNIGRAM = {"model": {"vocab": [["<unk>", 0.0], ["</s>", 0.0]]}}


@pytest.mark.parametrize(
    ("config", "tokenizer", "expected"),
    [
        ({"eos_token": "<end>"}, TOKENIZER, {1, 7}),
        ({"eos_token": {"content": "<end>"}}, TOKENIZER, {1, 7}),
        ({"eos_token": "</s>"}, TOKENIZER, {1, 2}),
        ({"eos_token": "</s>"}, UNIGRAM, {1}),
        ({"eos_token": "<e>", "added_tokens_decoder": {"9": {"content": "<e>"}}}, {}, {1, 9}),
        ({"eos_token": "unknown"}, TOKENIZER, {1}),
        ({"eos_token": None}, TOKENIZER, {1}),
    ],
)
def test_the_tokenizers_end_token_ends_answers(tmp_path, config, tokenizer, expected):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1]}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert end_token_ids(tmp_path, 5) == expected


def test_links_are_followed_out_of_the_directory(tmp_path):
    other = tmp_path / "disk"
    other.mkdir()
    folder = tmp_path / "links"
    folder.mkdir()
    write(other, LLAMA, {EMBEDDING: matrix(1), HEAD: matrix(2)})
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(other / name)
    assert load_model_dir(folder).head_parameters == 80


@pytest.mark.parametrize("stored", ["Infinity", '{"__float__": "Infinity"}'])
def test_numbers_without_a_bound_are_read_as_both_kinds_of_files_write_them(stored, tmp_path):
    text = (
        f'{{"model_type": "nemotron_h", "dtype": "bfloat16", "time_step_limit": [0.0, {stored}]}}'
    )
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert model_fields(tmp_path)["time_step_limit"] == [0.0, float("inf")]
