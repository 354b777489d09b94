"""Options of the commands that listen for HTTP, and the line that says that they are ready."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from llmpq.cli.common import print_json
from llmpq.options.declare import add_options, read_options
from llmpq.options.server import ListenOptions, TransportLimits


def add_address_options(parser: argparse.ArgumentParser) -> None:
    """Add where to listen, who may connect, and TLS."""
    address = parser.add_argument_group("address")
    names = ("host", "port", "api_key_file", "allowed_origins", "ssl_certfile", "ssl_keyfile")
    add_options(address, ListenOptions, *names)


def add_listen_limits(limits: argparse._ArgumentGroup) -> None:
    """Add the limits of bodies and of the time to end."""
    add_options(limits, TransportLimits, "max_body_bytes")
    add_options(limits, ListenOptions, "drain_timeout_s")


def listen_options(options: argparse.Namespace) -> ListenOptions:
    """Return how to listen.

    Raises:
        SpecError: an option cannot be used.
    """
    return read_options(ListenOptions, options, transport=read_options(TransportLimits, options))


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
