"""What a checkpoint says about its own quantization: ``quantization_config`` of GPTQ models.

The fields are those that gptqmodel writes and vLLM and transformers read. ``dynamic`` gives groups
of modules, named by regular expressions, a precision of their own (``+:``) or none (``-:``); the
first that matches counts. This module refuses to read tensors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError, bad_field
from llmpq.kernels.packed import PACKED_BITS
from llmpq.spec.fields import read_json
from llmpq.spec.precision import Precision

FIELD = "quantization_config"
# Older writers kept it in a file of its own.
OLD_FILE = "quantize_config.json"
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""What zero points are stored less, by version of the format."""

_MAX_PATTERN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One entry of ``dynamic``.

    Attributes:
        pattern: regular expression that a module's full name begins with.
        overrides: fields that differ from the file's own; ``None`` leaves the module unquantized.
    """

    pattern: re.Pattern[str]
    overrides: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqConfig:
    """How the operators of a checkpoint are quantized.

    Attributes:
        where: the file, for messages.
        fields: ``bits``, ``group_size`` and ``sym`` of modules that no rule names.
        rules: exceptions, in order.
        zero_offset: what zero points are stored less.
    """

    where: str
    fields: Mapping[str, Any]
    rules: tuple[Rule, ...] = field(default=())
    zero_offset: int = 1

    def precision(self, module: str) -> Precision | None:
        """Return the precision of a module by its full name; ``None``: it is not quantized.

        Raises:
            SpecError: its bits, group size or symmetry are none that we can read.
        """
        fields = dict(self.fields)
        rule = next((rule for rule in self.rules if rule.pattern.match(module)), None)
        if rule is not None:
            if rule.overrides is None:
                return None
            fields.update(rule.overrides)
        bits, group, symmetric = fields["bits"], fields["group_size"], fields["sym"]
        if type(bits) is not int or bits not in PACKED_BITS:
            raise bad_field(self.where, f"{FIELD}.bits", bits, f"one of {PACKED_BITS}")
        if type(group) is not int or (group < 1 and group != -1):
            raise bad_field(self.where, f"{FIELD}.group_size", group, "-1 or at least 1")
        if type(symmetric) is not bool:
            raise bad_field(self.where, f"{FIELD}.sym", symmetric, "true or false")
        return Precision(
            bits=bits,
            method="gptq",
            group_size=None if group == -1 else group,
            symmetric=symmetric,
        )


def find_config(model_dir: Path | str) -> dict[str, Any] | None:
    """Return what a model directory says about its quantization; ``None``: it is not quantized.

    Raises:
        SpecError: ``config.json`` is missing or not an object.
    """
    directory = Path(model_dir)
    config = read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise bad_field(str(directory / "config.json"), "(top level)", config, "an object")
    found = config.get(FIELD)
    if found is None and (directory / OLD_FILE).is_file():
        found = read_json(directory / OLD_FILE)
        if isinstance(found, dict):
            found.setdefault("quant_method", "gptq")
    if found is not None and not isinstance(found, dict):
        raise bad_field(str(directory / "config.json"), FIELD, found, "an object")
    return found


def parse_config(fields: Mapping[str, Any], where: str) -> GptqConfig:
    """Read a ``quantization_config``.

    Raises:
        SpecError: another method or packing than GPTQ's own, or rules that cannot be read.
    """
    expected = {"quant_method": ("gptq",), "pack_dtype": ("int32",), "lm_head": (False,)}
    for name, choices in expected.items():
        if fields.get(name, choices[0]) not in choices:
            raise bad_field(where, f"{FIELD}.{name}", fields[name], f"'{choices[0]}'")
    version = fields.get("checkpoint_format") or "gptq"
    if version not in ZERO_OFFSETS:
        raise bad_field(
            where, f"{FIELD}.checkpoint_format", version, f"one of {sorted(ZERO_OFFSETS)}"
        )
    return GptqConfig(
        where=where,
        fields={
            "bits": fields.get("bits"),
            "group_size": fields.get("group_size"),
            "sym": fields.get("sym", True),
        },
        rules=_rules(fields.get("dynamic"), where),
        zero_offset=ZERO_OFFSETS[version],
    )


def make_config(
    precisions: Sequence[Precision], layers_name: str, *, act_order: bool, meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the ``quantization_config`` of a model whose layers have these precisions.

    The commonest quantized precision is the file's own; the layers of every other get one rule.
    Symmetric files are of version 1, which every reader knows. With an asymmetric layer it is
    version 2: gptqmodel reads version 1 only when symmetric or of its own making.

    Args:
        precisions: of every layer; 16 bits leaves a layer as it is.
        layers_name: what the list of layers is called, such as ``layers``.
        act_order: whether groups of inputs are found through ``g_idx``.
        meta: where the file comes from.

    Raises:
        SpecError: no layer is quantized.
    """
    layers: dict[Precision, list[int]] = {}
    for index, precision in enumerate(precisions):
        layers.setdefault(precision, []).append(index)
    counts = Counter(precision for precision in precisions if precision.bits != 16)
    if not counts:
        raise SpecError("GPTQ file: found only layers of 16 bits, expected some to be quantized")
    common = counts.most_common(1)[0][0]
    is_symmetric = all(precision.symmetric for precision in counts)
    dynamic: dict[str, dict[str, Any]] = {}
    for precision, indices in layers.items():
        if precision == common:
            continue
        numbers = "|".join(map(str, indices))
        sign = "-" if precision.bits == 16 else "+"
        pattern = rf"{sign}:.*\.{re.escape(layers_name)}\.(?:{numbers})\..*"
        dynamic[pattern] = {} if precision.bits == 16 else _fields_of(precision)
    return _fields_of(common) | {
        "desc_act": act_order,
        "lm_head": False,
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if is_symmetric else "gptq_v2",
        "pack_dtype": "int32",
        "dynamic": dynamic,
        "meta": dict(meta),
    }


def _fields_of(precision: Precision) -> dict[str, Any]:
    group = -1 if precision.group_size is None else precision.group_size
    return {"bits": precision.bits, "group_size": group, "sym": precision.symmetric}


def _rules(value: object, where: str) -> tuple[Rule, ...]:
    if value is None or value is False:
        return ()
    if not isinstance(value, Mapping):
        raise bad_field(where, f"{FIELD}.dynamic", value, "an object of patterns")
    rules = []
    for text, overrides in value.items():
        is_left_out = text.startswith("-:")
        pattern = text[2:] if text.startswith(("-:", "+:")) else text
        if len(pattern) > _MAX_PATTERN or not isinstance(overrides, Mapping | None):
            raise bad_field(where, f"{FIELD}.dynamic", text, "a short pattern with its fields")
        try:
            compiled = re.compile(pattern)
        except (re.error, RecursionError) as error:
            raise bad_field(
                where, f"{FIELD}.dynamic", text, f"a regular expression ({error})"
            ) from None
        rules.append(Rule(pattern=compiled, overrides=None if is_left_out else overrides or {}))
    return tuple(rules)
