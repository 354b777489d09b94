"""llmpq-serve: answer OpenAI's API over HTTP with the ranks of a strategy, or of all of a fleet.

HTTP and tokenizing are in this process, the ranks in processes of their own. The line ``ready
http://HOST:PORT`` on standard output and standard error says that requests are answered.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import command_start_s, make_parser, require, run_command, words_without
from llmpq.cli.engine_options import (
    add_engine_options,
    check_engine_options,
    engine_words,
    launch_engine,
    run_stages,
)
from llmpq.cli.front.host_plan import saved_state_bytes
from llmpq.cli.front.plan_options import add_host_plan_options, check_plan_options
from llmpq.cli.front.planned import PlannedModel
from llmpq.cli.run_options import HostProgress, commands_of_hosts, stated_hosts
from llmpq.cli.server_options import (
    add_address_options,
    add_listen_limits,
    listen_options,
    say_ready,
)
from llmpq.cli.workers.hosts import other_hosts_of
from llmpq.dist import Hosts, model_dir_of
from llmpq.dist.launch.process_environment import visible_devices
from llmpq.dist.metrics.measurement import StartLog
from llmpq.dist.metrics.progress import SilentProgress
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, names_of, read_options, values_of
from llmpq.options.run import MODEL_HELP, HostOptions, HostPlanOptions, PromptFiles
from llmpq.options.server import (
    AdmissionOptions,
    ListenOptions,
    RoutingOptions,
    ServedFiles,
    ServedModel,
    TransportLimits,
)
from llmpq.routing import load_balancer
from llmpq.spec.plan import Fleet, Plan, read_fleet, read_plan
from llmpq.units import GIB

if TYPE_CHECKING:
    from llmpq.dist.async_engine import AsyncEngine
    from llmpq.server.admission import AdmissionLimits
    from llmpq.server.page.plan_view import PlanView
    from llmpq.server.router.fleet import ReplicaCommand
    from llmpq.server.text.tokenizer import ServerTokenizer

SERVER_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client", "jinja2", "tokenizers")
SEQUENCES = 4
"""Answers at the same time that a model is planned for by default."""
OF_MODEL = ("bits", "key_file", "no_measure", "ray_address", "replan", "workers")
"""Options of the plan of MODEL."""
_OF_MASTER = names_of(ListenOptions) | names_of(TransportLimits) | names_of(AdmissionOptions)
_OF_MASTER |= names_of(ServedModel) | {"json", "node_rank"}
"""Options that hosts without the master do not have, or not with the same value."""
FLEET_PACKAGES = ("torch", "transformers", "aiohttp", "fastapi", "uvicorn", "httptools")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    start = StartLog(command_start_s(argv))
    return run_command(_parser(), lambda options: _run(options, start), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("llmpq-serve", "Answer OpenAI's API with the ranks of a strategy.")
    _add_files(parser)
    add_address_options(parser)
    _add_limit_options(parser)
    add_engine_options(parser)
    _add_hosts(parser)
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    files = parser.add_argument_group("files")
    what = files.add_mutually_exclusive_group()
    add_options(what, PromptFiles, "strat_file_name")
    add_options(what, ServedFiles, "fleet")
    add_options(files, ServedFiles, "node", "node_addr", "in_fleet", node_addr={"default": None})
    add_options(files, PromptFiles, "model")
    given = {"help": f"instead of a plan, planned for this host: {MODEL_HELP}"}
    add_options(files, HostPlanOptions, "given", given=given)
    add_options(files, ServedFiles, "served_model_name", "pooling")
    balancer = {
        "default": None,
        "help": f"--fleet: which replica takes a request (default {RoutingOptions().balancer})",
    }
    add_options(files, RoutingOptions, "balancer", balancer=balancer)


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    hosts = parser.add_argument_group("several hosts (each runs this command; host 0 has HTTP)")
    add_options(hosts, HostOptions)
    add_host_plan_options(parser.add_argument_group("plan of MODEL"), SEQUENCES, has_length=False)


def _add_limit_options(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits (above them requests are answered with 503)")
    add_options(limits, AdmissionOptions, "max_num_queued_reqs", "max_num_choices")
    tokens = limits.add_mutually_exclusive_group()
    add_options(tokens, AdmissionOptions, "max_num_queued_tokens", "ttft_bound_s")
    add_listen_limits(limits)


def _run(options: argparse.Namespace, start: StartLog) -> int:
    _check_files(options)
    options.decisions = None  # of a plan that is made here
    check_engine_options(options)
    _check_names(options)
    if options.given is not None:
        with other_hosts_of(options, "llmpq-serve") or contextlib.nullcontext() as others:
            model = PlannedModel(options, others)
            options.max_model_len = None  # that of the plan
            given = {name for name, _ in options.given_words}
            if not options.no_prefix_caching and "state_cache_size" not in given:
                saved = saved_state_bytes(model.found)
                options.state_cache_size = (saved + 1) / GIB if saved else 0  # no state is lost
            return _serve_plan(options, start, model)
    if options.fleet is not None:
        return _run_fleet(options)
    return _serve_plan(options, start)


def _serve_plan(
    options: argparse.Namespace, start: StartLog, model: PlannedModel | None = None
) -> int:
    """Serve a plan, which was made here or is in a file, until SIGTERM or Ctrl-C."""
    for name in ("balancer", "node", "node_addr"):
        if getattr(options, name) is not None:
            raise SpecError(f"--{name}: found without --fleet, expected both")
    plan, hosts = read_plan(options.strat_file_name), stated_hosts(options)
    others = None if model is None else model.others
    if hosts.num_nodes == 1 and others is None:
        _check_one_host(plan, options)
    model_dir = model_dir_of(plan, options.model)
    require("torch", "transformers", *(() if hosts.node_rank else SERVER_PACKAGES))
    from llmpq.server.admission import token_budget_for
    from llmpq.server.page.plan_view import PlanView

    if options.itl_bound is not None:
        options.token_budget = token_budget_for(plan, options.itl_bound)
    if model is not None and others is not None:
        hosts = others.start(model.found, "serve", engine_words(options), replan=model.replan)
    on_host: HostProgress | None = None
    if hosts.num_nodes > 1:
        on_host = _host_progress(options, plan, hosts)
        if hosts.node_rank > 0:
            run_stages(options, plan, model_dir, hosts, on_host)
            on_host.say("done")
            return 0
    admission = _admission(options, plan)
    view = PlanView(plan, then=on_host)
    if model is not None:
        model.on_replan = view.show
    engine = launch_engine(options, plan, model_dir, hosts=hosts, progress=view, monitor=others)
    start.mark("command")
    try:
        _run_engine(options, engine, model_dir, view, admission, start)
    except BaseException:
        engine.kill()
        raise
    return 0


def _run_engine(
    options: argparse.Namespace,
    engine: AsyncEngine,
    model_dir: Path,
    view: PlanView,
    admission: AdmissionLimits,
    start: StartLog,
) -> None:
    """Serve an engine whose ranks load while the packages of the server are imported."""
    from llmpq.server.app import ServerOptions, run_server
    from llmpq.server.text.tokenizer import load_server_tokenizer

    start.mark("packages")
    names = tuple(options.served_model_name or (view.model_name,))
    server = ServerOptions(
        **values_of(listen_options(options)),
        model_dir=model_dir,
        names=names,
        admission=admission,
        view=view,
        pooling=options.pooling,
    )
    record: dict[str, Any] = {
        "models": list(names),
        "max_num_queued_tokens": admission.max_num_queued_tokens,
        "token_budget": options.token_budget,
    }

    def load_tokenizer(folder: Path) -> ServerTokenizer | None:
        begin_s = time.perf_counter()
        tokenizer = load_server_tokenizer(folder)
        record["tokenizer_s"] = time.perf_counter() - begin_s
        return tokenizer

    def on_ready(url: str) -> None:
        start.mark("ranks")
        steps = start.seconds
        record["start_s"] = {"total": sum(steps.values()), **steps}
        record["rank_start_s"] = dict(engine.start_s)
        if options.decisions is not None:
            record["decisions"] = options.decisions
        say_ready(options, {"url": url, **record})

    run_server(server, engine.ready, load_tokenizer, on_ready)


def _check_files(options: argparse.Namespace) -> None:
    """Check that the plan, fleet or model is given."""
    has_plan = options.strat_file_name is not None or options.fleet is not None
    if options.nnodes != 1 and options.strat_file_name is None:
        raise SpecError("--nnodes: found without --strat_file_name, expected both")
    if options.launcher != "local" and options.given is None:
        raise SpecError("--launcher ray: found without MODEL, expected both")
    if options.given is None and not has_plan:
        raise SpecError(
            "found no plan, expected MODEL (a folder or GGUF file, planned for this host), "
            "--strat_file_name FILE or --fleet FILE"
        )
    check_plan_options(options, OF_MODEL, SEQUENCES, has_plan=has_plan)


def _host_progress(options: argparse.Namespace, plan: Plan, hosts: Hosts) -> HostProgress:
    """Return what says which host this is and which it waits for."""
    is_started = options.in_fleet or options.given is not None
    words = None if is_started else ["llmpq-serve", *words_without(options, _OF_MASTER)]
    return HostProgress(SilentProgress(), hosts, plan, words, "llmpq-serve")


def _check_one_host(plan: Plan, options: argparse.Namespace) -> None:
    """Check that the ranks of a plan are on one node, where no option says that there are more."""
    nodes = plan.nodes
    if len(nodes) > 1:
        own, others = words_without(options, {"node_rank"}), words_without(options, _OF_MASTER)
        commands = commands_of_hosts(
            options, nodes, ["llmpq-serve", *own], ["llmpq-serve", *others]
        )
        raise SpecError(
            f"{options.strat_file_name}: found stages on {len(nodes)} nodes ({', '.join(nodes)}), "
            "expected one, or --nnodes. If all devices are in this host, plan with a cluster file "
            f"that has one node; else {commands}"
        )


def _check_names(options: argparse.Namespace) -> None:
    """Check the names that the server gets."""
    if not all(options.served_model_name or ("the plan's",)):
        raise SpecError("--served_model_name: found an empty name, expected at least one character")


def _admission(options: argparse.Namespace, plan: Plan) -> AdmissionLimits:
    """Return the limits of the options; a bound in seconds becomes a number of tokens."""
    from llmpq.server.admission import (
        AdmissionLimits,
        prefill_tokens_per_s,
        queued_tokens_for,
    )

    asked = values_of(read_options(AdmissionOptions, options))
    if options.ttft_bound is not None:
        asked["max_num_queued_tokens"] = queued_tokens_for(plan, options.ttft_bound)
    return AdmissionLimits(
        **asked,
        prefill_tokens_per_s=prefill_tokens_per_s(plan),
        decode_step_s=plan.decode_round_s,
    )


def _run_fleet(options: argparse.Namespace) -> int:
    """Serve a fleet, or what belongs to one host of it, until SIGTERM or Ctrl-C."""
    fleet = read_fleet(options.fleet)
    plans = fleet.plans(options.fleet)
    for plan in plans:
        model_dir_of(plan, options.model)
    places = [
        nodes_of_replica(fleet, number, plan, options.fleet) for number, plan in enumerate(plans)
    ]
    nodes = tuple(dict.fromkeys(name for place in places for name in place))
    _check_nodes(options, nodes, places)
    require(*FLEET_PACKAGES)
    commands = [
        replica_command(options, fleet, number, place, nodes[0])
        for number, place in enumerate(places)
    ]
    from llmpq.server.router.fleet import run_fleet, run_replicas

    if len(nodes) > 1:
        _say_parts(options, nodes, places)
    if options.node not in (None, nodes[0]):
        run_replicas(commands, listen_options(options).drain_timeout_s)
        return 0
    routing = RoutingOptions()
    run_fleet(
        listen_options(options),
        commands,
        load_balancer(options.balancer or routing.balancer),
        routing.poll_s,
        lambda url, urls: say_ready(options, {"url": url, "replicas": list(urls)}),
    )
    return 0


def nodes_of_replica(fleet: Fleet, number: int, plan: Plan, file: str) -> tuple[str, ...]:
    """Return the fleet's nodes of a replica, in the order of its pipeline.

    Raises:
        SpecError: the strategy distributes its devices over nodes in another way than the fleet.
    """
    labels = fleet.replicas[number].devices
    node_of = {device.label: device.node for device in fleet.cluster.devices}
    pairs = dict.fromkeys(
        (plan.cluster.devices[index].node, node_of[labels[index]]) for index in plan.rank_devices
    )
    found = tuple(dict.fromkeys(name for _, name in pairs))
    if not len(pairs) == len(found) == len(plan.nodes):
        raise SpecError(
            f"{file}: replica {number}: found nodes {', '.join(found)} in the fleet and "
            f"{', '.join(plan.nodes)} in its strategy, expected the same"
        )
    return found


def _check_nodes(
    options: argparse.Namespace, nodes: Sequence[str], places: Sequence[Sequence[str]]
) -> None:
    """Check that the options say which node of a fleet this is, and where the others are."""
    if options.node is None and len(nodes) > 1:
        lines = [f"  {node}: {_command_of_node(options, node, places)}" for node in nodes]
        raise SpecError(
            f"{options.fleet}: found replicas on {len(nodes)} nodes ({', '.join(nodes)}), expected "
            "one, or --node. Run on each host (--node_addr NAME=ADDRESS ... where the others do "
            "not reach a host by its name; FILE and KEYS: secrets that all hosts share, mode "
            "600)\n" + "\n".join(lines)
        )
    if options.node is not None and options.node not in nodes:
        raise SpecError(f"--node: found '{options.node}', expected one of {', '.join(nodes)}")
    if len(nodes) > 1 and options.port == 0:
        raise SpecError(
            "--port: found 0, expected a number: replicas of other hosts have those after it"
        )
    for pair in options.node_addr or ():
        name, _, address = pair.partition("=")
        if name not in nodes or not address:
            raise SpecError(f"--node_addr: found '{pair}', expected NAME=ADDRESS of a node")


def _command_of_node(
    options: argparse.Namespace, node: str, places: Sequence[Sequence[str]]
) -> str:
    """Return the command that starts what belongs to a node of a fleet."""
    words = words_without(options, {"node"})
    if options.token_file is None and any(len(place) > 1 for place in places):
        words += ["--token_file", "FILE"]
    if options.api_key_file is None and len({place[0] for place in places}) > 1:
        words += ["--api_key_file", "KEYS"]
    return shlex.join(["llmpq-serve", *words, "--node", node])


def _say_parts(
    options: argparse.Namespace, nodes: Sequence[str], places: Sequence[Sequence[str]]
) -> None:
    """Print what this host of a fleet starts, and the commands of the others."""
    parts = ["the router"] * (options.node == nodes[0])
    for number, place in enumerate(places):
        if options.node in place:
            part = f"host {place.index(options.node)} of {len(place)}"
            parts.append(f"replica {number}" + f" ({part})" * (len(place) > 1))
    lines = [f"node {options.node}: {', '.join(parts)}"]
    others = [node for node in nodes if node != options.node]
    lines += [f"start on {node}: {_command_of_node(options, node, places)}" for node in others]
    for line in lines:
        print(f"llmpq-serve: {line}", file=sys.stderr, flush=True)


def replica_command(
    options: argparse.Namespace, fleet: Fleet, number: int, place: Sequence[str], router: str
) -> ReplicaCommand:
    """Return what this host starts of a replica, and where it answers if that is another host.

    Replica ``number`` of another host than the router's listens on the port ``number + 1`` after
    the router's, and the ranks of several hosts meet at the port ``number`` after
    ``--master_port``.

    Args:
        options: of the command.
        fleet: the fleet.
        number: of the replica.
        place: its nodes, the master's first.
        router: node of the router.
    """
    from llmpq.server.router.fleet import ReplicaCommand

    node = options.node or router
    addresses = {name: name for name in place}
    addresses |= dict(pair.split("=", 1) for pair in options.node_addr or ())
    master, port = addresses[place[0]], options.port + 1 + number
    host = f"[{master}]" if ":" in master else master
    url = None if place[0] == router else f"http://{host}:{port}"
    if node not in place:
        return ReplicaCommand(words=(), address=url)
    one = fleet.replicas[number]
    strategy = Path(options.fleet).resolve().parent / one.strategy
    words = [sys.executable, "-m", "llmpq.cli.commands.serve", "--strat_file_name", str(strategy)]
    words += ["--in_fleet", *replica_options(options)]
    if node == place[0]:
        listen = ("127.0.0.1", 0) if url is None else (master, port)
        words += ["--host", listen[0], "--port", str(listen[1])]
    if len(place) > 1:
        words += ["--nnodes", str(len(place)), "--node_rank", str(place.index(node))]
        words += ["--master_addr", master, "--master_port", str(options.master_port + number)]
    return ReplicaCommand(
        words=words,
        environment=visible_devices(fleet.cluster, one.devices, os.environ, node),
        address=url,
    )


def replica_options(options: argparse.Namespace) -> list[str]:
    """Return the options of the command that its replicas get: all but those of router and hosts.

    A replica without other options listens on this host only.
    """
    own = {"fleet", "node", "node_addr", "balancer", "host", "port", "master_port", "json"}
    return words_without(options, own | {"ssl_certfile", "ssl_keyfile"})


if __name__ == "__main__":
    sys.exit(main())
