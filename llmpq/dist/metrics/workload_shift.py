"""What a run does when answers leave the lengths that its schedule was made for.

The watch itself is ``llmpq.batching.workload_shift``, the simulator's own. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmpq.batching import BatchingPolicy
from llmpq.batching.workload_shift import Drift, DriftWatch, drift_of, drift_words, watch_of
from llmpq.dist.io.job import DriftHandling
from llmpq.dist.metrics.measurement import Measurement
from llmpq.logging import get_logger
from llmpq.spec.fields import dump_json, write_text
from llmpq.spec.lengths import empirical, lengths_to_json
from llmpq.spec.schedule import Schedule

logger = get_logger(__name__)


def watch_for(
    schedule: Schedule, policy: BatchingPolicy, handling: DriftHandling
) -> DriftWatch | None:
    """Return what watches the answers of a run, ``None`` where its schedule rests on no lengths.

    When it notices one the lengths so far are written; whoever started the run tells it at the end.
    """
    watch: DriftWatch | None = None

    def tell(drift: Drift) -> None:
        assert watch is not None
        logger.info("%s", drift_message(drift, schedule, handling))
        if handling.lengths is not None:
            write_lengths(handling.lengths, watch.observed)

    watch = watch_of(schedule, policy, replans=handling.replans, tell=tell)
    return watch


def drift_message(
    drift: Drift, schedule: Schedule, handling: DriftHandling, adjusted: Sequence[int] = ()
) -> str:
    """Return what a run says of a drift: what was seen, what it does, what else can be done.

    Args:
        drift: what was seen.
        schedule: the run's own.
        handling: what it does about drifts.
        adjusted: decode iterations that it went on with, when it is over.
    """
    own = ""
    if adjusted:
        own = f"went on with {', '.join(map(str, adjusted))} decode iterations; "
    elif drift.suggested is not None:
        does = "going on with" if handling.replans else "--replan would take"
        own = f"{does} {drift.suggested.decode_iterations} decode iterations; "
    file = "FILE" if handling.lengths is None else handling.lengths
    return (
        f"drift: {drift_words(drift)}; {own}a latency bound is kept only by a new search: "
        f"llmpq-algo --policy {schedule.policy} --lengths {file}"
    )


def write_lengths(file: Path, new_tokens: Sequence[int]) -> None:
    """Write lengths as ``llmpq-algo --lengths`` and ``llmpq-sim --lengths`` read them."""
    write_text(file, dump_json(lengths_to_json(empirical(new_tokens))))


def drift_of_run(schedule: Schedule, measurement: Measurement) -> Drift | None:
    """Compare all answers of a run with its schedule; ``None`` where that rests on no lengths."""
    lengths = lengths_of(measurement)
    return drift_of(schedule, lengths) if lengths else None


def lengths_of(measurement: Measurement) -> list[int]:
    """Return the tokens of every answer of a run."""
    return [record.new_tokens for record in measurement.records]
