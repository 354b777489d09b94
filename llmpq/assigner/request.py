"""A planning request, the arrays that every method works on, and the solution that it returns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from llmpq.assigner.constraints.resolve import (
    NEVER,
    NO_OVERRIDES,
    Deadline,
    Limits,
    Overrides,
    resolve,
)
from llmpq.assigner.enumeration import (
    GroupTables,
    build_pairs,
    device_groups,
    device_orders,
    layers_that_fit,
    listed_orders,
    lower_bounds,
    micro_batch_pairs,
    most_layers,
)
from llmpq.assigner.objective import (
    Assignment,
    AssignmentProblem,
    Evaluation,
    FloatArray,
    IntArray,
    PairCosts,
    SearchSpace,
)
from llmpq.costmodel import ClusterCosts, LatencySource, build_costs
from llmpq.errors import InfeasibleError, SpecError
from llmpq.options.declare import check_options
from llmpq.options.plan import SearchOptions, SolverName
from llmpq.spec.cluster import Cluster
from llmpq.spec.huggingface.quantization import is_gptq
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import MicroBatching, OrderSet, Status
from llmpq.spec.precision import BITS, Dtype, Variant
from llmpq.spec.tables import SensitivityTable
from llmpq.spec.workload import Workload

DEFAULT_GAP = 1e-3
"""Of integer programs; the exact search goes on to a gap of 0."""
FIRST_PLAN_GAP = 0.99
"""Gap at which a search stops with the first plan that it finds."""
GAP_ROUNDING = 1e-9
KEY_BITS = 63
"""Of a stage's key in the exact search: how many layers of each kind and column it has."""
DEFAULT_OMEGA = "default: every layer alike, ((2^4 - 1) / (2^b - 1))^2"
DEFAULT_HEAD_LOSS = "default: half of what all layers lose"
HEAD_SHARE = 0.5
"""Loss of a head that was not measured, over that of all layers at its bits. The shipped model's
is 0.57 at 4 bits (``docs/how/head.md``)."""

NO_PLAN = "no plan fits in memory and within the quality budget"
"""Message of an error without reasons."""

Progress = Callable[[int, int, float | None], None]
"""Called with candidates settled, candidates in all, and the best objective so far."""


def silent(done: int, total: int, best_s: float | None) -> None:
    """A ``Progress`` that reports nothing."""
    del done, total, best_s


def default_gap(solver: str) -> float:
    """Return the gap at which a solver stops where none is asked for."""
    return 0.0 if solver == "exact" else DEFAULT_GAP


class OutOfTimeError(InfeasibleError):
    """The time limit passed before any plan was found; whether one exists is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(SearchOptions):
    """A model, a cluster and a workload to plan for, and how to search.

    Attributes:
        model: the model.
        model_source: directory of its weights, ``None`` for a catalogue model.
        cluster, workload: devices and requests.
        dtype: number format of whatever is not quantized.
        kv_bits: bits of a cached key or value.
        head_bits: bitwidths allowed for the head's matrix; ``overrides`` may fix another.
        sensitivity: measured degradation, ``None`` for ``DEFAULT_OMEGA``.
        deadline: the moment when ``time_limit_s`` is over; ``with_deadline`` sets it.
        profile_dir: folder of measured tables.
        latency: measured points with interpolation, or the regression fitted to them.
        overrides: manual decisions of the user.
        whole_layers: leave no experts to hosts.
        whole_experts: leave all routed experts of a layer to a host, or none.
        below_s: the search may leave out plans whose objective is not below this.
        gives_reasons: find out why there is no plan where there is none, which takes programs.
    """

    model: ModelSpec
    model_source: str | None = None
    cluster: Cluster
    workload: Workload
    dtype: Dtype
    kv_bits: int
    head_bits: tuple[int, ...] = (16,)
    sensitivity: SensitivityTable | None = None
    deadline: Deadline = NEVER
    profile_dir: Path | None = None
    latency: LatencySource = "table"
    overrides: Overrides = NO_OVERRIDES
    whole_layers: bool = False
    whole_experts: bool = False
    below_s: float = math.inf
    gives_reasons: bool = True

    def with_deadline(self) -> PlanRequest:
        """Return the request with the deadline of its time limit, counted from now if not set."""
        if self.time_limit_s is None or self.deadline != NEVER:
            return self
        return replace(self, deadline=NEVER.within(self.time_limit_s))

    @property
    def program_solver(self) -> SolverName:
        """The solver of integer programs, where the exact search does not apply."""
        return "gurobi" if self.solver == "gurobi" else "highs"

    @property
    def head_choices(self) -> tuple[int, ...]:
        """Bits that the head's matrix may have, widest first."""
        fixed = self.overrides.head_bits
        return tuple(sorted(set(self.head_bits), reverse=True)) if fixed is None else (fixed,)

    @property
    def head_width(self) -> int:
        """Bits of the head's matrix.

        Raises:
            SpecError: there is a choice.
        """
        if len(self.head_choices) > 1:
            raise SpecError(
                f"head_bits: found {list(self.head_choices)} to choose from, expected one: only "
                "the search for a single plan has the choice"
            )
        return self.head_choices[0]

    def __post_init__(self) -> None:
        check_options(self)
        longest = self.model.max_positions
        if longest is not None and self.workload.max_context_tokens > longest:
            raise SpecError(
                f"workload: prompt_tokens + new_tokens: found {self.workload.max_context_tokens}, "
                f"expected at most {longest}, the longest sequence of {self.model.name}"
            )
        if not self.bits or not set(self.bits) <= set(BITS):
            raise SpecError(f"bits: found {list(self.bits)}, expected some of {list(BITS)}")
        if not self.head_choices or not set(self.head_choices) <= set(BITS):
            found = ", ".join(map(str, self.head_choices)) or "none"
            raise SpecError(f"--fix_bits head: found {found}, expected one of {list(BITS)}")
        if not 0 <= self.gap < 1:
            raise SpecError(f"gap: found {self.gap}, expected a share in [0, 1)")
        sizes, batch = self.overrides.micro_batching, self.workload.batch
        if sizes is not None and not {sizes.prefill, sizes.decode} <= set(range(1, batch + 1)):
            raise SpecError(
                f"micro-batches: found {sizes.prefill} and {sizes.decode}, expected sizes in "
                f"[1, {batch}]"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanningTask:
    """A request with its arrays.

    Attributes:
        request: its ``theta_s`` is set, and its cluster has only the devices that may be used.
        cluster: the whole cluster, as the plan will store it.
        device_indices: for every device of the request's cluster its index in ``cluster``.
        limits: manual limits of layers, bits and use, ``None`` for none.
        fixed_order: group of every position when the user fixed the order.
        groups: device indices of every group of interchangeable devices.
        pairs: costs of every micro-batch pair for which the model may fit in memory.
        kinds, omega, run_lengths: ``[L]``, ``[L, B]`` and ``[L]`` layers of the runs decided
            together.
        apart: the last columns ``B``: layers of which all or some routed experts are on the host.
        num_pairs: micro-batch pairs before the memory test.
    """

    request: PlanRequest
    costs: ClusterCosts
    groups: tuple[tuple[int, ...], ...]
    pairs: tuple[PairCosts, ...]
    kinds: IntArray
    omega: FloatArray
    run_lengths: tuple[int, ...]
    apart: tuple[Variant, ...] = ()
    num_pairs: int
    cluster: Cluster
    device_indices: tuple[int, ...]
    limits: Limits | None = None
    fixed_order: tuple[int, ...] | None = None

    @property
    def theta_s(self) -> float:
        """Seconds that one unit of degradation costs."""
        return self.request.theta_s or 0.0

    @property
    def group_counts(self) -> IntArray:
        """``[T]`` devices of every group."""
        return np.array([len(members) for members in self.groups], dtype=np.int64)

    @property
    def has_limits(self) -> bool:
        """Whether the user fixed layers, bits, use or order, which most heuristics ignore."""
        return self.limits is not None or self.fixed_order is not None

    @cached_property
    def twins(self) -> tuple[int, ...]:
        """For every group its first twin; see ``device_orders``."""
        return GroupTables(self.space).twins()

    def orders(self) -> tuple[OrderSet, tuple[tuple[int, ...], ...]]:
        """Return the orders of groups that integer programs try, and which these are."""
        if self.fixed_order is not None:
            return "given", (self.fixed_order,)
        counts = self.group_counts.tolist()
        found = listed_orders(counts, self.request.orders, self.twins)
        return found, device_orders(counts, found, self.twins)

    @property
    def space(self) -> SearchSpace:
        """The search space."""
        return SearchSpace(
            pairs=self.pairs,
            group_counts=tuple(len(members) for members in self.groups),
            kinds=self.kinds,
            bits=(*self.request.bits, *(variant.bits for variant in self.apart)),
            omega=self.omega,
            theta_s=self.theta_s,
            quality_budget=self.request.quality_budget,
            formula=self.request.formula,
            limits=self.limits,
        )

    def problem(self, pair: PairCosts, order: tuple[int, ...]) -> AssignmentProblem:
        """Return the problem of one pair and one order of groups."""
        return self.space.problem(pair, order)

    def bounds(self, theta_s: float) -> FloatArray:
        """Return ``[P, T]`` lower bounds of the objective by pair and first group."""
        return lower_bounds(replace(self.space, theta_s=theta_s))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """The result of a planning method: the decision, what it costs, and what is proven.

    Attributes:
        solver: solver's name, empty without one.
        status: ``optimal`` when proven within the requested gap.
        bound_s: proven lower bound over the method's search space, ``None`` without one.
        orders: device orders considered, up to symmetry.
        order_set: which these are, ``None`` where nothing is proven.
        pairs_searched, pairs_pruned: (order, micro-batch pair) combinations solved and skipped.
    """

    problem: AssignmentProblem
    assignment: Assignment
    evaluation: Evaluation
    solver: str
    status: Status
    bound_s: float | None
    orders: int
    order_set: OrderSet | None = None
    pairs_searched: int
    pairs_pruned: int


def build_task(request: PlanRequest, among: Sequence[MicroBatching] | None = None) -> PlanningTask:
    """Build every array of a request; ``pairs`` is empty when the model cannot fit.

    Args:
        request: what to plan.
        among: the only micro-batch pairs, by default all.
    """
    request = request.with_deadline()
    bits = tuple(sorted(set(request.bits), reverse=True))
    compositions, kinds, lengths = _runs(request.model.layer_kinds, request.layer_group)
    resolved = resolve(request.overrides, request.cluster, np.cumsum([0, *lengths]).tolist(), bits)
    request = replace(request, bits=bits, cluster=resolved.cluster)
    costs = costs_of(request)
    sizes = request.overrides.micro_batching
    candidates = (sizes,) if sizes is not None else among
    candidates = candidates or micro_batch_pairs(request.workload.batch)
    groups = device_groups(request.cluster)
    counts = np.array([len(members) for members in groups])
    apart = apart_variants(request, costs)
    if apart and not request.whole_experts:
        (smallest,) = build_pairs(costs, request.workload, request.bits, candidates[:1], apart)
        apart += _shared_variants(request, smallest, counts, kinds)
    pairs = build_pairs(costs, request.workload, request.bits, candidates, apart)
    # A constant for the planner: an equal share for each layer puts it into every sum.
    omega = omega_of(request) + head_loss(request) / request.model.num_layers
    limits = resolved.limits
    if apart:
        columns = [*range(len(bits)), *(bits.index(variant.bits) for variant in apart)]
        omega = omega[:, columns]
        limits = None if limits is None else limits.of_columns(columns)
    if request.layer_group > 1:
        pairs = tuple(pair.merged(compositions) for pair in pairs)
        omega = np.add.reduceat(omega, np.cumsum([0, *lengths[:-1]]), axis=0)
    task = PlanningTask(
        request=request,
        costs=costs,
        groups=groups,
        pairs=tuple(
            pair
            for pair in pairs
            if layers_that_fit(pair, counts).max() >= len(kinds)
            and most_layers(pair, counts, kinds) == len(kinds)
        ),
        kinds=np.array(kinds, dtype=np.int64),
        omega=omega,
        run_lengths=lengths,
        apart=apart,
        num_pairs=len(pairs),
        cluster=resolved.whole,
        device_indices=resolved.indices,
        limits=limits,
        fixed_order=resolved.order,
    )
    if request.theta_s is not None:
        return task
    return replace(task, request=replace(request, theta_s=default_theta(task)))


def apart_variants(request: PlanRequest, costs: ClusterCosts) -> tuple[Variant, ...]:
    """Return how layers may be stored whose routed experts are all on a host.

    Raises:
        SpecError: the rate of scattered reads of a host was not measured.
    """
    if request.whole_layers:
        return ()
    devices = [
        device
        for device in request.cluster.devices
        if any(
            costs.has_experts_apart(device, kind, bits)
            for kind in range(len(request.model.layer_types))
            for bits in request.bits
        )
    ]
    for device in devices:
        costs.host_of(device)
    return tuple(Variant(bits, None, 0) for bits in request.bits) if devices else ()


def _shared_variants(
    request: PlanRequest, pair: PairCosts, counts: IntArray, kinds: Sequence[int]
) -> tuple[Variant, ...]:
    """Return how layers may be stored of which a share of the routed experts is on a host.

    One share for each bitwidth: that with which the experts of all layers would fill the memory of
    all devices. With layers of which all or none are there, it makes up any share, at most one
    layer apart. The narrowest bitwidths come first where not all can be counted.
    """
    number = len(request.bits)
    found = []
    for column, bits in reversed(list(enumerate(request.bits))):
        group = int(pair.host_bytes[:, :, number + column].max(axis=1).argmax())
        whole = pair.layer_bytes[group, kinds, column]
        experts = pair.host_bytes[group, kinds, number + column]
        room = int((counts * np.maximum(0, pair.capacity_bytes)).sum() - pair.master_bytes.min())
        most = max(layer.num_experts for layer in request.model.layer_types)
        resident = int(most * (room - (whole - experts).sum()) / max(1, experts.sum()))
        if 0 < resident < most:
            found.append(Variant(bits, None, resident))
    return tuple(found[: max(0, max_columns(kinds) - 2 * number)])


def max_columns(kinds: Sequence[int]) -> int:
    """Return for how many columns ``B`` a number of ``KEY_BITS`` counts the layers of a stage."""
    bits = sum(math.log2(number + 1) for number in Counter(kinds).values())
    return 1 + int(KEY_BITS / bits)


def costs_of(request: PlanRequest, cluster: Cluster | None = None) -> ClusterCosts:
    """Return the cost models of a request, on another cluster where one is given."""
    return build_costs(
        request.model,
        request.cluster if cluster is None else cluster,
        dtype=request.dtype,
        kv_bits=request.kv_bits,
        head_bits=request.head_width,
        profile_dir=request.profile_dir,
        latency=request.latency,
        can_stream=not request.no_streaming and not _is_gptq(request.model_source),
    )


def _is_gptq(source: str | None) -> bool:
    return source is not None and Path(source).is_dir() and is_gptq(source)


def default_theta(task: PlanningTask) -> float:
    """Return the seconds that one unit of degradation costs by default; 0 under a quality budget.

    It is a lower bound of any plan's latency, to two digits: all layers at 4 bits must then save
    about as much time as the fastest plan takes.
    """
    if task.request.quality_budget is not None or not task.pairs:
        return 0.0
    return float(f"{max(task.bounds(0.0).min(), _reading_bound_s(task)):.2g}")


def _reading_bound_s(task: PlanningTask) -> float:
    """Return the seconds that any plan at least reads from disk, as not all layers fit in memory.

    The disks share what does not fit.
    """
    counts = task.group_counts
    found = math.inf
    for pair in task.pairs:
        least = pair.layer_bytes.min(axis=(0, 2))[task.kinds].sum()
        room = (counts * np.maximum(0, pair.capacity_bytes)).sum() - pair.master_bytes.min()
        excess = max(0.0, float(least - room))
        steps = pair.prefill_batches, (pair.new_tokens - 1) * pair.decode_batches
        seconds = 0.0
        for byte_s, number in zip(
            (pair.stream_prefill_s, pair.stream_decode_s), steps, strict=True
        ):
            disks = byte_s > 0
            rate = float((counts[disks] / byte_s[disks]).sum())
            seconds += number * excess / rate if rate else 0.0
        found = min(found, seconds)
    return found


def default_omega(model: ModelSpec, bits: Sequence[int]) -> FloatArray:
    """Return ``[L, B]`` degradation from the quantizer's step size alone, equal for all layers.

    A bitwidth costs the square of its step between two codes, ``((2^4 - 1) / (2^b - 1))^2``, so
    that every layer at 4 bits is 1.
    """
    layers = model.num_layers
    row = [0.0 if width == 16 else (15 / (2**width - 1)) ** 2 / layers for width in bits]
    return np.tile(np.array(row), (layers, 1))


def head_loss(request: PlanRequest) -> float:
    """Return the normalised degradation by the request's head; see ``head_loss_at``."""
    return head_loss_at(request.sensitivity, request.model, request.head_width)


def head_loss_at(table: SensitivityTable | None, model: ModelSpec, bits: int) -> float:
    """Return the normalised degradation by a head of ``bits``: measured, or ``HEAD_SHARE``.

    Raises:
        SpecError: the head was measured, but not at these bits.
    """
    if bits == 16:
        return 0.0
    if table is None or table.head is None:
        return HEAD_SHARE * float(default_omega(model, (bits,)).sum())
    return table.normalised_head(bits)


def omega_of(request: PlanRequest) -> FloatArray:
    """Return ``[L, B]`` normalised degradation: measured, or the default.

    Raises:
        SpecError: the measured table has another number of layers, or lacks a bitwidth.
    """
    table = request.sensitivity
    if table is None:
        return default_omega(request.model, request.bits)
    if table.num_layers != request.model.num_layers:
        raise SpecError(
            f"sensitivity table of {table.model}: field 'omega': found {table.num_layers} layers, "
            f"expected {request.model.num_layers}, as {request.model.name} has"
        )
    return np.array(table.normalised(request.bits), dtype=np.float64)


def _runs(
    layer_kinds: tuple[int, ...], size: int
) -> tuple[tuple[tuple[int, ...], ...], list[int], tuple[int, ...]]:
    """Cut the layers into runs; return the kinds of run, and each run's kind and length."""
    runs = [layer_kinds[start : start + size] for start in range(0, len(layer_kinds), size)]
    if size == 1:
        return (), list(layer_kinds), (1,) * len(runs)
    known: dict[tuple[int, ...], int] = {}
    kinds = [known.setdefault(tuple(sorted(run)), len(known)) for run in runs]
    return tuple(known), kinds, tuple(len(run) for run in runs)
