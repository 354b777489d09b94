"""The ``quantization_config`` of formats other than GPTQ: FP8, compressed-tensors, AWQ, MXFP4.

Their weights are codes with scales that are read as numbers; a plan's bits are chosen freely.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmpq.errors import bad_field

FIELD = "quantization_config"
METHODS = ("fp8", "compressed-tensors", "awq", "mxfp4")
"""Values of ``quant_method`` whose weights are decoded when they are read."""

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "dense",
)
_LINEAR = "Linear"
_OF_WEIGHTS = ("weight_input", "weight_output")
"""Places of a transform that the stored weights already have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodesConfig:
    """What a file says about its codes.

    Attributes:
        groups: pattern of a module's name, and its bits, in order; an empty pattern is any module.
        block: rows and columns that share a scale; ``None`` if not stated.
    """

    groups: tuple[tuple[str, int], ...] = ()
    block: tuple[int, int] | None = None

    def bits(self, module: str) -> int | None:
        """Return the bits of a module's packed codes; ``None`` if not stated."""
        for pattern, bits in self.groups:
            if not pattern or re.match(pattern, module) or module.endswith(f".{pattern}"):
                return bits
        return None


def codes_config(fields: Mapping[str, Any] | None, where: str) -> CodesConfig | None:
    """Read a ``quantization_config``; ``None`` if the weights are plain or GPTQ's.

    Raises:
        SpecError: another method, or a format of it that is not read.
    """
    method = None if fields is None else fields.get("quant_method")
    if fields is None or method == "gptq":
        return None
    if method not in METHODS:
        raise bad_field(where, f"{FIELD}.quant_method", method, f"gptq, {', '.join(METHODS)}")
    if method == "compressed-tensors":
        return _compressed_tensors(fields, where)
    if method == "awq":
        _expect(fields, where, {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)})
    return CodesConfig(block=_block(fields.get("weight_block_size"), where))


def _compressed_tensors(fields: Mapping[str, Any], where: str) -> CodesConfig:
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise bad_field(where, f"{FIELD}.config_groups", groups, "an object of groups")
    if fields.get("sparsity_config"):
        raise bad_field(where, f"{FIELD}.sparsity_config", fields["sparsity_config"], "none")
    _check_transforms(fields, where)
    named: list[tuple[str, int]] = []
    others: list[tuple[str, int]] = []
    block = None
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        place = f"{FIELD}.config_groups.{name}"
        if not isinstance(weights, Mapping):
            raise bad_field(where, f"{place}.weights", weights, "an object")
        kind = group.get("format") or fields.get("format")
        if kind not in _FORMATS:
            raise bad_field(where, f"{place}.format", kind, f"one of {', '.join(_FORMATS)}")
        bits = weights.get("num_bits")
        if type(bits) is not int or not 2 <= bits <= 8:
            raise bad_field(where, f"{place}.weights.num_bits", bits, "2 to 8")
        block = _block(weights.get("block_structure"), where) or block
        for target in group.get("targets") or (_LINEAR,):
            (others if target == _LINEAR else named).append((_pattern(target, where), bits))
    return CodesConfig(groups=(*named, *others), block=block)


def _check_transforms(fields: Mapping[str, Any], where: str) -> None:
    """Check that no transform (a Hadamard rotation, say) applies to activations."""
    place = f"{FIELD}.transform_config"
    transforms = fields.get("transform_config") or {}
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    if transforms and not isinstance(groups, Mapping):
        raise bad_field(where, f"{place}.config_groups", groups, "an object of groups")
    for name, group in (groups or {}).items():
        applied = group.get("apply") if isinstance(group, Mapping) else None
        for entry in applied if isinstance(applied, list) else (None,):
            location = entry.get("location") if isinstance(entry, Mapping) else None
            if location not in _OF_WEIGHTS:
                found = f"{place}.config_groups.{name}.apply.location"
                raise bad_field(where, found, location, f"one of {', '.join(_OF_WEIGHTS)}")


def _pattern(target: object, where: str) -> str:
    """Return a target as a pattern: ``re:...``, the end of a module's name, or any ``Linear``."""
    if not isinstance(target, str) or len(target) > 4096:
        raise bad_field(where, f"{FIELD}.config_groups.targets", target, "short patterns")
    if target == _LINEAR:
        return ""
    pattern = target.removeprefix("re:") if target.startswith("re:") else re.escape(target)
    try:
        re.compile(pattern)
    except (re.error, RecursionError) as error:
        raise bad_field(
            where, f"{FIELD}.config_groups.targets", target, f"a regular expression ({error})"
        ) from None
    return pattern


def _block(value: object, where: str) -> tuple[int, int] | None:
    if value is None:
        return None
    sizes = tuple(value) if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise bad_field(where, f"{FIELD}.weight_block_size", value, "two sizes")
    return sizes[0], sizes[1]


def _expect(fields: Mapping[str, Any], where: str, allowed: Mapping[str, tuple[Any, ...]]) -> None:
    for name, choices in allowed.items():
        if fields.get(name, choices[0]) not in choices:
            raise bad_field(where, f"{FIELD}.{name}", fields[name], f"{choices[0]!r}")
