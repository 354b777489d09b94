"""Options of hosts that lend their devices to a command on another host."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from llmpq.options.declare import Option, check_options
from llmpq.options.run import host_name

WORKER_PORT = 29400
_MAX_PORT = 65535


def worker_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST`` or ``HOST:PORT``.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]") or (":" in host.strip("[]") and not host.startswith("[")):
        return host_name(text), WORKER_PORT
    if not port.isdecimal() or not 0 < int(port) <= _MAX_PORT:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected HOST or HOST:PORT")
    return host_name(host), int(port)


def address_text(address: tuple[str, int]) -> str:
    """Return an address as it is written on a command line."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Where a worker listens, and what it lends."""

    key_file: Annotated[
        Path,
        Option(metavar="FILE", help="secret that all hosts share (mode 600, at least 16 bytes)"),
    ]
    host: Annotated[
        str,
        Option(parse=host_name, help="address to listen on (default %(default)s: this host only)"),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Option(maximum=_MAX_PORT, help="its port; 0 takes a free one (default %(default)s)"),
    ] = WORKER_PORT
    model: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            help="weights on this host (default: the path of the other host, or the hub's cache)",
        ),
    ] = None
    no_measure: Annotated[
        bool, Option(help="lend devices that were not measured with the catalogue's figures")
    ] = False

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersOptions:
    """The hosts whose workers a command uses."""

    workers: Annotated[
        tuple[tuple[str, int], ...],
        Option(
            parse=worker_address,
            metavar="HOST[:PORT]",
            help="plan over the devices of this host and of these, where llmpq worker runs "
            f"(default port {WORKER_PORT})",
        ),
    ] = ()
    key_file: Annotated[
        Path | None, Option(metavar="FILE", help="--workers: the secret that all hosts share")
    ] = None
