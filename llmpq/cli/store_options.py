"""The options of loading: where quantized layers are kept, and which kernel runs them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from llmpq.dist.io.job import DEFAULT_STORE_LIMIT_BYTES
from llmpq.errors import SpecError
from llmpq.units import GIB

_OFF = "off"
_VARIABLE = "LLMPQ_STORE"


def add_store_options(group: argparse._ArgumentGroup) -> None:
    """Add ``--store``, ``--store_limit`` and ``--kernel``."""
    group.add_argument(
        "--store",
        metavar="DIR|off",
        help="keep quantized layers here, so that the next start quantizes nothing again "
        f"(default: ${_VARIABLE}, else llmpq/store in the user's cache)",
    )
    group.add_argument(
        "--store_limit",
        type=float,
        default=DEFAULT_STORE_LIMIT_BYTES / GIB,
        metavar="GIB",
        help="size of the store; what was unused for longest goes first (default %(default)g)",
    )
    add_kernel_option(group)


def add_kernel_option(group: argparse._ArgumentGroup) -> None:
    """Add ``--kernel``."""
    group.add_argument(
        "--kernel",
        metavar="NAME",
        help="multiply by this kernel wherever it can run, such as bnb_int8_cpu "
        "(default: the fastest; docs/reference/support.md lists them)",
    )


def store_directory(option: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the store, ``None`` when there is to be none.

    Args:
        option: what ``--store`` says.
        environ: of the process.
    """
    chosen = option or environ.get(_VARIABLE)
    if chosen == _OFF:
        return None
    if chosen:
        return Path(chosen).expanduser().resolve()
    home, cache = environ.get("HOME"), environ.get("XDG_CACHE_HOME")
    if not home and not cache:
        return None
    default = (Path(cache) if cache else Path(home or "") / ".cache").resolve() / "llmpq" / "store"
    try:  # nobody asked for it: a home that cannot be written to is no reason to stop
        default.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return None
    return default


def store_limit_bytes(gibibytes: float) -> int:
    """Return the limit in bytes.

    Raises:
        SpecError: it is negative or not a number.
    """
    if not 0 <= gibibytes < 2**30:
        raise SpecError(f"--store_limit: found {gibibytes}, expected gibibytes, at least 0")
    return int(gibibytes * GIB)
