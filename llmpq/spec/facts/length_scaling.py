"""How the rotary angles of a model depend on the length of a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
    stated = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    parts = [part for part in stated.values() if isinstance(part, Mapping)] or [stated]
    kinds = {part.get("rope_type") or part.get("type"): part for part in parts}
    name, longest = "original_max_position_embeddings", fields.get("max_position_embeddings")
    long = kinds.get("longrope")
    switch = None if long is None else fields.get(name) or long.get(name) or longest
    return LengthScaling(switches_after=switch, grows_after=longest if "dynamic" in kinds else None)
