"""Headers of GGUF files: valid ones, damaged ones, and which file is a model's."""

import contextlib
import shutil
import struct

import pytest
from helpers.gguf_headers import gguf_bytes, key, text
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.errors import SpecError
from llmpq.spec.model_files.config import config_bytes, config_of, gguf_config
from llmpq.spec.model_files.weight_headers import GGML_TYPES, find_gguf, read_gguf_header


def write(folder, content, name="model.gguf"):
    (folder / name).write_bytes(content)
    return folder / name


def test_sizes_and_tensors(tmp_path):
    long = text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 5000) + text("word") * 5000
    short = text("general.x") + struct.pack("<IIQ2i", 9, 5, 2, -1, 7)
    header = read_gguf_header(write(tmp_path, gguf_bytes(extra=(long, short))))
    assert header.metadata["general.x"] == (-1, 7)
    assert header.lengths["tokenizer.ggml.tokens"] == 5000
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert header.tensors["token_embd.weight"].shape == (8, 32)
    config = config_of(header)
    assert (config["vocab_size"], config["num_key_value_heads"], config["head_dim"]) == (8, 2, 16)
    assert config["tie_word_embeddings"] is True
    assert config["dtype"] == "float32"


def test_number_formats_have_the_packages_sizes():
    gguf = pytest.importorskip("gguf")
    for number, kind in GGML_TYPES.items():
        found = gguf.GGMLQuantizationType(number)
        assert (found.name, gguf.GGML_QUANT_SIZES[found]) == (
            kind.name,
            (kind.weights, kind.nbytes),
        )


TOO_LONG = text("llama.x") + struct.pack("<IQ", 8, 1 << 60)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + b"\0" * 20, "expected 'GGUF'"),
        (gguf_bytes(version=1), "found version 1"),
        (gguf_bytes()[:60], "inside its header"),
        (gguf_bytes()[:-1], "tensor 'token_embd.weight': ends at byte"),
        (gguf_bytes(extra=(TOO_LONG,)), "string of 1152921504606846976 bytes"),
        (gguf_bytes(extra=(key("llama.block_count", 4, "I", 2),)), "found twice"),
        (gguf_bytes(extra=(key("general.alignment", 4, "I", 3),)), "a power of two"),
        (gguf_bytes(tensors=(("token_embd.weight", (32, 8), 99),)), "found number format 99"),
        (gguf_bytes(tensors=(("token_embd.weight", (33, 8), 8),)), "whole blocks of 32"),
        (gguf_bytes(tensors=(("output.weight", (32, 8), 0),)), "no tensor 'token_embd.weight'"),
        (gguf_bytes(extra=(key("llama.rope.dimension_count", 4, "I", 8),)), "rope.dimension_count"),
    ],
)
def test_damaged_files_are_errors(tmp_path, content, message):
    with pytest.raises(SpecError, match=message):
        gguf_config(write(tmp_path, content))


def test_unknown_scaling_of_positions_is_an_error(tmp_path):
    kind = text("llama.rope.scaling.type") + struct.pack("<I", 8) + text("dynamic")
    with pytest.raises(SpecError, match=r"llama.rope.scaling.type': found 'dynamic', expected"):
        gguf_config(write(tmp_path, gguf_bytes(extra=(kind,))))


def test_scaled_positions(tmp_path):
    kind = text("llama.rope.scaling.type") + struct.pack("<I", 8) + text("linear")
    factor = key("llama.rope.scaling.factor", 6, "f", 4.0)
    config = gguf_config(write(tmp_path, gguf_bytes(extra=(kind, factor))))
    assert config["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 10000.0,
        "factor": 4.0,
    }


def test_which_file_is_a_models(tmp_path):
    file = write(tmp_path, gguf_bytes())
    assert find_gguf(file) == find_gguf(tmp_path) == file
    assert config_bytes(tmp_path) == config_bytes(file)
    other = write(tmp_path, gguf_bytes(), "other.gguf")
    with pytest.raises(SpecError, match="found 2 GGUF models"):
        find_gguf(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(tmp_path) is None
    assert find_gguf(other) == other
    assert find_gguf(tmp_path / "missing.gguf") is None
    parts = [write(tmp_path, gguf_bytes(), f"m-0000{part}-of-00002.gguf") for part in (1, 2)]
    assert [find_gguf(part) for part in parts] == parts[:1] * 2


def kind_of(value):
    return text("general.type") + struct.pack("<I", 8) + text(value)


def test_files_that_go_with_a_model_are_none(tmp_path):
    model = write(tmp_path, gguf_bytes(extra=(kind_of("model"),)), "m.gguf")
    write(tmp_path, gguf_bytes(architecture="clip"), "mmproj-F16.gguf")
    for kind in ("mmproj", "imatrix", "adapter"):
        write(tmp_path, gguf_bytes(extra=(kind_of(kind),)), f"{kind}.gguf")
    assert find_gguf(tmp_path) == model
    write(tmp_path, b"GGUF", "damaged.gguf")
    with pytest.raises(SpecError, match="found 2 GGUF models"):
        find_gguf(tmp_path)


def test_a_configuration_beside_gguf_weights_alone_changes_nothing(tmp_path):
    # As published, so that other programs find the family.
    file = write(tmp_path, gguf_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert find_gguf(tmp_path) == file
    assert gguf_config(tmp_path) == gguf_config(file)
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).touch()
        assert find_gguf(tmp_path) is None
        (tmp_path / name).unlink()


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_any_changed_byte_is_read_or_refused(tmp_path_factory, data):
    content = bytearray(gguf_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1025))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("gguf")
    with contextlib.suppress(SpecError):
        gguf_config(write(folder, bytes(content)))
    shutil.rmtree(folder)
