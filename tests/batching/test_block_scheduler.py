"""Engine scheduler: budget, admission, preemption, aborts, and the memory behind its blocks.

``Engine`` executes steps on a model of paged memory whose entries name the whole prefix of a token,
so that a block that is shared, freed or reused too early is noticed by the sequence that reads it.
"""

import random
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching.block_scheduler import (
    FURTHER_STARTS,
    OFFLOAD_TIERS,
    REMEMBERED_STEPS,
    SCORED_SHARE,
    BlockScheduler,
)
from llmpq.batching.blocks import OffloadLimits
from llmpq.batching.engine_step import EngineLimits, EngineRequest
from llmpq.batching.queue_order import QUEUE_ORDERS, queue_order
from llmpq.batching.speculation import DraftCredit
from llmpq.errors import CapacityError, LlmpqError, SpecError


def _limits(**given_):
    defaults = {
        "token_budget": 8,
        "max_sequences": 4,
        "num_blocks": 100,
        "block_size": 4,
        "watermark": 0.0,
    }
    return EngineLimits(**{**defaults, **given_})


def _scheduler(name="fcfs", propose=None, **given_):
    return BlockScheduler(_limits(**given_), queue_order(name), propose)


def _request(number, prompt, new=4, arrival_s=0.0, **given_):
    ids = tuple(prompt) if isinstance(prompt, (tuple, list)) else None
    length = prompt if ids is None else len(ids)
    return EngineRequest(
        request=number,
        token_ids=ids,
        prompt_tokens=length,
        max_tokens=new,
        arrival_s=arrival_s,
        **given_,
    )


def _next_token(prefix):
    return hash(("next", *prefix)) % 3


class Drafts:
    """Proposes tokens for an engine that is known later; some of them are right."""

    def __init__(self, seed, share=0.7):
        self.chance, self.share, self.engine, self.last = random.Random(seed), share, None, {}

    def __call__(self, request, most):
        sequence = list(self.engine.tokens[request])
        draft = self.last[request] = []
        for _ in range(self.chance.randint(0, most)):
            is_right = self.chance.random() < self.share
            draft.append(_next_token(sequence) if is_right else self.chance.randrange(3))
            sequence.append(draft[-1])
        return len(draft)


class Engine:
    """Executes the steps of a scheduler in order, and checks every read."""

    def __init__(self, scheduler, block_size, drafts=None, limits=None):
        self.drafts, self.limits = drafts, limits
        self.prompts = {}  # request -> prompt length
        if drafts is not None:
            drafts.engine = self
        self.scheduler, self.size = scheduler, block_size
        self.memory = {}  # (block, offset) -> angles, prefix up to and including the token
        self.window_memory = {}  # likewise, in layers with windows
        self.tokens = {}  # prompt and answer of every request
        self.wanted = {}  # request -> answer length
        self.done = set()
        self.steps = deque()
        self.history = []
        self.kept = {}  # (tier, whether of windows, place) -> entries of a block, by offset
        self.copies = []  # of the next step
        self.made = []  # copies so far
        self.unread = lambda: False  # whether the next file is damaged
        scheduler.copy_blocks = self.copy

    def copy(self, copies):
        """Copy with the next step; what is on disk may be damaged."""
        unread = [
            place for place, one in enumerate(copies) if one.source == "disk" and self.unread()
        ]
        self.copies += [one for place, one in enumerate(copies) if place not in unread]
        return unread

    def make_copies(self, copies):
        self.made += copies
        for one in copies:
            memory = self.window_memory if one.has_window else self.memory
            if one.source == "blocks":
                found = [memory[one.source_place, offset] for offset in range(self.size)]
            else:
                found = self.kept[one.source, one.has_window, one.source_place]
            if one.target == "blocks":
                for offset, entry in enumerate(found):
                    memory[one.target_place, offset] = entry
                continue
            limits = self.limits.offload
            sizes = limits.window_sizes if one.has_window else limits.sizes
            assert 0 <= one.target_place < sizes[one.target == "disk"]
            self.kept[one.target, one.has_window, one.target_place] = found

    def add(self, request, wanted):
        self.scheduler.add(request)
        self.tokens[request.request] = list(request.token_ids or (0,) * request.prompt_tokens)
        self.wanted[request.request] = wanted + request.prompt_tokens
        self.prompts[request.request] = request.prompt_tokens

    def angles(self, request, place, length):
        """The rotary angles of a token of a sequence of some length."""
        if self.limits is None:
            return None
        if self.limits.grows_after is not None:
            return max(self.prompts[request], place + 1, self.limits.grows_after)
        return self.limits.switches_after is not None and length > self.limits.switches_after

    def schedule(self, now_s=0.0):
        step = self.scheduler.schedule(now_s)
        if step is not None:
            busy = {chunk.request for other, _ in self.steps for chunk in other.chunks}
            own = [chunk.request for chunk in step.chunks]
            assert len(set(own)) == len(own)
            assert not busy & set(own)
            self.steps.append((step, self.copies))
            self.history.append(step)
            self.copies = []
        return step

    def check_reads(self, chunk, sequence):
        """Write a chunk; check what its tokens see, in layers with windows as well."""
        end, length = chunk.first + chunk.count, len(sequence)
        tables = [(chunk.blocks, self.memory, 0)]
        if chunk.window_blocks:
            seen = max(0, chunk.first - self.limits.window_tokens + 1)
            held = chunk.window_blocks[seen // self.size : -(-end // self.size)]
            assert len(set(held)) == len(held) <= self.limits.window_blocks_for(end)
            tables.append((chunk.window_blocks, self.window_memory, seen))
        for blocks, memory, seen in tables:
            content = {
                place: (self.angles(chunk.request, place, length), tuple(sequence[: place + 1]))
                for place in range(seen, end)
            }
            entries = {place: (blocks[place // self.size], place % self.size) for place in content}
            for place in range(chunk.first, end):
                memory[entries[place]] = content[place]
            assert [memory[entries[place]] for place in content] == list(content.values())

    def complete(self):
        step, copies = self.steps.popleft()
        self.make_copies(copies)
        new, finished, accepted = {}, set(), {}
        for chunk in step.chunks:
            sequence = self.tokens[chunk.request]
            known = len(sequence)
            if chunk.num_draft_tokens:
                assert (chunk.first + 1, chunk.count - 1) == (known, chunk.num_draft_tokens)
                sequence = [*sequence, *self.drafts.last[chunk.request]]
                assert chunk.first + chunk.count == len(sequence)
            end = chunk.first + chunk.count
            self.check_reads(chunk, sequence)
            assert chunk.makes_token == (end == len(sequence))
            if chunk.makes_token and chunk.request not in self.done:
                wanted = self.wanted[chunk.request]
                made = []
                for place in range(known, len(sequence) + 1):
                    made.append(_next_token(sequence[:place]))
                    if place == len(sequence) or made[-1] != sequence[place]:
                        break
                *accepted[chunk.request], new[chunk.request] = made[: wanted - known]
                if known + len(made) >= wanted:
                    finished.add(chunk.request)
        self.scheduler.complete(step.number, new, finished, accepted)
        for request, token in new.items():
            self.tokens[request] += [*accepted[request], token]
        self.done |= finished

    def run(self):
        while not self.scheduler.is_idle:
            if self.schedule() is None:
                self.complete()


def _chunks(step):
    return [(chunk.request, chunk.first, chunk.count, chunk.makes_token) for chunk in step.chunks]


def test_long_prompt_is_chunked_and_mixed_with_decode_steps():
    engine = Engine(_scheduler(), 4)
    engine.add(_request(0, 3), 4)
    engine.add(_request(1, 14), 2)
    engine.run()
    assert [_chunks(step) for step in engine.history[:4]] == [
        [(0, 0, 3, True), (1, 0, 5, False)],
        [(0, 3, 1, True), (1, 5, 7, False)],
        [(0, 4, 1, True), (1, 12, 2, True)],
        [(0, 5, 1, True), (1, 14, 1, True)],
    ]


def test_sequence_admitted_last_is_preempted_and_resumes_before_others():
    scheduler = _scheduler("spf", num_blocks=6, token_budget=64)
    engine = Engine(scheduler, 4)
    engine.add(_request(0, 8, 12), 12)
    engine.add(_request(1, 9, 8), 8)
    engine.add(_request(2, 10, 1), 1)
    engine.run()
    assert scheduler.num_preemptions == sum(len(step.preempted) for step in engine.history) > 0
    assert {request for step in engine.history for request in step.preempted} == {1}
    starts = [chunk.request for step in engine.history for chunk in step.chunks if chunk.count > 1]
    assert starts.index(2) == len(starts) - 1


def test_prompt_is_admitted_only_if_all_its_blocks_are_free():
    scheduler = _scheduler(num_blocks=4, token_budget=4)
    scheduler.add(_request(0, 6, 2))
    scheduler.add(_request(1, 12, 1))
    scheduler.add(_request(2, 1, 1))
    step = scheduler.schedule(0.0)
    assert [chunk.request for chunk in step.chunks] == [0]
    scheduler.complete(step.number, {})
    step = scheduler.schedule(0.0)  # two tokens are left, but no request skips the one in front
    assert _chunks(step) == [(0, 4, 2, True)]
    assert scheduler.free_blocks == 2


def test_watermark_keeps_blocks_free_while_sequences_run():
    scheduler = _scheduler(num_blocks=10, token_budget=100, watermark=0.3)
    scheduler.add(_request(0, 20, 1))
    scheduler.add(_request(1, 12, 1))
    assert [chunk.request for chunk in scheduler.schedule(0.0).chunks] == [0]
    alone = _scheduler(num_blocks=10, token_budget=100, watermark=0.3)
    alone.add(_request(0, 40, 1))
    assert alone.schedule(0.0) is not None


def test_equal_prompts_share_full_blocks_from_the_next_step_on():
    prompt = tuple(range(10))
    scheduler = _scheduler(token_budget=100)
    engine = Engine(scheduler, 4)
    engine.add(_request(0, prompt), 4)
    engine.add(_request(1, prompt), 4)
    first = engine.schedule()
    assert [chunk.first for chunk in first.chunks] == [0, 0]
    engine.complete()
    engine.add(_request(2, prompt), 4)
    engine.add(_request(3, prompt[:8]), 4)
    engine.add(_request(4, prompt, cache_salt="other"), 4)
    engine.add(_request(5, prompt, scores_prompt=True), 4)
    engine.run()
    starts = {chunk.request: chunk.first for step in engine.history for chunk in step.chunks[::-1]}
    assert starts
    firsts = {}
    for step in engine.history:
        for chunk in step.chunks:
            firsts.setdefault(chunk.request, chunk.first)
    # The last token of a prompt is always computed: its output is needed.
    assert firsts == {0: 0, 1: 0, 2: 8, 3: 4, 4: 0, 5: 0}
    assert (scheduler.prefix_cache_queries, scheduler.prefix_cache_hits) == (58, 12)


def test_prompts_with_a_score_at_every_position_leave_most_of_a_step_to_other_requests():
    budget = 8 * SCORED_SHARE
    scheduler = _scheduler(token_budget=budget, num_blocks=4000, max_sequences=40)
    engine = Engine(scheduler, 4)
    for number in range(3):
        engine.add(_request(number, 3 * budget, scores_prompt=True), 4)
    assert _chunks(engine.schedule()) == [(0, 0, budget, False)]  # there are no others
    engine.complete()
    engine.add(_request(3, 20), 1)
    engine.add(_request(4, 2), 1)
    step = engine.schedule()
    assert _chunks(step) == [(0, budget, 8, False), (3, 0, 20, True), (4, 0, 2, True)]
    engine.complete()
    for _ in range(REMEMBERED_STEPS - 1):  # others may come again
        assert sum(chunk.count for chunk in engine.schedule().chunks) == 8
        engine.complete()
    assert sum(chunk.count for chunk in engine.schedule().chunks) == budget
    engine.complete()
    engine.run()
    assert engine.done == set(range(5))


def test_few_further_answers_start_in_a_step_while_there_are_other_requests():
    alone, beside = (
        _scheduler(token_budget=400, num_blocks=400, max_sequences=100) for _ in range(2)
    )
    beside.add(_request(99, 2))
    for number in range(30):
        for scheduler in (alone, beside):
            scheduler.add(_request(number, 5, group="many"))
    assert len(alone.schedule(0.0).chunks) == 30
    assert len(beside.schedule(0.0).chunks) == 2 + FURTHER_STARTS  # the first ones of both
    beside.add(_request(100, 3))
    beside.complete(0, dict.fromkeys([99, *range(30)], 1))
    step = beside.schedule(0.0)
    assert 100 in [chunk.request for chunk in step.chunks]  # it passes those that wait
    for number in (99, 100):
        beside.abort(number)
    beside.complete(1, {chunk.request: 1 for chunk in step.chunks})
    starts = [chunk for chunk in beside.schedule(0.0).chunks if chunk.first == 0]
    assert len(starts) == FURTHER_STARTS  # others may come again


def test_one_step_in_flight_at_most_has_scored_prompts_or_starts_further_answers():
    limits = {"token_budget": 8 * SCORED_SHARE, "num_blocks": 4000, "max_sequences": 100}
    scheduler = _scheduler(**limits, steps_in_flight=4)
    engine = Engine(scheduler, 4)
    engine.add(_request(0, 8, 60), 60)  # the other request
    for number in range(1, 4):
        engine.add(_request(number, 100, scores_prompt=True), 4)
    for number in range(4, 40):
        engine.add(_request(number, 5, group="many"), 1)
    most_scored = most_further = 0
    in_flight, seen = [], set()
    while 0 not in engine.done:
        while (step := engine.schedule()) is not None:
            in_flight.append(step)
        scored = further = 0
        for step in in_flight:
            chunks = [chunk for chunk in step.chunks if chunk.request in range(1, 4)]
            scored += any(chunk.first + chunk.count <= 100 for chunk in chunks)
            further += any(chunk.request in range(5, 40) for chunk in step.chunks)
            seen |= {chunk.request for chunk in step.chunks}
        most_scored, most_further = max(most_scored, scored), max(most_further, further)
        engine.complete()
        in_flight.pop(0)
    assert (most_scored, most_further) == (1, 1)
    assert seen > set(range(6))
    engine.run()
    assert engine.done == set(range(40))


def test_aborted_sequence_keeps_its_blocks_until_its_step_is_complete():
    scheduler = _scheduler(token_budget=100)
    engine = Engine(scheduler, 4)
    for number in range(6):
        engine.add(_request(number, 8), 4)
    step = engine.schedule()
    assert scheduler.abort(0)
    assert not scheduler.abort(0)
    assert scheduler.abort(5)  # it waits
    assert (scheduler.free_blocks, scheduler.num_waiting) == (92, 1)
    engine.complete()
    assert (scheduler.free_blocks, scheduler.num_running) == (94, 3)
    engine.run()
    assert scheduler.free_blocks == 100
    assert step.number == 0
    assert not scheduler.abort(1)


def test_steps_in_flight_share_the_running_sequences():
    engine = Engine(_scheduler(token_budget=100, steps_in_flight=2), 4)
    for number in range(4):
        engine.add(_request(number, 2), 4)
    engine.schedule()
    assert engine.schedule() is None  # all of them are in the first step
    engine.complete()
    rows = [[chunk.request for chunk in engine.schedule().chunks] for _ in range(2)]
    assert rows == [[0, 1], [2, 3]]
    assert engine.scheduler.schedule(0.0) is None


def test_queued_tokens_are_those_before_the_next_token_of_every_request():
    scheduler = _scheduler(token_budget=8)
    scheduler.add(_request(0, 10))
    scheduler.add(_request(1, 5))
    assert scheduler.queued_tokens == 15
    step = scheduler.schedule(0.0)
    assert scheduler.queued_tokens == 2 - 1 + 5
    # The blocks of the whole first prompt are allocated.
    assert (scheduler.waiting_tokens, scheduler.started_tokens) == (5, 10)
    scheduler.complete(step.number, {})
    scheduler.abort(1)
    assert scheduler.queued_tokens == 1


class WrongDrafts(Drafts):
    """Proposes tokens that no sequence has."""

    def __call__(self, request, most):
        self.last[request] = [7] * most
        return most


def test_rejected_drafts_change_no_other_decision_and_keep_few_blocks(monkeypatch):
    monkeypatch.setattr(DraftCredit, "longest", lambda *_: 100)
    histories = []
    for drafts in (None, WrongDrafts(0)):
        limits = _limits(token_budget=12, num_speculative_tokens=9)
        scheduler = BlockScheduler(limits, queue_order("fcfs"), drafts)
        engine = Engine(scheduler, 4, drafts)
        for number in range(3):
            engine.add(_request(number, 3 + 9 * number, 20), 20)
        while not scheduler.is_idle:
            step = engine.schedule()
            assert sum(chunk.count for chunk in step.chunks) <= 12
            for chunk in step.chunks:
                most = len(engine.tokens[chunk.request]) + 9
                assert len(chunk.blocks) <= limits.blocks_for(most)
            engine.complete()
        assert scheduler.free_blocks == 100
        histories.append(
            [
                [(chunk.request, chunk.first, chunk.count - chunk.num_draft_tokens)
                 for chunk in step.chunks]
                for step in engine.history
            ]
        )  # fmt: skip
    assert histories[0] == histories[1]
    assert scheduler.drafts.num_draft_tokens > 100
    assert scheduler.drafts.num_accepted_tokens == 0


@pytest.mark.parametrize(("share", "most"), [(1.0, 6), (0.25, 20)])
def test_wrong_drafts_end_the_sooner_the_more_their_rows_take(share, most):
    """The clock of the caller says what a row takes; nothing is known of it before."""
    scheduler = _scheduler(propose=lambda _, most: most, num_blocks=110, num_speculative_tokens=5)
    scheduler.add(_request(0, (1, 2, 3), 400))
    now_s, end_s = 0.0, 0.0
    for token in range(400):
        step = scheduler.schedule(now_s)
        now_s += 1 + share * (sum(chunk.count for chunk in step.chunks) - 1)
        scheduler.complete(step.number, {0: 4}, {0} if token == 399 else (), now_s=now_s)
        end_s += 1.0 if token else now_s
    assert 0 < scheduler.drafts.num_draft_tokens <= most
    assert now_s <= 1.015 * end_s


def test_accepted_tokens_save_steps_and_are_found_by_their_content():
    drafts = Drafts(0, 1.0)
    limits = _limits(token_budget=100, num_speculative_tokens=5)
    scheduler = BlockScheduler(limits, queue_order("fcfs"), drafts)
    drafts.chance.randint = lambda _, most: most
    engine = Engine(scheduler, 4, drafts)
    engine.add(_request(0, (1, 2, 3), 40), 40)
    engine.run()
    assert len(engine.history) < 15
    assert (
        scheduler.drafts.num_accepted_tokens
        == scheduler.drafts.num_draft_tokens
        == 40 - len(engine.history)
    )
    assert scheduler.drafts.num_drafts <= len(engine.history)
    answer = tuple(engine.tokens[0])
    engine.add(_request(1, answer), 1)
    # The last token was no input, and the last block that is full may end before it.
    assert engine.schedule().chunks[0].first >= len(answer) - 1 - 4


def test_drafts_take_only_free_blocks_and_what_is_left_of_the_budget(monkeypatch):
    monkeypatch.setattr(DraftCredit, "longest", lambda *_: 100)
    scheduler = _scheduler(
        propose=lambda _, most: most, num_blocks=3, token_budget=6, num_speculative_tokens=9
    )
    scheduler.add(_request(0, (1, 2, 3), 9))
    scheduler.complete(scheduler.schedule(0.0).number, {0: 4})
    (chunk,) = scheduler.schedule(0.0).chunks
    assert (chunk.first, chunk.count, chunk.num_draft_tokens) == (3, 6, 5)
    scheduler.complete(1, {0: 4}, (), {0: [4, 4, 4, 4]})
    (chunk,) = scheduler.schedule(0.0).chunks  # 3 of 9 answer tokens are left, 1 is no input
    assert (chunk.first, chunk.num_draft_tokens) == (8, 2)
    assert scheduler.free_blocks == 0


def test_invalid_requests_and_steps_raise_errors():
    scheduler = _scheduler(num_blocks=2)
    with pytest.raises(CapacityError, match="need 3 KV blocks, more than the 2 available"):
        scheduler.add(_request(0, 5, 5))
    scheduler.add(_request(0, 5, 4))
    with pytest.raises(LlmpqError, match="request 0 is not finished"):
        scheduler.add(_request(0, 1))
    with pytest.raises(LlmpqError, match="step 7 is not in flight"):
        scheduler.complete(7, {})
    step = scheduler.schedule(0.0)
    with pytest.raises(LlmpqError, match="no token of request 0"):
        scheduler.complete(step.number, {})
    with pytest.raises(SpecError, match="at least 1 of each"):
        _request(0, ())
    with pytest.raises(SpecError, match="'token_budget': found 0"):
        _limits(token_budget=0)
    with pytest.raises(SpecError, match="'num_speculative_tokens': found -1"):
        _limits(num_speculative_tokens=-1)
    with pytest.raises(SpecError, match="'watermark': found 1"):
        _limits(watermark=1.0)
    with pytest.raises(SpecError, match="'row_cost': found"):
        _limits(row_cost=1.5)


def test_answer_longer_than_its_limit_raises_an_error():
    scheduler = _scheduler()
    scheduler.add(_request(0, 1, 1))
    step = scheduler.schedule(0.0)
    with pytest.raises(LlmpqError, match="has its 1 tokens"):
        scheduler.complete(step.number, {0: 0})


class RandomRun:
    """Random arrivals, aborts, restarts and completions."""

    def __init__(self, seed, scheduler, limits, drafts=None):
        self.chance = random.Random(seed)
        self.scheduler, self.limits = scheduler, limits
        self.engine = Engine(scheduler, limits.block_size, drafts, limits)
        self.number, self.now_s, self.aborted = 0, 0.0, set()
        self.prefixes = [tuple(self.chance.randrange(2) for _ in range(20)) for _ in range(2)]

    def act(self):
        self.now_s += 0.1
        action = self.chance.random()
        if action < 0.2:
            self.add()
        elif action < 0.24:
            self.abort()
        elif action < 0.65 or not self.engine.steps:
            self.schedule()
        else:
            self.engine.complete()

    def add(self):
        chance = self.chance
        new = chance.randint(1, 6)
        longest = new + chance.randint(0, 3)
        room = self.limits.num_blocks * self.limits.block_size - longest
        shared = chance.choice(self.prefixes)[: chance.randint(0, min(19, room - 1))]
        request = _request(
            self.number,
            (*shared, chance.randrange(3)),
            longest,
            arrival_s=self.now_s,
            priority=chance.randrange(3),
            predicted_tokens=chance.choice([None, 2.0, 5.0]),
            cache_salt=chance.choice(["", "", "salt"]),
            scores_prompt=chance.random() < 0.2,
            group=chance.choice([None, None, "a", "b"]),
        )
        self.engine.add(request, new)
        self.number += 1

    def abort(self):
        request = self.chance.randint(0, self.number)
        if self.scheduler.abort(request):
            self.aborted.add(request)

    def schedule(self):
        step = self.engine.schedule(self.now_s)
        if step is not None:
            assert sum(chunk.count for chunk in step.chunks) <= self.limits.token_budget
            assert len(step.chunks) <= self.limits.max_sequences
        elif not self.engine.steps:
            assert self.scheduler.is_idle


def with_windows(limits, window, more):
    """The limits with blocks of their own for windows: those of one sequence, and some more."""
    found = replace(limits, window_tokens=window, num_window_blocks=limits.num_blocks)
    longest = limits.num_blocks * limits.block_size
    return replace(found, num_window_blocks=found.window_blocks_for(longest) + more)


@settings(max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    token_budget=st.integers(1, 24),
    max_sequences=st.integers(1, 6),
    num_blocks=st.integers(10, 22),
    block_size=st.sampled_from([1, 2, 4]),
    watermark=st.sampled_from([0.0, 0.1, 0.3]),
    prefix_caching=st.booleans(),
    steps_in_flight=st.integers(1, 3),
    num_speculative_tokens=st.sampled_from([0, 0, 1, 5]),
    share=st.sampled_from([0.3, 0.95]),
    name=st.sampled_from(QUEUE_ORDERS),
    angles=st.sampled_from(
        [{}, {}, {"switches_after": 5}, {"switches_after": 11}, {"grows_after": 6}]
    ),
    window=st.sampled_from([None, None, 1, 3, 7, 30]),
    more=st.integers(0, 9),
    kept=st.sampled_from([(0, 0), (0, 0), (3, 0), (30, 0), (0, 5), (1, 40), (8, 8)]),
)
def test_random_schedules_compute_the_tokens_of_an_undisturbed_run(
    seed, name, share, angles, window, more, kept, **given_
):
    host, disk = kept
    offload = OffloadLimits(
        host_blocks=host, disk_blocks=disk, host_window_blocks=host, disk_window_blocks=disk // 2
    )
    limits = EngineLimits(**given_, **angles, offload=offload)
    if window is not None:
        limits = with_windows(limits, window, more)
    drafts = Drafts(seed, share) if limits.num_speculative_tokens else None
    scheduler = BlockScheduler(limits, queue_order(name), drafts)
    run = RandomRun(seed, scheduler, limits, drafts)
    run.engine.unread = lambda: run.chance.random() < 0.2
    for _ in range(80):
        run.act()
        assert scheduler.num_running <= limits.max_sequences
        for tier, most, most_windows in zip(
            OFFLOAD_TIERS, offload.sizes, offload.window_sizes, strict=True
        ):
            held = scheduler.offloaded(tier).held
            assert held[0] <= most
            assert held[1] <= most_windows
    assert sum(scheduler.tier_hits.values()) == scheduler.prefix_cache_hits
    run.engine.run()
    assert scheduler.free_blocks == limits.num_blocks
    if window is not None:
        assert scheduler.free_window_blocks == limits.num_window_blocks
    assert scheduler.num_waiting == scheduler.num_running == scheduler.queued_tokens == 0
    for request in set(range(run.number)) - run.aborted:
        assert request in run.engine.done
        assert len(run.engine.tokens[request]) == run.engine.wanted[request]
    if name == "no_preempt" and limits.switches_after is None:
        assert not scheduler.num_preemptions


def test_a_long_sequence_holds_the_blocks_of_its_window():
    limits = with_windows(_limits(token_budget=8, num_blocks=100), 10, 0)
    assert limits.num_window_blocks == 6  # 9 tokens before a chunk of 8, wherever a block begins
    engine = Engine(BlockScheduler(limits, queue_order("fcfs")), 4, limits=limits)
    engine.add(_request(0, [number % 3 for number in range(300)], 50), 50)
    engine.run()
    assert engine.done == {0}
    assert not engine.scheduler.num_preemptions
    longest = max(len(step.chunks[0].window_blocks) for step in engine.history)
    assert longest == limits.blocks_for(349)


def test_a_prefix_is_found_only_with_the_window_before_its_end():
    limits = with_windows(_limits(num_blocks=100), 6, 2)
    scheduler = BlockScheduler(limits, queue_order("fcfs"))
    engine = Engine(scheduler, 4, limits=limits)
    prompt = tuple(number % 3 for number in range(41))
    engine.add(_request(0, prompt, 1), 1)
    engine.run()
    engine.add(_request(1, prompt, 1), 1)
    engine.run()
    assert scheduler.prefix_cache_hits == 40
    # Another prompt takes all blocks of windows; those of the first prompt remain elsewhere.
    engine.add(_request(2, [1] * 60, 1), 1)
    engine.run()
    engine.add(_request(3, prompt, 1), 1)
    engine.run()
    assert scheduler.prefix_cache_hits == 40


def _play_conversations(**offload):
    """Two conversations in turn, in a pool that holds one; return the scheduler at the end."""
    limits = _limits(num_blocks=8, token_budget=64, offload=OffloadLimits(**offload))
    scheduler = BlockScheduler(limits, queue_order("fcfs"))
    engine = Engine(scheduler, 4, limits=limits)
    for number in range(4):
        engine.add(_request(number, (number % 2,) * 28, 4), 4)
        engine.run()
    return scheduler, engine


@pytest.mark.parametrize(
    ("offload", "hits"),
    [
        ({}, {"blocks": 0, "host": 0, "disk": 0}),
        ({"host_blocks": 16}, {"blocks": 0, "host": 48, "disk": 0}),
        ({"disk_blocks": 16}, {"blocks": 0, "host": 0, "disk": 48}),
        ({"host_blocks": 2, "disk_blocks": 12}, {"blocks": 0, "host": 12, "disk": 36}),
    ],
)
def test_prefixes_whose_blocks_were_taken_are_found_in_host_memory_and_on_disk(offload, hits):
    scheduler, _ = _play_conversations(**offload)
    assert scheduler.tier_hits == hits
    assert scheduler.prefix_cache_hits == sum(hits.values())
    for tier in OFFLOAD_TIERS:
        counts = scheduler.offloaded(tier)
        assert counts.num_loaded == hits[tier] / 4
        assert bool(counts.num_saved) == (f"{tier}_blocks" in offload)


def test_a_file_that_cannot_be_read_is_computed_and_not_found_again():
    scheduler, engine = _play_conversations(disk_blocks=20)
    loaded = scheduler.offloaded("disk").num_loaded
    engine.unread = lambda: True
    engine.add(_request(9, (0,) * 28, 4), 4)
    assert engine.schedule().chunks[0].first == 0
    assert scheduler.num_unread == scheduler.offloaded("disk").num_loaded - loaded > 0
    engine.run()
    assert engine.tokens[9] == engine.tokens[0]


def test_files_of_an_engine_before_are_found():
    scheduler, engine = _play_conversations(disk_blocks=40)
    files = {one.key: one.target_place for one in engine.made if one.target == "disk"}
    limits = _limits(num_blocks=8, token_budget=64, offload=OffloadLimits(disk_blocks=40))
    scheduler = BlockScheduler(limits, queue_order("fcfs"))
    stored = [(False, key, place) for key, place in files.items()]
    scheduler.restore([(False, b"beyond the budget", 40), (True, b"no windows", 1), *stored])
    assert scheduler.offloaded("disk").held == (len(files), 0)
    again = Engine(scheduler, 4, limits=limits)
    again.kept = engine.kept
    again.add(_request(9, (0,) * 28, 4), 4)
    again.run()
    assert scheduler.tier_hits == {"blocks": 0, "host": 0, "disk": 24}


def test_a_preempted_sequence_finds_its_blocks_again():
    limits = _limits(num_blocks=9, token_budget=64, offload=OffloadLimits(host_blocks=20))
    scheduler = BlockScheduler(limits, queue_order("fcfs"))
    engine = Engine(scheduler, 4, limits=limits)
    engine.add(_request(0, (0,) * 16, 16), 16)
    engine.add(_request(1, (1,) * 16, 8), 8)
    engine.run()
    assert scheduler.num_preemptions
    resumed = [chunk for step in engine.history for chunk in step.chunks if chunk.request == 1]
    assert all(chunk.first for chunk in resumed[1:])  # nothing is computed from the start again
    assert scheduler.offloaded("host").num_loaded


def test_too_few_blocks_for_the_window_of_a_sequence_are_refused():
    with pytest.raises(SpecError, match="'num_window_blocks': found 3, expected at least 6"):
        _limits(window_tokens=10, num_window_blocks=3)
