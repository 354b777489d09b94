"""GGUF files written by the gguf package load as the models that they were made from."""

import importlib.util
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

if importlib.util.find_spec("gguf") is None:
    pytest.skip("needs the gguf package", allow_module_level=True)

import gguf
import numpy as np
from helpers.gguf_writer import DEMO, demo_tokenizer, rewritten, write_gguf
from helpers.tiny_models import load_reference

from llmpq.assigner.planner import even_plan
from llmpq.dist import model_dir_of
from llmpq.dist.io.model_files import eos_token_ids, load_tokenizer
from llmpq.dist.io.sampling_params import StructuredOutputsParams
from llmpq.dist.io.structured_outputs import GrammarCompiler
from llmpq.errors import SpecError
from llmpq.models import Checkpoint, load_config, tensor_files
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.tables import weights_digest

torch.set_num_threads(1)

SHAPE = {"layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2}
TOKENS = torch.arange(3, 43).view(2, 20)


@pytest.fixture
def model_of(tiny_model):
    def make(family):
        return tiny_model(family, seed=3, shape=SHAPE)

    return make


def run(model, bits=None, layers=2):
    """Logits of the pipeline in float32 from one stage."""
    stage = load_stage(model, 0, layers, bits, dtype=torch.float32, device="cpu")
    master = load_master(model, dtype=torch.float32, device="cpu")
    rows, width = TOKENS.shape
    hidden = master.embed(TOKENS, torch.arange(width).expand(rows, -1))
    hidden = stage.run_whole(hidden)
    return master.logits(hidden.flatten(0, 1)).view(rows, width, -1)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q5_1", "Q8_0"])
def test_weights_and_logits_are_those_of_transformers_own_reader(kind, model_of, tmp_path):
    file = write_gguf(model_of("llama"), tmp_path / "model.gguf", kind)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    checkpoint = Checkpoint(file)
    for name, value in reference.state_dict().items():
        assert torch.equal(checkpoint.tensors.load(checkpoint.tensors.source(name)), value), name
    with torch.inference_mode():
        assert torch.allclose(run(file), reference(TOKENS).logits, atol=1e-5)
    assert checkpoint.dtype == (torch.float16 if kind == "F16" else torch.bfloat16)


# Places of the float16 scales in the blocks; other bytes can have any value.
K_QUANTS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


@pytest.mark.parametrize("kind", [*K_QUANTS, "IQ4_XS"])
def test_k_quants_are_those_of_the_gguf_package(kind, tmp_path, tiny_model):
    shape = {"layers": 1, "hidden": 256, "intermediate": 256, "heads": 4, "kv_heads": 2}
    file = write_gguf(tiny_model("llama", shape=shape), tmp_path / "plain.gguf", "F16")
    type_ = gguf.GGMLQuantizationType[kind]
    stored = random_blocks(kind, rows=256)
    rewritten(file, tmp_path / "k.gguf", {"blk.0.ffn_down.weight": (stored, type_)})
    expected = gguf.dequantize(stored, type_)
    checkpoint = Checkpoint(tmp_path / "k.gguf")
    found = checkpoint.layer_state_dict(0)["mlp.down_proj.weight"]
    assert np.array_equal(found.numpy(), expected)


def random_blocks(kind, rows):
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, nbytes), dtype=np.uint8)
    for place in K_QUANTS.get(kind, (0,)):
        blocks[:, place : place + 2] = np.full(rows, 0.01, np.float16).view(np.uint8).reshape(-1, 2)
    return blocks


@pytest.mark.parametrize("form", ["{}.scale", "{}.weight.scale"])
def test_factors_of_nvfp4_are_in_tensors_of_their_own(form, model_of, tmp_path):
    """As llama.cpp's converter writes it; factors of activations are not used."""
    kind = gguf.GGMLQuantizationType.NVFP4
    plain = write_gguf(model_of("mixtral"), tmp_path / "plain.gguf", "F32")
    counts = {"blk.0.attn_q": (1, 1), "blk.1.attn_output": (1, 1), "blk.0.ffn_up_exps": (4, 4),
              "blk.1.ffn_gate_exps": (1, 4)}  # fmt: skip
    stored, factors, expected = {}, {}, {}
    shapes = {one.name: one.data.shape for one in gguf.GGUFReader(plain).tensors}
    for number, (name, (count, experts)) in enumerate(counts.items()):
        *_, rows, columns = shapes[f"{name}.weight"]
        blocks = np.random.default_rng(number).integers(
            0, 120, (experts * rows, columns // 64 * 36), dtype=np.uint8
        )
        factor = np.linspace(0.5, 2, count, dtype=np.float32)
        whole = gguf.dequantize(blocks, kind).reshape(experts, rows, columns)
        expected[name] = whole * factor[:, None, None]
        shape = (experts, rows, -1) if experts > 1 else (rows, -1)
        stored[f"{name}.weight"] = blocks.reshape(shape), kind
        factors[form.format(name)] = factor
        factors[f"{name}.input_scale"] = np.ones(1, np.float32)
    file = rewritten(plain, tmp_path / "model.gguf", stored, factors)
    layers = [Checkpoint(file).layer_state_dict(layer) for layer in range(2)]
    found = layers[1]["self_attn.o_proj.weight"]
    assert np.array_equal(found.numpy(), expected["blk.1.attn_output"][0])
    queries = torch.from_numpy(expected["blk.0.attn_q"][0])
    halves = queries.view(SHAPE["heads"], -1, 2, queries.shape[1]).transpose(1, 2)
    assert torch.equal(layers[0]["self_attn.q_proj.weight"], halves.reshape(queries.shape))
    gate, up = (layer["mlp.experts.gate_up_proj"].numpy() for layer in reversed(layers))
    rows = up.shape[1] // 2
    assert np.array_equal(up[:, rows:], expected["blk.0.ffn_up_exps"])
    assert np.array_equal(gate[:, :rows], expected["blk.1.ffn_gate_exps"])


def test_factors_of_another_shape_are_an_error(model_of, tmp_path):
    plain = write_gguf(model_of("llama"), tmp_path / "plain.gguf", "F32")
    factors = {"blk.0.attn_q.scale": np.ones(3, np.float32)}
    file = rewritten(plain, tmp_path / "model.gguf", {}, factors)
    with pytest.raises(SpecError, match=r"'blk.0.attn_q.scale': found shape \[3\], expected \[1\]"):
        Checkpoint(file)


@pytest.mark.parametrize("bits", [4, 8])
def test_plan_bits_quantize_what_was_decoded(bits, model_of, tmp_path):
    model_dir = model_of("mixtral")
    file = write_gguf(model_dir, tmp_path / "model.gguf", "F32")
    assert torch.equal(run(file, [bits] * 2), run(model_dir, [bits] * 2))


def test_blocks_of_rows_give_the_same_weights(model_of, tmp_path, monkeypatch):
    file = write_gguf(model_of("llama"), tmp_path / "model.gguf", "Q8_0")
    whole = Checkpoint(file).layer_state_dict(1)
    monkeypatch.setattr(tensor_files, "BLOCK_WEIGHTS", 7 * 64)
    checkpoint = Checkpoint(file)
    for name, source in checkpoint.layer_sources(1).items():
        assert torch.equal(checkpoint.tensors.load(source), whole[name])
        if len(source.shape) == 2:
            blocks = list(checkpoint.tensors.load_blocks(source, _memory, 16))
            assert torch.equal(torch.cat(blocks), whole[name])


def _memory(shape, dtype):
    return torch.full(shape, torch.nan, dtype=dtype)


def test_llama_3_frequencies_follow_the_factors_of_the_file(tiny_model, tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500000.0,
    }
    model_dir = tiny_model("llama", shape=SHAPE, rope_parameters=scaling)
    reference = load_reference(model_dir)
    plain = 1 / 500000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / reference.model.rotary_emb.inv_freq).float().numpy()
    extra = [lambda writer: writer.add_tensor("rope_freqs.weight", factors)]
    file = write_gguf(model_dir, tmp_path / "model.gguf", extra=extra)
    with torch.inference_mode():
        assert torch.allclose(run(file), reference(TOKENS).logits, atol=1e-5)


def test_split_files_are_one_model(model_of, tmp_path):
    model_dir = model_of("qwen2")
    whole = write_gguf(model_dir, tmp_path / "whole.gguf")
    reader = gguf.GGUFReader(whole)
    names = [tensor.name for tensor in reader.tensors]
    for part, chosen in enumerate((names[:9], names[9:]), start=1):
        file = tmp_path / "parts" / f"qwen-{part:05d}-of-00002.gguf"
        file.parent.mkdir(exist_ok=True)
        writer = gguf.GGUFWriter(file, "qwen2")
        for name, entry in reader.fields.items() if part == 1 else ():
            if not name.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(name, entry.contents(), entry.types[0])
        for tensor in reader.tensors:
            if tensor.name in chosen:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    second = tmp_path / "parts" / "qwen-00002-of-00002.gguf"
    expected = Checkpoint(whole)
    for found in (Checkpoint(tmp_path / "parts"), Checkpoint(second)):
        for name, value in expected.layer_state_dict(1).items():
            assert torch.equal(found.layer_state_dict(1)[name], value)
    assert load_model_dir(second).layers == load_model_dir(whole).layers
    (tmp_path / "parts" / "qwen-00002-of-00002.gguf").unlink()
    with pytest.raises(SpecError, match=r"qwen-00002-of-00002.gguf: cannot be read"):
        Checkpoint(tmp_path / "parts")


def with_tokenizer_of_the_demo(model_dir, output):
    """Write a model as a GGUF file with the tokenizer of the shipped model in it."""
    extra = [*demo_tokenizer()[1], lambda writer: writer.add_eos_token_id(0)]
    return write_gguf(model_dir, output, extra=extra)


def test_tokenizer_of_the_file_or_beside_it(tiny_model, tmp_path):
    model_dir = tiny_model("qwen2", shape=SHAPE)
    file = with_tokenizer_of_the_demo(model_dir, tmp_path / "model.gguf")
    text = "The quick brown fox"
    expected = load_tokenizer(DEMO)
    tokenizer = load_tokenizer(file)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (DEMO / name).is_file():
            shutil.copy(DEMO / name, tmp_path)
    assert load_tokenizer(file).encode(text) == expected.encode(text)


def test_forms_of_answers_are_compiled_for_the_tokenizer_of_the_file(tiny_model, tmp_path):
    pytest.importorskip("llguidance")
    model_dir = tiny_model("qwen2", shape=SHAPE)
    file = with_tokenizer_of_the_demo(model_dir, tmp_path / "model.gguf")
    form = StructuredOutputsParams(choice=["yes", "never"])
    found, expected = (
        GrammarCompiler(one, [0]).compile(form).allowed(4096) for one in (file, DEMO)
    )
    assert found.any()
    assert (found == expected).all()


def test_tensor_without_a_place_is_an_error(model_of, tmp_path):
    extra = [lambda writer: writer.add_tensor("blk.0.ssm_a.weight", np.zeros(4, np.float32))]
    file = write_gguf(model_of("llama"), tmp_path / "model.gguf", extra=extra)
    with pytest.raises(SpecError, match=r"'blk.0.ssm_a.weight': has no place in a llama model"):
        Checkpoint(file)


def test_a_file_of_a_hub_cache_is_read_by_its_link(model_of, tmp_path):
    blob = tmp_path / "blobs" / "0a1b2c"
    blob.parent.mkdir()
    write_gguf(model_of("llama"), blob)
    link = tmp_path / "snapshots" / "main" / "tiny-F32.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../blobs/0a1b2c")
    model = load_model_dir(link)
    assert model.name == "tiny-F32.gguf"
    plan = even_plan(link, bits=(16,), stages=1, shape=(1, 8, 4), micro_batch=(1, 1))
    found = model_dir_of(plan, None)
    assert found == model_dir_of(plan, link) == link
    torch.testing.assert_close(run(found), run(model_of("llama")), atol=1e-4, rtol=0)
    # The blob itself has no suffix.
    assert load_model_dir(blob).layers == model.layers
    assert weights_digest(link) == weights_digest(blob.parent / ".." / "snapshots/main") != ""


def test_the_end_of_a_turn_ends_answers(model_of, tmp_path):
    file = write_gguf(
        model_of("llama"), tmp_path / "m.gguf", extra=[lambda writer: writer.add_eot_token_id(9)]
    )
    assert 9 in eos_token_ids(file, load_config(file))
