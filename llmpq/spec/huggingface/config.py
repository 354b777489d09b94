"""Typed access to the fields of a transformers ``config.json``.

Unknown fields are ignored, some fields have several names, and null means absent. Fields that are
read are checked as strictly as in ``llmpq.spec.fields``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from llmpq.errors import SpecError, bad_field
from llmpq.spec.precision import DTYPE_BYTES, Dtype

MAX_SIZE = 2**31
MAX_LAYERS = 10_000

HIDDEN = ("hidden_size", "n_embed")
LAYERS = ("num_hidden_layers", "n_layer")
HEADS = ("num_attention_heads", "n_head")


class Config:
    """Typed access to a ``config.json``; null means absent, as in transformers."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def error(self, field: str, found: object, expected: str) -> SpecError:
        """Build the error for one field."""
        return bad_field(self._where, field, found, expected)

    def has_key(self, field: str) -> bool:
        """Return whether the file has ``field``, null included."""
        return field in self._values

    def size(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """Return the first of ``names`` that is set, as a whole number in range."""
        for name in names:
            value = self._values.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise self.error(name, value, "a whole number")
                if not minimum <= value <= MAX_SIZE:
                    raise self.error(name, value, f"a whole number in [{minimum}, {MAX_SIZE}]")
                return value
        if default is None:
            raise self.error(names[0], "nothing", "this field to be present")
        return default

    def optional_size(self, name: str) -> int | None:
        """Return a positive whole number, ``None`` when absent or null."""
        return None if self._values.get(name) is None else self.size(name)

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def layers(self) -> int:
        """Return the number of decoder layers."""
        count = self.size(*LAYERS)
        if count > MAX_LAYERS:
            raise self.error(LAYERS[0], count, f"at most {MAX_LAYERS} layers")
        return count

    def head_dim(self, default: int | None) -> int:
        """Return the size of a head: as stated, ``default``, or an equal share of the width."""
        stated = self.optional_size("head_dim") or default
        if stated is not None:
            return stated
        return self.head_share()

    def head_share(self) -> int:
        """Return an equal share of the width for each query head."""
        width, heads = self.size(*HIDDEN), self.size(*HEADS)
        if width % heads:
            raise self.error(HEADS[0], heads, f"a divisor of hidden_size = {width}")
        return width // heads

    def kv_heads(self, default: int | None) -> int:
        """Return the key-value heads; ``default`` holds only where the file has no such field."""
        heads = self.size(*HEADS)
        missing = heads if default is None or self.has_key("num_key_value_heads") else default
        found = self.size("num_key_value_heads", default=missing)
        if heads % found:
            raise self.error("num_key_value_heads", found, f"a divisor of {heads} query heads")
        return found

    def names(self, field: str, length: int, choices: Sequence[str]) -> tuple[str, ...] | None:
        """Return a list of ``length`` words out of ``choices``, ``None`` when absent."""
        value = self._values.get(field)
        if value is None:
            return None
        is_list = isinstance(value, list) and len(value) == length
        if not is_list or not all(item in choices for item in value):
            raise self.error(field, value, f"{length} entries out of {', '.join(choices)}")
        return tuple(value)

    def indices(self, field: str) -> frozenset[int]:
        """Return a list of layer numbers, empty when absent."""
        value = self._values.get(field)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(field, value, "an array of layer numbers")
        return frozenset(value)

    def dtype(self) -> Dtype:
        """Return the checkpoint's number format: ``dtype``, else ``torch_dtype``, else float32.

        float32 is torch's default.
        """
        for name in ("dtype", "torch_dtype"):
            value = self._values.get(name)
            if value is not None:
                text = value.removeprefix("torch.") if isinstance(value, str) else ""
                if text not in DTYPE_BYTES:
                    raise self.error(name, value, f"one of {', '.join(DTYPE_BYTES)}")
                return cast(Dtype, text)
        return "float32"
