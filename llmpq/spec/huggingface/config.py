"""Typed access to the fields of a transformers ``config.json``.

Unknown fields are ignored, some fields have several names, and null means absent. A field that the
file leaves out has transformers' default of the family (``llmpq/data/config_defaults.json``), where
there is one. Fields that are read are checked as strictly as in ``llmpq.spec.fields``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, cast

from llmpq.errors import missing_field
from llmpq.spec.fields import Fields, read_json
from llmpq.spec.precision import DTYPE_BYTES, Dtype

MAX_SIZE = 2**31
MAX_LAYERS = 10_000

# Families differ in the names of these fields.
HIDDEN = ("hidden_size", "n_embed", "n_embd", "d_model")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
LAYER_KINDS = "layers_block_type"
HEADS = ("num_attention_heads", "n_head", "n_heads")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
SHARED_EXPERTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_ORIGINAL = "original_max_position_embeddings"
SCALING = ("rope_parameters", "rope_scaling", _ORIGINAL, "max_position_embeddings")
"""Fields of how rotary angles depend on the length."""
DEFAULTS_FILE = "config_defaults.json"


def family_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return the defaults of transformers' configuration classes by ``model_type``."""
    return _defaults("families")


def class_sizes() -> Mapping[str, Mapping[str, Any]]:
    """Return the sizes that transformers' classes have by default, by ``model_type``."""
    return _defaults("sizes")


@cache
def _defaults(part: str) -> Mapping[str, Mapping[str, Any]]:
    with resources.as_file(resources.files("llmpq") / "data" / DEFAULTS_FILE) as path:
        return cast(Mapping[str, Mapping[str, Any]], read_json(path)[part])


class Config(Fields):
    """The fields of a ``config.json``: any number of reads, and null means absent.

    Args:
        value: the parsed file.
        where: name of the file, for messages.
        path: dotted path of this object inside the file.
        defaults: values of fields that the file leaves out; a field that is null has none.
    """

    def __init__(
        self,
        value: object,
        where: str,
        path: str = "",
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(value, where, path)
        self._stated = frozenset(self.names())
        missing = {} if defaults is None else defaults
        self._left = {**missing, **self._left}

    def take(self, field: str) -> Any:
        """Return the raw value of a required field."""
        if not self.has(field):
            raise missing_field(self.where, self.name_of(field))
        return self._left[field]

    def is_stated(self, field: str) -> bool:
        """Return whether the file itself has the field, null or not."""
        return field in self._stated

    def size(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """Return the first of ``names`` that is set, as a whole number in range.

        Fields of the file come before defaults.
        """
        found = [name for name in names if self.has(name)]
        name = next((name for name in found if name in self._stated), found[0] if found else None)
        if name is None and default is not None:
            return default
        return self.integer(name or names[0], minimum, MAX_SIZE)

    def integer(self, field: str, minimum: int = 0, maximum: int = MAX_SIZE) -> int:
        """Return a whole number in ``[minimum, maximum]``, or the one that a list repeats."""
        value = self.take(field)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            self._left[field] = value[0]
        return super().integer(field, minimum, maximum)

    def optional_size(self, name: str) -> int | None:
        """Return a positive whole number, ``None`` when absent or null."""
        return self.size(name) if self.has(name) else None

    def flag_or(self, name: str, default: bool) -> bool:
        """Return true or false."""
        return self.flag(name) if self.has(name) else default

    def inner(self, field: str) -> Config:
        """Return a nested object; empty when absent."""
        value = self.take(field) if self.has(field) else {}
        return Config(value, self.where, self.name_of(field))

    def layers(self) -> int:
        """Return the number of decoder layers; Nemotron-H states the kind of each alone."""
        kinds = self._left.get(LAYER_KINDS)
        if isinstance(kinds, list) and not any(self.has(name) for name in LAYERS):
            count = len(kinds)
        else:
            count = self.size(*LAYERS)
        if count > MAX_LAYERS:
            raise self.error(LAYERS[0], count, f"at most {MAX_LAYERS} layers")
        return count

    def head_dim(self) -> int:
        """Return the size of a head: as stated, or an equal share of the width."""
        return self.optional_size("head_dim") or self.head_share()

    def head_share(self) -> int:
        """Return an equal share of the width for each query head."""
        width, heads = self.size(*HIDDEN), self.size(*HEADS)
        if width % heads:
            raise self.error(HEADS[0], heads, f"a divisor of hidden_size = {width}")
        return width // heads

    def kv_heads(self, *names: str) -> int:
        """Return the key-value heads, as many as query heads when absent."""
        heads = self.size(*HEADS)
        names = names or ("num_key_value_heads",)
        found = self.size(*names, default=heads)
        if heads % found:
            raise self.error(names[0], found, f"a divisor of {heads} query heads")
        return found

    def words(self, field: str, length: int, choices: Sequence[str]) -> tuple[str, ...] | None:
        """Return a list of ``length`` words out of ``choices``, ``None`` when absent."""
        if not self.has(field):
            return None
        value = self.take(field)
        is_list = isinstance(value, list) and len(value) == length
        if not is_list or not all(item in choices for item in value):
            raise self.error(field, value, f"{length} entries out of {', '.join(choices)}")
        return tuple(value)

    def indices(self, field: str) -> frozenset[int]:
        """Return a list of layer numbers, empty when absent."""
        value = self.take(field) if self.has(field) else []
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(field, value, "an array of layer numbers")
        return frozenset(value)

    def periodic(self, period: str, offset: str) -> list[bool]:
        """Return for every layer whether it is layer ``offset`` of a group of ``period`` layers."""
        every, place = self.size(period), self.size(offset, minimum=0)
        if place >= every:
            raise self.error(offset, place, f"less than {period} = {every}")
        return [index % every == place for index in range(self.layers())]

    def dtype(self) -> Dtype:
        """Return the checkpoint's number format; bfloat16, today's usual one, if not stated."""
        name = next((name for name in ("dtype", "torch_dtype") if self.has(name)), None)
        value = "bfloat16" if name is None else self.take(name)
        text = value.removeprefix("torch.") if isinstance(value, str) else ""
        if text not in DTYPE_BYTES:
            raise self.error(str(name), value, f"one of {', '.join(DTYPE_BYTES)}")
        return cast(Dtype, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthScaling:
    """How the rotary angles of a model depend on the length of a sequence.

    Attributes:
        switches_after: longest sequence with the first of the two tables of ``longrope``. One token
            later, all keys have other angles and are computed again, as transformers does.
        grows_after: longest sequence without ``dynamic`` scaling. The tokens of a longer prompt
            have the angles of its length, each later token those of its own position.
    """

    switches_after: int | None = None
    grows_after: int | None = None


def read_length_scaling(fields: Mapping[str, Any]) -> LengthScaling:
    """Return the scaling that the fields of a language model's configuration state.

    Files of earlier releases of transformers have ``rope_scaling`` with a ``type``. A length beside
    these parameters comes before one among them, as in transformers.
    """
    kinds = {_kind(part): part for part in rotations(fields)}
    long, longest = kinds.get("longrope"), fields.get("max_position_embeddings")
    switch = None if long is None else fields.get(_ORIGINAL) or long.get(_ORIGINAL) or longest
    return LengthScaling(switches_after=switch, grows_after=longest if "dynamic" in kinds else None)


def scaled_positions(fields: Mapping[str, Any]) -> int | None:
    """Return the tokens that YaRN stretches the rotary angles to, ``None`` without it.

    They are the factor times the length before it, in tokens (https://arxiv.org/abs/2309.00071). A
    configuration may state the model's own length beside it. Of other scaling, files state the
    whole length.

    Args:
        fields: of a language model's configuration.
    """
    found = []
    for part in rotations(fields):
        factor, before = part.get("factor"), part.get(_ORIGINAL) or fields.get(_ORIGINAL)
        before = before or fields.get("max_position_embeddings")
        if _kind(part) == "yarn" and isinstance(factor, int | float) and isinstance(before, int):
            found.append(int(factor * before))
    return min(found, default=None)


def rotations(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rotary parameters of each kind of layer, or those of all."""
    stated = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        return []
    return [part for part in stated.values() if isinstance(part, Mapping)] or [stated]


def _kind(rotation: Mapping[str, Any]) -> object:
    return rotation.get("rope_type") or rotation.get("type")
