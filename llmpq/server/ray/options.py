"""Arguments of the application in Ray Serve, as a config file of ``serve run`` states them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any

from llmpq.errors import SpecError
from llmpq.options.declare import Option, check_options, read_keywords
from llmpq.options.engine import EngineOptions
from llmpq.options.run import LaunchOptions
from llmpq.options.server import QueueLimits, RoutingOptions


@dataclass(frozen=True, kw_only=True)
class FleetOptions(RoutingOptions, QueueLimits):
    """What is served, where, and how requests are routed."""

    strategies: Annotated[
        Mapping[str, str],
        Option(help="strategy files by the value of label; the same paths on every node"),
    ]
    label: Annotated[
        str, Option(help="label of Ray's nodes that says which strategy is meant for a node")
    ] = "ray.io/accelerator-type"
    num_replicas: Annotated[int, Option(minimum=1, help="how many there are in all")] = 1
    max_replicas_per_node: Annotated[
        int | None, Option(minimum=1, help="how many may share a node")
    ] = None
    num_cpus: Annotated[float, Option(help="cores that Ray reserves for a replica")] = 1.0
    num_gpus: Annotated[float, Option(help="GPUs that Ray reserves for a replica")] = 0.0
    model: Annotated[
        str | None, Option(help="directory of the weights (default: that of each strategy)")
    ] = None
    served_model_name: Annotated[
        str | None, Option(help="name of the model in requests (default: that of the strategy)")
    ] = None
    max_ongoing_requests: Annotated[
        int, Option(minimum=1, help="answers under way in a replica; more wait in the router")
    ] = 1024
    api_key_file: Annotated[
        str | None, Option(help="keys that the ingress accepts, one a line")
    ] = None
    engine: Annotated[
        Mapping[str, Any],
        Option(help="settings of AsyncEngine.start: those of EngineOptions and LaunchOptions"),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (_is_object(self.strategies) and self.strategies):
            raise _wrong("strategies", self.strategies, "a strategy file for each value of 'label'")
        for name, file in self.strategies.items():
            if not isinstance(file, str):
                raise _wrong(f"strategies.{name}", file, "the path of a strategy file")
        if not _is_object(self.engine):
            raise _wrong("engine", self.engine, "an object")
        with _named(""):
            check_options(self)
        with _named("engine."):
            read_keywords(self.engine, EngineOptions, LaunchOptions)

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


@contextlib.contextmanager
def _named(prefix: str) -> Iterator[None]:
    """Name the field of an error as it is in the arguments."""
    try:
        yield
    except TypeError as error:
        raise SpecError(f"args: field 'engine': {error}") from None
    except SpecError as error:
        name, _, text = str(error).partition(": ")
        raise SpecError(f"args: field '{prefix}{name}': {text}") from None


def _wrong(name: str, found: object, expected: str) -> SpecError:
    return SpecError(f"args: field '{name}': found {found}, expected {expected}")
