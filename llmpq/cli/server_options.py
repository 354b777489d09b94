"""Options of the commands that listen for HTTP, and the line that says that they are ready."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from llmpq.cli.common import host_name, print_json
from llmpq.dist.launch.supervisor import DRAIN_TIMEOUT_S
from llmpq.errors import SpecError

if TYPE_CHECKING:
    from llmpq.server.app import ListenOptions

DEFAULT_PORT = 8000
MAX_PORT = 65535


def add_address_options(parser: argparse.ArgumentParser) -> None:
    """Add where to listen, who may connect, and TLS."""
    address = parser.add_argument_group("address")
    address.add_argument(
        "--host",
        type=host_name,
        default="127.0.0.1",
        help="address to listen on; one that other hosts can reach needs --api_key_file "
        "(default 127.0.0.1)",
    )
    address.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help=f"port to listen on; 0 takes a free one (default {DEFAULT_PORT})",
    )
    address.add_argument(
        "--api_key_file",
        metavar="FILE",
        help="accepted API keys, one of at least 16 characters a line, # for comments (mode 600)",
    )
    address.add_argument("--ssl_certfile", metavar="FILE.pem", help="certificate chain, for TLS")
    address.add_argument(
        "--ssl_keyfile", metavar="FILE.pem", help="its key (default: in --ssl_certfile)"
    )


def add_listen_limits(limits: argparse._ArgumentGroup) -> None:
    """Add the limits of bodies and of the time to end."""
    limits.add_argument(
        "--max_body_bytes",
        type=int,
        default=8 << 20,
        metavar="N",
        help="largest body of a request (default 8 MiB)",
    )
    limits.add_argument(
        "--drain_timeout",
        type=float,
        default=DRAIN_TIMEOUT_S,
        metavar="SECONDS",
        help="time for running answers after SIGTERM or Ctrl-C; a second signal ends the server at "
        f"once (default {DRAIN_TIMEOUT_S:g})",
    )


def listen_options(options: argparse.Namespace) -> ListenOptions:
    """Return how to listen.

    Raises:
        SpecError: an option cannot be used.
    """
    from llmpq.server.app import ListenOptions
    from llmpq.server.transport import TransportLimits

    if not 0 <= options.port <= MAX_PORT:
        raise SpecError(f"--port: found {options.port}, expected 0 to {MAX_PORT}")
    return ListenOptions(
        host=options.host,
        port=options.port,
        transport=TransportLimits(
            max_body_bytes=at_least("--max_body_bytes", options.max_body_bytes, 1)
        ),
        api_key_file=_path(options.api_key_file),
        drain_timeout_s=at_least("--drain_timeout", options.drain_timeout, 0),
        ssl_certfile=_path(options.ssl_certfile),
        ssl_keyfile=_path(options.ssl_keyfile),
    )


def say_ready(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Print the line that scripts wait for, and with ``--json`` the record.

    A full disk behind an output ends no server.
    """
    with _unless_full(sys.stderr):
        print(f"ready {record['url']}", file=sys.stderr, flush=True)
    with _unless_full(sys.stdout):
        if options.json:
            print_json(record)
        else:
            print(f"ready {record['url']}")
        sys.stdout.flush()


@contextlib.contextmanager
def _unless_full(stream: TextIO) -> Iterator[None]:
    """Write to a stream, and to nothing from now on if its disk is full."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())


def at_least(name: str, value: Any, minimum: int) -> Any:
    """Return the value of an option.

    Raises:
        SpecError: it is too small.
    """
    if value is not None and not value >= minimum:
        raise SpecError(f"{name}: found {value}, expected at least {minimum}")
    return value


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name).resolve()
