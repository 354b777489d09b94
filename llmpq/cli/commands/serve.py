"""llmpq-serve: answer OpenAI's API over HTTP with the ranks of a strategy, or of all of a fleet.

HTTP and tokenizing are in this process, the ranks in processes of their own. The line ``ready
http://HOST:PORT`` on standard output and standard error says that requests are answered.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmpq.cli.common import command_start_s, make_parser, require, run_command
from llmpq.cli.engine_options import add_engine_options, check_engine_options, launch_engine
from llmpq.cli.front.host_plan import (
    MODEL_HELP,
    add_host_plan_options,
    host_plan,
    plan_decisions,
    say_plan,
)
from llmpq.cli.server_options import (
    add_address_options,
    add_listen_limits,
    listen_options,
    say_ready,
)
from llmpq.dist import model_dir_of
from llmpq.dist.launch.local_devices import visible_devices
from llmpq.dist.metrics.measurement import StartLog
from llmpq.errors import SpecError
from llmpq.options.declare import add_options, read_options, values_of
from llmpq.options.server import AdmissionOptions, RoutingOptions
from llmpq.routing import load_balancer
from llmpq.spec.plan import Plan, read_fleet, read_plan

if TYPE_CHECKING:
    from llmpq.dist.async_engine import AsyncEngine
    from llmpq.server.admission import AdmissionLimits
    from llmpq.server.text.tokenizer import ServerTokenizer

SERVER_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client", "jinja2", "tokenizers")
SEQUENCES = 4
"""Answers at the same time that a model is planned for by default."""
FLEET_PACKAGES = ("torch", "transformers", "aiohttp", "fastapi", "uvicorn", "httptools")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    start = StartLog(command_start_s(argv))
    return run_command(_parser(), lambda options: _run(options, start), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("llmpq-serve", "Answer OpenAI's API with the ranks of a strategy.")
    files = parser.add_argument_group("files")
    what = files.add_mutually_exclusive_group()
    what.add_argument("--strat_file_name", metavar="FILE", help="strategy file")
    what.add_argument(
        "--fleet",
        metavar="FILE",
        help="fleet file of llmpq-algo --replicas: start every replica on this host, each with the "
        "other options, and a router in front of them",
    )
    files.add_argument(
        "--model", metavar="DIR", help="weights (default: the directory in the plan)"
    )
    files.add_argument(
        "given",
        nargs="?",
        metavar="MODEL",
        help=f"instead of a plan, planned for this host: {MODEL_HELP}",
    )
    files.add_argument(
        "--served_model_name",
        nargs="+",
        metavar="NAME",
        help="names of the model in requests; answers use the first (default: the plan's)",
    )
    balancer = {
        "default": None,
        "help": f"--fleet: which replica takes a request (default {RoutingOptions().balancer})",
    }
    add_options(files, RoutingOptions, "balancer", balancer=balancer)
    add_address_options(parser)
    _add_limit_options(parser)
    add_engine_options(parser)
    add_host_plan_options(parser.add_argument_group("plan of MODEL"), SEQUENCES, has_length=False)
    return parser


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
    if options.given is not None:
        _plan_model(options)
    _check_names(options)
    if options.fleet is not None:
        return _run_fleet(options)
    if options.balancer is not None:
        raise SpecError("--balancer: found without --fleet, expected both")
    plan = read_plan(options.strat_file_name)
    _check_one_host(plan, options.strat_file_name)
    model_dir = model_dir_of(plan, options.model)
    require("torch", "transformers", *SERVER_PACKAGES)
    from llmpq.server.admission import token_budget_for

    admission = _admission(options, plan)
    if options.itl_bound is not None:
        options.token_budget = token_budget_for(plan, options.itl_bound)
    engine = launch_engine(options, plan, model_dir)
    start.mark("command")
    names = tuple(options.served_model_name or (plan.model.name,))
    try:
        _run_engine(options, engine, model_dir, names, admission, start)
    except BaseException:
        engine.kill()
        raise
    return 0


def _run_engine(
    options: argparse.Namespace,
    engine: AsyncEngine,
    model_dir: Path,
    names: tuple[str, ...],
    admission: AdmissionLimits,
    start: StartLog,
) -> None:
    """Serve an engine whose ranks load while the packages of the server are imported."""
    from llmpq.server.app import ServerOptions, run_server
    from llmpq.server.text.tokenizer import load_server_tokenizer

    start.mark("packages")
    server = ServerOptions(
        **values_of(listen_options(options)), model_dir=model_dir, names=names, admission=admission
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
    given, has_plan = options.given, options.strat_file_name or options.fleet
    if has_plan and given is None:
        is_asked = options.bits or options.replan or options.no_measure
        if is_asked or options.max_num_seqs != SEQUENCES:
            raise SpecError(
                "--bits, --max_num_seqs, --no_measure, --replan: found with a plan, expected with "
                "MODEL alone"
            )
        return
    if has_plan:
        raise SpecError(f"found '{given}' and a plan, expected one of them")
    if given is None:
        raise SpecError(
            "found no plan, expected MODEL (a folder or GGUF file, planned for this host), "
            "--strat_file_name FILE or --fleet FILE"
        )
    if Path(given).is_file() and given.endswith(".json"):
        raise SpecError(f"found '{given}' alone, expected --strat_file_name {given}")
    if options.model is not None:
        raise SpecError(f"--model: found with '{given}', expected one of them")


def _plan_model(options: argparse.Namespace) -> None:
    """Plan the model for this host; the options are those of its plan then."""
    found = host_plan(options.given, options)
    say_plan(found)
    options.strat_file_name = str(found.file)
    options.decisions = plan_decisions(found)
    options.max_model_len = None  # that of the plan


def _check_one_host(plan: Plan, file: str) -> None:
    """Check that the ranks of a plan are on one node, because all of them start here."""
    nodes = plan.nodes
    if len(nodes) > 1:
        raise SpecError(
            f"{file}: found stages on {len(nodes)} nodes ({', '.join(nodes)}), expected one: all "
            "ranks start on this host. Over several hosts, llmpq-dist --nnodes answers files of "
            "prompts; if the devices are in this host, plan with a cluster file that has one node"
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
    """Serve a fleet until SIGTERM or Ctrl-C; return the exit status."""
    fleet = read_fleet(options.fleet)
    for one, plan in zip(fleet.replicas, fleet.plans(options.fleet), strict=True):
        _check_one_host(plan, str(Path(options.fleet).parent / one.strategy))
        model_dir_of(plan, options.model)
    used = {name for one in fleet.replicas for name in one.devices}
    nodes = {device.node for device in fleet.cluster.devices if device.label in used}
    if len(nodes) > 1:
        raise SpecError(
            f"{options.fleet}: found replicas on {len(nodes)} nodes ({', '.join(sorted(nodes))}), "
            "expected one: all start on this host; start llmpq-serve with the strategy file of its "
            "replica on each host, and llmpq-route"
        )
    environments = [
        visible_devices(fleet.cluster, one.devices, os.environ) for one in fleet.replicas
    ]
    require(*FLEET_PACKAGES)
    from llmpq.server.router.fleet import ReplicaCommand, run_fleet

    words, routing = replica_options(options.argv), RoutingOptions()
    folder = Path(options.fleet).resolve().parent
    serve = [sys.executable, "-m", "llmpq.cli.commands.serve"]
    run_fleet(
        listen_options(options),
        [
            ReplicaCommand(
                words=[*serve, "--strat_file_name", str(folder / one.strategy), *words],
                environment=environment,
            )
            for one, environment in zip(fleet.replicas, environments, strict=True)
        ],
        load_balancer(options.balancer or routing.balancer),
        routing.poll_s,
        lambda url, urls: say_ready(options, {"url": url, "replicas": list(urls)}),
    )
    return 0


def replica_options(words: Sequence[str]) -> list[str]:
    """Return the options of the command that its replicas get: all but those of the router.

    A replica listens on this host only.
    """
    parser = argparse.ArgumentParser(add_help=False)
    for name in ("fleet", "balancer", "host", "port", "ssl_certfile", "ssl_keyfile"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--json", action="store_true")
    return [*parser.parse_known_args(words)[1], "--host", "127.0.0.1", "--port", "0"]


if __name__ == "__main__":
    sys.exit(main())
