"""The language model of a ``config.json``: the text part of a multimodal model, and other names.

Text alone passes through the same layers as in the language model that the family builds on:
Qwen's three position rows are equal then, so its text model is Qwen2 or Qwen3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmpq.spec.families import family_of

_TIE = "tie_word_embeddings"
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id")
_ROPE = ("rope_parameters", "rope_scaling")


def language_fields(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the language model; those of any other model as they are.

    Fields that the inner object leaves out and both objects can have are those of the outer one;
    the outer one says first whether the head is tied.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return _renamed(config)
    shared = {name: config[name] for name in _SHARED if name in config and name not in inner}
    if config.get(_TIE) is not None:
        shared[_TIE] = config[_TIE]
    return _renamed({**inner, **shared})


def _renamed(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or (name := family_of(model_type).name) == model_type:
        return fields
    found = dict(fields)
    found["model_type"] = name
    for name in _ROPE:
        rope = found.get(name)
        if isinstance(rope, Mapping):
            kept = {key: rope[key] for key in rope if not key.startswith("mrope")}
            kinds = {key: kept[key] for key in ("type", "rope_type") if kept.get(key) == "mrope"}
            found[name] = {**kept, **dict.fromkeys(kinds, "default")}
    return found
