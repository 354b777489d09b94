"""Options that say where the ranks of a run are and how they reach each other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from llmpq.dist import Hosts
from llmpq.dist.io.job import Rendezvous, Transport
from llmpq.errors import SpecError


def add_host_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the options and return their group."""
    hosts = parser.add_argument_group("several hosts (each runs this command)")
    hosts.add_argument("--nnodes", type=int, default=1, help="number of hosts")
    hosts.add_argument("--node_rank", type=int, default=0, help="this host; 0 is the master's")
    hosts.add_argument("--master_addr", help="address of host 0 that rank 0 listens on")
    hosts.add_argument("--master_port", type=int, default=29500)
    hosts.add_argument(
        "--token_file",
        metavar="FILE",
        help="secret that all hosts share (mode 600); needed unless --master_addr is this host",
    )
    hosts.add_argument(
        "--transport",
        choices=get_args(Transport),
        default="auto",
        help="auto: unix sockets inside a host, TCP between hosts; gloo: torch's own, for "
        "comparison, which authenticates nobody",
    )
    return hosts


def hosts_of(options: argparse.Namespace) -> Hosts:
    """Return this host's place among all.

    Raises:
        SpecError: there are several hosts and no address to meet at.
    """
    if options.nnodes == 1:
        return Hosts()
    if options.master_addr is None:
        raise SpecError("--nnodes: found more than one host, expected --master_addr too")
    return Hosts(
        num_nodes=options.nnodes,
        node_rank=options.node_rank,
        address=(options.master_addr, options.master_port),
    )


def rendezvous_of(options: argparse.Namespace) -> Rendezvous:
    """Return how the ranks meet as far as options say; the rest is decided at the start."""
    token_file = None if options.token_file is None else Path(options.token_file).resolve()
    return Rendezvous(from_environment=True, token_file=token_file)
