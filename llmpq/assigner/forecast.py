"""Forecast: a plan played forward as the runtime executes it.

The closed formula that the search minimises knows two micro-batch times and one mean context. Here
every micro-batch is sent off by the runtime's own policy and book of requests, so that ragged last
micro-batches, regrouping between the phases, the overlap of a draining prefill with the first
decode, the contexts that grow and the limit of micro-batches in flight are what they will be.

- The master is one worker: it embeds and runs its own layers, and it projects and samples what
  comes back, one thing at a time.
- On a CPU a message costs both ends processor time (serialising, copying, the loopback device), so
  between workers of one host half of a send occupies each end; a worker that was computing when it
  came pays ``busy_s`` instead, as the communicator wants its core. Other links only delay.
- Workers that share cores (``cores`` of a node) share them evenly while they compute.

It refuses to model requests that differ; that is the simulator's task.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from llmpq.batching import HybridPolicy, RequestBook, Step, WaitingRequest
from llmpq.costmodel import ClusterCosts
from llmpq.spec.cluster import Device
from llmpq.spec.plan import Plan, PlanForecast, StageForecast
from llmpq.spec.precision import Phase

MAX_STEPS = 20_000
"""Micro-batches times stages that are played; beyond, one decode round stands for several."""
MIN_ROUNDS = 8
_TINY_S = 1e-12


def forecast(
    plan: Plan, costs: ClusterCosts, devices: Sequence[Device] | None = None
) -> PlanForecast:
    """Play a plan forward.

    Args:
        plan: what runs; its workload gives the requests.
        costs: the cost models.
        devices: of every stage, as ``costs`` knows them; the plan's own by default.

    Raises:
        ProfileMissError: a table has nothing for a phase and bitwidth of the plan.
    """
    own = [plan.device_of(stage) for stage in plan.stages] if devices is None else devices
    return _Run(plan, _Prices(plan, costs, own)).run()


class _Prices:
    """Seconds of every kind of step, each asked for once."""

    def __init__(self, plan: Plan, costs: ClusterCosts, devices: Sequence[Device]) -> None:
        self.costs = costs
        self.devices = devices
        kinds = costs.model.layer_kinds
        self.layers = [
            Counter(zip(kinds[stage.first_layer : stage.end_layer], stage.bits, strict=True))
            for stage in plan.stages
        ]
        self._stage: dict[tuple[int, Phase, int, float], float] = {}
        self._hops: dict[tuple[int, Phase, int], tuple[float, float]] = {}
        self._heads: dict[tuple[Phase, int], float] = {}
        self._prompt_tokens = plan.workload.prompt_tokens

    def stage_s(self, rank: int, phase: Phase, rows: int, tokens: float) -> float:
        """Return the seconds of a stage's layers on one micro-batch."""
        key = rank, phase, rows, tokens
        if key not in self._stage:
            device, layers = self.devices[rank], self.layers[rank]
            seconds = sum(
                count * self.costs.layer_s(device, phase, bits, rows, tokens, kind)
                for (kind, bits), count in layers.items()
            )
            self._stage[key] = seconds + (self.costs.stage_s(device, phase) if layers else 0.0)
        return self._stage[key]

    def head_s(self, phase: Phase, rows: int) -> float:
        """Return the seconds of the master's own work on one micro-batch."""
        key = phase, rows
        if key not in self._heads:
            tokens = self._prompt_tokens if phase is Phase.PREFILL else 1
            self._heads[key] = self.costs.master_s(self.devices[0], phase, rows, tokens)
        return self._heads[key]

    def hop_s(self, rank: int, phase: Phase, rows: int) -> tuple[float, float]:
        """Return the seconds that sending a stage's output takes each end, and delays it."""
        key = rank, phase, rows
        if key not in self._hops:
            self._hops[key] = self._hop(rank, phase, rows)
        return self._hops[key]

    def _hop(self, rank: int, phase: Phase, rows: int) -> tuple[float, float]:
        if len(self.devices) == 1:
            return 0.0, 0.0
        is_last = rank == len(self.devices) - 1
        source, target = self.devices[rank], self.devices[0 if is_last else rank + 1]
        # The last stage answers with the last position only: all that the head reads.
        tokens = 1 if is_last or phase is Phase.DECODE else self._prompt_tokens
        seconds = self.costs.send_s(source, target, phase, rows, tokens)
        kinds = {self.costs.specs[end.group].kind for end in (source, target)}
        if source.node == target.node and kinds == {"cpu"}:
            return seconds / 2.0, 0.0
        return 0.0, seconds


@dataclass(slots=True, kw_only=True)
class _Worker:
    """One rank: what waits for it and what it does.

    Attributes:
        threads: cores it occupies while it computes.
        node: its host.
        waiting: micro-batches that arrived, the oldest first.
        step: the micro-batch it computes on, ``None`` when it idles.
        left_s: seconds of undisturbed work left.
        is_landing: whether the master projects and samples rather than embeds.
    """

    threads: int
    node: str
    waiting: deque[Step] = field(default_factory=deque)
    step: Step | None = None
    left_s: float = 0.0
    is_landing: bool = False


class _Run:
    """One plan in motion."""

    def __init__(self, plan: Plan, prices: _Prices) -> None:
        self.plan = plan
        self.prices = prices
        work, sizes, stages = plan.workload, plan.micro_batching, len(plan.stages)
        self.rounds = work.new_tokens - 1
        a_round = stages * (1 + -(-work.batch // sizes.decode))
        self.played = min(self.rounds, max(MIN_ROUNDS, MAX_STEPS // a_round))
        self.book = RequestBook(
            policy=HybridPolicy(micro_batching=sizes, num_slots=work.batch, num_stages=stages),
            num_slots=work.batch,
        )
        for number in range(work.batch):
            self.book.arrive(WaitingRequest(request=number, prompt_tokens=work.prompt_tokens))
        self.book.close()
        self.workers = [
            _Worker(threads=device.threads or 1, node=device.node) for device in prices.devices
        ]
        self.cores = {node.name: node.cores for node in prices.costs.cluster.nodes}
        self.most_in_flight = 1 if stages == 1 else stages + 1
        self.now_s = 0.0
        self.prefill_s = 0.0
        self.is_waiting = False
        self.sent: deque[int] = deque()
        self.arrivals: list[tuple[float, int, int, Step]] = []
        self.came_to_busy: set[tuple[int, int]] = set()
        self.busy_s = [{phase: 0.0 for phase in Phase} for _ in self.workers]

    def run(self) -> PlanForecast:
        """Play until the last token, and stretch what was played of decode to all of it."""
        self._wake_master()
        while not self.book.is_done:
            self._advance()
            self._wake_master()
        stretch = self.rounds / self.played if self.played else 1.0
        decode_s = (self.now_s - self.prefill_s) * stretch
        return PlanForecast(
            latency_s=self.prefill_s + decode_s,
            prefill_s=self.prefill_s,
            stages=tuple(self._stage(rank, stretch) for rank in range(len(self.workers))),
        )

    def _stage(self, rank: int, stretch: float) -> StageForecast:
        work, sizes = self.plan.workload, self.plan.micro_batching
        prefill_s = self.prices.stage_s(rank, Phase.PREFILL, sizes.prefill, work.prompt_tokens)
        decode_s = self.prices.stage_s(rank, Phase.DECODE, sizes.decode, work.mean_context_tokens)
        if rank == 0:
            prefill_s += self.prices.head_s(Phase.PREFILL, sizes.prefill)
            decode_s += self.prices.head_s(Phase.DECODE, sizes.decode)
        busy = self.busy_s[rank]
        return StageForecast(
            prefill_s=prefill_s,
            decode_s=decode_s if self.rounds else 0.0,
            prefill_busy_s=busy[Phase.PREFILL],
            decode_busy_s=busy[Phase.DECODE] * stretch,
        )

    def _wake_master(self) -> None:
        """Give an idle master its next task, as the engine's loop does: land before sending."""
        master = self.workers[0]
        if master.step is not None:
            return
        if master.waiting:
            self._begin(0, is_landing=True)
            return
        if self.is_waiting or len(self.sent) >= self.most_in_flight:
            return
        _, step = self.book.decide(self.now_s)
        if step is None:
            self.is_waiting = True  # nothing changes until a micro-batch lands
            return
        self.sent.append(step.flight.number)
        master.waiting.append(step)
        self._begin(0, is_landing=False)

    def _begin(self, rank: int, *, is_landing: bool) -> None:
        worker = self.workers[rank]
        step = worker.waiting.popleft()
        rows, phase, last = len(step.sequences), step.flight.phase, len(self.workers) - 1
        if is_landing:
            seconds = self.prices.head_s(phase, rows)
            received_s = self.prices.hop_s(last, phase, rows)[0]
            sent_s = 0.0
        else:
            seconds = self.prices.stage_s(rank, phase, rows, self._tokens(step))
            received_s = self.prices.hop_s(rank - 1, phase, rows)[0] if rank else 0.0
            sent_s = self.prices.hop_s(rank, phase, rows)[0]
        if (rank, step.flight.number) in self.came_to_busy and received_s > 0:
            self.came_to_busy.discard((rank, step.flight.number))
            received_s = max(received_s, self.prices.costs.busy_s - sent_s)
        self.busy_s[rank][phase] += seconds
        worker.step, worker.is_landing = step, is_landing
        worker.left_s = received_s + seconds + sent_s

    def _tokens(self, step: Step) -> float:
        """Return the length that a step's time depends on: of its prompts, or of its contexts."""
        work = self.plan.workload
        if step.flight.phase is Phase.PREFILL:
            return work.prompt_tokens
        made = max(sequence.new_tokens for sequence in step.sequences)
        # The k-th played round is the middle of the rounds that it stands for.
        return work.prompt_tokens + 0.5 + (made - 0.5) * self.rounds / self.played

    def _advance(self) -> None:
        """Go on to the next moment at which a task ends or a message arrives."""
        rates = self._rates()
        ends = [worker.left_s / rates[i] for i, worker in enumerate(self.workers) if worker.step]
        moments = [self.now_s + min(ends)] if ends else []
        moments += [self.arrivals[0][0]] if self.arrivals else []
        passed_s = min(moments) - self.now_s
        self.now_s += passed_s
        for rank, worker in enumerate(self.workers):
            if worker.step is not None:
                worker.left_s -= passed_s * rates[rank]
                if worker.left_s <= _TINY_S:
                    self._end(rank, worker)
        while self.arrivals and self.arrivals[0][0] <= self.now_s + _TINY_S:
            _, _, rank, step = heapq.heappop(self.arrivals)
            worker = self.workers[rank]
            if worker.step is not None or worker.waiting:
                self.came_to_busy.add((rank, step.flight.number))
            worker.waiting.append(step)
        for rank, worker in enumerate(self.workers[1:], start=1):
            if worker.step is None and worker.waiting:
                self._begin(rank, is_landing=False)

    def _rates(self) -> list[float]:
        """Return the share of its speed that each worker has while those now at work are."""
        threads: Counter[str] = Counter()
        for worker in self.workers:
            threads[worker.node] += worker.threads if worker.step else 0
        rates = []
        for worker in self.workers:
            cores = self.cores[worker.node]
            rates.append(1.0 if cores is None else min(1.0, cores / max(1, threads[worker.node])))
        return rates

    def _end(self, rank: int, worker: _Worker) -> None:
        step = worker.step
        assert step is not None
        worker.step = None
        if worker.is_landing:
            self._land(step)
            return
        phase, rows = step.flight.phase, len(step.sequences)
        target = (rank + 1) % len(self.workers)
        delay_s = self.prices.hop_s(rank, phase, rows)[1]
        heapq.heappush(self.arrivals, (self.now_s + delay_s, step.flight.number, target, step))

    def _land(self, step: Step) -> None:
        self.workers[0].is_landing = False
        self.is_waiting = False
        self.sent.popleft()
        if step.flight.phase is Phase.PREFILL:
            self.prefill_s = self.now_s
        is_complete = [sequence.new_tokens >= self.played for sequence in step.sequences]
        self.book.land(step.flight.number, is_complete)
