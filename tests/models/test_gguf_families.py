"""GGUF files of every family that is read, against the models that they were made from."""

import importlib.util
import json
from dataclasses import replace

import pytest
import torch

if importlib.util.find_spec("gguf") is None:
    pytest.skip("needs the gguf package", allow_module_level=True)

import gguf
import numpy as np
from helpers.gguf_families import CONVERSIONS
from helpers.gguf_writer import DEMO, demo_tokenizer, rewritten, write_gguf
from helpers.lanes import a_third
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import (
    Pipeline,
    Sequences,
    generate_alone,
    load_reference,
    make_tiny_model_script,
)
from tokenizers import Regex, pre_tokenizers
from transformers import Qwen2TokenizerFast

from llmpq.dist.io.model_files import load_tokenizer
from llmpq.errors import SpecError
from llmpq.models import Checkpoint, gguf_files
from llmpq.spec.families import family_of, known_families
from llmpq.spec.huggingface.families import load_model_dir

torch.set_num_threads(1)

PROMPT = [(7 * number) % 90 + 3 for number in range(19)]
NEW = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a tiny model of a family, by its model type."""
    made = {}

    def model(family):
        if family not in made:
            script, folder = make_tiny_model_script(), tmp_path_factory.mktemp(family)
            config = tiny_config(family.split()[0], **CONVERSIONS[family].config)
            script.save_model(script.make_model(config, seed=1), folder, dtype=torch.float32)
            made[family] = folder
        return made[family]

    return model


def test_every_family_that_is_read_is_written_here():
    read = {family.name for family in known_families() if family.gguf is not None}
    assert read == {name.split()[0] for name in CONVERSIONS}


@pytest.mark.parametrize("family", CONVERSIONS)
def test_tokens_are_those_of_transformers(family, models, tmp_path):
    model_dir = models(family)
    file = write_gguf(model_dir, tmp_path / "model.gguf")
    reference = load_reference(model_dir)
    reference.generation_config.eos_token_id = None
    expected, logits = generate_alone(reference, PROMPT, NEW)
    count = reference.config.num_hidden_layers
    sequences = Sequences(Pipeline(file, (0, count)))
    sequences.prefill({"one": (0, PROMPT)})
    sequences.decode(["one"], NEW - 1)
    assert sequences.tokens["one"] == expected
    torch.testing.assert_close(torch.stack(sequences.logits["one"]), logits, rtol=0, atol=3e-5)


@pytest.mark.parametrize("family", CONVERSIONS)
def test_planner_reads_the_same_sizes(family, models, tmp_path):
    model_dir = models(family)
    expected = load_model_dir(model_dir)
    found = load_model_dir(write_gguf(model_dir, tmp_path / "model.gguf"))
    assert found.layer_types == expected.layer_types
    assert found.layers == expected.layers
    assert found.parameters == expected.parameters
    assert (found.dtype, found.family) == (expected.dtype, expected.family)


@pytest.mark.parametrize("family", CONVERSIONS)
def test_tensors_are_those_that_were_written(family, models, tmp_path):
    model_dir = models(family)
    plain, found = Checkpoint(model_dir), Checkpoint(write_gguf(model_dir, tmp_path / "m.gguf"))
    folded, config = CONVERSIONS[family].folded, plain.config.to_dict()
    for expected, state in zip(states_of(plain), states_of(found), strict=True):
        assert state.keys() == expected.keys()
        for name, stored in expected.items():
            value = folded(name, stored, config)
            # Norms are rounded after + 1, and A_log after exp.
            is_rounded = value.dim() == 1 or name.endswith("A_log")
            torch.testing.assert_close(state[name], value, rtol=0, atol=3e-7 * is_rounded, msg=name)


def states_of(checkpoint):
    layers = range(checkpoint.config.num_hidden_layers)
    return [*map(checkpoint.layer_state_dict, layers), checkpoint.master_state_dict()]


@pytest.mark.parametrize(
    ("family", "kind"),
    a_third(
        [name for name, one in CONVERSIONS.items() if one.changes_rows], ["Q8_0", "Q4_K", "MXFP4"]
    ),
)
def test_quantized_tensors_are_those_of_the_gguf_package(family, kind, tmp_path):
    """Reading what is stored in blocks gives what the package decodes, in the same places."""
    script = make_tiny_model_script()
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "vocab_size": 32}
    sizes |= CONVERSIONS[family].config
    model = script.make_model(tiny_config(family.split()[0], **sizes), seed=1)
    file = write_gguf(
        script.save_model(model, tmp_path, dtype=torch.float32), tmp_path / "plain.gguf"
    )
    type_ = gguf.GGMLQuantizationType[kind]
    quantized, decoded = {}, {}
    for tensor in gguf.GGUFReader(file).tensors:
        if len(tensor.shape) > 1 and tensor.shape[0] % gguf.GGML_QUANT_SIZES[type_][0] == 0:
            stored = random_blocks(type_, tensor.data.shape)
            quantized[tensor.name] = (stored, type_)
            decoded[tensor.name] = (gguf.dequantize(stored, type_), gguf.GGMLQuantizationType.F32)
    has_attention = any("attn_q" in tensor.name for tensor in gguf.GGUFReader(file).tensors)
    assert any(("attn" if has_attention else "ssm_in") in name for name in quantized)
    found, expected = (
        states_of(Checkpoint(rewritten(file, tmp_path / f"{name}.gguf", tensors)))
        for name, tensors in (("quantized", quantized), ("decoded", decoded))
    )
    for one, other in zip(found, expected, strict=True):
        for name, value in other.items():
            assert torch.equal(one[name], value), name


# Places of the scales in a block, and their bytes; other bytes can have any value.
SCALES = {"Q8_0": ((0, 2),), "Q4_K": ((0, 2), (2, 4)), "MXFP4": ((0, 1),)}


def random_blocks(type_, shape):
    weights, nbytes = gguf.GGML_QUANT_SIZES[type_]
    blocks = np.random.default_rng(0).integers(
        0, 256, (*shape[:-1], shape[-1] // weights, nbytes), dtype=np.uint8
    )
    for first, end in SCALES[type_.name]:
        scale = np.array([0.01], np.float16).view(np.uint8) if end - first == 2 else 120
        blocks[..., first:end] = scale
    return blocks.reshape(*shape[:-1], -1)


@pytest.mark.parametrize(
    ("family", "add", "message"),
    [
        ("qwen3", lambda w: w.add_logit_scale(0.5), r"'qwen3.logit_scale': found 0.5, expected no"),
        ("qwen3", lambda w: w.add_causal_attention(False), "'qwen3.attention.causal': found False"),
        ("qwen3_5_text", lambda w: w.add_nextn_predict_layers(4), "found 4, expected fewer than 4"),
        ("jamba", lambda w: w.add_head_count_kv([2, 2, 0]), r"'attn' in layers \[0, 1\], expected"),
        ("bamba", lambda w: w.add_rope_scaling_finetuned(False), "found False, expected True"),
    ],
)
def test_keys_that_are_not_understood_are_errors(family, add, message, models, tmp_path):
    file = write_gguf(models(family), tmp_path / "model.gguf", extra=[add])
    with pytest.raises(SpecError, match=message):
        load_model_dir(file)


@pytest.mark.parametrize("has_names", [False, True])
def test_layers_that_draft_tokens_are_none_of_the_models(models, tmp_path, monkeypatch, has_names):
    whole = write_gguf(models("qwen3_5_text"), tmp_path / "whole.gguf")
    count = Checkpoint(whole).config.num_hidden_layers
    extra = [
        lambda writer: writer.add_nextn_predict_layers(1),
        lambda writer: writer.add_tensor(
            f"blk.{count - 1}.nextn.of_tomorrow.weight", np.zeros((32, 32), np.float32)
        ),
    ]
    file = write_gguf(models("qwen3_5_text"), tmp_path / "model.gguf", extra=extra)
    if not has_names:
        own = replace(family_of("qwen3_5_text"), mtp=None)
        monkeypatch.setattr(gguf_files, "family_of", lambda _: own)
    found = Checkpoint(file)
    assert found.config.num_hidden_layers == count - 1
    drafting = [name for name in found.tensors.names if f".layers.{count - 1}." in name]
    assert bool(drafting) == has_names
    assert not any("of_tomorrow" in name for name in drafting)


def test_an_architecture_that_is_not_run_is_named(models, tmp_path):
    file = write_gguf(models("qwen2"), tmp_path / "model.gguf")
    content = file.read_bytes().replace(b"qwen2", b"rwkv6")
    file.write_bytes(content)
    with pytest.raises(SpecError, match=r"'general.architecture': found 'rwkv6', expected one of"):
        load_model_dir(file)


TEXTS = [
    "The quick fox's 12345 jumps!!\n\n  over  (x+y)=3.5\tIt'S HTTPServer getURL",
    "naïve Çafé Größe 你好世界12 ありがとう हिन्दी ",
    " \n \r\n\n   leading, trailing   \n",
    "a//b/c\n/d, e...\n'll don't WE'RE 1 22 333 4444",
]


def stated_splits():
    forms = [family.gguf for family in known_families() if family.gguf is not None]
    return {name: split for form in forms for split in form.splits for name in split.names}


def parts_of(text, patterns):
    steps = [pre_tokenizers.Split(Regex(one), behavior="isolated") for one in patterns]
    return [part for part, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


def test_texts_are_split_as_transformers_does():
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    if not hasattr(mapping, "GGUF_PRE_TOKENIZER_SPLITS"):
        pytest.skip("needs transformers 5.23")
    found = stated_splits()
    shared = found.keys() & mapping.GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert len(shared) > 15
    for name in shared:
        theirs = mapping.GGUF_PRE_TOKENIZER_SPLITS[name]
        for text in TEXTS:
            assert parts_of(text, found[name].patterns) == parts_of(text, [theirs]), name


def test_texts_are_split_as_the_library_does_for_plain_words():
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    for name, expected in (("phi-2", plain), ("exaone4", plain), ("command-r", digits)):
        steps = [
            *(
                pre_tokenizers.Split(Regex(one), behavior="isolated")
                for one in stated_splits()[name].patterns
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        for text in TEXTS:
            found = pre_tokenizers.Sequence(steps).pre_tokenize_str(text)
            assert found == expected.pre_tokenize_str(text), name


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if number % 3 == 0 else pytest.mark.slow)
        for number, family in enumerate(CONVERSIONS)
    ],
)
def test_tokenizer_of_the_file_is_read(family, models, tmp_path):
    file = write_gguf(models(family), tmp_path / "model.gguf", extra=demo_tokenizer()[1])
    tokenizer = load_tokenizer(file)
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in TEXTS)


def _with_tokenizer(models, tmp_path, *more):
    """A file with the shipped model's tokenizer, and more metadata."""
    return write_gguf(models("qwen3"), tmp_path / "m.gguf", extra=[*demo_tokenizer()[1], *more])


def test_a_tokenizer_of_byte_pairs_is_that_of_transformers(models, tmp_path):
    stored = json.loads((DEMO / "tokenizer.json").read_text())["model"]
    merges = [
        tuple(one) if isinstance(one, list) else tuple(one.split()) for one in stored["merges"]
    ]
    theirs = Qwen2TokenizerFast(vocab=stored["vocab"], merges=merges)
    ours = load_tokenizer(_with_tokenizer(models, tmp_path))
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]


def test_tokens_that_are_found_whole_keep_their_numbers(models, tmp_path):
    """Also those that are not spelled as bytes, as DeepSeek's are."""
    added = {"<\uff5cUser\uff5c>": 3, "<|end|>": 3, "<think>": 4, "    ": 4, "日本": 1}
    count, extra = demo_tokenizer()
    vocabulary = json.loads((DEMO / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.get), *added]
    extra[2] = lambda writer: writer.add_token_list(tokens)
    extra[3] = lambda writer: writer.add_token_types([1] * count + list(added.values()))
    extra.append(lambda writer: writer.add_bos_token_id(count))
    extra.append(lambda writer: writer.add_eos_token_id(count + 1))
    extra.append(lambda writer: writer.add_add_bos_token(True))
    tokenizer = load_tokenizer(write_gguf(models("qwen3"), tmp_path / "m.gguf", extra=extra))
    found = tokenizer.encode("<think>a<|end|>")
    assert found[:2] == [count, count + 2]
    assert found[-1] == count + 1
    assert tokenizer.encode("<\uff5cUser\uff5c>") == [count, count]
    assert tokenizer.encode("    ") == [count, count + 3]
    assert tokenizer.decode(found) == "<think>a"
    assert tokenizer.decode([count + 4]) == "日本"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({4: None}, "'tokenizer.ggml.merges': found None, expected pairs of tokens"),
        (
            {4: lambda writer: writer.add_token_merges(["no such"])},
            "the tokenizer cannot be read: .*no",
        ),
        (
            {5: lambda writer: writer.add_eos_token_id(10**6)},
            "'tokenizer.ggml.eos_token_id': found 1000000, expected one of the 4096 tokens",
        ),
    ],
)
def test_a_tokenizer_that_misses_something_is_an_error(models, tmp_path, changed, message):
    numbered = dict(enumerate(demo_tokenizer()[1])) | changed
    extra = [add for add in numbered.values() if add is not None]
    with pytest.raises(SpecError, match=message):
        load_tokenizer(write_gguf(models("qwen3"), tmp_path / "m.gguf", extra=extra))


def test_an_unknown_way_to_split_texts_is_an_error(models, tmp_path):
    extra = demo_tokenizer()[1]
    extra[1] = lambda writer: writer.add_tokenizer_pre("of-tomorrow")
    file = write_gguf(models("qwen3"), tmp_path / "model.gguf", extra=extra)
    with pytest.raises(SpecError, match=r"'tokenizer.ggml.pre': found 'of-tomorrow', expected one"):
        load_tokenizer(file)
