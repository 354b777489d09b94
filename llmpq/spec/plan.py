"""Plan: which device runs which layers at how many bits, and the predicted time and memory.

A plan is stored as a strategy file (JSON) with the cluster and the workload it was made for. Its
invariants hold once it is constructed. Reading and writing a file again gives the same bytes.

A ``Schedule`` is its batching policy with control variables, so that a run obeys what was searched;
a strategy without one runs hybrid micro-batches (LLM-PQ). A strategy without a ``PlannedDraft`` has
no drafts of its own. A ``Fleet`` is replicas of a model on parts of one cluster, each with a
strategy file of its own.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, Device
from llmpq.spec.fields import SCHEMA, Rule, dump_json, from_json, read_fields, to_json, write_text
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype, Phase, StageExperts, Variant, variants_of
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE, KV_CODE_BITS, kept_blocks
from llmpq.spec.workload import Workload
from llmpq.units import format_bytes, format_number, format_seconds

PolicyName = Literal["hybrid", "static", "iteration", "rra", "waa", "multibin"]
POLICY_NAMES: tuple[str, ...] = get_args(PolicyName)

Count = Annotated[int, Rule(minimum=1, maximum=1_000_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEstimate:
    """Expected performance of a schedule.

    Attributes:
        requests_per_s: finished requests per second, as simulated or in steady state.
        latency_s: of an answer of ``new_tokens`` tokens (such as the 99th percentile), or what 99 %
            of the requests take in simulation where that is longer; from the start of the prefill.
        latency_bound_s: requested bound, ``None`` without one.
    """

    requests_per_s: float
    latency_s: float
    new_tokens: Annotated[int, Rule(minimum=1)]
    latency_bound_s: Annotated[float | None, Rule(null=True)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A policy and its control variables; variables of other policies are ``None``.

    Attributes:
        policy: its name.
        encode_batch: RRA, WAA: mean number of requests encoded at a time, ``B_E``.
        decode_batch: RRA, WAA: mean number of sequences decoded together, ``B_D``. Static,
            multi-bin: requests of a batch.
        decode_iterations: RRA: iterations between two encodings, ``N_D``.
        threshold: RRA, WAA: largest relative deviation of a batch from its mean.
        mean_prompt_tokens: RRA, WAA: mean prompt length, to balance encoding work.
        mean_new_tokens: RRA, WAA: mean answer length it was made for, to detect workload shift.
        boundaries: multi-bin: lengths between the bins, rising.
        max_wait_s: static, multi-bin: longest wait for a batch to fill.
        holds_finished: static, multi-bin: whether finished sequences keep their slots until the
            whole batch is done.
        estimate: expected performance.
    """

    policy: PolicyName
    encode_batch: Count | None = None
    decode_batch: Count | None = None
    decode_iterations: Count | None = None
    threshold: float | None = None
    mean_prompt_tokens: float | None = None
    mean_new_tokens: Annotated[float | None, Rule(minimum=1)] = None
    boundaries: tuple[float, ...] | None = None
    max_wait_s: float | None = None
    holds_finished: bool | None = None
    estimate: ScheduleEstimate | None = None

    def __post_init__(self) -> None:
        if self.policy not in POLICY_NAMES:
            raise SpecError(
                f"schedule: field 'policy': found '{self.policy}', "
                f"expected one of {', '.join(POLICY_NAMES)}"
            )
        needed, allowed = _FIELDS[self.policy]
        for item in fields(self):
            if item.name in ("policy", "estimate"):
                continue
            value = getattr(self, item.name)
            if value is None and item.name in needed:
                raise SpecError(f"schedule: policy '{self.policy}' needs the field '{item.name}'")
            if value is not None and item.name not in needed + allowed:
                raise SpecError(
                    f"schedule: field '{item.name}': found {value}, but policy '{self.policy}' "
                    "has no such field"
                )
        if self.boundaries is not None and any(a > b for a, b in pairwise(self.boundaries)):
            raise SpecError(
                f"schedule: field 'boundaries': found {list(self.boundaries)}, "
                "expected rising numbers of tokens"
            )


_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hybrid": ((), ()),
    "iteration": ((), ()),
    "static": (("decode_batch",), ("max_wait_s", "holds_finished")),
    "multibin": (("decode_batch", "boundaries"), ("max_wait_s", "holds_finished")),
    "rra": (
        ("encode_batch", "decode_batch", "decode_iterations"),
        ("threshold", "mean_prompt_tokens", "mean_new_tokens"),
    ),
    "waa": (
        ("encode_batch", "decode_batch"),
        ("threshold", "mean_prompt_tokens", "mean_new_tokens"),
    ),
}
"""Required and optional fields of every policy."""


def default_schedule(policy: PolicyName, num_slots: int) -> Schedule:
    """Return a schedule of a policy without a search.

    Static and multi-bin fill every slot; RRA and WAA keep the slots full by encoding an eighth of
    them at a time, and RRA decodes eight iterations between. Multi-bin has one bin.
    """
    plain: dict[str, dict[str, Any]] = {"hybrid": {}, "iteration": {}}
    batch = {"decode_batch": num_slots}
    eighth = batch | {"encode_batch": max(1, num_slots // 8)}
    values: dict[str, dict[str, Any]] = plain | {
        "static": batch,
        "multibin": batch | {"boundaries": ()},
        "rra": eighth | {"decode_iterations": 8},
        "waa": eighth,
    }
    return Schedule(policy=policy, **values[policy])


ACCEPTANCE_RATE = 0.7
"""Probability that a draft token is right where it is not known."""
MOST_DRAFT_TOKENS = 8
"""Most draft tokens of a sequence in a step where no other number is given."""
MTP = "mtp"
"""What a plan calls a model's own layer for multi-token prediction, as its draft model."""
DRAFT_HEAD_BITS = 8
"""Bits of the head of a draft model whose layers are rounded to fewer than 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDraft:
    """The draft model of a plan: where it runs, and what it is expected to do.

    Attributes:
        model: directory of its weights, or its name; ``MTP`` for the model's own layer.
        bits: of its layers, ``None`` as stored.
        num_speculative_tokens: most draft tokens of a sequence in a step.
        device: index into ``cluster.devices``. On that of stage 0 it runs in the process of rank
            0, elsewhere in one of its own.
        acceptance_rate: chance that a draft token is right, once those before it are.
        cost: seconds of a draft token of one sequence, in decode steps of one sequence.
        handover: seconds of sending the token ids of a step to its process and back, in such
            steps; ``None`` in the process of rank 0.
        speedup: seconds of decoding without drafts, over those with them.
        memory_bytes: weights, KV blocks and temporary memory on its device; in a process of its
            own also those of the runtime.
    """

    model: str
    bits: int | None = None
    num_speculative_tokens: Annotated[int, Rule(minimum=1)]
    device: int
    acceptance_rate: Annotated[float, Rule(maximum=1)]
    cost: float
    handover: float | None = None
    speedup: float
    memory_bytes: int

    def __post_init__(self) -> None:
        if self.bits not in (None, *BITS):
            raise SpecError(f"plan: field 'draft.bits': found {self.bits}, expected some of {BITS}")


def draft_bytes(draft: PlannedDraft | None, device: int) -> int:
    """Return the bytes that a plan's draft model takes on a device of the cluster."""
    return 0 if draft is None or draft.device != device else draft.memory_bytes


Status = Literal["optimal", "feasible"]
OrderSet = Literal["all", "types", "leading", "given"]
"""Orders of devices that a proof covers: all; those that keep equal devices of a node together;
each kind of device first and the others in file order; the one that the user gave."""
Formula = Literal["steady", "paper"]
QUALITY_UNIT = "quality_unit"
"""Input of a plan: what a loss of 1 is, such as ``0.018 nats``, if the table measured that."""
PREFILL_BUFFERS = 2
"""Micro-batches that a stage which only prefills has slots for: one computed, one being sent."""


WeightsPlace = Literal["resident", "disk"]
"""Where the weights of a layer rest: in the memory of its device, or on the disk of its host, from
which they are read whenever the layer runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageAssignment:
    """Consecutive layers on one device, and the precision of each.

    Attributes:
        rank: position in the pipeline; rank 0 also is the master.
        device: index into ``cluster.devices``.
        first_layer, end_layer: half-open range of its decoder layers. Only rank 0 may have none.
        bits: the bitwidth of each of those layers.
        weights: where those of each layer rest; ``None`` where all are resident.
        phase: the only phase its layers compute (WAA); ``None`` for both.
        dtype: number format of the stage, ``None`` for the plan's.
        experts: bits and place of routed experts, where they differ; ``None`` for nowhere.
    """

    rank: int
    device: int
    first_layer: int
    end_layer: int
    bits: tuple[int, ...]
    weights: tuple[WeightsPlace, ...] | None = None
    phase: Phase | None = None
    dtype: Dtype | None = None
    experts: StageExperts | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers of the stage."""
        return self.end_layer - self.first_layer

    @property
    def on_disk(self) -> tuple[int, ...]:
        """Layers of the stage (from 0) whose weights rest on disk."""
        places = self.weights or ()
        return tuple(index for index, place in enumerate(places) if place == "disk")

    @property
    def num_apart(self) -> int:
        """Layers with experts in the host's memory."""
        return sum(one.resident is not None for one in self.variants)

    @property
    def host_threads(self) -> int:
        """Threads of its host that compute experts."""
        return 0 if self.experts is None else self.experts.host_threads

    @property
    def variants(self) -> tuple[Variant, ...]:
        """How each of its layers is stored, for cost models."""
        own = () if self.experts is None else self.experts.layers
        return variants_of(own, self.first_layer, self.bits)

    def computes(self, phase: Phase) -> bool:
        """Whether its layers take part in a phase."""
        return self.phase in (None, phase)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """Sequences of a micro-batch: one size for prefill (``eta``), one for decode (``xi``)."""

    prefill: Annotated[int, Rule(minimum=1)]
    decode: Annotated[int, Rule(minimum=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes on one device, by cause (LLM-PQ, Sec. 4.1).

    Attributes:
        weights: decoder layers with scales, zero points, norms and biases.
        kv: preallocated key-value slots.
        temporary: worst operator of a layer over both phases, and message buffers.
        master: embeddings, final norm, head and logits; 0 off the first stage.
        runtime: memory of the process itself.
        host: routed experts in the memory of the device's host, in addition; ``None`` for none.
    """

    weights: int
    kv: int
    temporary: int
    master: int
    runtime: int
    host: int | None = None

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.weights + self.kv + self.temporary + self.master + self.runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Predicted seconds of one micro-batch (decode at mean context), and bytes, of one stage.

    ``prefill_s`` and ``decode_s`` include the master's own work; ``send_*_s`` is to the next stage,
    from the last stage to the master.
    """

    prefill_s: float
    decode_s: float
    send_prefill_s: float
    send_decode_s: float
    memory: Annotated[MemoryParts, Rule(key="memory_bytes")]
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForecast:
    """Forecast of one stage, as the runtime measures it; 0 for a phase that it does not compute.

    Attributes:
        prefill_s, decode_s: as in ``StageEstimate``.
        prefill_busy_s, decode_busy_s: seconds of all micro-batches of a phase.
    """

    prefill_s: float
    decode_s: float
    prefill_busy_s: float
    decode_busy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanForecast:
    """A simulation of the plan as the runtime executes it: every micro-batch, link and token.

    ``latency_s`` is from the first prompt to the last token of the batch, ``prefill_s`` to the
    first token of the last prompt. ``row_cost`` is what one more row adds to a decode step of one
    sequence, in such steps: what a draft token costs; ``None`` in plans of earlier versions.
    """

    latency_s: float
    prefill_s: float
    stages: tuple[StageForecast, ...]
    row_cost: Annotated[float | None, Rule(maximum=1)] = None

    @property
    def decode_s(self) -> float:
        """Seconds from the last prompt's first token to the last token."""
        return self.latency_s - self.prefill_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEstimate:
    """Predicted time and quality of the whole plan.

    Attributes:
        latency_s: seconds for the whole batch by the closed formula that was minimised.
        quality: normalised degradation; 1 is every layer at 4 bits, 0 is unquantized.
        objective_s: latency plus the cost of the degradation, which was minimised.
        stages: one entry a stage, in order of rank.
        forecast: the simulated plan, ``None`` without a simulation.
    """

    latency_s: float
    quality: float
    objective_s: float
    stages: tuple[StageEstimate, ...]
    forecast: PlanForecast | None = None

    @property
    def predicted_s(self) -> float:
        """The predicted latency of a run: the forecast if there is one, else the formula."""
        return self.latency_s if self.forecast is None else self.forecast.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How the plan was found, and its proof.

    Attributes:
        theta_s: seconds that "every layer at 4 bits" costs in the objective.
        quality_budget: largest allowed degradation.
        status: ``optimal`` when proven within ``gap`` over everything searched.
        bound_s: proven lower bound of the objective, ``None`` when the method proves nothing.
        gap: ``(objective - bound) / objective``, ``None`` likewise.
        orders, pairs_searched, pairs_pruned: size of the outer loop; orders up to symmetry.
        order_set: which orders these are; ``None`` where nothing is proven, and in plans of earlier
            versions.
    """

    method: str
    solver: Annotated[str | None, Rule(null=True)] = None
    formula: Formula = "steady"
    theta_s: float = 0.0
    quality_budget: Annotated[float | None, Rule(null=True)] = None
    status: Status = "feasible"
    bound_s: Annotated[float | None, Rule(minimum=-1e30, null=True)] = None
    gap: Annotated[float | None, Rule(minimum=-1, null=True)] = None
    planning_s: float = 0.0
    orders: int = 0
    order_set: OrderSet | None = None
    pairs_searched: int = 0
    pairs_pruned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Origin of a file: command, version of llmpq, and name and digest of every input."""

    command: str
    version: str
    inputs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """The model of a plan; ``source`` is the directory of its weights, if it has one."""

    name: str
    source: Annotated[str | None, Rule(null=True)] = None
    num_layers: Annotated[int, Rule(minimum=1, maximum=10_000)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A strategy: all that ``llmpq-dist`` runs and ``llmpq-check`` verifies.

    Attributes:
        dtype: number format of whatever is not quantized.
        kv_bits: bits of a cached key or value (the dtype's own width when not quantized).
        head_bits: bits of the LM head, and of the token embedding where they are one matrix;
            ``None`` for 16.
        stages: the pipeline in order; together they cover every layer once. Where prefill and
            decode have stages of their own (WAA), those that decode come first; either cover every
            layer once, with equal bits.
        dropped_devices: indices into ``cluster.devices`` that run nothing.
        schedule: the batching policy it runs under; ``None`` is hybrid micro-batches.
        draft: its draft model, ``None`` without one.
    """

    SCHEMA: ClassVar[int] = SCHEMA
    LATEST_SCHEMA: ClassVar[int] = 2

    model: ModelRef
    dtype: Dtype
    kv_bits: int
    head_bits: int | None = None
    micro_batching: MicroBatching
    stages: tuple[StageAssignment, ...]
    dropped_devices: tuple[int, ...]
    schedule: Schedule | None = None
    draft: PlannedDraft | None = None
    estimate: PlanEstimate
    search: Search
    workload: Workload
    cluster: Cluster
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_stages(self)
        _check_sizes(self)

    @property
    def schema(self) -> int:
        """Version of its file: 2 where it says where weights or experts are, which 1 cannot."""
        needs_latest = any(stage.weights or stage.experts for stage in self.stages)
        return self.LATEST_SCHEMA if needs_latest else self.SCHEMA

    def __repr__(self) -> str:
        """Return the plan in a line; :meth:`summary` has more."""
        bits = Counter(self.bits)
        widths = " ".join(f"{bits[width]}x{width}" for width in sorted(bits, reverse=True))
        return (
            f"<Plan of {self.model.name} on {self.cluster.name}: {len(self.stages)} stages, "
            f"{widths} bits, {format_seconds(self.estimate.predicted_s)}>"
        )

    @property
    def throughput_tokens_per_s(self) -> float:
        """Generated tokens per predicted second."""
        tokens = self.workload.batch * self.workload.new_tokens
        return tokens / self.estimate.latency_s if self.estimate.latency_s > 0 else 0.0

    @property
    def decode_round_s(self) -> float:
        """Forecast of the seconds in which each sequence of the batch makes a token.

        The micro-batches of a round follow each other through the stages; the slowest stage, or the
        way of one micro-batch, takes longest.
        """
        times = [max(stage.decode_s, stage.send_decode_s) for stage in self.estimate.stages]
        rounds = math.ceil(self.workload.batch / self.micro_batching.decode)
        return max(sum(times), rounds * max(times))

    @property
    def first_token_s(self) -> float:
        """Predicted seconds from a prompt to its first token, without other requests."""
        stages = [self.estimate.stages[rank] for rank in self.path(Phase.PREFILL)]
        return sum(stage.prefill_s + stage.send_prefill_s for stage in stages)

    @property
    def answer_tokens_per_s(self) -> float | None:
        """Predicted tokens a second of one answer, while the whole batch decodes.

        ``None`` for answers of one token.
        """
        round_s = self.decode_round_s
        return 1 / round_s if self.workload.new_tokens > 1 and round_s > 0 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Predicted tokens a second of all answers, while the whole batch decodes."""
        own = self.answer_tokens_per_s
        return None if own is None else own * self.workload.batch

    @property
    def divergence_nats(self) -> float | None:
        """Estimated KL divergence of a token from the unquantized model.

        ``None`` where the quality was not measured as a divergence.
        """
        unit = dict(self.provenance.inputs).get(QUALITY_UNIT)
        return None if unit is None else self.estimate.quality * float(unit.split()[0])

    @property
    def bits(self) -> tuple[int, ...]:
        """The bitwidth of every layer, in order."""
        return tuple(bits for stage in self.stages_of(Phase.DECODE) for bits in stage.bits)

    @property
    def whole_bits(self) -> tuple[int, ...]:
        """The bitwidth of every layer, its experts included.

        Raises:
            SpecError: the experts of a layer have another one than the rest of it.
        """
        for stage in self.stages:
            if any(one.expert_bits for one in stage.variants):
                raise SpecError(
                    f"plan: field 'stages[{stage.rank}].experts': found experts of other bits than "
                    "the rest of their layer, which ranks run; expected one bitwidth a layer here"
                )
        return self.bits

    @property
    def head_width(self) -> int:
        """Bits of the LM head: 16 unless the plan quantizes it."""
        return 16 if self.head_bits is None else self.head_bits

    @property
    def is_split(self) -> bool:
        """Whether prefill and decode have stages of their own."""
        return self.stages[0].phase is not None

    def stages_of(self, phase: Phase) -> tuple[StageAssignment, ...]:
        """Return the stages whose layers compute a phase, in the order of their layers."""
        return tuple(stage for stage in self.stages if stage.computes(phase))

    def slots_of(self, stage: StageAssignment) -> tuple[int, int]:
        """Return the KV slots of a stage, and the tokens of each.

        A stage that only prefills has slots for the micro-batch that it computes and for the one
        that it sends.
        """
        if stage.phase is Phase.PREFILL:
            return PREFILL_BUFFERS * self.micro_batching.prefill, self.workload.max_prompt_tokens
        return self.workload.batch, self.workload.max_context_tokens

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence that all blocks for keys and values hold.

        One that is longer than planned takes those of several. Stages that only prefill hold
        prompts as planned.
        """
        work = self.workload
        if self.is_split:
            return work.max_context_tokens
        return work.batch * kept_blocks(work.max_context_tokens, None) * KV_BLOCK_SIZE

    def path(self, phase: Phase) -> tuple[int, ...]:
        """Return the ranks of a micro-batch in order, the master first.

        The master embeds in both phases, even where its layers only decode.
        """
        ranks = tuple(stage.rank for stage in self.stages_of(phase))
        return ranks if ranks[0] == 0 else (0, *ranks)

    def dtype_of(self, stage: StageAssignment) -> Dtype:
        """Return the number format in which a stage computes."""
        return stage.dtype or self.dtype

    def kv_bits_of(self, stage: StageAssignment) -> int:
        """Return the bits of a cached key or value of a stage: 4, 8, or those of its format."""
        is_code = self.kv_bits in KV_CODE_BITS
        return self.kv_bits if is_code else 8 * DTYPE_BYTES[self.dtype_of(stage)]

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """Return the number formats of all stages, the plan's own first."""
        return tuple(dict.fromkeys((self.dtype, *map(self.dtype_of, self.stages))))

    def device_of(self, stage: StageAssignment) -> Device:
        """Return the device a stage runs on."""
        return self.cluster.devices[stage.device]

    @property
    def rank_devices(self) -> tuple[int, ...]:
        """Device of every rank: of each stage, and of a draft model that is not on rank 0's."""
        drafts = () if self.draft is None else {self.draft.device} - {self.stages[0].device}
        return (*(stage.device for stage in self.stages), *drafts)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes of its ranks, each once, in the order of the pipeline."""
        return tuple(dict.fromkeys(self.cluster.devices[one].node for one in self.rank_devices))

    @property
    def draft_rank(self) -> int | None:
        """Rank of the draft model's own process; ``None`` where it runs in that of rank 0."""
        return len(self.stages) if len(self.rank_devices) > len(self.stages) else None

    def summary(self) -> str:
        """Return the plan as a short text: the task, each stage, what it is predicted to take."""
        lines = [
            f"stage {rank}: {device}, layers {layers}, bits {bits}, {memory}"
            for rank, device, layers, bits, memory in self._stage_cells()
        ]
        return "\n".join([self._title_text(), *lines, self._result_text()])

    def _repr_html_(self) -> str:
        """Return the summary as a table, for notebooks."""
        rows = [("stage", "device", "layers", "bits", "memory"), *self._stage_cells()]
        head, *body = (_html_row(row, "td" if number else "th") for number, row in enumerate(rows))
        return (
            f"<p>{escape(self._title_text())}</p><table><thead>{head}</thead>"
            f"<tbody>{''.join(body)}</tbody></table><p>{escape(self._result_text())}</p>"
        )

    def _title_text(self) -> str:
        return f"{self.model.name} on {self.cluster.name}: {self.workload.text}, {self.dtype}" + (
            "" if self.head_width == 16 else f", head at {self.head_width} bits"
        )

    def _stage_cells(self) -> list[tuple[str, ...]]:
        """Return rank, device, layers, bits and memory of each stage."""
        found: list[tuple[str, ...]] = []
        for stage, cost in zip(self.stages, self.estimate.stages, strict=True):
            bits = ", ".join(f"{bits} x {n}" for bits, n in Counter(stage.bits).most_common())
            form = "" if stage.dtype is None else f" in {stage.dtype}"
            form += f", {len(stage.on_disk)} read from disk" if stage.on_disk else ""
            form += f", experts of {apart} on the host" if (apart := stage.num_apart) else ""
            found.append(
                (
                    str(stage.rank),
                    self.device_of(stage).label,
                    f"[{stage.first_layer}, {stage.end_layer})",
                    f"{bits or 'none'}{form}",
                    f"{format_bytes(cost.memory.total)} of {format_bytes(cost.capacity_bytes)}",
                )
            )
        return found

    def _result_text(self) -> str:
        return (
            f"predicted: {format_seconds(self.estimate.predicted_s)}; {self.speed_text()}; "
            f"quality loss {self.quality_text()}; {self.search.status}"
        )

    def speed_text(self) -> str:
        """Return the time to the first token, and tokens a second of one answer and of all."""
        parts = [f"first token {format_seconds(self.first_token_s)}"]
        forecast, batch = self.estimate.forecast, self.workload.batch
        if forecast is not None and batch > self.micro_batching.prefill:
            parts[0] += f" (last of {batch}: {format_seconds(forecast.prefill_s)})"
        if (own := self.answer_tokens_per_s) is not None:
            parts.append(f"one answer {format_number(own)} tokens/s")
            if batch > 1:
                parts.append(f"all {batch} together {format_number(own * batch)}")
        return ", ".join(parts)

    def quality_text(self) -> str:
        """Return the loss of quality, and its divergence where that is known."""
        nats = self.divergence_nats
        known = "" if nats is None else f", about {format_number(nats)} nats of KL divergence"
        return f"{self.estimate.quality:.3g} (1 is every layer at 4 bits{known})"

    def save(self, path: str | Path) -> None:
        """Write the plan as a strategy file."""
        write_plan(path, self)


def _html_row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _check_stages(plan: Plan) -> None:
    if not plan.stages:
        raise SpecError("plan: field 'stages': found none, expected at least one")
    for rank, stage in enumerate(plan.stages):
        if stage.rank != rank:
            raise SpecError(
                f"plan: field 'stages[{rank}].rank': found {stage.rank}, expected {rank}"
            )
    phases = tuple(dict.fromkeys(stage.phase for stage in plan.stages))
    if phases not in ((None,), (Phase.DECODE, Phase.PREFILL)):
        raise SpecError(
            f"plan: field 'stages[].phase': found {[str(stage.phase) for stage in plan.stages]}, "
            "expected none, or stages that decode before stages that prefill"
        )
    for phase in phases:
        _check_cover(plan, plan.stages_of(phase or Phase.DECODE))
    if plan.is_split:
        _check_split(plan)


def _check_cover(plan: Plan, stages: tuple[StageAssignment, ...]) -> None:
    """Check that the stages hold every layer once, in order, on existing devices."""
    layer = 0
    for stage in stages:
        where = f"plan: field 'stages[{stage.rank}]"
        if not 0 <= stage.device < len(plan.cluster.devices):
            raise SpecError(
                f"{where}.device': found {stage.device}, "
                f"expected an index below {len(plan.cluster.devices)}"
            )
        if stage.first_layer != layer or stage.end_layer < layer:
            raise SpecError(
                f"{where}.first_layer': found layers [{stage.first_layer}, {stage.end_layer}), "
                f"expected the range to start at {layer}"
            )
        if stage.num_layers == 0 and stage.rank > 0:
            raise SpecError(f"{where}': found no layers, expected some on every rank but 0")
        if len(stage.bits) != stage.num_layers or not set(stage.bits) <= set(BITS):
            raise SpecError(
                f"{where}.bits': found {list(stage.bits)}, "
                f"expected {stage.num_layers} entries out of {list(BITS)}"
            )
        if stage.weights is not None and len(stage.weights) != stage.num_layers:
            raise SpecError(
                f"{where}.weights': found {len(stage.weights)} entries, expected "
                f"{stage.num_layers}, one for each layer"
            )
        if stage.experts is not None:
            layers = stage.first_layer, stage.end_layer
            stage.experts.check(f"{where}.experts", layers, stage.on_disk)
        layer = stage.end_layer
    if layer != plan.model.num_layers:
        raise SpecError(
            f"plan: field 'stages': found {layer} layers covered, expected {plan.model.num_layers}"
        )


def _check_split(plan: Plan) -> None:
    """Check that prefill and decode stages have equal bits and formats, and the policy is WAA."""
    formats = {plan.dtype_of(stage) for stage in plan.stages}
    if len(formats) > 1:
        raise SpecError(
            f"plan: field 'stages[].dtype': found {', '.join(sorted(formats))}, expected one "
            "format, as separate stages for prefill and decode send each other keys and values"
        )
    prefill, decode = (
        [one[:2] for stage in plan.stages_of(phase) for one in stage.variants]
        for phase in (Phase.PREFILL, Phase.DECODE)
    )
    if prefill != decode:
        raise SpecError(
            "plan: field 'stages[].bits': found other bits for prefill than for decode, "
            "expected two copies of the same layers"
        )
    if plan.schedule is None or plan.schedule.policy != "waa":
        found = "none" if plan.schedule is None else f"'{plan.schedule.policy}'"
        raise SpecError(
            f"plan: field 'schedule': found {found}, expected 'waa' for separate stages"
        )


def _check_sizes(plan: Plan) -> None:
    everyone = sorted([*(stage.device for stage in plan.stages), *plan.dropped_devices])
    if everyone != list(range(len(plan.cluster.devices))):
        raise SpecError(
            "plan: fields 'stages' and 'dropped_devices': found devices "
            f"{everyone}, expected each of {len(plan.cluster.devices)} devices once"
        )
    forecast = plan.estimate.forecast
    counts = {"stages": len(plan.estimate.stages)}
    if forecast is not None:
        counts["forecast.stages"] = len(forecast.stages)
    for name, count in counts.items():
        if count != len(plan.stages):
            raise SpecError(
                f"plan: field 'estimate.{name}': found {count} entries, expected {len(plan.stages)}"
            )
    for name in ("prefill", "decode"):
        size = getattr(plan.micro_batching, name)
        if not 1 <= size <= plan.workload.batch:
            raise SpecError(
                f"plan: field 'micro_batching.{name}': found {size}, "
                f"expected a whole number in [1, {plan.workload.batch}]"
            )
    if plan.kv_bits not in (*KV_CODE_BITS, 16, 32):
        raise SpecError(f"plan: field 'kv_bits': found {plan.kv_bits}, expected 4, 8, 16 or 32")
    if plan.head_width not in BITS:
        raise SpecError(
            f"plan: field 'head_bits': found {plan.head_bits}, expected one of {list(BITS)}"
        )
    if plan.draft is not None and plan.draft.device >= len(plan.cluster.devices):
        raise SpecError(
            f"plan: field 'draft.device': found {plan.draft.device}, expected an index below "
            f"{len(plan.cluster.devices)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """Layers ``[first_layer, end_layer)`` that ``source`` prefills and ``target`` decodes."""

    source: int
    target: int
    first_layer: int
    end_layer: int


def handovers_of(plan: Plan) -> tuple[Handover, ...]:
    """Return every handover of a plan, by source and layer; none when phases share stages."""
    if not plan.is_split:
        return ()
    return tuple(
        Handover(source=made.rank, target=held.rank, first_layer=first, end_layer=end)
        for made in plan.stages_of(Phase.PREFILL)
        for held in plan.stages_of(Phase.DECODE)
        if (first := max(made.first_layer, held.first_layer))
        < (end := min(made.end_layer, held.end_layer))
    )


def read_plan(path: str | Path) -> Plan:
    """Read and validate a strategy file; ``SpecError`` names the file and the field."""
    return from_json(Plan, read_fields(path, "strategy"))


def write_plan(path: str | Path, plan: Plan) -> None:
    """Write a strategy file atomically."""
    write_text(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """Return the exact text of a strategy file."""
    return dump_json(to_json(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMember:
    """Strategy file, devices and speed of one replica of a fleet file.

    Attributes:
        strategy: its strategy file, relative to the fleet file.
        devices: labels of its devices in the fleet's cluster, in the order of the plan's cluster.
        requests_per_s: batch of the plan over its predicted latency.
        arrivals_per_s: share of the arrivals that the fleet was planned for.
    """

    strategy: str
    devices: Annotated[tuple[str, ...], Rule(minimum=1)]
    requests_per_s: float
    arrivals_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherCut:
    """Another way to cut the cluster.

    Attributes:
        requests_per_s: 0 where no part holds the model, ``None`` where it was not planned in time.
        ttft_s: mean time to first token; ``None`` where it does not answer all arrivals.
    """

    name: str
    replicas: int
    requests_per_s: Annotated[float | None, Rule(null=True)] = None
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All replicas; what a fleet file holds.

    Attributes:
        model: its name.
        cluster: the whole cluster.
        quality_budget: largest degradation of any replica; ``None`` for no limit.
        requests_per_s: of all replicas together.
        bound: no fleet makes more.
        status: ``optimal`` when proven.
        others: other ways to cut the cluster.
        ttft_s: mean time to first token, which a fleet for a rate of arrivals was chosen for.
        ttft_bound_s: no fleet has less.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    model: str
    replicas: Annotated[tuple[FleetMember, ...], Rule(minimum=1)]
    requests_per_s: float
    bound: float
    status: Status
    quality_budget: float | None = None
    others: Annotated[tuple[OtherCut, ...], Rule(optional=True)] = ()
    ttft_s: float | None = None
    ttft_bound_s: float | None = None
    cluster: Cluster

    def __post_init__(self) -> None:
        known = {device.label for device in self.cluster.devices}
        taken = Counter(name for replica in self.replicas for name in replica.devices)
        for name, count in taken.items():
            if name not in known:
                raise SpecError(
                    f"fleet: field 'replicas': found device '{name}', expected one of the "
                    f"cluster's: {', '.join(sorted(known))}"
                )
            if count > 1:
                raise SpecError(
                    f"fleet: field 'replicas': found device '{name}' {count} times, expected once"
                )

    @property
    def idle(self) -> tuple[str, ...]:
        """Labels of the devices that no replica uses."""
        taken = {name for replica in self.replicas for name in replica.devices}
        return tuple(d.label for d in self.cluster.devices if d.label not in taken)

    def plans(self, path: str | Path) -> tuple[Plan, ...]:
        """Read the strategy files of a fleet file.

        Raises:
            SpecError: one cannot be read, is for another model, or has other devices.
        """
        found = []
        types = {device.label: device.type for device in self.cluster.devices}
        for number, replica in enumerate(self.replicas):
            file = Path(path).parent / replica.strategy
            plan = read_plan(file)
            where = f"{path}: field 'replicas[{number}]"
            if plan.model.name != self.model:
                raise SpecError(
                    f"{where}.strategy': found {file} of model '{plan.model.name}', expected "
                    f"'{self.model}'"
                )
            own = [types[name] for name in replica.devices]
            planned = [device.type for device in plan.cluster.devices]
            if own != planned:
                raise SpecError(
                    f"{where}.devices': found {', '.join(own)}, expected those of {file}: "
                    f"{', '.join(planned)}"
                )
            found.append(plan)
        return tuple(found)


def seconds_of_requests(plans: Sequence[Plan], number: int) -> float:
    """Return the predicted seconds in which replicas answer so many requests.

    Each takes a full batch of its plan whenever it has answered one.
    """
    each = [(plan.estimate.latency_s, plan.workload.batch) for plan in plans]
    rate = sum(batch / latency_s for latency_s, batch in each)
    # All batches that end well before the last one, and the rest in the order in which they end.
    early_s = number / rate - 2 * max(latency_s for latency_s, _ in each)
    done = [max(0, int(early_s / latency_s)) for latency_s, _ in each]
    left = number - sum(count * batch for count, (_, batch) in zip(done, each, strict=True))
    ends = [
        ((count + 1) * latency_s, place)
        for place, (count, (latency_s, _)) in enumerate(zip(done, each, strict=True))
    ]
    heapq.heapify(ends)
    while True:
        end_s, place = ends[0]
        latency_s, batch = each[place]
        left -= batch
        if left <= 0:
            return end_s
        heapq.heapreplace(ends, (end_s + latency_s, place))


def read_fleet(path: str | Path) -> Fleet:
    """Read a fleet file; ``SpecError`` names the file and the field."""
    return from_json(Fleet, read_fields(path, "fleet"))


def write_fleet(path: str | Path, fleet: Fleet) -> None:
    """Write a fleet file atomically."""
    write_text(path, dump_json(to_json(fleet)))
