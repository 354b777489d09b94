"""The options by which a person decides instead of the planner."""

from __future__ import annotations

import argparse

from llmpq.assigner.constraints.overrides import Overrides
from llmpq.errors import SpecError
from llmpq.spec.plan import MicroBatching
from llmpq.units import GIB


def add_override_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options to a parser."""
    group = parser.add_argument_group(
        "manual decisions",
        "A device is node/type#0; where several may be meant, node/type, node or type name all of "
        "them. The search decides the rest.",
    )
    group.add_argument(
        "--memory_gib", nargs="+", metavar="DEVICE=GIB", help="memory a device may use"
    )
    group.add_argument("--exclude", nargs="+", metavar="DEVICE", help="leave these out")
    group.add_argument("--use", nargs="+", metavar="DEVICE", help="each holds a layer at least")
    group.add_argument(
        "--fix_order", nargs="+", metavar="DEVICE", help="the pipeline; others are left out"
    )
    group.add_argument(
        "--fix_layers",
        nargs="+",
        metavar="DEVICE=FIRST:END",
        help="exactly these layers on a device, END excluded",
    )
    group.add_argument(
        "--fix_bits",
        nargs="+",
        metavar="LAYERS=BITS",
        help="bits of layers FIRST:END, or of whatever layers a DEVICE holds",
    )
    group.add_argument(
        "--micro_batch", nargs=2, type=int, metavar=("PREFILL", "DECODE"), help="the two sizes"
    )


def overrides_of(options: argparse.Namespace) -> Overrides:
    """Return the decisions of parsed options.

    Raises:
        SpecError: an entry is malformed.
    """
    bits = [_pair("--fix_bits", text) for text in options.fix_bits or ()]
    sizes = options.micro_batch
    return Overrides(
        memory=tuple(_memory(text) for text in options.memory_gib or ()),
        exclude=tuple(options.exclude or ()),
        use=tuple(options.use or ()),
        order=tuple(options.fix_order or ()),
        layers=tuple(
            (name, *_range("--fix_layers", text, span))
            for text in options.fix_layers or ()
            for name, span in [_pair("--fix_layers", text)]
        ),
        layer_bits=tuple(
            (*_range("--fix_bits", f"{name}={width}", name), _whole("--fix_bits", name, width))
            for name, width in bits
            if _is_range(name)
        ),
        device_bits=tuple(
            (name, _whole("--fix_bits", name, width)) for name, width in bits if not _is_range(name)
        ),
        micro_batching=None if sizes is None else MicroBatching(prefill=sizes[0], decode=sizes[1]),
    )


def _pair(option: str, text: str) -> tuple[str, str]:
    name, sign, value = text.rpartition("=")
    if not (sign and name and value):
        raise SpecError(f"{option}: found '{text}', expected two parts joined by '='")
    return name, value


def _memory(text: str) -> tuple[str, int]:
    name, value = _pair("--memory_gib", text)
    try:
        size = float(value)
    except ValueError:
        size = -1.0
    if not 0 < size < 1e6:
        raise SpecError(f"--memory_gib: found '{text}', expected a number of GiB above 0")
    return name, round(size * GIB)


def _is_range(text: str) -> bool:
    return all(part.isdecimal() for part in text.split(":")) and text.count(":") == 1


def _range(option: str, text: str, span: str) -> tuple[int, int]:
    if not _is_range(span):
        raise SpecError(f"{option}: found '{text}', expected layers as FIRST:END")
    first, end = span.split(":")
    return int(first), int(end)


def _whole(option: str, name: str, value: str) -> int:
    if not value.isdecimal():
        raise SpecError(f"{option}: found '{name}={value}', expected whole bits")
    return int(value)
