"""Measurement: what a run made and took, as values that cross from the ranks to the command.

Needs no torch, so that the command that started the ranks can read what they measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llmpq.batching import RequestRecord
from llmpq.spec.fields import Fields
from llmpq.spec.precision import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """What a rank's tensors take for as long as it runs, counted tensor by tensor.

    Attributes:
        weights: of the decoder layers, as their kernels keep them.
        master: embeddings, final norm and head; 0 off rank 0.
        kv: key-value slots.
        buffers: what every step shares: 8-bit keys and values are read into one.
        load_peak: not a part but the most the process had held until all of these were there; on
            CUDA, the most its tensors had.
    """

    weights: int
    master: int
    kv: int
    buffers: int
    load_peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkSample:
    """Work of one kind that a rank did: what forecasts are held against and corrected by.

    Attributes:
        phase: prefill or decode.
        rows: sequences of the micro-batch.
        tokens: prompt length, or what the decode steps read of a row in the mean: each row's own
            context on a CPU, elsewhere the longest one.
        count: micro-batches.
        seconds: all of them together, the master's own work apart.
        master_s: the master's own work on them, 0 off rank 0.
    """

    phase: Phase
    rows: int
    tokens: float
    count: int
    seconds: float
    master_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStats:
    """The measurements of one rank.

    Attributes:
        rank: of the stage.
        load_s: reading, quantizing and placing its tensors.
        busy_s: all its work on micro-batches.
        prefill_s: median of a full prefill micro-batch (of any, when none was full); ``None`` when
            there was none. The master's own work is part of its figures.
        decode_s: likewise for decode.
        memory_bytes: see ``llmpq.dist.metrics.stats.peak_memory_bytes``.
        held: parts of it, ``None`` where nothing was counted.
        work: its work by kind, the kinds that took longest first.
        wait_s: waiting for micro-batches, from its first one on.
        send_s: handing micro-batches to the next rank.
    """

    rank: int
    load_s: float
    busy_s: float
    prefill_s: float | None
    decode_s: float | None
    memory_bytes: int
    held: HeldBytes | None = None
    work: tuple[WorkSample, ...] = ()
    wait_s: float = 0.0
    send_s: float = 0.0

    def busy_in(self, phase: Phase) -> float:
        """Return the seconds of all micro-batches of a phase, the master's own work included."""
        return sum(one.seconds + one.master_s for one in self.work if one.phase is phase)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        value = asdict(self)
        value["work"] = [work_to_json(one) for one in self.work]
        if self.held is None:
            del value["held"]
        return value


def stats_from_fields(fields: Fields) -> StageStats:
    """Build the measurements of a rank from their JSON object, strictly."""
    stats = StageStats(
        rank=fields.integer("rank"),
        load_s=fields.number("load_s"),
        busy_s=fields.number("busy_s"),
        prefill_s=fields.optional_number("prefill_s"),
        decode_s=fields.optional_number("decode_s"),
        memory_bytes=fields.integer("memory_bytes"),
        held=_held(fields.child("held")) if fields.has("held") else None,
        work=tuple(work_from_fields(one) for one in fields.children("work"))
        if fields.has("work")
        else (),
        wait_s=fields.optional_number("wait_s") or 0.0,
        send_s=fields.optional_number("send_s") or 0.0,
    )
    fields.done()
    return stats


def work_to_json(work: WorkSample) -> dict[str, Any]:
    """Return the JSON object of a kind of work."""
    return asdict(work) | {"phase": work.phase.value}


def work_from_fields(fields: Fields) -> WorkSample:
    """Build a kind of work from its JSON object, strictly."""
    work = WorkSample(
        phase=Phase(fields.text("phase", tuple(phase.value for phase in Phase))),
        rows=fields.integer("rows", minimum=1),
        tokens=fields.number("tokens"),
        count=fields.integer("count", minimum=1),
        seconds=fields.number("seconds"),
        master_s=fields.number("master_s"),
    )
    fields.done()
    return work


def _held(fields: Fields) -> HeldBytes:
    held = HeldBytes(
        weights=fields.integer("weights"),
        master=fields.integer("master"),
        kv=fields.integer("kv"),
        buffers=fields.integer("buffers"),
        load_peak=fields.integer("load_peak"),
    )
    fields.done()
    return held


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A start of all ranks after one of them was lost.

    Attributes:
        cause: why, in the words of the error.
        lost_s: how long the ranks that ended had run.
        finished: requests that they had answered.
    """

    cause: str
    lost_s: float
    finished: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What a run made and took.

    Attributes:
        requests: finished ones.
        generated_tokens: new tokens of all of them.
        latency_s: from the first micro-batch sent off to the last token.
        load_s: until every rank was ready.
        stages: what every rank measured of itself, in order.
        prefill_s: of ``latency_s``, until the last prompt's first token; ``None`` where nobody
            looked.
        policy: the batching policy that was obeyed.
        records: when each request came, began and ended.
        adjusted: decode iterations that RRA was given in the run, one after the other.
        not_served: requests that had not begun when the run was told to end.
        refused: prompts that could not be served, each with where it stands and why.
        restarts: what befell the run before the ranks that measured this were started.
    """

    requests: int
    generated_tokens: int
    latency_s: float
    load_s: float
    stages: tuple[StageStats, ...]
    prefill_s: float | None = None
    policy: str = "hybrid"
    records: tuple[RequestRecord, ...] = ()
    adjusted: tuple[int, ...] = ()
    not_served: int = 0
    refused: tuple[str, ...] = ()
    restarts: tuple[Restart, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; of restarts only the launcher knows."""
        return {
            "requests": self.requests,
            "generated_tokens": self.generated_tokens,
            "latency_s": self.latency_s,
            "load_s": self.load_s,
            "prefill_s": self.prefill_s,
            "policy": self.policy,
            "stages": [stage.to_json() for stage in self.stages],
            "records": [asdict(record) for record in self.records],
            "adjusted": list(self.adjusted),
            "not_served": self.not_served,
            "refused": list(self.refused),
        }


def measurement_from_fields(fields: Fields) -> Measurement:
    """Build a measurement from its JSON object, strictly."""
    measurement = Measurement(
        requests=fields.integer("requests"),
        generated_tokens=fields.integer("generated_tokens"),
        latency_s=fields.number("latency_s"),
        load_s=fields.number("load_s"),
        stages=tuple(stats_from_fields(stage) for stage in fields.children("stages", minimum=1)),
        prefill_s=fields.optional_number("prefill_s"),
        policy=fields.text("policy"),
        records=tuple(_record(record) for record in fields.children("records")),
        adjusted=tuple(int(one) for one in fields.items("adjusted")),
        not_served=fields.integer("not_served"),
        refused=tuple(str(text) for text in fields.items("refused")),
    )
    fields.done()
    return measurement


def _record(fields: Fields) -> RequestRecord:
    record = RequestRecord(
        request=fields.integer("request"),
        prompt_tokens=fields.integer("prompt_tokens", minimum=1),
        new_tokens=fields.integer("new_tokens", minimum=1),
        arrival_s=fields.number("arrival_s"),
        start_s=fields.number("start_s"),
        first_token_s=fields.number("first_token_s"),
        end_s=fields.number("end_s"),
    )
    fields.done()
    return record
