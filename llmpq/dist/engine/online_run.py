"""OnlineRun: answers the requests of a control channel, which arrive while it runs.

The order of the queue and the KV blocks decide on the steps, each of which mixes decode rows and
prompt chunks (``BlockScheduler``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from operator import mul
from typing import Protocol

from llmpq.batching.block_scheduler import OFFLOAD_TIERS, BlockScheduler
from llmpq.batching.engine_step import EngineLimits, EngineRequest
from llmpq.batching.length import LengthPredictor
from llmpq.batching.queue_order import QueueOrder
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.engine.drafters import Drafter
from llmpq.dist.engine.engine import (
    MAX_IDLE_WAIT_S,
    Engine,
    NewTokens,
    RunningSequence,
    SamplingState,
    TokenMatcher,
)
from llmpq.dist.engine.executor import StepExecutor
from llmpq.dist.io.control_channel import (
    AddedRequest,
    Message,
    ModelLimits,
    added_from_json,
    new_tokens_of,
    output_to_json,
)
from llmpq.dist.io.generation import ServingStats, TokenOutput
from llmpq.dist.io.structured_outputs import GrammarCompiler
from llmpq.errors import CapacityError, SpecError
from llmpq.logging import get_logger

STATS_PERIOD_S = 0.05
"""How often changed counters are sent at most; less than the 0.1 s that load balancers assume."""
COMPILE_POLL_S = 0.005
COMPILE_THREADS = 2
_log = get_logger(__name__)


class EngineChannel(Protocol):
    """The engine's end of a control channel."""

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; ``EOFError`` once the other end is closed."""
        ...

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message, ``None`` when none arrives; ``EOFError`` after the last."""
        ...


class OnlineRun:
    """Serves the requests of a control channel until its other end is closed.

    Args:
        channel: where requests come from and tokens go to.
        executor: computes the steps.
        limits: of the scheduler.
        order: of the waiting queue.
        model: what a request may be.
        grammars: compiles the forms of answers; ``None`` refuses requests that have one.
        speculative: where drafts come from; ``None`` for no speculative decoding.
        draft_model: proposes them where ``limits.draft`` has its size.
        predictor: predicts the lengths of answers; ``None`` for none.
        clock: seconds, for arrivals.
        block_bytes: of a block on all stages, and of one of layers with windows.
        stored: blocks in files of the ranks before, as ``BlockScheduler.restore`` takes them.
    """

    def __init__(  # noqa: PLR0913  the parts of an engine
        self,
        *,
        channel: EngineChannel,
        executor: StepExecutor,
        limits: EngineLimits,
        order: QueueOrder,
        model: ModelLimits,
        grammars: GrammarCompiler | None = None,
        speculative: SpeculativeConfig | None = None,
        draft_model: Drafter | None = None,
        predictor: LengthPredictor | None = None,
        clock: Callable[[], float] = time.monotonic,
        block_bytes: tuple[int, int] = (0, 0),
        stored: Sequence[tuple[bool, bytes, int]] = (),
    ) -> None:
        self._channel = channel
        self._block_bytes = block_bytes
        self._executor = executor
        self._limits = limits
        self._model = model
        self._grammars = grammars
        self._predictor = predictor
        self.scheduler = BlockScheduler(limits, order)
        self.scheduler.copy_blocks = executor.copy_blocks
        self.scheduler.restore(stored)
        self._engine = Engine(
            executor=executor,
            scheduler=self.scheduler,
            limits=limits,
            clock=clock,
            lookup=speculative,
            draft_model=draft_model,
            on_start=self._report_started,
        )
        self._added: dict[int, AddedRequest] = {}  # unfinished ones, by number
        self._scored: dict[int, RunningSequence] = {}  # whose prompts have scores to send
        self._numbers: dict[str, int] = {}
        self._next_number = 0
        self._compiling: dict[str, tuple[AddedRequest, Future[TokenMatcher]]] = {}
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, "llmpq grammar")
        self._stats = ServingStats()
        self._stats_s = -STATS_PERIOD_S

    def run(self, start_s: Mapping[str, float] | None = None) -> None:
        """Serve until the channel is closed; steps in flight are completed.

        Args:
            start_s: seconds of each step of the start, for the other end.

        Raises:
            LlmpqError: a stage failed.
        """
        try:
            with contextlib.suppress(EOFError):
                self._send_stats()  # a router asks for them as soon as the engine is ready
                self._channel.send(
                    "ready",
                    max_model_len=self._model.max_model_len,
                    vocab_size=self._model.vocab_size,
                    start_s=dict(start_s or {}),
                )
                while True:
                    self._step()
                    self._send_stats()
            self._engine.drain()
        finally:
            self._compilers.shutdown(cancel_futures=True)

    def _step(self) -> None:
        """Complete a step that is back, or dispatch one, or wait."""
        self._take_messages(0.0)
        self._take_compiled()
        if self._engine.has_result():
            self._complete()
        elif self._engine.dispatch() is not None:
            pass
        elif self._engine.num_in_flight:
            self._executor.await_result(STATS_PERIOD_S)
        else:
            self._executor.check()
            is_quiet = self._stats == self.stats()
            wait_s = MAX_IDLE_WAIT_S if is_quiet else STATS_PERIOD_S
            self._take_messages(COMPILE_POLL_S if self._compiling else wait_s)

    def _take_messages(self, wait_s: float) -> None:
        message = self._channel.receive(wait_s)
        while message is not None:
            if message["kind"] == "add":
                self._receive_request(message)
            elif message["kind"] == "abort":
                self._abort(message["id"])
            message = self._channel.receive(0.0)

    def _receive_request(self, message: Message) -> None:
        try:
            added = added_from_json(message)
            form = added.request.sampling.structured_outputs
            if form is None:
                self._add(added, None)
            elif self._grammars is None:
                raise SpecError("structured_outputs: this engine has no tokenizer")
            elif (matcher := self._grammars.compiled(form)) is not None:
                self._add(added, matcher)
            else:
                future: Future[TokenMatcher] = self._compilers.submit(self._grammars.compile, form)
                self._compiling[added.request.id] = (added, future)
                self._channel.send("started", ids=[added.request.id])
        except (SpecError, CapacityError) as error:
            self._channel.send("refused", id=message["id"], message=str(error))

    def _take_compiled(self) -> None:
        """Add the requests whose forms are compiled."""
        for id, (added, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[id]
            # A failure of the compiler, even a panic, ends its request alone.
            error = future.exception()
            try:
                if error is None:
                    self._add(added, future.result())
            except (SpecError, CapacityError) as found:
                error = found
            if error is not None:
                is_own = isinstance(error, SpecError | CapacityError)
                text = str(error) if is_own else f"structured_outputs: {type(error).__name__}"
                self._channel.send("refused", id=id, message=text)

    def _add(self, added: AddedRequest, matcher: TokenMatcher | None) -> None:
        """Queue a request.

        Raises:
            SpecError: it is not acceptable.
            CapacityError: it does not fit into the KV memory.
        """
        request, params = added.request, added.request.sampling
        if request.id in self._numbers:
            raise SpecError(f"id: found {request.id!r} of an unfinished request, expected another")
        max_tokens = new_tokens_of(added, self._model)
        stops = set(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._model.eos_token_ids
        state = SamplingState(
            params,
            # Equal seeds give equal answers, whatever the id.
            request=request.id if params.seed is None else "",
            prompt_token_ids=request.prompt_token_ids,
            stop_token_ids=stops,
            matcher=matcher,
            token_ids=added.token_ids,
        )
        number, self._next_number = self._next_number, self._next_number + 1
        # A step that was computed meanwhile counts as waiting, as does a restart.
        arrival_s = self._engine.now_s()
        if added.arrival_s is not None:
            arrival_s = min(arrival_s, added.arrival_s - self._engine.start_s)
        tokens = (*request.prompt_token_ids, *added.token_ids)
        asked = EngineRequest(
            request=number,
            token_ids=tokens,
            prompt_tokens=len(tokens),
            max_tokens=max_tokens - len(added.token_ids),
            arrival_s=arrival_s,
            priority=request.priority,
            cache_salt=request.cache_salt,
            group=request.group,
            scores_prompt=added.needs_prompt_logprobs or request.pooling == "mean",
        )
        if self._predictor is not None:
            prompt = request.prompt_token_ids
            whole = replace(asked, token_ids=prompt, prompt_tokens=len(prompt))
            left = self._predictor(whole) - len(added.token_ids)  # after a restart
            asked = replace(asked, predicted_tokens=max(1.0, left))
        sequence = RunningSequence.of(asked, request.prompt_token_ids, state, request.pooling)
        self._engine.add(asked, lambda: sequence)
        self._numbers[request.id] = number
        self._added[number] = added
        if added.needs_prompt_logprobs:
            self._scored[number] = sequence

    def _abort(self, id: str) -> None:
        if (compiling := self._compiling.pop(id, None)) is not None:
            compiling[1].cancel()
            return
        number = self._numbers.pop(id, None)
        if number is not None:
            self._engine.abort(number)
            self._scored.pop(number, None)
            del self._added[number]

    def _report_started(self, numbers: Sequence[int]) -> None:
        """Name the requests that a failure of the next step may be due to."""
        self._channel.send("started", ids=[self._added[one].request.id for one in numbers])

    def _complete(self) -> None:
        """Complete the oldest step: the next token of every sequence whose chunk makes one."""
        made = self._engine.complete()
        items = [self._scores_of(number) for number in list(self._scored)]
        items = [item for item in items if item is not None]
        items += [self._reported(one) for one in made]
        if items:
            self._channel.send("tokens", outputs=items)

    def _scores_of(self, number: int) -> list[object] | None:
        """Return the message with what a step found of a prompt's log probabilities.

        A long prompt has megabytes of them: the other end reads them step by step.
        """
        found = self._scored[number].take_prompt_logprobs()
        if not found:
            return None
        output = TokenOutput(token_ids=(), prompt_logprobs=tuple(found))
        return output_to_json(self._added[number].request.id, output)

    def _reported(self, made: NewTokens) -> list[object]:
        """Return the message with new tokens of a request; forget it where it is complete."""
        sequence, sampled, reason, embedding = made
        added = self._added[sequence.number]
        tokens = [token for token in sampled if token.error is None]
        if reason == "error":
            _log.warning("request %s: %s", added.request.id, sampled[-1].error)
        ids = [token.token_id for token in tokens]
        self._scored.pop(sequence.number, None)
        sequence.prompt_logprobs = None  # they are sent once
        stops = added.request.sampling.stop_token_ids
        output = TokenOutput(
            token_ids=tuple(ids),
            logprobs=tuple(token.logprobs for token in tokens if token.logprobs) or None,
            finish_reason=reason,
            stop_reason=ids[-1] if reason == "stop" and ids[-1] in stops else None,
            num_cached_tokens=sequence.num_cached_tokens or 0,
            is_form_complete=reason == "stop" and not sequence.state.ends_with_stop_token,
            embedding=embedding,
        )
        if reason is not None:
            del self._added[sequence.number]
            del self._numbers[added.request.id]
        return output_to_json(added.request.id, output)

    def stats(self) -> ServingStats:
        """Return the counters of now."""
        scheduler, limits = self.scheduler, self._limits
        kept = {tier: scheduler.offloaded(tier) for tier in OFFLOAD_TIERS}
        return ServingStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + len(self._compiling),
            queued_tokens=scheduler.queued_tokens,
            started_tokens=scheduler.started_tokens,
            kv_cache_usage=1 - scheduler.free_blocks / limits.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            prefix_tier_hits=dict(scheduler.tier_hits),
            kv_offload_bytes={
                tier: sum(map(mul, one.held, self._block_bytes)) for tier, one in kept.items()
            },
            kv_offload_saves={tier: one.num_saved for tier, one in kept.items()},
            kv_offload_loads={tier: one.num_loaded for tier, one in kept.items()},
            kv_offload_unread=scheduler.num_unread,
            num_blocks=limits.num_blocks,
            token_budget=limits.token_budget,
            block_size=limits.block_size,
            num_drafts=scheduler.drafts.num_drafts,
            num_draft_tokens=scheduler.drafts.num_draft_tokens,
            num_accepted_tokens=scheduler.drafts.num_accepted_tokens,
        )

    def _send_stats(self) -> None:
        """Send the counters where they changed, at a limited rate."""
        now_s = self._engine.now_s()
        if now_s - self._stats_s < STATS_PERIOD_S:
            return
        self._stats_s = now_s
        stats = self.stats()
        if stats != self._stats:
            self._stats = stats
            self._channel.send("stats", stats=asdict(stats))
