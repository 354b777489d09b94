"""The ``config.json`` that a GGUF file stands for.

llama.cpp's converter writes sizes as metadata and leaves out what follows from the architecture;
here they become the fields of transformers again. What transformers could not compute as
llama.cpp does is an error.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import dump_json
from llmpq.spec.gguf.header import GgufHeader, find_gguf, read_header

_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62
_LOCAL_THETA = 10_000.0  # base of Gemma 3's sliding layers, which older files do not state


def gguf_config(model: Path | str) -> dict[str, Any] | None:
    """Return the ``config.json`` of a GGUF model; ``None`` if the model is none.

    Raises:
        SpecError: the file is damaged, of an unknown architecture, or scales positions in a way
            that transformers does not.
    """
    path = find_gguf(model)
    return None if path is None else config_of(read_header(path))


def config_bytes(model: Path | str) -> bytes:
    """Return a model's ``config.json`` for a digest, as stored or as made from a GGUF file.

    Raises:
        SpecError: as :func:`gguf_config`.
        OSError: there is no such file.
    """
    config = gguf_config(model)
    if config is None:
        return (Path(model) / "config.json").read_bytes()
    return dump_json(config).encode()


def config_of(header: GgufHeader) -> dict[str, Any]:
    """Return the ``config.json`` of a header; errors as :func:`gguf_config`."""
    metadata = _Metadata(header)
    build = _ARCHITECTURES.get(metadata.architecture)
    if build is None:
        raise bad_field(
            str(header.path),
            "general.architecture",
            metadata.architecture,
            f"one of {', '.join(sorted(_ARCHITECTURES))}",
        )
    return _common(metadata) | build(metadata)


class _Metadata:
    """Typed access to the metadata of a model; keys without the architecture's prefix."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = str(header.metadata.get("general.architecture", ""))

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.header.metadata

    def whole(self, key: str, default: int | None = None) -> int:
        """Return a size; arrays with a value for each layer must have one value."""
        found = self._get(key, default)
        if isinstance(found, tuple) and len(set(found)) == 1:
            found = found[0]
        if type(found) is not int:
            raise self.error(key, found, "one whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self._get(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.error(key, found, "a number")
        return float(found)

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors

    def floats(self, name: str) -> list[float]:
        """Return the numbers of a small float32 tensor."""
        tensor = self.header.tensors[name]
        if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 1 << 16:
            raise SpecError(f"{tensor.file}: tensor '{name}': expected a short list in F32")
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.begin)
            return list(struct.unpack(f"<{tensor.shape[0]}f", stream.read(tensor.nbytes)))

    def error(self, key: str, found: object, expected: str) -> SpecError:
        return bad_field(str(self.header.path), f"{self.architecture}.{key}", found, expected)

    def _get(self, key: str, default: object) -> object:
        found = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if found is None:
            raise self.error(key, None, "this key to be present")
        return found


def _common(metadata: _Metadata) -> dict[str, Any]:
    heads = metadata.whole("attention.head_count")
    vocabulary = metadata.header.tensors.get("token_embd.weight")
    if vocabulary is None or len(vocabulary.shape) != 2:
        raise SpecError(f"{metadata.header.path}: found no tensor 'token_embd.weight'")
    config: dict[str, Any] = {
        "hidden_size": metadata.whole("embedding_length"),
        "num_hidden_layers": metadata.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.whole("attention.head_count_kv", heads),
        "head_dim": _head_dim(metadata),
        "intermediate_size": metadata.whole("feed_forward_length"),
        "max_position_embeddings": metadata.whole("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": vocabulary.shape[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "rope_parameters": _rope(metadata),
        "dtype": _dtype(metadata.header),
    }
    for name in ("bos", "eos", "padding"):
        token = metadata.header.metadata.get(f"tokenizer.ggml.{name}_token_id")
        config[f"{name.replace('padding', 'pad')}_token_id"] = token
    return config


def _head_dim(metadata: _Metadata) -> int:
    hidden, heads = metadata.whole("embedding_length"), metadata.whole("attention.head_count")
    default = metadata.whole("attention.key_length", hidden // max(1, heads))
    rotated = metadata.whole("rope.dimension_count", default)
    for key, found in (
        ("rope.dimension_count", rotated),
        ("attention.value_length", metadata.whole("attention.value_length", default)),
    ):
        if found != default:
            raise metadata.error(key, found, f"{default}, as 'attention.key_length'")
    return default


def _rope(metadata: _Metadata) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
    }
    kind = metadata.header.metadata.get(f"{metadata.architecture}.rope.scaling.type", "none")
    if metadata.has_tensor("rope_factors_short.weight"):
        return found | _long_rope(metadata)
    if metadata.has_tensor("rope_freqs.weight"):
        # Llama 3's frequencies, which the converter divides by these factors.
        return found | _factors(metadata, metadata.floats("rope_freqs.weight"))
    if kind == "linear":
        return found | {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn" and not any(".yarn_" in key for key in metadata.header.metadata):
        return found | {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "original_max_position_embeddings": metadata.whole(
                "rope.scaling.original_context_length"
            ),
        }
    if kind != "none":
        raise metadata.error("rope.scaling.type", kind, "none, linear or plain yarn")
    return found


def _factors(metadata: _Metadata, factors: list[float]) -> dict[str, Any]:
    """Return scaling that divides every frequency by a factor, at any length."""
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": metadata.whole("context_length"),
    }


def _long_rope(metadata: _Metadata) -> dict[str, Any]:
    original = metadata.whole("rope.scaling.original_context_length")
    return {
        "rope_type": "longrope",
        "factor": metadata.whole("context_length") / original,
        "short_factor": metadata.floats("rope_factors_short.weight"),
        "long_factor": metadata.floats("rope_factors_long.weight"),
        "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
        "original_max_position_embeddings": original,
    }


def _dtype(header: GgufHeader) -> str:
    """Return the number format of most matrices by bytes; bfloat16 for quantized ones."""
    counts: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.type.name] += tensor.nbytes
    most = counts.most_common(1)[0][0]
    return {"F32": "float32", "F16": "float16"}.get(most, "bfloat16")


def _llama(metadata: _Metadata) -> dict[str, Any]:
    has_bias = metadata.has_tensor("blk.0.attn_q.bias")
    if has_bias != metadata.has_tensor("blk.0.attn_output.bias"):
        raise SpecError(
            f"{metadata.header.path}: found a bias in some projections of attention, expected "
            "all or none in a llama model"
        )
    if not metadata.whole("expert_count", 0):
        biases = {"attention_bias": has_bias, "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias")}
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | biases
    if has_bias:
        raise SpecError(f"{metadata.header.path}: found biases, expected none in a mixtral model")
    return {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "sliding_window": None,
    }


def _qwen2(metadata: _Metadata) -> dict[str, Any]:
    del metadata
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}


def _qwen3(metadata: _Metadata) -> dict[str, Any]:
    del metadata
    return {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False}


def _qwen3_moe(metadata: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        # llama.cpp always makes the chosen experts' shares add up to one.
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(metadata: _Metadata) -> dict[str, Any]:
    del metadata
    return {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]} | _GELU


def _gemma2(metadata: _Metadata) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": _query_scalar(metadata, _GEMMA2_27B_LAYERS),
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    } | _GELU


def _gemma3(metadata: _Metadata) -> dict[str, Any]:
    count = metadata.whole("block_count")
    if not metadata.has("attention.sliding_window"):
        raise metadata.error("attention.sliding_window", None, "windows, as Gemma 3 has them")
    period = metadata.whole("attention.sliding_window_pattern", 6)
    kinds = [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)
    ]
    theta = metadata.number("rope.freq_base_swa", _LOCAL_THETA)
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": _query_scalar(metadata, _GEMMA3_27B_LAYERS),
        "sliding_window": metadata.whole("attention.sliding_window"),
        "layer_types": kinds,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": (
            metadata.number("final_logit_softcapping")
            if metadata.has("final_logit_softcapping")
            else None
        ),
        "rope_parameters": {
            "full_attention": _rope(metadata),
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    } | _GELU


def _query_scalar(metadata: _Metadata, layers_of_27b: int) -> int:
    """Return the number whose root divides queries; the 27B models differ from their head size."""
    if metadata.whole("block_count") != layers_of_27b:
        return _head_dim(metadata)
    return metadata.whole("embedding_length") // metadata.whole("attention.head_count")


def _phi3(metadata: _Metadata) -> dict[str, Any]:
    window = metadata.whole("attention.sliding_window", 0) or None
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": window,
        "original_max_position_embeddings": metadata.whole(
            "rope.scaling.original_context_length", metadata.whole("context_length")
        ),
    }


_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_ARCHITECTURES: dict[str, Callable[[_Metadata], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
