"""Options of what listens for HTTP: the servers of a plan, and the router in front of several."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from llmpq.options.declare import Option, check_options
from llmpq.options.run import DrainOptions, Pooling, host_name
from llmpq.routing import BALANCERS
from llmpq.spec.runtime_constants import FIRST_BYTE_S, MAX_CHOICES, POLL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportLimits:
    """Largest body of a request, and seconds to wait for a client.

    Attributes:
        max_body_bytes: largest body.
        read_timeout_s: longest time for the headers of a request, and again for its body.
        write_timeout_s: how long a reader may take nothing before its request is aborted.
    """

    max_body_bytes: Annotated[
        int,
        Option(minimum=1, metavar="N", help="largest body of a request (default 8 MiB)"),
    ] = 8 << 20
    read_timeout_s: float = 60.0
    write_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class ListenOptions(DrainOptions):
    """Where to listen, who may connect, and how to end."""

    host: Annotated[
        str,
        Option(
            parse=host_name,
            help="address to listen on; one that other hosts can reach needs --api_key_file "
            "(default %(default)s)",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        Option(maximum=65535, help="port to listen on; 0 takes a free one (default %(default)s)"),
    ] = 8000
    api_key_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="accepted API keys, one of at least 16 characters a line, # for comments (mode "
            "600)",
        ),
    ] = None
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            metavar="ORIGIN",
            help="sites whose pages may use this server from a browser (CORS), * for all (default: "
            "pages of this host without a key, and none may read answers)",
        ),
    ] = ()
    ssl_certfile: Annotated[
        Path | None, Option(metavar="FILE.pem", help="certificate chain, for TLS")
    ] = None
    ssl_keyfile: Annotated[
        Path | None, Option(metavar="FILE.pem", help="its key (default: in --ssl_certfile)")
    ] = None
    transport: TransportLimits = field(default_factory=TransportLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """How requests name a model, and how its embeddings are made."""

    served_model_name: Annotated[
        tuple[str, ...],
        Option(
            metavar="NAME",
            help="names of the model in requests; answers use the first (default: the plan's)",
        ),
    ] = ()
    pooling: Annotated[
        Pooling | None,
        Option(
            help="embeddings: the last token's final hidden state, or the mean of all (default: "
            "1_Pooling/config.json of the model, else last)"
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFiles(ServedModel):
    """Which fleet is served, and which part of it this host has."""

    fleet: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="fleet file of llmpq-algo --replicas: start every replica on this host, each with "
            "the other options, and a router in front of them",
        ),
    ] = None
    node: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="--fleet over several hosts: the node of its cluster that this host is; the first "
            "node has the router, which listens on --port, and replicas on the ports after it",
        ),
    ] = None
    node_addr: Annotated[
        tuple[str, ...],
        Option(
            metavar="NAME=ADDRESS",
            help="--node: where the other hosts reach a node (default: its name)",
        ),
    ] = ()
    in_fleet: Annotated[bool, Option(help=argparse.SUPPRESS)] = False


@dataclass(frozen=True, kw_only=True)
class QueueLimits:
    """How many answers and prompt tokens a server takes at once.

    Raises:
        SpecError: a value cannot be used.
    """

    max_num_queued_reqs: Annotated[
        int | None,
        Option(
            minimum=1,
            metavar="N",
            help="answers that wait or run at once; one request alone may have more (default: any "
            "number)",
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        int | None,
        Option(
            minimum=1,
            metavar="N",
            help="prompt tokens that have not been computed (default: any number)",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class AdmissionOptions(QueueLimits):
    """Limits above which a server answers that it is busy."""

    max_num_choices: Annotated[
        int,
        Option(
            minimum=1,
            metavar="N",
            help="answers of one request, its prompts times n; more are answered with 400 (default "
            "%(default)s)",
        ),
    ] = MAX_CHOICES
    ttft_bound_s: Annotated[
        float | None,
        Option(
            flags=("ttft_bound",),
            above=0,
            metavar="SECONDS",
            help="bound on the time to the first token, from which --max_num_queued_tokens is "
            "computed by the plan's own cost model, and corrected by what is measured",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """How requests are balanced over replicas.

    Raises:
        SpecError: a value cannot be used.
    """

    balancer: Annotated[
        str,
        Option(
            choices=tuple(BALANCERS), help="which replica takes a request (default %(default)s)"
        ),
    ] = "sal_seconds"
    poll_s: Annotated[
        float,
        Option(
            above=0,
            maximum=60,
            metavar="SECONDS",
            help="time between two readings of the replicas' statistics (default %(default)g)",
        ),
    ] = POLL_S
    seed: Annotated[int, Option(help="of random balancers (default %(default)s)")] = 0

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class RouterOptions(RoutingOptions):
    """Which replicas a router has, and how it treats them."""

    replica: Annotated[
        tuple[str, ...],
        Option(metavar="URL", help="addresses of the replicas, http://HOST:PORT"),
    ]
    first_byte_timeout_s: Annotated[
        float,
        Option(
            flags=("first_byte_timeout",),
            above=0,
            metavar="SECONDS",
            help="time to the first byte of a streamed answer, ten times as long for a whole one; "
            "then another replica is tried (default %(default)g)",
        ),
    ] = FIRST_BYTE_S
