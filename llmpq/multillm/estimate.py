"""Simulated running of an application: which models run with which plans, stage after stage.

A stage is a set of models with their plans. It ends when the first of them has answered all
requests that it gets in the stage (SamuLLM, Sec. 3). A model whose plan does not change keeps its
process; any other is stopped at the end of its stage, keeps the tokens of its unfinished requests
and prefills them anew later. Every process is simulated from its start, whenever its inputs change;
results are kept by inputs relative to the start, as stages are tried in many orders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from llmpq.errors import SolverError
from llmpq.multillm.candidates import Candidate
from llmpq.multillm.engine.law import Array, EngineRun, Ints, play
from llmpq.multillm.workload import AppWorkload

Stage = Mapping[int, Candidate]
"""Plan of every model that runs, by index of the model."""
MAX_ROUNDS = 1000
"""Times that the processes of a stage are simulated anew because their inputs changed."""
INSTANT_S = 1e-9
"""Times that differ by less are one moment: sums in another order differ in their last digits."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingRequests:
    """Requests of a model that a process has to answer.

    Attributes:
        requests: their numbers, rising [n].
        made: tokens that they have [n].
        following: next chunk, a place in ``requests`` or -1 [n].
        is_released: whether the previous chunk is among them [n].
        item_rank: number of the item among those left [n].
        waits: whether any of them has parents.
    """

    requests: Ints
    made: Ints
    following: Ints
    is_released: np.ndarray
    item_rank: Ints
    waits: bool


@dataclass(frozen=True, slots=True, eq=False)
class ModelProcess:
    """A model that runs with a plan from ``begin_s`` on; it loads first."""

    model: int
    candidate: Candidate
    begin_s: float
    rest: PendingRequests

    @property
    def start_s(self) -> float:
        """When it has loaded."""
        return self.begin_s + self.candidate.load_s


@dataclass(frozen=True, slots=True, eq=False)
class ProcessRun:
    """Result of a process; times are relative to its start.

    Attributes:
        finish_s: when its requests finish, infinite if they do not [n].
        last_s: largest of them that is finite, negative if there is none.
        replicas: places of the requests of each replica, and its run.
    """

    finish_s: Array
    last_s: float
    replicas: tuple[tuple[Ints, EngineRun], ...]

    def until(self, seconds: float) -> tuple[float, float]:
        """Return useful operations, and busy seconds of all replicas, up to a time."""
        work = busy = 0.0
        if seconds > 0:
            for _, run in self.replicas:
                times, done, used = run.curve.T
                work += float(np.interp(seconds, times, done))
                busy += float(np.interp(seconds, times, used))
        return work, busy


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Where an application is between two stages.

    Attributes:
        time_s: now.
        finish_s: when each request finished [n]; infinite if it has not.
        made: tokens of each request when its model's present process began [n].
        processes: those of the stage that ended now, by model.
        rests: what each model has left if a new process begins, filled on demand.
    """

    time_s: float
    finish_s: Array
    made: Ints
    processes: Mapping[int, ModelProcess] = field(default_factory=dict)
    rests: dict[int, PendingRequests] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class StageRun:
    """Models that run side by side, when each of them finishes, and the end of the first.

    Attributes:
        begin_s, end_s: of the stage.
        processes: of its models.
        runs: their results.
        ends: when each model finishes what it gets in the stage.
        work: useful operations of each in the stage.
    """

    begin_s: float
    end_s: float
    processes: Mapping[int, ModelProcess]
    runs: Mapping[int, ProcessRun]
    ends: Mapping[int, float]
    work: Mapping[int, float]

    @property
    def seconds(self) -> float:
        """Duration of the stage."""
        return self.end_s - self.begin_s


class Simulator:
    """Simulates stages of an application.

    Args:
        workload: requests of the application.

    Attributes:
        models: number of models.
        simulations: processes simulated so far.
    """

    def __init__(self, workload: AppWorkload) -> None:
        self.workload = workload
        self.models = len(workload.app.models)
        self._of_model = [np.flatnonzero(workload.model == model) for model in range(self.models)]
        self._producers = [self._producers_of(model) for model in range(self.models)]
        self._runs: dict[tuple[object, ...], ProcessRun] = {}
        self._rests: dict[tuple[int, bytes], PendingRequests] = {}

    def begin(self) -> Progress:
        """Return the application before its first stage."""
        count = len(self.workload)
        return Progress(0.0, np.full(count, np.inf), np.zeros(count, np.int64))

    def unfinished(self, progress: Progress) -> list[int]:
        """Return the models with unfinished requests."""
        return [
            model
            for model, requests in enumerate(self._of_model)
            if np.isinf(progress.finish_s[requests]).any()
        ]

    def producers(self, model: int) -> set[int]:
        """Return the models whose answers a model reads, itself included if it does."""
        return self._producers[model]

    def run(self, progress: Progress, stage: Stage, *, may_wait: bool = False) -> StageRun | None:
        """Simulate a stage; ``None`` if one of its models gets no request in it.

        With ``may_wait`` such models only keep their devices; ``None`` if all are such.
        """
        processes = {
            model: self._process(progress, model, candidate) for model, candidate in stage.items()
        }
        runs = self._settle(progress, processes)
        ends = {model: one.start_s + runs[model].last_s for model, one in processes.items()}
        now = progress.time_s + INSTANT_S
        if may_wait:
            ends = {model: end_s for model, end_s in ends.items() if end_s > now}
        end_s = min(ends.values(), default=now)
        if end_s <= now:
            return None
        work = {}
        for model, process in processes.items():
            work[model] = runs[model].until(end_s - process.start_s)[0]
            work[model] -= runs[model].until(progress.time_s - process.start_s)[0]
        return StageRun(progress.time_s, end_s, processes, runs, ends, work)

    def stopped(self, progress: Progress, models: Collection[int]) -> Progress:
        """Return the application with the processes of some models ended."""
        made = progress.made.copy()
        for model in progress.processes.keys() & set(models):
            rest = self._rest(progress, model)
            made[rest.requests] = rest.made
        kept = {key: one for key, one in progress.processes.items() if key not in models}
        return Progress(progress.time_s, progress.finish_s, made, kept)

    def after(self, progress: Progress, run: StageRun) -> Progress:
        """Return the application at the end of a stage."""
        ended = [
            model
            for model, own in progress.processes.items()
            if run.processes.get(model) is not own
        ]
        finish, made = progress.finish_s.copy(), self.stopped(progress, ended).made
        for model, process in run.processes.items():
            found = run.runs[model].finish_s + process.start_s
            done = found <= run.end_s + INSTANT_S
            finish[process.rest.requests[done]] = found[done]
        processes = {
            model: process
            for model, process in run.processes.items()
            if np.isinf(finish[process.rest.requests]).any()
        }
        return Progress(run.end_s, finish, made, processes)

    def _process(self, progress: Progress, model: int, candidate: Candidate) -> ModelProcess:
        """Return the process of a model that runs on, or a new one."""
        own = progress.processes.get(model)
        if own is not None and own.candidate is candidate:
            return own
        return ModelProcess(model, candidate, progress.time_s, self._rest(progress, model))

    def _rest(self, progress: Progress, model: int) -> PendingRequests:
        """Return what a new process of a model would have to answer."""
        if model not in progress.rests:
            requests = self._of_model[model]
            requests = requests[np.isinf(progress.finish_s[requests])]
            made = progress.made[requests]
            own = progress.processes.get(model)
            if own is not None:
                made = (
                    made + self._made(progress, own)[np.searchsorted(own.rest.requests, requests)]
                )
                # Its last iteration may end after the stage; the token is computed anew then.
                made = np.minimum(made, self.workload.answer[requests] - 1)
            digest = hashlib.blake2b(requests.tobytes() + made.tobytes()).digest()
            key = model, digest
            if key not in self._rests:
                self._rests[key] = self._remainder(requests, made)
            progress.rests[model] = self._rests[key]
        return progress.rests[model]

    def _remainder(self, requests: Ints, made: Ints) -> PendingRequests:
        work = self.workload
        before = work.before[requests]
        at = np.searchsorted(requests, before).clip(max=max(0, len(requests) - 1))
        is_released = (before >= 0) & (requests[at] == before) if len(requests) else before >= 0
        following = np.full(len(requests), -1)
        following[at[is_released]] = np.flatnonzero(is_released)
        return PendingRequests(
            requests=requests,
            made=made,
            following=following,
            is_released=is_released,
            item_rank=np.unique(work.item[requests], return_inverse=True)[1],
            waits=bool((work.first[requests + 1] > work.first[requests]).any()),
        )

    def _made(self, progress: Progress, process: ModelProcess) -> Ints:
        """Return the tokens that requests got from a process by now."""
        ready = self._ready(process, progress.finish_s)
        run = self._play(process, ready, progress.time_s - process.start_s)
        made = np.zeros(len(process.rest.requests), np.int64)
        for places, replica in run.replicas:
            made[places] = replica.made
        return made

    def _settle(
        self, progress: Progress, processes: Mapping[int, ModelProcess]
    ) -> dict[int, ProcessRun]:
        """Simulate processes until none gets other inputs."""
        finish = progress.finish_s
        is_linked = any(self._producers[model] & processes.keys() for model in processes)
        if is_linked:
            finish = finish.copy()
        runs: dict[int, ProcessRun] = {}
        inputs: dict[int, Array | None] = {}
        for _ in range(MAX_ROUNDS):
            has_changed = False
            for model, process in self._in_order(processes):
                ready = self._ready(process, finish)
                if model in inputs and _is_same(ready, inputs[model]):
                    continue
                runs[model], inputs[model] = self._play(process, ready), ready
                if is_linked:
                    has_changed = True
                    requests = process.rest.requests
                    found = runs[model].finish_s + process.start_s
                    known = progress.finish_s[requests]
                    finish[requests] = np.where(np.isfinite(known), known, found)
            if not has_changed:
                return runs
        raise SolverError("applications: the times of requests between models do not settle")

    def _in_order(
        self, processes: Mapping[int, ModelProcess]
    ) -> Iterator[tuple[int, ModelProcess]]:
        """Yield processes, producers first."""
        left = dict(processes)
        while left:
            model = next(
                (one for one in left if not self._producers[one] & (left.keys() - {one})),
                next(iter(left)),
            )
            yield model, left.pop(model)

    def _producers_of(self, model: int) -> set[int]:
        app = self.workload.app
        nodes = [node.name for node in app.nodes if node.model == app.models[model].name]
        names = {app.node(one).model for node in nodes for one in app.producers(node)}
        return {place for place, one in enumerate(app.models) if one.name in names}

    def _ready(self, process: ModelProcess, finish: Array) -> Array | None:
        """Return when requests become ready, from the start of a process; ``None``: all at once."""
        work, rest = self.workload, process.rest
        if not rest.waits:
            return None
        first, end = work.first[rest.requests], work.first[rest.requests + 1]
        ready = np.zeros(len(rest.requests))
        has = np.flatnonzero(end > first)
        counts = (end - first)[has]
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        places = np.arange(counts.sum()) - np.repeat(starts, counts)
        times = finish[work.parents[np.repeat(first[has], counts) + places]]
        ready[has] = np.maximum.reduceat(times, starts)
        found: Array = np.maximum(ready - process.start_s, 0.0)
        return found

    def _play(
        self, process: ModelProcess, ready: Array | None, end_s: float = np.inf
    ) -> ProcessRun:
        """Simulate a process from its start; times are relative to it."""
        digest = None if ready is None else hashlib.blake2b(ready.tobytes()).digest()
        key = process.rest, process.candidate, digest, end_s
        if key not in self._runs:
            self._runs[key] = self._simulate(process, ready, end_s)
        return self._runs[key]

    def _simulate(self, process: ModelProcess, ready: Array | None, end_s: float) -> ProcessRun:
        work, rest, law = self.workload, process.rest, process.candidate.law
        prompt = work.prompt[rest.requests] + rest.made
        long = prompt.astype(np.float64)
        fresh = np.where(rest.made == 0, law.flops_token * long + law.flops_key * long**2, 0.0)
        # The engine releases a chunk when the one before it is finished.
        times = np.where(rest.is_released, np.inf, 0.0 if ready is None else ready)
        replica = rest.item_rank % process.candidate.replicas
        finish = np.full(len(rest.requests), np.inf)
        runs = []
        for number in range(process.candidate.replicas):
            places = np.flatnonzero(replica == number)
            if not places.size:
                continue
            following = rest.following[places]
            run = play(
                law,
                ready_s=times[places],
                prompt=prompt[places],
                answer=(work.answer[rest.requests] - rest.made)[places],
                following=np.where(following >= 0, np.searchsorted(places, following), -1),
                work=fresh[places],
                end_s=end_s,
            )
            finish[places] = run.finish_s
            runs.append((places, run))
        finite = finish[np.isfinite(finish)]
        return ProcessRun(finish, float(finite.max(initial=-np.inf)), tuple(runs))


def _is_same(ready: Array | None, other: Array | None) -> bool:
    if ready is None or other is None:
        return ready is other
    return np.array_equal(ready, other)
