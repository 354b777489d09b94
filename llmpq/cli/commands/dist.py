"""llmpq-dist: run a strategy on prompts.

It starts one process per stage (with ``--nnodes``: those of this host), shows their progress on
standard error, and prints predicted and measured times. Instead of a strategy it takes a model,
which it plans for this host, its workers or the nodes of a Ray cluster, and the lengths of the
prompts. Under torchrun, with ``--no_auto``, each process is one rank; under ``srun`` and ``mpirun``
it is one rank or one host. With ``--launcher ray``, the hosts are nodes of a Ray cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from llmpq.batching.drift import Drift
from llmpq.cli import run_options
from llmpq.cli.common import command_start_s, make_parser, print_json, require, run_command
from llmpq.cli.front.plan_options import add_host_plan_options, check_plan_options
from llmpq.cli.options import (
    add_drift_options,
    add_policy_options,
    prediction_of,
    schedule_of,
)
from llmpq.cli.running import doctor
from llmpq.dist import check_job, model_dir_of, run_job
from llmpq.dist.io.job import Job, checked_speculation
from llmpq.dist.io.prompts import Prompt, sort_prompts
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.launch.process_environment import Task, started_task, torchrun_task
from llmpq.dist.launch.ranks import rank_environment
from llmpq.dist.launch.signals import StopRequest
from llmpq.dist.metrics import report as run_report
from llmpq.dist.metrics.measurement import Measurement
from llmpq.dist.metrics.progress import SilentProgress
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.logging import get_logger
from llmpq.options.declare import add_options, read_options, values_of
from llmpq.options.engine import EngineOptions
from llmpq.options.run import (
    MODEL_HELP,
    FaultOptions,
    HostPlanOptions,
    LauncherOptions,
    PromptFiles,
    RunOptions,
)
from llmpq.spec.fields import dump_json, write_text
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import Plan, PlanForecast, Schedule, read_plan
from llmpq.spec.workload import TraceRequest

if TYPE_CHECKING:
    from llmpq.cli.front.host_plan import Lengths
    from llmpq.cli.front.planned import PlannedModel
    from llmpq.cli.workers.hosts import OtherHosts

logger = get_logger(__name__)

SEQUENCES = 16
"""Requests at the same time that a model is planned for by default."""
_OF_MODEL = ("bits", "key_file", "max_model_len", "no_measure", "workers")
"""Options of the plan of MODEL."""
_OF_A_PLAN: dict[str, Any] = {"no_auto": False, "nnodes": 1}
"""Options, and their defaults, that need a strategy."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    start_s = command_start_s(argv)
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["doctor"]:
        return doctor.main(words[1:])
    return run_command(_parser(), lambda options: _run(options, start_s), argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("llmpq-dist", "Run a strategy on prompts.")
    files = parser.add_argument_group("files")
    given = {"help": f"instead of a strategy, planned for the prompts: {MODEL_HELP}"}
    add_options(files, HostPlanOptions, "given", given=given)
    prompts = ("strat_file_name", "model", "prompts", "format", "output", "resume")
    add_options(files, PromptFiles, *prompts, "report", "plot", "trace")
    sampling = parser.add_argument_group("sampling (greedy by default)")
    names = ("temperature", "top_k", "top_p", "seed")
    add_options(sampling, SamplingParams, *names, seed={"default": 0})
    run = parser.add_argument_group("running")
    add_options(run, RunOptions, "pins_workers", "captures")
    add_options(run, EngineOptions, "speculative_config", "prefix_caching")
    add_options(run, RunOptions, "step_timeout_s")
    run_options.add_fault_options(parser)
    add_policy_options(parser)
    add_drift_options(parser)
    run_options.add_store_options(parser.add_argument_group("loading"))
    hosts = run_options.add_host_options(parser)
    add_options(hosts, LauncherOptions, "auto")
    run_options.add_ray_options(hosts)
    planned = parser.add_argument_group("plan of MODEL")
    add_host_plan_options(planned, SEQUENCES, has_replan=False, has_launcher=False)
    return parser


def _run(options: argparse.Namespace, start_s: float) -> int:
    has_plan = options.strat_file_name is not None
    if options.given is None and not has_plan:
        raise SpecError(
            "found no plan, expected MODEL (a folder or GGUF file, planned for the prompts) or "
            "--strat_file_name FILE"
        )
    check_plan_options(options, _OF_MODEL, SEQUENCES, has_plan=has_plan)
    if options.given is not None:
        return _plan_and_run(options, start_s)
    return _run_plan(options, start_s)


def _plan_and_run(options: argparse.Namespace, start_s: float) -> int:
    """Plan MODEL for the prompts, this host and the others, and run the plan."""
    from llmpq.cli.front.planned import PlannedModel
    from llmpq.cli.workers.hosts import other_hosts_of

    for name, value in _OF_A_PLAN.items():
        if getattr(options, name) != value:
            raise SpecError(f"--{name}: found with '{options.given}', expected a strategy")
    with other_hosts_of(options, "llmpq-dist") or contextlib.nullcontext() as others:
        read_lengths = None
        if options.format == "llmpq":
            read_lengths = partial(lengths_of, sort_prompts(options.prompts)[0])
        model = PlannedModel(options, others, read_lengths)
        options.max_model_len = None  # that of the plan
        return _run_plan(options, start_s, model)


def _run_plan(
    options: argparse.Namespace, start_s: float, model: PlannedModel | None = None
) -> int:
    plan = read_plan(options.strat_file_name)
    _check_runs(plan, options.strat_file_name)
    address = run_options.ray_address_of(options)
    if options.launcher == "ray" and model is None:
        return _run_on_ray(options, plan, address)
    is_alone = options.nnodes == 1 and not options.no_auto and started_task(os.environ) is None
    if is_alone and (model is None or model.others is None):
        _warn_of_nodes(plan, options.strat_file_name)
    if options.format == "openai_batch":
        from llmpq.cli.running import openai_batch

        return openai_batch.answer_batch(options, plan, model)
    require("torch", "transformers")
    task = _own_task(options, plan)
    job = replace(_job(options, plan, task), start_s=start_s)
    if task:
        measurement = _be_one_rank(job, plan, task)
    elif model is not None and model.others is not None:
        measurement = _supervise_with_others(job, options, model, model.others)
        plan = model.found.plan  # another one, where a host was lost
        job = replace(job, schedule=_schedule(options, plan))
    else:
        measurement = _supervise(job, plan, options)
    if measurement is None:
        return 0
    _report(plan, measurement, job, options)
    return run_options.outcome(measurement)


def lengths_of(prompts: Sequence[Prompt], model: Path) -> Lengths | None:
    """Return the lengths of prompts; ``None`` where none can be read or served.

    The run itself says what is wrong with prompts.
    """
    from llmpq.assigner.longest_context import USUAL_ANSWER
    from llmpq.cli.front.host_plan import Lengths
    from llmpq.dist.io.model_files import load_tokenizer

    tokenizer = None
    if any(prompt.text is not None for prompt in prompts):
        require("torch", "transformers")
        tokenizer = load_tokenizer(model)
    found = []
    for prompt in prompts:
        ids = prompt.token_ids
        if ids is None and tokenizer is not None:
            ids = tuple(tokenizer.encode(prompt.text or ""))
        if ids:
            found.append((len(ids), prompt.max_new_tokens or USUAL_ANSWER))
    if not found:
        return None
    prompt_tokens, new_tokens = (
        max(1, round(fmean(column))) for column in zip(*found, strict=True)
    )
    longest = max(sum(lengths) for lengths in found)
    return Lengths(
        requests=len(found),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        context_tokens=max(longest, prompt_tokens + new_tokens),
    )


def _run_on_ray(options: argparse.Namespace, plan: Plan, address: str | None) -> int:
    """Run the command on nodes of a Ray cluster; return its exit status."""
    words = run_options.words_for_ray(options)
    require("ray")
    from llmpq.server.ray.launcher import run_on_ray

    ends = run_on_ray(plan, words, StopRequest(), address=address)
    print(ends[0].out, end="")
    for end in ends:
        for line in end.errors.splitlines():
            print(f"{end.node}: {line}", file=sys.stderr)
    # A stage that was lost is what other hosts see of an error of one.
    failed = [end.status for end in ends if end.status]
    causes = [status for status in failed if status != StageError.exit_status]
    return next(iter([*causes, *failed]), 0)


def _check_runs(plan: Plan, file: str) -> None:
    """Check that the runtime supports the plan."""
    for device in plan.cluster.devices:
        if device.members > 1:
            raise SpecError(
                f"{file}: cluster: {device.label}: found tensor_parallel {device.members}, "
                "expected none: the pipeline's stages are of one device each; llmpq-sim plays it"
            )


def _warn_of_nodes(plan: Plan, file: str) -> None:
    """Warn of a plan over several hosts that runs on this one."""
    nodes = plan.nodes
    if len(nodes) > 1:
        logger.warning(
            "%s: found stages on %d nodes (%s); without --nnodes all of them run on this host",
            file,
            len(nodes),
            ", ".join(nodes),
        )


def _supervise(job: Job, plan: Plan, options: argparse.Namespace) -> Measurement | None:
    """Run the ranks of this host, with restarts, until done or stopped."""
    faults = read_options(FaultOptions, options)
    place, stop = run_options.hosts_of(options), StopRequest()
    with run_options.run_progress(plan.model.num_layers) as progress, stop.from_signals():
        if place.num_nodes == 1:
            return run_job(job, progress=progress, stop=stop, **values_of(faults))
        words = run_options.host_words(options, "llmpq-dist")
        on_host = run_options.HostProgress(progress, place, plan, words)
        measurement = run_job(job, hosts=place, progress=on_host, stop=stop, **values_of(faults))
    on_host.say("done")
    return measurement


def _supervise_with_others(
    job: Job, options: argparse.Namespace, model: PlannedModel, others: OtherHosts
) -> Measurement | None:
    """Run the ranks of this host, and those of other hosts, until done or stopped."""
    from llmpq.cli.engine_options import engine_words

    plan, words = model.found.plan, engine_words(options)
    place = others.start(model.found, "dist", words, replan=model.replan)
    faults, stop = read_options(FaultOptions, options), StopRequest()
    with run_options.run_progress(plan.model.num_layers) as progress, stop.from_signals():
        on_host = run_options.HostProgress(progress, place, plan, None)
        return run_job(
            job,
            hosts=place,
            progress=on_host if place.num_nodes > 1 else progress,
            stop=stop,
            monitor=others,
            **values_of(faults),
        )


def _job(options: argparse.Namespace, plan: Plan, task: Task | None) -> Job:
    model_dir = model_dir_of(plan, options.model)
    engine = read_options(EngineOptions, options, leaves=("predictor",))  # that of policies
    config = checked_speculation(plan, engine.speculative_config, model_dir)
    return Job(
        strategy=Path(options.strat_file_name).resolve(),
        model_dir=model_dir,
        prompts=Path(options.prompts).resolve(),
        output=Path(options.output).resolve(),
        resume=options.resume,
        sampling=read_options(SamplingParams, options),
        schedule=_schedule(options, plan),
        prediction=prediction_of(options),
        rendezvous=run_options.rendezvous_of(options, task),
        trace=None if options.trace is None else Path(options.trace).resolve(),
        skips_bad_prompts=options.bad_prompts == "skip",
        replans=options.replan,
        lengths=_lengths_file(options),
        engine=replace(engine, speculative_config=config),
        **values_of(run_options.read_run_options(RunOptions, options))
        | {"transport": run_options.transport_of(options, is_rank=options.no_auto)},
    )


def _lengths_file(options: argparse.Namespace) -> Path:
    """Return the file of the answer lengths: that of the option, or next to the results."""
    return Path(options.lengths_out or f"{options.output}.lengths.json").resolve()


def _schedule(options: argparse.Namespace, plan: Plan) -> Schedule:
    """Return the schedule; multi-bin boundaries use the largest answers of the prompts."""
    prompts, _ = sort_prompts(options.prompts)
    wanted = [prompt.max_new_tokens or plan.workload.new_tokens for prompt in prompts]
    return schedule_of(options, plan, wanted)


def _own_task(options: argparse.Namespace, plan: Plan) -> Task | None:
    """Return the task of this process if it is one rank, ``None`` if it starts ranks."""
    if options.no_auto:
        return torchrun_task(os.environ)
    task = started_task(os.environ) if options.nnodes == 1 else None
    if (
        task is None
        or task.world_size == len(plan.nodes)
        or task.world_size != len(plan.rank_devices)
    ):
        return None
    return task


def _be_one_rank(job: Job, plan: Plan, task: Task) -> Measurement | None:
    """Run the rank of this process."""
    rank = task.rank
    if task.world_size != len(plan.rank_devices):
        raise SpecError(
            f"environment: found rank {rank} of WORLD_SIZE {task.world_size}, expected one process "
            f"for each of the plan's {len(plan.rank_devices)} ranks"
        )
    if rank == 0:
        check_job(job)
    os.environ.update(rank_environment(plan, rank, task.local_ranks, store=job.store))
    # Only now, for torch reads its environment when it is first imported.
    from llmpq.dist.launch.rank_tasks import run_rank
    from llmpq.dist.launch.worker import die_with

    die_with(os.getppid())

    if rank > 0:
        return run_rank(job, rank, SilentProgress())
    with run_options.run_progress(plan.stages[0].num_layers) as progress:
        return run_rank(job, rank, progress)


def _report(plan: Plan, measurement: Measurement, job: Job, options: argparse.Namespace) -> None:
    """Print predicted and measured times, and write and draw them as the options say."""
    assert job.schedule is not None  # ``_job`` says which
    report = run_report.build_report(plan, measurement, forecast_of(plan, measurement, job))
    answers = [record.new_tokens for record in measurement.records]
    drift = Drift.of(job.schedule, answers) if answers else None
    if drift is not None:
        report["drift"] = drift.to_json(measurement.adjusted)
    has_drifted = drift is not None and drift.is_notable
    lengths = _lengths_file(options)
    if answers and (has_drifted or options.lengths_out is not None):
        run_report.write_lengths(lengths, answers)
    if drift is not None and has_drifted:
        text = drift.text(replans=job.replans, adjusted=measurement.adjusted, lengths=lengths)
        logger.warning("drift: %s", text)
    report["quantizer"] = run_report.quantizer_of(model_dir_of(plan, options.model))
    if options.report is not None:
        write_text(options.report, dump_json(report))
    if options.plot is not None:
        from llmpq.cli.plots import draw_run

        draw_run(report, options.plot)
    if options.json:
        print_json(report)
    else:
        print(run_report.format_report(report, verbose=options.verbose))
        if options.verbose and any(width != 16 for width in plan.bits):
            print(f"weights quantized by {report['quantizer']}")


def forecast_of(plan: Plan, measurement: Measurement, job: Job) -> PlanForecast | None:
    """Return a forecast of the requests that ran, ``None`` where nothing can be said of them."""
    if measurement.draft_tokens or measurement.cached_tokens or not measurement.records:
        return None  # the cost models know no draft tokens, nor prompts that begin as others
    from llmpq.assigner.forecast import costs_of_plan, forecast_run

    assert job.schedule is not None  # ``_job`` says which
    records = sorted(measurement.records, key=lambda record: (record.arrival_s, record.request))
    begin_s = records[0].arrival_s
    requests = [
        TraceRequest(
            arrival_s=record.arrival_s - begin_s,
            prompt_tokens=record.prompt_tokens,
            new_tokens=record.new_tokens,
        )
        for record in records
    ]
    model = load_model_dir(job.model_dir)
    for reads_tables in (True, False):  # the plan's tables may be on the host that planned only
        with contextlib.suppress(LlmpqError):
            return forecast_run(
                plan,
                costs_of_plan(plan, model, reads_tables=reads_tables),
                requests,
                schedule=job.schedule,
                prediction=job.prediction,
            )
    return None


if __name__ == "__main__":
    sys.exit(main())
