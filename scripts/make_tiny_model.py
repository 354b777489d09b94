#!/usr/bin/env python3
"""Write a random model of any supported family: a config.json and safetensors, no tokenizer.

    scripts/make_tiny_model.py --family llama --layers 4 --hidden 64 --output DIR

Weights are seeded and scaled so that activations neither vanish nor explode, and norms and biases
are disturbed, so that a run that forgets one of them shows. Sizes are free: 100 million parameters
take seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# The disturbance of norms and biases, relative to their usual ones and zeros.
VECTOR_NOISE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that every family has, under whatever name."""

    layers: int = 3
    hidden: int = 32
    intermediate: int = 64
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 100
    max_positions: int = 128


def _common(shape: Shape) -> dict[str, object]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.max_positions,
    }


def _with_head_dim(shape: Shape) -> dict[str, object]:
    return _common(shape) | {"head_dim": shape.hidden // shape.heads}


def _multi_head(shape: Shape) -> dict[str, object]:
    return _common(shape) | {"num_key_value_heads": shape.heads}


def _opt(shape: Shape) -> dict[str, object]:
    return {
        "hidden_size": shape.hidden,
        "ffn_dim": shape.intermediate,
        "word_embed_proj_dim": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_positions,
    }


def _bloom(shape: Shape) -> dict[str, object]:
    return {"hidden_size": shape.hidden, "n_layer": shape.layers, "n_head": shape.heads}


def _gpt_neox(shape: Shape) -> dict[str, object]:
    fields = _common(shape)
    del fields["num_key_value_heads"]
    return fields


def _soft_capped(shape: Shape) -> dict[str, object]:
    # Every other layer slides; scores as if head_dim were the usual scale.
    fields = _with_head_dim(shape)
    return fields | {"query_pre_attn_scalar": fields["head_dim"], "sliding_window": 8}


def _gemma3(shape: Shape) -> dict[str, object]:
    kinds = ["sliding_attention", "full_attention"]
    return _soft_capped(shape) | {"layer_types": [kinds[i % 2] for i in range(shape.layers)]}


def _mixtral(shape: Shape) -> dict[str, object]:
    return _with_head_dim(shape) | {"num_local_experts": 4, "num_experts_per_tok": 2}


def _qwen3_moe(shape: Shape) -> dict[str, object]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    return _with_head_dim(shape) | experts | {"moe_intermediate_size": shape.intermediate}


def _jetmoe(shape: Shape) -> dict[str, object]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "kv_channels": shape.hidden // shape.heads,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": shape.max_positions,
    }


def _gpt_oss(shape: Shape) -> dict[str, object]:
    return _mixtral(shape) | {
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


# Family -> (model_type of transformers, its fields for a shape).
FAMILIES: dict[str, tuple[str, Callable[[Shape], dict[str, object]]]] = {
    "bloom": ("bloom", _bloom),
    "cohere": ("cohere", _common),
    "diffllama": ("diffllama", _with_head_dim),
    "gemma": ("gemma", _with_head_dim),
    "gemma2": ("gemma2", _soft_capped),
    "gemma3": ("gemma3_text", _gemma3),
    "gpt_neox": ("gpt_neox", _gpt_neox),
    "gpt_oss": ("gpt_oss", _gpt_oss),
    "granite": ("granite", _common),
    "jetmoe": ("jetmoe", _jetmoe),
    "llama": ("llama", _common),
    "mistral": ("mistral", _with_head_dim),
    "mixtral": ("mixtral", _mixtral),
    "opt": ("opt", _opt),
    "phi": ("phi", _multi_head),
    "phi3": ("phi3", _common),
    "qwen2": ("qwen2", _common),
    "qwen3": ("qwen3", _with_head_dim),
    "qwen3_moe": ("qwen3_moe", _qwen3_moe),
    "vaultgemma": ("vaultgemma", _soft_capped),
}


def make_config(
    family: str, shape: Shape, overrides: Mapping[str, object] | None = None
) -> PreTrainedConfig:
    """Configuration of ``family`` in ``shape``; ``overrides`` are the family's own fields."""
    model_type, fields_of = FAMILIES[family]
    fields: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "initializer_range": shape.hidden**-0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **fields_of(shape),
        **(overrides or {}),
    }
    return CONFIG_MAPPING[model_type](**fields)


def make_model(config: PreTrainedConfig, *, seed: int) -> PreTrainedModel:
    """Model of ``config`` with random float32 weights that depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=VECTOR_NOISE)
    return model.eval()


def save_model(
    model: PreTrainedModel, output: Path, *, dtype: torch.dtype, max_shard_size: str = "5GB"
) -> Path:
    """Write ``model`` to ``output`` in ``dtype``; the model itself is cast."""
    model.to(dtype).save_pretrained(output, max_shard_size=max_shard_size)
    return output


def _override(text: str) -> tuple[str, object]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected FIELD=JSON")
    try:
        return name, json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{name}: not JSON: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--family", required=True, choices=sorted(FAMILIES))
    for name, value in (
        ("layers", 4),
        ("hidden", 64),
        ("intermediate", None),
        ("heads", 4),
        ("kv_heads", None),
        ("vocab", 128),
        ("max_positions", 2048),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", type=_override, action="append", default=[], metavar="FIELD=JSON")
    parser.add_argument("--max_shard_size", default="5GB")
    parser.add_argument("--output", type=Path, required=True)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Write the model that the options describe; print where it is and how large."""
    options = _parser().parse_args(argv)
    shape = Shape(
        layers=options.layers,
        hidden=options.hidden,
        intermediate=options.intermediate or 4 * options.hidden,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        vocab=options.vocab,
        max_positions=options.max_positions,
    )
    config = make_config(options.family, shape, dict(options.set))
    model = make_model(config, seed=options.seed)
    save_model(
        model,
        options.output,
        dtype=getattr(torch, options.dtype),
        max_shard_size=options.max_shard_size,
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.output}: {options.family}, {parameters:,} parameters, {options.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
