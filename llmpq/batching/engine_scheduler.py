"""Scheduler of an engine of packed steps over paged KV memory, shared by runtime and simulator.

A step is a list of chunks: one token of a sequence that decodes, or the next tokens of a prompt.
Every step has a token budget. Running sequences come first; the rest of the budget goes to waiting
requests in the order of a :class:`~llmpq.batching.queue_order.QueueOrder`. A request is admitted
when the blocks of its whole prompt are free; the first one that does not fit ends admission. When a
running sequence needs a block and none is free, the sequence admitted last is preempted: it
releases its blocks, keeps its tokens, returns to the head of the queue and is recomputed (vLLM).

A pipeline has several steps in flight; a sequence is in at most one of them. The steps must be
computed in the order of their numbers: a block may be found by its content from the next step on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from llmpq.batching.blocks import BlockAllocator, BlockKey, next_key, root_key
from llmpq.batching.queue_order import QueueOrder, QueueState
from llmpq.errors import CapacityError, LlmpqError, SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Sequences and tokens that an engine computes in one step.

    Attributes:
        token_budget: tokens of all sequences in one step.
        max_sequences: running sequences.
        num_blocks: KV blocks.
        block_size: tokens of a block.
        watermark: share of the blocks that an admission leaves free while sequences run.
        prefix_caching: reuse blocks of equal content.
        steps_in_flight: steps that may be in the pipeline at once.
    """

    token_budget: int
    max_sequences: int
    num_blocks: int
    block_size: int
    watermark: float = 0.01
    prefix_caching: bool = True
    steps_in_flight: int = 1

    def __post_init__(self) -> None:
        for name in (
            "token_budget",
            "max_sequences",
            "num_blocks",
            "block_size",
            "steps_in_flight",
        ):
            if getattr(self, name) < 1:
                raise SpecError(
                    f"engine limits: field '{name}': found {getattr(self, name)}, expected at "
                    "least 1"
                )
        if not 0 <= self.watermark < 1:
            raise SpecError(
                f"engine limits: field 'watermark': found {self.watermark}, expected 0 to 1"
            )

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks of a number of tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A prompt, as the scheduler of an engine sees it, and how long its answer may be.

    Attributes:
        request: number, unique among the unfinished requests.
        token_ids: the prompt; ``None`` in a simulation without content, where only a preempted
            request finds its own blocks again.
        prompt_tokens: length of the prompt, at least 1.
        max_tokens: largest number of answer tokens, at least 1.
        arrival_s: arrival on the clock given to :meth:`EngineScheduler.schedule`.
        priority: a lower value is admitted earlier by the order ``priority``.
        predicted_tokens: predicted answer tokens, for the order ``trail``.
        cache_salt: requests share blocks only under the same salt.
        skip_prefix_cache: compute the whole prompt, because every position has an output that is
            needed (log-probabilities of the prompt).
    """

    request: int
    token_ids: tuple[int, ...] | None
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    priority: int = 0
    predicted_tokens: float | None = None
    cache_salt: str = ""
    skip_prefix_cache: bool = False

    def __post_init__(self) -> None:
        tokens = self.prompt_tokens if self.token_ids is None else len(self.token_ids)
        if self.prompt_tokens < 1 or self.max_tokens < 1 or tokens != self.prompt_tokens:
            raise SpecError(
                f"request {self.request}: found {self.prompt_tokens} prompt tokens, {tokens} token "
                f"ids and at most {self.max_tokens} new tokens, expected at least 1 of each"
            )


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens ``[first, first + count)`` of a sequence in a step.

    Attributes:
        request: number of the request.
        first: tokens before the chunk; their keys and values are in the blocks.
        count: tokens to compute.
        blocks: block ``i`` holds tokens ``[i * block_size, (i + 1) * block_size)``; it may have
            more blocks than ``first + count`` tokens need.
        makes_token: the chunk ends at the last token so far, so its output is the next one.
    """

    request: int
    first: int
    count: int
    blocks: tuple[int, ...]
    makes_token: bool


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Chunks of several sequences that an engine computes together.

    Attributes:
        number: counted from 0.
        chunks: at least one; each of another sequence.
        preempted: requests preempted since the step before.
    """

    number: int
    chunks: tuple[ScheduledChunk, ...]
    preempted: tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """State of an unfinished request.

    ``tokens`` counts prompt and answer so far; ``computed`` those with keys and values in
    ``blocks``, the step in flight included.
    """

    request: EngineRequest
    tokens: int
    ids: list[int] | None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    table: tuple[int, ...] = ()
    keys: list[BlockKey] = field(default_factory=list)
    in_step: int | None = None
    last_step: int = -1
    is_aborted: bool = False
    was_admitted: bool = False


class EngineScheduler:
    """Decides the steps of one engine.

    Args:
        limits: of the engine.
        order: of the waiting queue.
    """

    def __init__(self, limits: EngineLimits, order: QueueOrder) -> None:
        self._limits = limits
        self._order = order
        self._allocator = BlockAllocator(limits.num_blocks)
        self._watermark = int(limits.watermark * limits.num_blocks)
        self._sequences: dict[int, _Sequence] = {}
        self._waiting: dict[int, EngineRequest] = {}  # never admitted, in order of arrival
        self._preempted: deque[_Sequence] = deque()  # admitted before all others
        self._running: dict[int, _Sequence] = {}  # in order of admission
        self._in_flight: dict[int, tuple[ScheduledChunk, ...]] = {}
        self._next_step = 0
        self._newly_preempted: list[int] = []  # not yet reported by a step
        self._num_arrived = self._arrived_tokens = self._waiting_tokens = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        """Prompt tokens of admitted requests."""
        self.prefix_cache_hits = 0
        """Those of them whose keys and values were found."""

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps that are not complete."""
        return len(self._in_flight)

    @property
    def free_blocks(self) -> int:
        """Blocks without a user."""
        return self._allocator.num_free

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute before every request has its next token; running prompts included."""
        preempted = sum(sequence.tokens for sequence in self._preempted)
        running = sum(max(0, item.tokens - item.computed - 1) for item in self._running.values())
        return self._waiting_tokens + preempted + running

    @property
    def is_idle(self) -> bool:
        """Whether no request is unfinished."""
        return not self._sequences

    def add(self, request: EngineRequest) -> None:
        """Put a request at the end of the queue.

        Raises:
            CapacityError: its prompt and longest answer do not fit into all blocks.
            LlmpqError: an unfinished request has the same number.
        """
        if request.request in self._sequences:
            raise LlmpqError(f"engine scheduler: request {request.request} is not finished")
        # The last token of an answer is never an input, so its keys and values are not stored.
        needed = self._limits.blocks_for(request.prompt_tokens + request.max_tokens - 1)
        if needed > self._limits.num_blocks:
            raise CapacityError(
                f"request {request.request}: {request.prompt_tokens} prompt and up to "
                f"{request.max_tokens} new tokens need {needed} KV blocks, more than the "
                f"{self._limits.num_blocks} available"
            )
        ids = None if request.token_ids is None else list(request.token_ids)
        sequence = _Sequence(request=request, tokens=request.prompt_tokens, ids=ids)
        self._add_keys(sequence, request.prompt_tokens)
        self._sequences[request.request] = sequence
        self._waiting[request.request] = request
        self._num_arrived += 1
        self._arrived_tokens += request.prompt_tokens
        self._waiting_tokens += request.prompt_tokens

    def abort(self, request: int) -> bool:
        """Remove a request; its blocks are released when its step in flight is complete.

        Returns:
            Whether the request was unfinished.
        """
        sequence = self._sequences.get(request)
        if sequence is None or sequence.is_aborted:
            return False
        sequence.is_aborted = True
        if sequence.in_step is not None:
            return True
        if request in self._waiting:
            self._leave_queue(sequence)
        elif request not in self._running:
            self._preempted.remove(sequence)
        self._remove(sequence)
        return True

    def schedule(self, now_s: float) -> EngineStep | None:
        """Return the next step, or ``None`` if nothing can run before a step completes.

        Args:
            now_s: time on the clock of the arrivals.
        """
        if len(self._in_flight) == self._limits.steps_in_flight:
            return None
        before = self.num_preemptions
        chunks, left = self._continue()
        if self.num_preemptions == before:
            chunks += self._admit(left, now_s)
        if not chunks:
            return None
        step = EngineStep(self._next_step, tuple(chunks), tuple(self._newly_preempted))
        self._newly_preempted.clear()
        self._cache_full_blocks(chunks)
        self._in_flight[step.number] = step.chunks
        self._next_step += 1
        return step

    def complete(
        self, number: int, tokens: Mapping[int, int], finished: Collection[int] = ()
    ) -> None:
        """Complete a step in flight.

        Args:
            number: of the step.
            tokens: token id of each chunk that makes a token; aborted requests are ignored.
            finished: requests whose answer is complete with this token.

        Raises:
            LlmpqError: the step is not in flight, a token is missing, or an unfinished request has
                its ``max_tokens``.
        """
        chunks = self._in_flight.pop(number, None)
        if chunks is None:
            raise LlmpqError(f"engine scheduler: step {number} is not in flight")
        for chunk in chunks:
            sequence = self._sequences[chunk.request]
            sequence.in_step = None
            if sequence.is_aborted or (chunk.makes_token and chunk.request in finished):
                self._remove(sequence)
            elif chunk.makes_token:
                self._append(sequence, tokens)

    def restart(self) -> None:
        """Put all sequences back to the head of the queue, after the KV memory was lost.

        Steps in flight are forgotten, tokens so far are kept, and aborted sequences are removed.
        """
        self._in_flight.clear()
        for sequence in reversed(self._running.copy().values()):
            sequence.in_step = None
            if sequence.is_aborted:
                self._remove(sequence)
            else:
                self._to_head_of_queue(sequence)
        self._allocator.clear_cache()

    def _append(self, sequence: _Sequence, tokens: Mapping[int, int]) -> None:
        request = sequence.request
        if request.request not in tokens:
            raise LlmpqError(f"engine scheduler: found no token of request {request.request}")
        sequence.tokens += 1
        if sequence.tokens == request.prompt_tokens + request.max_tokens:
            raise LlmpqError(
                f"engine scheduler: request {request.request} has its {request.max_tokens} tokens, "
                "expected to be finished"
            )
        if sequence.ids is not None:
            sequence.ids.append(tokens[request.request])

    def _remove(self, sequence: _Sequence) -> None:
        number = sequence.request.request
        self._running.pop(number, None)
        self._allocator.free(sequence.blocks)
        del self._sequences[number]

    def _leave_queue(self, sequence: _Sequence) -> None:
        del self._waiting[sequence.request.request]
        self._waiting_tokens -= sequence.request.prompt_tokens

    def _continue(self) -> tuple[list[ScheduledChunk], int]:
        """Return chunks of running sequences, and the tokens that are left of the budget.

        Other sequences are preempted to make room for them.
        """
        chunks: list[ScheduledChunk] = []
        left, size = self._limits.token_budget, self._limits.block_size
        # The steps of a pipeline share the running sequences evenly.
        share = -(-len(self._running) // self._limits.steps_in_flight)
        for sequence in self._ready():
            if not left or len(chunks) == share:
                break
            if not sequence.blocks:
                continue  # preempted in this step
            count = sequence.tokens - sequence.computed
            if count > left:
                count = left
            end = sequence.computed + count
            if end <= len(sequence.table) * size or self._make_room(sequence, end):
                chunks.append(self._advance(sequence, count))
                left -= count
        return chunks, left

    def _ready(self) -> list[_Sequence]:
        """Return the running sequences that are in no step, the one that waits longest first."""
        ready = [item for item in self._running.values() if item.in_step is None]
        if self._limits.steps_in_flight > 1:
            ready.sort(key=lambda item: item.last_step)
        return ready

    def _make_room(self, sequence: _Sequence, tokens: int) -> bool:
        """Allocate blocks for a number of tokens; return whether that was possible."""
        missing = self._limits.blocks_for(tokens) - len(sequence.blocks)
        while missing > self._allocator.num_free:
            victim = next(item for item in reversed(self._running.values()) if item.in_step is None)
            if victim is sequence and self._in_flight:
                return False  # a step in flight may end sequences
            self._newly_preempted.append(victim.request.request)
            self.num_preemptions += 1
            self._to_head_of_queue(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._allocator.allocate(missing)
        sequence.table = tuple(sequence.blocks)
        return True

    def _to_head_of_queue(self, sequence: _Sequence) -> None:
        del self._running[sequence.request.request]
        self._allocator.free(sequence.blocks)
        sequence.blocks, sequence.table, sequence.computed = [], (), 0
        self._preempted.appendleft(sequence)

    def _admit(self, left: int, now_s: float) -> list[ScheduledChunk]:
        """Start waiting requests in order, until one does not fit."""
        chunks: list[ScheduledChunk] = []
        for sequence in self._in_order(now_s):
            is_full = len(self._running) == self._limits.max_sequences
            if is_full or not left or not self._start(sequence):
                break
            count = min(sequence.tokens - sequence.computed, left)
            chunks.append(self._advance(sequence, count))
            left -= count
        for chunk in chunks:
            if chunk.request in self._waiting:
                self._leave_queue(self._sequences[chunk.request])
        while self._preempted and self._preempted[0].blocks:
            self._preempted.popleft()
        return chunks

    def _in_order(self, now_s: float) -> Iterator[_Sequence]:
        """Yield the queue, preempted sequences first."""
        yield from self._preempted
        if not self._waiting or (self._running and self.free_blocks <= self._watermark):
            return
        mean = self._arrived_tokens / self._num_arrived
        for request in self._order(self._waiting.values(), QueueState(now_s, mean)):
            yield self._sequences[request.request]

    def _start(self, sequence: _Sequence) -> bool:
        """Allocate the blocks of a waiting sequence; return whether they were free."""
        request, limits = sequence.request, self._limits
        tokens = sequence.tokens
        if self._order.reserves_answer:
            tokens = request.prompt_tokens + request.max_tokens - 1
        shared: list[int] = []
        if limits.prefix_caching and not request.skip_prefix_cache:
            # The last token is always computed, because its output is needed.
            shared = self._allocator.find(
                sequence.keys[: (sequence.tokens - 1) // limits.block_size]
            )
        missing = limits.blocks_for(tokens) - len(shared)
        room = self.free_blocks - (self._watermark if self._running else 0)
        if missing + self._allocator.count_free(shared) > room:
            return False
        sequence.blocks = self._allocator.allocate(missing, shared)
        sequence.table = tuple(sequence.blocks)
        sequence.computed = len(shared) * limits.block_size
        if not sequence.was_admitted:
            sequence.was_admitted = True
            self.prefix_cache_queries += sequence.tokens
            self.prefix_cache_hits += sequence.computed
        self._running[request.request] = sequence
        return True

    def _advance(self, sequence: _Sequence, count: int) -> ScheduledChunk:
        first, end = sequence.computed, sequence.computed + count
        sequence.computed = end
        sequence.in_step = sequence.last_step = self._next_step
        makes_token = end == sequence.tokens
        return ScheduledChunk(sequence.request.request, first, count, sequence.table, makes_token)

    def _cache_full_blocks(self, chunks: list[ScheduledChunk]) -> None:
        """Let the next steps find the blocks that this step fills."""
        if not self._limits.prefix_caching:
            return
        size = self._limits.block_size
        for chunk in chunks:
            end = chunk.first + chunk.count
            if end // size > chunk.first // size:
                sequence = self._sequences[chunk.request]
                self._add_keys(sequence, end)
                for index in range(chunk.first // size, end // size):
                    self._allocator.cache(sequence.blocks[index], sequence.keys[index])

    def _add_keys(self, sequence: _Sequence, tokens: int) -> None:
        """Compute the keys of the full blocks among the first tokens."""
        if not self._limits.prefix_caching:
            return
        size, keys, ids = self._limits.block_size, sequence.keys, sequence.ids
        if ids is None:
            keys += [
                (sequence.request.request, index) for index in range(len(keys), tokens // size)
            ]
            return
        parent = keys[-1] if keys else root_key(sequence.request.cache_salt)
        for index in range(len(keys), tokens // size):
            assert isinstance(parent, bytes)
            parent = next_key(parent, ids[index * size : (index + 1) * size])
            keys.append(parent)
