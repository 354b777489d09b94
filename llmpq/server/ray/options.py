"""Arguments of the application in Ray Serve, as a config file of ``serve run`` states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from llmpq.batching.queue_order import SERVED_ORDERS
from llmpq.errors import SpecError
from llmpq.routing import BALANCERS

DEFAULT_LABEL = "ray.io/accelerator-type"
ENGINE_SETTINGS = (
    "scheduler",
    "alpha",
    "token_budget",
    "max_model_len",
    "prefix_caching",
    "step_timeout_s",
    "max_restarts",
    "form_timeout_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What is served, where, and how requests are routed.

    Attributes:
        strategies: strategy files by the value of ``label``; the same paths on every node.
        label: label of Ray's nodes that says which strategy is meant for a node.
        num_replicas: how many there are in all.
        max_replicas_per_node: how many may share a node.
        num_cpus: cores that Ray reserves for a replica.
        num_gpus: GPUs likewise.
        model: directory of the weights; by default that of each strategy.
        served_model_name: name of the model in requests; by default that of the strategy.
        balancer: a name of ``llmpq.routing.BALANCERS``.
        seed: of balancers that draw at random.
        poll_s: seconds between two readings of the statistics.
        max_ongoing_requests: answers under way in a replica; more wait in the router.
        max_num_queued_reqs: of a replica, as for ``llmpq-serve``.
        max_num_queued_tokens: likewise.
        api_key_file: keys that the ingress accepts, one a line.
        engine: settings of ``AsyncEngine.start``: those in ``ENGINE_SETTINGS``.

    Raises:
        SpecError: a value cannot be used.
    """

    strategies: Mapping[str, str]
    label: str = DEFAULT_LABEL
    num_replicas: int = 1
    max_replicas_per_node: int | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    model: str | None = None
    served_model_name: str | None = None
    balancer: str = "sal_seconds"
    seed: int = 0
    poll_s: float = 0.1
    max_ongoing_requests: int = 1024
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    api_key_file: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (_is_object(self.strategies) and self.strategies):
            raise _wrong("strategies", self.strategies, "a strategy file for each value of 'label'")
        for name, file in self.strategies.items():
            if not isinstance(file, str):
                raise _wrong(f"strategies.{name}", file, "the path of a strategy file")
        for name, minimum in (("num_replicas", 1), ("max_ongoing_requests", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise _wrong(name, value, f"a whole number from {minimum}")
        if not (_is_number(self.poll_s) and 0 < self.poll_s <= 60):
            raise _wrong("poll_s", self.poll_s, "more than 0, at most 60")
        if self.balancer not in BALANCERS:
            raise _wrong("balancer", self.balancer, f"one of {', '.join(BALANCERS)}")
        self._check_engine()

    def _check_engine(self) -> None:
        if not _is_object(self.engine):
            raise _wrong("engine", self.engine, "an object")
        for name in self.engine:
            if name not in ENGINE_SETTINGS:
                raise _wrong(f"engine.{name}", "a setting", f"one of {', '.join(ENGINE_SETTINGS)}")
        order = self.engine.get("scheduler", "fcfs")
        if order not in SERVED_ORDERS:
            raise _wrong("engine.scheduler", order, f"one of {', '.join(SERVED_ORDERS)}")

    def engine_settings(self) -> dict[str, Any]:
        """Return the arguments of ``AsyncEngine.start``."""
        return dict(self.engine)


def options_of(args: Mapping[str, Any]) -> FleetOptions:
    """Return the options of the arguments in a config file.

    Raises:
        SpecError: a field is unknown, missing or cannot be used.
    """
    names = [one.name for one in fields(FleetOptions)]
    for name in args:
        if name not in names:
            raise _wrong(name, "a field", f"one of {', '.join(names)}")
    for one in fields(FleetOptions):
        is_needed = one.default is MISSING and one.default_factory is MISSING
        if is_needed and one.name not in args:
            raise _wrong(one.name, "nothing", "a value")
    return FleetOptions(**args)


def strategy_for(options: FleetOptions, labels: Mapping[str, str]) -> str:
    """Return the strategy file for a node.

    Raises:
        SpecError: no strategy is meant for it.
    """
    value = labels.get(options.label)
    file = None if value is None else options.strategies.get(value)
    if file is None:
        known = ", ".join(sorted(options.strategies))
        raise SpecError(f"node: label '{options.label}': found {value}, expected one of {known}")
    return file


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _wrong(name: str, found: object, expected: str) -> SpecError:
    return SpecError(f"args: field '{name}': found {found}, expected {expected}")
