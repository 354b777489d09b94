"""A model that a command plans itself, instead of reading a plan."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

from llmpq.cli.common import words_without
from llmpq.cli.engine_options import add_engine_options
from llmpq.cli.front.host_plan import HostPlan, Lengths, host_plan, plan_decisions, say_plan
from llmpq.cli.workers.hosts import OtherHosts
from llmpq.spec.plan import Plan

OF_THIS_HOST = ("max_model_len", "store", "store_limit", "token_budget", "itl_bound")
"""Options of the engine that the plan says, or that name files of this host."""


class PlannedModel:
    """A model that is planned here, for this host and others that lend devices.

    Args:
        options: of the command, with MODEL and those of its plan.
        others: these hosts, ``None`` without any.
        lengths: of the requests that it will answer, where they are known.

    Attributes:
        found: the plan.
        on_replan: receives the plan that takes its place.

    Raises:
        LlmpqError: there is no plan.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        others: OtherHosts | None,
        lengths: Lengths | None = None,
    ) -> None:
        self._options = copy.copy(options)
        self._lengths = lengths
        self.others = others
        self.on_replan: Callable[[Plan], None] = lambda _: None
        self.found = self._plan()
        options.strat_file_name = str(self.found.file)
        options.decisions = plan_decisions(self.found)

    def replan(self) -> HostPlan:
        """Plan again, for the hosts that are left."""
        self.found = self._plan()
        self.on_replan(self.found.plan)
        return self.found

    def _plan(self) -> HostPlan:
        found = host_plan(self._options.given, self._options, self.others, self._lengths)
        say_plan(found)
        return found


def engine_words(options: argparse.Namespace) -> list[str]:
    """Return the options of the engine, which its ranks on other hosts have too.

    Those of the plan, and of the files of this host, are left out.
    """
    engine = argparse.ArgumentParser(add_help=False)
    add_engine_options(engine)
    others = {name for name, _ in options.given_words} - {one.dest for one in engine._actions}
    words = words_without(options, others.union(OF_THIS_HOST))
    budget = getattr(options, "token_budget", None)
    return words if budget is None else [*words, "--token_budget", str(budget)]
