"""Typed access to the fields of a transformers ``config.json``.

Unknown fields are ignored, some fields have several names, and null means absent. Fields that are
read are checked as strictly as in ``llmpq.spec.fields``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from llmpq.spec.fields import Fields
from llmpq.spec.precision import DTYPE_BYTES, Dtype

MAX_SIZE = 2**31
MAX_LAYERS = 10_000

HIDDEN = ("hidden_size", "n_embed")
LAYERS = ("num_hidden_layers", "n_layer")
HEADS = ("num_attention_heads", "n_head")


class Config(Fields):
    """The fields of a ``config.json``: any number of reads, and null means absent."""

    def take(self, field: str) -> Any:
        """Return the raw value of a required field."""
        if not self.has(field):
            raise self.error(field, "nothing", "this field to be present")
        return self._left[field]

    def size(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """Return the first of ``names`` that is set, as a whole number in range."""
        name = next((name for name in names if self.has(name)), None)
        if name is None and default is not None:
            return default
        return self.integer(name or names[0], minimum, MAX_SIZE)

    def optional_size(self, name: str) -> int | None:
        """Return a positive whole number, ``None`` when absent or null."""
        return self.size(name) if self.has(name) else None

    def flag_or(self, name: str, default: bool) -> bool:
        """Return true or false."""
        return self.flag(name) if self.has(name) else default

    def layers(self) -> int:
        """Return the number of decoder layers."""
        count = self.size(*LAYERS)
        if count > MAX_LAYERS:
            raise self.error(LAYERS[0], count, f"at most {MAX_LAYERS} layers")
        return count

    def head_dim(self, default: int | None) -> int:
        """Return the size of a head: as stated, ``default``, or an equal share of the width."""
        return self.optional_size("head_dim") or default or self.head_share()

    def head_share(self) -> int:
        """Return an equal share of the width for each query head."""
        width, heads = self.size(*HIDDEN), self.size(*HEADS)
        if width % heads:
            raise self.error(HEADS[0], heads, f"a divisor of hidden_size = {width}")
        return width // heads

    def kv_heads(self, default: int | None) -> int:
        """Return the key-value heads; ``default`` holds only where the file has no such field."""
        heads = self.size(*HEADS)
        missing = heads if default is None or "num_key_value_heads" in self.names() else default
        found = self.size("num_key_value_heads", default=missing)
        if heads % found:
            raise self.error("num_key_value_heads", found, f"a divisor of {heads} query heads")
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

    def dtype(self) -> Dtype:
        """Return the checkpoint's number format; float32, torch's default, if not stated."""
        name = next((name for name in ("dtype", "torch_dtype") if self.has(name)), None)
        value = "float32" if name is None else self.take(name)
        text = value.removeprefix("torch.") if isinstance(value, str) else ""
        if text not in DTYPE_BYTES:
            raise self.error(str(name), value, f"one of {', '.join(DTYPE_BYTES)}")
        return cast(Dtype, text)
