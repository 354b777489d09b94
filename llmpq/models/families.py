"""Families whose modules around the decoder layers differ from the default.

The default is the structure of Llama: ``embed_tokens``, ``layers``, ``norm``, ``lm_head``, rotary
embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn


def _plain_positions(embedding: nn.Module, positions: Tensor) -> Tensor:
    result: Tensor = embedding(positions)
    return result


def _opt_positions(embedding: nn.Module, positions: Tensor) -> Tensor:
    # OPT's module adds its offset of 2; it reads the mask only without positions.
    result: Tensor = embedding(None, 0, position_ids=positions)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Names of the submodules before and after the layers of a family.

    Attributes:
        embedding: the token embedding.
        positions: learned position embedding, if any.
        embed_positions: calls the module ``positions``.
        project_in: projection of embeddings narrower than the residual stream.
        embedding_norm: norm applied to the embeddings.
        final_norm: norm after the last layer; optional in a model.
        project_out: projection before the head.
        alibi: whether layers take a bias of the key positions.
        activation: activation submodule of a layer to compute blockwise, if any.
        embedding_multiplier: configuration field that scales embeddings.
        logits_multiplier: configuration field that scales logits.
        logits_divisor: configuration field that divides logits.
        applied_scales: configuration fields of scales that transformers' modules apply.
        attends_to_cache: whether a layer attends to its cached keys and values unchanged, query
            heads of a group next to each other.
        stored_head: name of the head in checkpoints, if it differs from that in transformers.
        sends_more: whether stages may send more than hidden states (``models.token_layout``).
        own_embeddings: what makes the embeddings of single layers; optional in a model.
        streams: what makes the hidden states of a token from its embedding, and one of them again.
    """

    embedding: str = "embed_tokens"
    positions: str | None = None
    embed_positions: Callable[[nn.Module, Tensor], Tensor] = _plain_positions
    project_in: str | None = None
    embedding_norm: str | None = None
    final_norm: str = "norm"
    project_out: str | None = None
    alibi: bool = False
    activation: str | None = None
    embedding_multiplier: str | None = None
    logits_multiplier: str | None = None
    logits_divisor: str | None = None
    applied_scales: tuple[str, ...] = ()
    attends_to_cache: bool = True
    stored_head: str | None = None
    sends_more: bool = False
    own_embeddings: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()


DEFAULT = Family()

# Families whose tokens and logits are tested against transformers. Other families of the default
# structure run with a warning.
# fmt: off
TESTED = frozenset((
    "afmoe", "apertus", "arcee", "bitnet", "bloom", "codegen", "cohere", "cohere2", "dbrx",
    "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "falcon", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma3n_text",
    "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neox",
    "gpt_oss", "gptj",
    "granite", "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "internlm3",
    "iquestcoder", "jais2", "jetmoe", "llama", "llama4_text", "mellum", "minicpm3", "minimax_m2",
    "ministral", "ministral3", "mistral", "mixtral", "mpt", "nanochat", "nemotron", "olmo", "olmo2",
    "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2", "vaultgemma",
    "youtu",
))
# fmt: on

# Families of the default structure that do not work: family -> reason.
UNSUPPORTED = {
    "doge": "its layers build their own attention masks",
}

_GPT2 = Family(embedding="wte", positions="wpe", final_norm="ln_f")
_GPTJ = Family(embedding="wte", final_norm="ln_f")
_OWN_EMBEDDINGS = (
    "embed_tokens_per_layer",
    "per_layer_model_projection",
    "per_layer_projection_norm",
)
_GRANITE = Family(embedding_multiplier="embedding_multiplier", logits_divisor="logits_scaling")

FAMILIES: dict[str, Family] = {
    "opt": Family(
        positions="embed_positions",
        embed_positions=_opt_positions,
        project_in="project_in",
        final_norm="final_layer_norm",
        project_out="project_out",
    ),
    "bloom": Family(
        embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        final_norm="ln_f",
        alibi=True,
        activation="mlp.gelu_impl",
    ),
    "codegen": _GPTJ,
    "cohere": Family(logits_multiplier="logit_scale"),
    "cohere2": Family(logits_multiplier="logit_scale"),
    "dbrx": Family(embedding="wte", final_norm="norm_f"),
    "diffllama": Family(attends_to_cache=False),  # the two halves of its heads attend separately
    "jetmoe": Family(attends_to_cache=False),  # query heads of a group are far from each other
    "falcon": Family(embedding="word_embeddings", final_norm="ln_f"),
    "gemma3n_text": Family(
        sends_more=True,
        own_embeddings=_OWN_EMBEDDINGS,
        streams=("altup_projections", "altup_unembed_projections"),
    ),
    "gemma4_text": Family(sends_more=True, own_embeddings=_OWN_EMBEDDINGS),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gptj": _GPTJ,
    "gpt_neox": Family(
        embedding="embed_in", final_norm="final_layer_norm", stored_head="embed_out"
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "minicpm3": Family(logits_divisor="logits_scaling", applied_scales=("scale_emb",)),
    "mpt": Family(embedding="wte", final_norm="norm_f", alibi=True),
    "phi": Family(final_norm="final_layernorm", activation="mlp.activation_fn"),
    "nanochat": Family(embedding_norm="norm"),  # one norm, without weights, at both ends
    "persimmon": Family(final_norm="final_layernorm"),
}


def family_of(model_type: str) -> Family:
    """Return the entry of ``model_type``, or the default."""
    return FAMILIES.get(model_type, DEFAULT)
