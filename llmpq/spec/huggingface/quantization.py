"""The ``quantization_config`` of a checkpoint: GPTQ, and formats whose weights are decoded.

Fields of GPTQ are those that gptqmodel writes and vLLM and transformers read. ``dynamic`` sets the
precision of modules by regular expression (``+:``) or leaves them unquantized (``-:``); the first
match counts. Only names of tensors are read, not their data.

Weights of the other formats (``METHODS``) are codes with scales that are read as numbers; a plan's
bits are chosen freely. AutoRound stores its codes as GPTQ or AWQ does, under fields of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmpq.errors import SpecError, bad_field
from llmpq.spec.fields import read_json
from llmpq.spec.model_files.config import language_fields, model_fields
from llmpq.spec.model_files.weight_headers import find_weights, read_headers
from llmpq.spec.precision import Precision, heaviest, unquantized

# Older checkpoints of GPTQ and of ModelOpt have it in a separate file.
OLD_FILE = "quantize_config.json"
MODELOPT_FILE = "hf_quant_config.json"
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}
"""Amount subtracted from stored zero points, by version of the format."""

QUANTIZED_BITS = (3, 4, 8)

_MAX_PATTERN = 4096
_PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
"""Format of the codes of each ``packing_format`` of AutoRound."""
_PLAIN_BITS = (16, 32)
"""Bits of modules that AutoRound leaves as they are."""
_REGEX = re.compile(r"[*+?^$|()\[\]{}\\]")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_CODES = ".qweight"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRule:
    """One entry of ``dynamic``: a regular expression that a module's full name begins with.

    ``overrides`` are fields that differ from the file's own; ``None`` leaves the module
    unquantized.
    """

    pattern: re.Pattern[str]
    overrides: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqConfig:
    """How the operators of a checkpoint are quantized.

    Attributes:
        fields: ``bits``, ``group_size`` and ``sym`` of modules that no rule names.
        rules: exceptions, in order.
        zero_offset: amount subtracted from stored zero points.
        has_head: whether the LM head is quantized, too.
    """

    where: str
    fields: Mapping[str, Any]
    rules: tuple[ModuleRule, ...] = field(default=())
    zero_offset: int = 1
    has_head: bool = False

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
        if type(bits) is not int or bits not in QUANTIZED_BITS:
            raise bad_field(self.where, f"{FIELD}.bits", bits, f"one of {QUANTIZED_BITS}")
        if type(group) is not int or (group < 1 and group != -1):
            raise bad_field(self.where, f"{FIELD}.group_size", group, "-1 or at least 1")
        if type(symmetric) is not bool:
            raise bad_field(self.where, f"{FIELD}.sym", symmetric, "true or false")
        return Precision(
            bits=bits, method="gptq", group_size=None if group == -1 else group, symmetric=symmetric
        )


def find_config(model_dir: Path | str) -> dict[str, Any] | None:
    """Return what a model directory says about its quantization; ``None``: it is not quantized.

    Raises:
        SpecError: as ``model_fields``, or what it says is no object.
    """
    directory = Path(model_dir)
    config = model_fields(directory)
    found = config.get(FIELD, language_fields(config).get(FIELD))
    where = str(directory / "config.json")
    if found is None and (directory / OLD_FILE).is_file():
        found = read_json(directory / OLD_FILE)
        if isinstance(found, dict):
            found.setdefault("quant_method", "gptq")
    elif found is None and (directory / MODELOPT_FILE).is_file():
        where, found = str(directory / MODELOPT_FILE), read_json(directory / MODELOPT_FILE)
        found = found.get("quantization") if isinstance(found, dict) else found
        if isinstance(found, dict):
            found.setdefault("quant_method", "modelopt")
    if found is not None and not isinstance(found, dict):
        raise bad_field(where, FIELD, found, "an object")
    if found is not None and found.get("quant_method") in ("auto-round", "auto_round"):
        return _of_auto_round(found, where)
    return found


def _of_auto_round(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Return AutoRound's fields as those of the format that its codes have.

    Raises:
        SpecError: codes of another format, numbers that are no integers, or malformed exceptions.
    """
    packing = fields.get("packing_format", "auto_round:auto_gptq")
    kind = _PACKINGS.get(str(packing))
    if kind is None:
        raise bad_field(where, f"{FIELD}.packing_format", packing, f"one of {', '.join(_PACKINGS)}")
    _expect(fields, where, {"data_type": ("int",)})
    exceptions = fields.get("extra_config") or {}
    if not isinstance(exceptions, Mapping) or not all(
        isinstance(one, Mapping) for one in exceptions.values()
    ):
        raise bad_field(where, f"{FIELD}.extra_config", exceptions, "an object of modules")
    same: dict[str, Any] = {
        name: fields[name] for name in ("bits", "group_size", "sym") if name in fields
    }
    said: dict[str, Any] = {"packing_format": packing, **same}
    if kind == "awq":
        return {"quant_method": "awq", **said}
    rules: dict[str, Any] = {}
    for module, of_module in exceptions.items():
        # A name, or a regular expression that a name contains.
        pattern = f".*(?:{module})" if _REGEX.search(module) else f"{re.escape(module)}$"
        changed = {name: of_module[name] for name in same if name in of_module}
        if changed.get("bits") in _PLAIN_BITS:
            rules[f"-:{pattern}"] = None
        elif changed:
            rules[f"+:{pattern}"] = changed
    head = exceptions.get("lm_head") or {}
    has_head = head.get("bits", _PLAIN_BITS[0]) not in _PLAIN_BITS
    return {"quant_method": "gptq", **said, "dynamic": rules, "lm_head": has_head}


def is_gptq(model_dir: Path | str) -> bool:
    """Return whether the ``config.json`` of a model directory names GPTQ codes.

    Raises:
        SpecError: it has no readable ``config.json``, or was quantized in an unknown format.
    """
    found = find_config(model_dir)
    where = str(Path(model_dir) / "config.json")
    return found is not None and codes_config(found, where) is None


def parse_config(fields: Mapping[str, Any], where: str) -> GptqConfig:
    """Read a ``quantization_config``.

    Raises:
        SpecError: the method or packing is not GPTQ's, or a rule is malformed.
    """
    expected = {"quant_method": ("gptq",), "pack_dtype": ("int32",), "lm_head": (False, True)}
    for name, choices in expected.items():
        if fields.get(name, choices[0]) not in choices:
            raise bad_field(
                where, f"{FIELD}.{name}", fields[name], " or ".join(f"'{one}'" for one in choices)
            )
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
        has_head=bool(fields.get("lm_head")),
    )


def stored_precisions(model_dir: Path | str, num_layers: int) -> tuple[Precision, ...]:
    """Return the stored precision of every layer of a GPTQ checkpoint; empty for any other.

    If operators of a layer differ in groups or symmetry, the one with the most bytes counts.

    Raises:
        SpecError: quantized in an unknown format, or operators of a layer differ in bits.
    """
    fields = find_config(model_dir)
    directory = Path(model_dir)
    if fields is None or codes_config(fields, str(directory / "config.json")) is not None:
        return ()
    config = parse_config(fields, str(directory / "config.json"))
    found: dict[int, set[Precision]] = {}
    for name in _tensor_names(directory):
        layer = _LAYER.search(name)
        if layer is None or not name.endswith(_CODES):
            continue
        precision = config.precision(name.removesuffix(_CODES))
        if precision is None:
            raise SpecError(f"{config.where}: {name} is stored, expected 'dynamic' to say so")
        found.setdefault(int(layer[1]), set()).add(precision)
    return tuple(_of_layer(found.get(i, set()), directory, i) for i in range(num_layers))


def stored_head(model_dir: Path | str) -> Precision | None:
    """Return the stored precision of the LM head of a GPTQ checkpoint; ``None``: not quantized.

    Raises:
        SpecError: quantized in an unknown format, or the head's codes are not as ``lm_head`` says.
    """
    fields, directory = find_config(model_dir), Path(model_dir)
    where = str(directory / "config.json")
    if fields is None or codes_config(fields, where) is not None:
        return None
    config = parse_config(fields, where)
    heads = [
        name
        for name in _tensor_names(directory)
        if name.endswith(_CODES) and _LAYER.search(name) is None
    ]
    if config.has_head != bool(heads):
        stored = f"'{heads[0]}'" if heads else "no codes of a head"
        raise bad_field(where, f"{FIELD}.lm_head", config.has_head, f"what is stored, {stored}")
    if not heads:
        return None
    found = config.precision(heads[0].removesuffix(_CODES))
    if found is None:
        raise SpecError(f"{where}: {heads[0]} is stored, expected 'dynamic' to say so")
    return found


def _of_layer(found: set[Precision], directory: Path, index: int) -> Precision:
    if len({precision.bits for precision in found}) > 1:
        raise SpecError(
            f"{directory}: layer {index} mixes operators of {sorted({p.bits for p in found})} "
            "bits, expected one bitwidth a layer"
        )
    return heaviest(found) if found else unquantized()


def _tensor_names(directory: Path) -> Iterable[str]:
    """Return the names of all tensors, from the index or the headers of the files."""
    files = find_weights(directory)
    return files.file_of or files.assign(read_headers(files))


def _rules(value: object, where: str) -> tuple[ModuleRule, ...]:
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
        rules.append(
            ModuleRule(pattern=compiled, overrides=None if is_left_out else overrides or {})
        )
    return tuple(rules)


FIELD = "quantization_config"
METHODS = ("fp8", "compressed-tensors", "awq", "mxfp4", "bitsandbytes", "modelopt")
"""Values of ``quant_method`` whose weights are decoded when they are read."""

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "dense",
)
_MODELOPT_ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4",
)  # fmt: skip
"""Of ModelOpt: those whose weights mean the same without what is done to activations."""
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
        others = ", ".join(("gptq", "auto-round", *METHODS))
        raise bad_field(where, f"{FIELD}.quant_method", method, others)
    if method == "compressed-tensors":
        return _compressed_tensors(fields, where)
    if method == "modelopt":
        _check_modelopt(fields, where)
    if method == "awq":
        _expect(fields, where, {"bits": (4,), "version": ("gemm", "GEMM"), "zero_point": (True,)})
    return CodesConfig(block=_block(fields.get("weight_block_size"), where))


def _check_modelopt(fields: Mapping[str, Any], where: str) -> None:
    """Check the algorithm, or those of all modules of a mixture.

    Raises:
        SpecError: one is not read.
    """
    name, found = f"{FIELD}.quant_algo", [fields.get("quant_algo")]
    if found == ["MIXED_PRECISION"]:
        name, modules = f"{FIELD}.quantized_layers", fields.get("quantized_layers")
        if not isinstance(modules, Mapping) or not all(
            isinstance(one, Mapping) for one in modules.values()
        ):
            raise bad_field(where, name, modules, "an object of modules")
        found = [one.get("quant_algo") for one in modules.values()]
    for algorithm in found:
        if str(algorithm).upper() not in _MODELOPT_ALGORITHMS:
            expected = f"one of {', '.join(_MODELOPT_ALGORITHMS)}"
            raise bad_field(where, name, algorithm, expected)


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
