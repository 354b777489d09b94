"""A model that a command plans itself, instead of reading a plan."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

from llmpq.cli.front.host_plan import HostPlan, Lengths, host_plan, plan_decisions, say_plan
from llmpq.cli.workers.hosts import OtherHosts
from llmpq.spec.plan import Plan


class PlannedModel:
    """A model that is planned here, for this host and others that lend devices.

    Args:
        options: of the command, with MODEL and those of its plan.
        others: these hosts, ``None`` without any.
        read_lengths: returns those of the requests that it will answer, given the model's files;
            ``None`` where they are not known.

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
        read_lengths: Callable[[Path], Lengths | None] | None = None,
    ) -> None:
        self._options = copy.copy(options)
        self._read_lengths = read_lengths
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
        found = host_plan(self._options.given, self._options, self.others, self._read_lengths)
        say_plan(found)
        return found
