"""Laws that every policy keeps, on any pipeline and any lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.abstract_pipeline import Pipeline
from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching import (
    Admission,
    BatchingPolicy,
    Decode,
    FirstComeFormer,
    HybridPolicy,
    InFlightBatch,
    IterationPolicy,
    MultiBinFormer,
    Prefill,
    ReadySequence,
    RraPolicy,
    SchedulerView,
    StaticPolicy,
    WaaPolicy,
    Wait,
    WaitingRequest,
)
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase

MakePolicy = Callable[[int, MicroBatching, list[int]], BatchingPolicy]


def _admission(slots: int) -> Admission:
    return Admission(encode_batch=max(1, slots // 3), decode_batch=slots)


POLICIES: dict[str, MakePolicy] = {
    "hybrid": lambda slots, sizes, _: HybridPolicy(
        micro_batching=sizes, num_slots=slots, num_stages=2
    ),
    "static": lambda slots, sizes, _: StaticPolicy(
        former=FirstComeFormer(batch=slots), micro_batching=sizes
    ),
    "shrinking": lambda slots, sizes, _: StaticPolicy(
        former=FirstComeFormer(batch=slots), micro_batching=sizes, holds_finished=False
    ),
    "multibin": lambda slots, sizes, _: StaticPolicy(
        former=MultiBinFormer(batch=slots, boundaries=(3, 6)),
        micro_batching=sizes,
    ),
    "iteration": lambda _, sizes, __: IterationPolicy(micro_batching=sizes),
    "rra": lambda slots, sizes, _: RraPolicy(
        admission=_admission(slots), decode_iterations=3, micro_batching=sizes
    ),
    "waa": lambda slots, sizes, _: WaaPolicy(admission=_admission(slots), micro_batching=sizes),
}


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Pipeline, MicroBatching]:
    """Draw requests, their arrivals and a pipeline with its micro-batches."""
    wanted = draw(st.lists(st.integers(1, 9), min_size=1, max_size=30))
    slots = draw(st.integers(1, 10))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(wanted), max_size=len(wanted)))
    arrivals = [sum(gaps[: index + 1]) for index in range(len(gaps))]
    pipeline = Pipeline(wanted, slots, limit=draw(st.integers(1, 4)), arrivals=arrivals)
    sizes = MicroBatching(prefill=draw(st.integers(1, slots)), decode=draw(st.integers(1, slots)))
    return pipeline, sizes


@pytest.mark.parametrize("name", POLICIES)
@given(workload=workloads())
def test_every_request_gets_exactly_its_tokens(name, workload):
    pipeline, sizes = workload
    pipeline.run(POLICIES[name](pipeline.num_slots, sizes, list(pipeline.wanted)))
    assert pipeline.made == dict(enumerate(pipeline.wanted))
    assert sorted(pipeline.finished) == list(range(len(pipeline.wanted)))
    for phase, size in pipeline.sizes:
        assert 1 <= size <= (sizes.prefill if phase == "prefill" else sizes.decode)


@pytest.mark.parametrize("name", POLICIES)
@given(workload=workloads())
def test_only_a_held_batch_computes_finished_sequences(name, workload):
    pipeline, sizes = workload
    policy = POLICIES[name](pipeline.num_slots, sizes, list(pipeline.wanted))
    pipeline.run(policy)
    useful = sum(pipeline.wanted)
    assert pipeline.computed >= useful if policy.holds_finished else pipeline.computed == useful


@pytest.mark.parametrize("name", POLICIES)
@given(workload=workloads())
def test_equal_views_give_equal_decisions(name, workload):
    first, sizes = workload
    second = Pipeline(first.wanted, first.num_slots, first.limit, first.arrivals)
    for pipeline in (first, second):
        pipeline.run(POLICIES[name](pipeline.num_slots, sizes, list(pipeline.wanted)))
    assert first.decisions == second.decisions


def test_static_batches_wait_for_their_last_member():
    pipeline = Pipeline([1, 4, 2, 2], num_slots=2, limit=1)
    sizes = MicroBatching(prefill=2, decode=2)
    pipeline.run(StaticPolicy(former=FirstComeFormer(batch=2), micro_batching=sizes))
    steps = [step for step in pipeline.decisions if not isinstance(step, Wait)]
    assert steps == [
        Prefill(requests=(0, 1)),
        *[Decode(slots=(0, 1))] * 3,
        Prefill(requests=(2, 3)),
        Decode(slots=(0, 1)),
    ]
    assert pipeline.computed == 2 * 4 + 2 * 2  # request 0 is computed three times for nothing


def test_multi_bin_equals_the_example_of_the_paper():
    wanted = [1, 5, 2, 6]  # Figure 1(b): 11 steps in order of arrival, 8 in two bins
    sizes = MicroBatching(prefill=2, decode=2)
    served = {}
    for bins, boundaries in ((1, ()), (2, (4,))):
        former = MultiBinFormer(batch=2, boundaries=boundaries)
        pipeline = Pipeline(wanted, num_slots=2, limit=1)
        pipeline.run(StaticPolicy(former=former, micro_batching=sizes))
        served[bins] = len(pipeline.sizes)
    assert served == {1: 11, 2: 8}


def test_multi_bin_serves_the_bin_that_is_full_first():
    former = MultiBinFormer(batch=2, boundaries=(10,))
    sizes = MicroBatching(prefill=2, decode=2)
    pipeline = Pipeline([1, 20, 21, 2], num_slots=2, limit=1)
    pipeline.run(StaticPolicy(former=former, micro_batching=sizes))
    prefills = [step.requests for step in pipeline.decisions if isinstance(step, Prefill)]
    assert prefills == [(1, 2), (0, 3)]


@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_rra_decodes_n_iterations_between_two_encodings(iterations):
    pipeline = Pipeline([5 + number % 7 for number in range(60)], num_slots=10, limit=1)
    policy = RraPolicy(
        admission=Admission(encode_batch=3, decode_batch=10, threshold=0.0),
        decode_iterations=iterations,
        micro_batching=MicroBatching(prefill=10, decode=10),
    )
    pipeline.run(policy)
    phases = "".join("P" if phase == "prefill" else "d" for phase, _ in pipeline.sizes)
    runs = [len(run) for run in phases.split("P")[1:]]
    assert all(run % iterations == 0 for run in runs[:-1])
    assert iterations in runs


class RecordingRra(RraPolicy):
    """Remembers how many decode micro-batches were out whenever it encoded."""

    def decide(self, view):
        decision = super().decide(view)
        if isinstance(decision, Prefill):
            self.out = [*getattr(self, "out", []), view.num_in_flight(Phase.DECODE)]
        return decision


def test_rra_encodes_before_the_last_micro_batch_of_a_cycle_completes():
    pipeline = Pipeline([3, 9, 9, 9] * 5, num_slots=4, limit=2)
    policy = RecordingRra(
        admission=Admission(encode_batch=1, decode_batch=4, threshold=0.0),
        decode_iterations=2,
        micro_batching=MicroBatching(prefill=1, decode=2),
    )
    pipeline.run(policy)
    assert sum(policy.out) > 2


@pytest.mark.parametrize(("free", "phase"), [(2, "prefill"), (1, "prefill"), (0, "decode")])
def test_rra_does_not_wait_for_slots_in_use(free, phase):
    policy = RraPolicy(
        admission=Admission(encode_batch=2, decode_batch=6, threshold=0.0),
        decode_iterations=1,
        micro_batching=MicroBatching(prefill=2, decode=2),
    )
    kept = [
        ReadySequence(request=number, slot=number, context_tokens=9, new_tokens=2)
        for number in range(6 - free)
    ]
    waiting = [WaitingRequest(request=9 + number, prompt_tokens=3) for number in range(4)]
    view = SchedulerView(waiting=waiting, ready=kept, free_slots=free)
    begun = policy.decide(replace(view, waiting=[]))
    assert isinstance(begun, Decode)
    batch = InFlightBatch(number=0, phase=Phase.DECODE, sequences=tuple(kept[:2]))
    assert batch.slots == begun.slots
    late = replace(view, ready=kept[2:], in_flight=(batch,))
    for _ in range(-(-len(late.ready) // 2)):  # the others make the cycle's token and are back
        assert isinstance(policy.decide(replace(late, waiting=[])), Decode)
    decision = policy.decide(late)
    assert isinstance(decision, Prefill if phase == "prefill" else Decode)
    if isinstance(decision, Prefill):
        assert len(decision.requests) == free


def test_rra_starts_with_a_full_decoding_batch():
    pipeline = Pipeline([20] * 40, num_slots=16, limit=1)
    policy = RraPolicy(
        admission=Admission(encode_batch=2, decode_batch=16),
        decode_iterations=4,
        micro_batching=MicroBatching(prefill=4, decode=16),
    )
    pipeline.run(policy)
    first = next(size for phase, size in pipeline.sizes if phase == "decode")
    assert first == 12  # three quarters: the threshold below the mean


def test_rra_keeps_its_decoding_batch_near_the_mean():
    pipeline = Pipeline([4 + number % 9 for number in range(300)], num_slots=24, limit=1)
    # ExeGPT, Sec. 6: with N_D = 4 a request of S tokens ends in a given phase with 1 / ceil(S / 4).
    policy = RraPolicy(
        admission=Admission(encode_batch=12, decode_batch=24),
        decode_iterations=4,
        micro_batching=MicroBatching(prefill=24, decode=24),
    )
    pipeline.run(policy)
    decodes = [size for phase, size in pipeline.sizes if phase == "decode"][20:-20]
    assert sum(decodes) / len(decodes) > 0.7 * 24


def waiting_for(prompts, free_slots=16):
    """Return a view of requests with prompts of these lengths, and of free slots."""
    waiting = [
        WaitingRequest(request=number, prompt_tokens=tokens)
        for number, tokens in enumerate(prompts)
    ]
    return SchedulerView(waiting=waiting, ready=[], free_slots=free_slots)


def test_the_prompt_tokens_of_an_encoding_batch_stay_within_a_threshold_of_the_mean():
    admission = Admission(encode_batch=4, decode_batch=16, mean_prompt_tokens=10, threshold=0.25)

    def taken(*prompts):
        return admission.choose(waiting_for(prompts), 4)

    assert taken(10, 10, 20, 10, 10) == (0, 1, 2, 3)  # 50 tokens are 1.25 times 4 x 10
    assert taken(10, 10, 21, 10, 10) == (0, 1, 2)
    assert taken(99, 10) == (0,)  # one request is encoded, however long
    assert taken(10, 10, 5, 5, 10) == (0, 1, 2, 3)  # 30 tokens are 0.75 times 4 x 10
    assert taken(10, 10, 5, 4, 9, 10) == (0, 1, 2, 3, 4)
    assert taken(1, 1, 1, 1, 1, 50) == (0, 1, 2, 3, 4)  # the next would make it too long


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    batch=st.integers(1, 8),
    slots=st.integers(8, 64),
    threshold=st.sampled_from((0.0, 0.25, 0.5)),
)
def test_only_slots_requests_or_the_next_prompt_keep_an_encoding_batch_below_the_mean(
    prompts, batch, slots, threshold
):
    admission = Admission(
        encode_batch=batch, decode_batch=64, mean_prompt_tokens=20, threshold=threshold
    )
    chosen = admission.choose(waiting_for(prompts, slots), batch)
    assert chosen == tuple(range(len(chosen)))
    tokens, rows = sum(prompts[: len(chosen)]), min(batch, len(prompts))
    band = max(threshold, 0.25)
    assert len(chosen) == 1 or tokens <= 20 * batch * (1 + band)
    if tokens < 20 * batch * (1 - band) and len(chosen) < min(len(prompts), slots):
        assert tokens + prompts[len(chosen)] > 20 * batch * (1 + band)
    if len(chosen) > rows:
        assert sum(prompts[:rows]) < 20 * batch * (1 - band)


def test_a_cycle_of_rra_encodes_prompts_of_the_mean_workload():
    lengths = [6] * 150 + [28] * 150  # eight of them would have 48 and 224 tokens
    policy = RraPolicy(
        admission=Admission(encode_batch=8, decode_batch=40, mean_prompt_tokens=15, threshold=0.5),
        decode_iterations=2,
        micro_batching=MicroBatching(prefill=4, decode=64),
    )
    pipeline = Pipeline([9] * 300, num_slots=40, limit=1, prompts=lengths)
    pipeline.run(policy)
    cycles, tokens = [], 0
    for decision in pipeline.decisions:
        if isinstance(decision, Prefill):
            tokens += sum(lengths[number] for number in decision.requests)
        elif isinstance(decision, Decode) and tokens:
            cycles.append(tokens)
            tokens = 0
    inner = cycles[8:-2]  # once the slots are filled, until requests run out
    assert len(inner) > 10
    # 1.5 times the mean, or more where the decoding batch has shrunk by the threshold.
    assert all(0.5 * 120 <= tokens <= 200 for tokens in inner)


def test_waa_merges_encoded_requests_into_one_decoding_batch():
    pipeline = Pipeline([8] * 40, num_slots=16, limit=2)
    policy = WaaPolicy(
        admission=Admission(encode_batch=2, decode_batch=16),
        micro_batching=MicroBatching(prefill=2, decode=16),
    )
    pipeline.run(policy)
    assert max(size for phase, size in pipeline.sizes if phase == "prefill") == 2
    assert max(size for phase, size in pipeline.sizes if phase == "decode") > 6


def test_iteration_policy_adds_requests_while_others_decode():
    pipeline = Pipeline([9, 9, 9], num_slots=3, limit=1, arrivals=[0, 3, 6])
    pipeline.run(IterationPolicy(micro_batching=MicroBatching(prefill=3, decode=3)))
    sizes = [size for phase, size in pipeline.sizes if phase == "decode"]
    assert {1, 2, 3} <= set(sizes)
