"""Model families: a record of each, in a file of its own that is named after its ``model_type``.

A family is added with one file: ``FAMILY`` states what differs from Llama, the default of every
field. A file of another model type with the record of a family says that both are the same on text.
The records import no torch: planner, loader and runtime read the same.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from llmpq.spec.huggingface.sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All that planner and runtime know of the models of one ``model_type``.

    Attributes:
        name: ``model_type`` of transformers.
        sizes: operators and parameters; ``None`` if they are only described
            (``llmpq-profile describe``).
    """

    name: str
    sizes: Sizes | None = None


@cache
def family_of(model_type: str) -> Family:
    """Return the record of a model type; one with the defaults if there is none."""
    if model_type not in _model_types():
        return Family(name=model_type)
    record: Family = importlib.import_module(f"{__name__}.{model_type}").FAMILY
    return record


def known_families() -> Iterator[Family]:
    """Yield the record of every family, by name."""
    for model_type in sorted(_model_types()):
        family = family_of(model_type)
        if family.name == model_type:
            yield family


@cache
def _model_types() -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(__path__))
