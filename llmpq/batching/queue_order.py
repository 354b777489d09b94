"""Orders of the waiting queue of an engine: which request is admitted next.

Each order is one small function that scores all waiting requests; the highest score is admitted
first, and equal scores in the order of the queue.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from llmpq.errors import SpecError


class WaitingView(Protocol):
    """What an order may read of a waiting request."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        ...

    @property
    def max_tokens(self) -> int:
        """Largest number of answer tokens."""
        ...

    @property
    def arrival_s(self) -> float:
        """Arrival on the clock of the engine."""
        ...

    @property
    def priority(self) -> int:
        """Priority given by the client; a lower value is admitted earlier, as in vLLM."""
        ...

    @property
    def predicted_tokens(self) -> float | None:
        """Predicted answer tokens."""
        ...


class QueueState(NamedTuple):
    """What an order may read of the engine.

    Attributes:
        now_s: time on the clock of the arrivals.
        mean_prompt_tokens: mean over all requests that have arrived so far.
        mean_prefill_s: seconds in which the steps so far compute so many tokens; 0 before the first
            step with a prompt is complete.
    """

    now_s: float
    mean_prompt_tokens: float
    mean_prefill_s: float


Scores = Callable[[Collection[WaitingView], QueueState], Iterable[float]]
Waiting = TypeVar("Waiting", bound=WaitingView)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOrder:
    """Order of an engine's waiting queue, and whether admission reserves a whole answer.

    Attributes:
        name: as given to :func:`queue_order`.
        scores: returns the score of every waiting request; ``None`` for the order of arrival.
        reserves_answer: allocate the blocks of the prompt and of the longest answer at admission,
            so that no sequence is preempted (TensorRT-LLM, ORCA; LARRY, Sec. 2.2: No-Preempt).
    """

    name: str
    scores: Scores | None = None
    reserves_answer: bool = False

    def __call__(self, waiting: Collection[Waiting], state: QueueState) -> Iterable[Waiting]:
        """Return the waiting requests, the one to admit first in front.

        Args:
            waiting: in the order of the queue.
            state: of the engine.
        """
        if self.scores is None:
            return waiting
        return _best_first(waiting, self.scores(waiting, state))


def _best_first(waiting: Iterable[Waiting], scores: Iterable[float]) -> Iterator[Waiting]:
    """Yield in decreasing order of score; only the yielded ones are sorted."""
    heap = [
        (-score, place, item)
        for place, (item, score) in enumerate(zip(waiting, scores, strict=True))
    ]
    heapq.heapify(heap)
    while heap:
        yield heapq.heappop(heap)[2]


def larry(
    waiting: Collection[WaitingView],
    state: QueueState,
    *,
    alpha: float,
    unit: float | None = None,
    unit_s: float | None = None,
) -> list[float]:
    """Score by waiting time, and against prompt length while the queue is long (LARRY, Sec. 4.1).

    The paper's Equation 1 is missing from its public text. This reconstruction agrees with what
    the text says about its terms and its extremes, but no ``alpha`` that was tried has all of its
    results (docs/evidence/larry.md):
    ``alpha * wait_s / unit_s - |queue| * prompt_tokens / unit``.

    Args:
        waiting: the queue.
        state: of the engine.
        alpha: weight of waiting; 0 is shortest prompt first, above about 1000 FCFS.
        unit: tokens; the mean prompt by default. Scaling ``alpha`` by ``c`` and ``unit`` by
            ``1 / c`` changes nothing.
        unit_s: seconds; the mean prefill time of a prompt by default, so that one ``alpha`` does
            for short and for long prompts. It is a second before it is known.
    """
    weight = len(waiting) / (state.mean_prompt_tokens if unit is None else unit)
    rate = alpha / (unit_s or state.mean_prefill_s or 1.0)
    now_s = state.now_s
    return [rate * (now_s - item.arrival_s) - weight * item.prompt_tokens for item in waiting]


def trail(waiting: Collection[WaitingView], state: QueueState) -> list[float]:  # noqa: ARG001
    """Score by the fewest predicted answer tokens (TRAIL with ``c = 0``: LARRY, Sec. 6).

    Running sequences are not preempted for shorter ones. A request without a prediction counts with
    its longest answer. Simulations predict the true length by default, a server what
    ``llmpq-profile lengths`` has learned.
    """
    return [
        -float(item.max_tokens if item.predicted_tokens is None else item.predicted_tokens)
        for item in waiting
    ]


def shortest_prompt_first(
    waiting: Collection[WaitingView],
    state: QueueState,  # noqa: ARG001
) -> list[float]:
    """Score by the shortest prompt."""
    return [-float(item.prompt_tokens) for item in waiting]


def highest_response_ratio(waiting: Collection[WaitingView], state: QueueState) -> list[float]:
    """Score by ``(wait + service) / service`` with a service time proportional to the prompt."""
    return [(state.now_s - item.arrival_s) / item.prompt_tokens for item in waiting]


def by_priority(waiting: Collection[WaitingView], state: QueueState) -> list[float]:  # noqa: ARG001
    """Score by the priority of the request."""
    return [-float(item.priority) for item in waiting]


_SCORES: dict[str, Scores | None] = {
    "fcfs": None,
    "no_preempt": None,
    "trail": trail,
    "spf": shortest_prompt_first,
    "hrrn": highest_response_ratio,
    "priority": by_priority,
}
QUEUE_ORDERS = ("larry", *_SCORES)
ALPHA = 1.0
"""Default weight of waiting in LARRY, in mean prefill times of a prompt."""


def queue_order(
    name: str,
    *,
    alpha: float | None = None,
    unit: float | None = None,
    unit_s: float | None = None,
) -> QueueOrder:
    """Return an order.

    Args:
        name: ``fcfs`` (first come, first served), ``larry``, ``no_preempt`` (FCFS that reserves
            memory for the longest answer), ``trail``, ``spf`` (shortest prompt first), ``hrrn``
            (highest response ratio next) or ``priority``.
        alpha: of LARRY, see :func:`larry`; ``ALPHA`` by default.
        unit: of LARRY.
        unit_s: of LARRY.

    Raises:
        SpecError: the name is unknown, ``alpha`` is negative, or a unit is not positive.
    """
    alpha = ALPHA if alpha is None else alpha
    units = [one for one in (unit, unit_s) if one is not None]
    if not alpha >= 0 or not all(one > 0 for one in units):
        raise SpecError(
            f"queue order: found alpha {alpha}, unit {unit} and unit_s {unit_s}, expected at least "
            "0 and above 0"
        )
    if name == "larry":
        return QueueOrder(name=name, scores=partial(larry, alpha=alpha, unit=unit, unit_s=unit_s))
    if name not in _SCORES:
        raise SpecError(f"queue order: found '{name}', expected one of {', '.join(QUEUE_ORDERS)}")
    return QueueOrder(name=name, scores=_SCORES[name], reserves_answer=name == "no_preempt")


@dataclass(slots=True)
class _Group:
    """Unfinished answers of one request: how many, how many of them run, and the last turn."""

    last_turn: int
    unfinished: int = 0
    running: int = 0


class FairTurns:
    """Gives turns to the answers of one queue: those of a request take turns with other requests.

    An answer gets the turn after the last one of its request, and at least the turn that is
    admitted now (start-time fair queueing: Goyal, Vin and Cheng 1996). So a request of 500 answers
    is ahead of a later request with one of them at most, and requests of one answer keep the order
    of arrival.
    """

    def __init__(self) -> None:
        self._now = 0
        self._groups: dict[str, _Group] = {}
        self._num_several = 0
        self._num_lone = 0

    @property
    def is_needed(self) -> bool:
        """Whether any request has several unfinished answers; else all turns are in order."""
        return self._num_several > 0

    def add(self, group: str | None) -> int:
        """Return the turn of a new answer.

        Args:
            group: of the answers that take turns with the others; ``None`` for a lone answer.
        """
        if group is None:
            self._num_lone += 1
            return self._now
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = _Group(self._now - 1)
        found.last_turn = max(self._now, found.last_turn + 1)
        found.unfinished += 1
        self._num_several += found.unfinished == 2
        return found.last_turn

    def start(self, group: str | None, turn: int) -> None:
        """Count an answer as running."""
        self._now = max(self._now, turn)
        if group is not None:
            self._groups[group].running += 1

    def stop(self, group: str | None) -> None:
        """Count an answer as not running any more."""
        if group is not None:
            self._groups[group].running -= 1

    def remove(self, group: str | None) -> None:
        """Forget an answer, which does not run."""
        if group is None:
            self._num_lone -= 1
            return
        found = self._groups[group]
        found.unfinished -= 1
        self._num_several -= found.unfinished == 1
        if not found.unfinished:
            del self._groups[group]

    @property
    def num_requests(self) -> int:
        """Requests with an unfinished answer."""
        return self._num_lone + len(self._groups)

    def is_further(self, group: str | None) -> bool:
        """Return whether an answer of the same request runs."""
        return group is not None and self._groups[group].running > 0
