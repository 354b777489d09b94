"""Options of the plan of MODEL; commands that run a plan import nothing that makes one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from llmpq.errors import SpecError
from llmpq.options.declare import add_options
from llmpq.options.engine import EngineOptions
from llmpq.options.plan import SearchOptions
from llmpq.options.run import HostPlanOptions, LauncherOptions


def add_host_plan_options(
    group: argparse._ActionsContainer,
    sequences: int = 1,
    *,
    has_length: bool = True,
    has_replan: bool = True,
    has_launcher: bool = True,
) -> None:
    """Add what a plan for this host can be asked for.

    Args:
        group: gets the options.
        sequences: default number of answers at the same time.
        has_length: whether ``--max_model_len`` is among them.
        has_replan: whether ``--replan`` is.
        has_launcher: whether ``--launcher`` is.
    """
    if has_length:
        length = "tokens of prompt and answer together (default: the most that fit without loss "
        length += "of quality, up to the model's own)"
        add_options(group, EngineOptions, "max_model_len", max_model_len={"help": length})
    add_options(group, HostPlanOptions, "max_num_seqs", max_num_seqs={"default": sequences})
    bits = "bitwidths to choose from (default: all; 8 and more where they fit)"
    stays = "refuse a model that does not fit in memory, instead of reading weights from disk"
    add_options(
        group,
        SearchOptions,
        "bits",
        "no_streaming",
        bits={"default": None, "help": bits},
        no_streaming={"help": stays},
    )
    names = ("no_measure", "workers", "key_file", "replan_timeout_s")
    add_options(group, HostPlanOptions, *(["replan"] * has_replan), *names)
    if has_launcher:
        launcher = {
            "help": "ray: plan over the devices of all nodes of a Ray cluster, one of them this "
            "host (default %(default)s: this host, and --workers)"
        }
        add_options(group, LauncherOptions, "launcher", "ray_address", launcher=launcher)


def check_plan_options(
    options: argparse.Namespace, names: Sequence[str], sequences: int, *, has_plan: bool
) -> None:
    """Check that MODEL is given without a plan, and options of its plan with it alone.

    Args:
        options: of the command.
        names: of those options, but for ``max_num_seqs``.
        sequences: default of ``--max_num_seqs``.
        has_plan: whether a plan is given.

    Raises:
        SpecError: a plan and MODEL, or options of MODEL's plan without MODEL.
    """
    given = options.given
    if given is None:
        if any(getattr(options, one) for one in names) or options.max_num_seqs != sequences:
            shown = ", ".join(f"--{name}" for name in sorted([*names, "max_num_seqs"]))
            raise SpecError(f"{shown}: found with a plan, expected with MODEL alone")
    elif has_plan:
        raise SpecError(f"found '{given}' and a plan, expected one of them")
    elif Path(given).is_file() and given.endswith(".json"):
        raise SpecError(f"found '{given}' alone, expected --strat_file_name {given}")
    elif options.model is not None:
        raise SpecError(f"--model: found with '{given}', expected one of them")
