"""The online engine answers as transformers' generate under any schedule, and loses no block."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from helpers.block_steps import BlockSteps
from helpers.clocks import PATIENCE_S
from helpers.online_runs import BLOCK, FREE, VOCAB, Clock, fresh, greedy, limits, request, serve
from helpers.scripted_channel import Script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.batching.block_scheduler import BlockScheduler
from llmpq.batching.queue_order import queue_order
from llmpq.dist.engine.online_run import COMPILE_POLL_S, COMPILE_THREADS, OnlineRun
from llmpq.dist.io.control_channel import ModelLimits
from llmpq.dist.io.sampling_params import SamplingParams, StructuredOutputsParams
from llmpq.errors import SpecError, StageError

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def steps(tiny_model) -> BlockSteps:
    return BlockSteps(tiny_model("llama", seed=1), num_blocks=64, block_size=BLOCK)


def test_the_reference_scores_give_the_tokens_of_generate(steps):
    prompt = [3, 1, 4, 1, 5]
    steps.model.generation_config.eos_token_id = None
    found = steps.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)
    assert greedy(steps, prompt, 8) == found[0, len(prompt) :].tolist()


PROMPTS = st.lists(st.integers(3, 8), min_size=1, max_size=20)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompts=st.lists(
        st.tuples(PROMPTS, st.integers(1, 10), st.integers(0, 40), st.integers(0, 60)),
        min_size=1,
        max_size=8,
    ),
    budget=st.integers(1, 24),
    num_blocks=st.integers(8, 30),
    most=st.integers(1, 4),
    delay=st.integers(0, 3),
    prefix_caching=st.booleans(),
    order=st.sampled_from(["fcfs", "larry", "no_preempt", "spf", "hrrn", "priority"]),
    max_sequences=st.integers(1, 8),
)
def test_tokens_equal_generate_under_random_schedules(
    steps, prompts, budget, num_blocks, most, delay, prefix_caching, order, max_sequences
):
    script = Script()
    aborted = set()
    for number, (prompt, count, call, abort) in enumerate(prompts):
        params = replace(FREE, max_tokens=count)
        script.add(call + 1, request(number, prompt, params))
        if abort < 30:
            script.abort(call + 1 + abort, f"r{number}")
            aborted.add(number)
    engine = serve(
        steps,
        script,
        limits(
            token_budget=budget,
            num_blocks=num_blocks,
            steps_in_flight=most,
            prefix_caching=prefix_caching,
            max_sequences=max_sequences,
        ),
        order,
        delay,
    )
    assert not script.refused
    for number, (prompt, count, _, _) in enumerate(prompts):
        expected = greedy(steps, prompt, count)
        found = script.tokens(f"r{number}")
        reasons = [output.finish_reason for output in script.outputs.get(f"r{number}", ())]
        if number in aborted and reasons[-1:] != ["length"]:
            assert found == expected[: len(found)]
            assert set(reasons) <= {None}
        else:
            assert found == expected
            assert reasons == [None] * (count - 1) + ["length"]
    assert engine.scheduler.free_blocks == num_blocks
    assert engine.scheduler.is_idle
    assert steps.most_in_flight <= most


def test_a_tiny_pool_preempts_at_every_turn_and_changes_no_token(steps):
    script = Script()
    prompts = [[3 + number, 4, 5, 6, 7, 8, 3] for number in range(5)]
    for number, prompt in enumerate(prompts):
        script.add(1, request(number, prompt, replace(FREE, max_tokens=10)))
    engine = serve(steps, script, limits(num_blocks=5, prefix_caching=False))
    assert engine.scheduler.num_preemptions > 0
    for number, prompt in enumerate(prompts):
        assert script.tokens(f"r{number}") == greedy(steps, prompt, 10)
    assert engine.scheduler.free_blocks == 5


def test_a_request_waits_since_its_client_made_it(steps, monkeypatch):
    """Not since the engine read it, which is after a step; and never since a later time."""
    found = []
    add = BlockScheduler.add
    monkeypatch.setattr(
        BlockScheduler,
        "add",
        lambda self, item: [found.append((item.arrival_s, item.request)), add(self, item)],
    )
    script = Script()
    start_s = Clock()()
    for number, arrival_s in enumerate([start_s - 7.5, 1e9, None]):
        script.add(1, request(number, [3, 4]), arrival_s=arrival_s)
    serve(steps, script, limits())
    (early, _), (late, _), (unknown, _) = found
    assert early == -7.5
    assert 0 < late < unknown < 1


def test_several_steps_are_in_flight(steps):
    script = Script()
    for number in range(6):
        script.add(1, request(number, [3 + number, 4]))
    serve(steps, script, limits(steps_in_flight=3), delay=5)
    assert steps.most_in_flight == 3


def test_a_common_prefix_is_computed_once(steps):
    script = Script()
    prompt = [3, 4, 5, 6, 7, 8, 3, 4, 5]
    script.add(1, request(0, prompt))
    script.add(100, request(1, [*prompt, 8]))
    engine = serve(steps, script, limits())
    assert script.outputs["r1"][0].num_cached_tokens == 8
    assert script.outputs["r0"][0].num_cached_tokens == 0
    assert engine.scheduler.prefix_cache_hits == 8
    assert script.tokens("r1") == greedy(steps, [*prompt, 8], 6)


def test_another_salt_shares_no_prefix(steps):
    script = Script()
    prompt = [3, 4, 5, 6, 7, 8, 3, 4, 5]
    script.add(1, request(0, prompt))
    script.add(100, replace(request(1, prompt), cache_salt="other"))
    serve(steps, script, limits())
    assert script.outputs["r1"][0].num_cached_tokens == 0


def test_requests_of_one_step_have_their_own_parameters(steps):
    prompt = [3, 4, 5]
    first = greedy(steps, prompt, 6)
    script = Script()
    script.add(1, request(0, prompt))
    script.add(1, request(1, prompt, replace(FREE, stop_token_ids=(first[2],))))
    script.add(1, request(2, prompt, replace(FREE, allowed_token_ids=(7, 9))))
    script.add(1, request(3, prompt, replace(FREE, temperature=1.0, seed=5)))
    script.add(1, request(4, prompt, replace(FREE, temperature=1.0, seed=5)))
    script.add(1, request(5, prompt, replace(FREE, temperature=1.0)))
    script.add(1, request(6, prompt, replace(FREE, temperature=1.0)))
    serve(steps, script, limits())
    assert script.tokens("r0") == first
    end = first.index(first[2]) + 1
    assert script.tokens("r1") == first[:end]
    last = script.outputs["r1"][-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", first[2])
    assert set(script.tokens("r2")) <= {7, 9}
    assert script.tokens("r3") == script.tokens("r4")
    assert script.tokens("r5") != script.tokens("r6")


def test_the_end_token_of_the_model_has_no_stop_reason(steps):
    script = Script()
    params = SamplingParams(max_tokens=6, logit_bias={2: 100})
    script.add(1, request(0, [3, 4], params))
    script.add(1, request(1, [3, 4], replace(params, min_tokens=3)))
    serve(steps, script, limits())
    last = script.outputs["r0"][-1]
    assert (script.tokens("r0"), last.finish_reason, last.stop_reason) == ([2], "stop", None)
    assert script.tokens("r1").index(2) == 3


@pytest.mark.parametrize("budget", [1, 3, 16])
def test_logprobs_are_those_of_the_model(steps, budget):
    prompt = [3, 4, 5, 6, 7]
    params = replace(FREE, logprobs=2, prompt_logprobs=1, max_tokens=3)
    script = Script()
    script.add(1, request(0, prompt, params))
    script.add(1, request(1, [7], params))
    serve(steps, script, limits(token_budget=budget))
    first = script.outputs["r0"][0]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    for position, item in enumerate(first.prompt_logprobs[1:]):
        expected = torch.log_softmax(steps.scores(tuple(prompt[: position + 1])), -1)
        assert item.token_id == prompt[position + 1]
        assert item.logprob == pytest.approx(float(expected[item.token_id]), abs=1e-5)
        assert item.top[0][0] == int(expected.argmax())
    tokens = list(prompt)
    for output in script.outputs["r0"]:
        (item,) = output.logprobs
        expected = torch.log_softmax(steps.scores(tuple(tokens)), -1)
        assert item.logprob == pytest.approx(float(expected.max()), abs=1e-5)
        assert len(item.top) == 2
        tokens.append(item.token_id)
    assert [output.prompt_logprobs for output in script.outputs["r0"][1:]] == [None, None]
    assert script.outputs["r1"][0].prompt_logprobs == (None,)
    assert len(script.scores["r0"]) == -(-4 // budget)  # a part a step


def test_a_preempted_prompt_keeps_its_logprobs(steps):
    script = Script()
    params = replace(FREE, prompt_logprobs=0, max_tokens=9)
    prompts = [[3 + number, 4, 5, 6, 7, 8, 3, 4] for number in range(3)]
    for number, prompt in enumerate(prompts):
        script.add(1, request(number, prompt, params))
    engine = serve(steps, script, limits(num_blocks=5, token_budget=3))
    assert engine.scheduler.num_preemptions > 0
    for number, prompt in enumerate(prompts):
        found = [
            output.prompt_logprobs
            for output in script.outputs[f"r{number}"]
            if output.prompt_logprobs is not None
        ]
        assert len(found) == 1
        assert [item and item.token_id for item in found[0]] == [None, *prompt[1:]]
        assert script.tokens(f"r{number}") == greedy(steps, prompt, 9)


def test_scores_that_are_no_numbers_end_their_request_alone(steps, monkeypatch):
    broken = (3, 4, 5)
    real = BlockSteps.scores

    def scores(self, tokens):
        found = real(self, tokens)
        return torch.full_like(found, float("nan")) if tokens[:3] == broken else found

    monkeypatch.setattr(BlockSteps, "scores", scores)
    script = Script()
    script.add(1, request(0, list(broken)))
    script.add(1, request(1, [5, 4, 3]))
    engine = serve(steps, script, limits())
    assert [output.finish_reason for output in script.outputs["r0"]] == ["error"]
    assert len(script.tokens("r1")) == 6
    assert engine.scheduler.free_blocks == 64


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(0, []), "found 0 tokens"),
        (request(0, [VOCAB]), "vocabulary"),
        (request(0, [3] * 40), "found 40 tokens"),
        (request(0, [3] * 36), "together at most 40"),
        (request(0, [3], replace(FREE, stop_token_ids=(VOCAB,))), "stop_token_ids"),
        (request(1, [3]), "unfinished"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_alone(steps, bad, message):
    script = Script()
    script.add(1, request(1, [3, 4]))
    script.add(1, bad)
    engine = serve(steps, script, limits())
    assert message in script.refused[bad.id]
    assert script.tokens("r1") == greedy(steps, [3, 4], 6)
    assert engine.scheduler.free_blocks == 64


def test_a_request_larger_than_the_memory_is_refused(steps):
    script = Script()
    script.add(1, request(0, [3] * 30))
    serve(steps, script, limits(num_blocks=8))
    assert "KV blocks" in script.refused["r0"]


def test_no_max_tokens_means_as_many_as_fit(steps):
    script = Script()
    script.add(1, request(0, [3] * 30, SamplingParams(ignore_eos=True)))
    serve(steps, script, limits())
    assert len(script.tokens("r0")) == 10


@pytest.mark.parametrize("params", [FREE, replace(FREE, temperature=1.0, seed=3)])
def test_after_a_lost_rank_answers_go_on_where_their_clients_are(steps, params):
    params = replace(params, max_tokens=12, frequency_penalty=0.5)
    prompts = [[3, 4, 5, 6, 7], [5, 4, 3]]
    whole = Script()
    for number, prompt in enumerate(prompts):
        whole.add(1, request(number, prompt, params))
    serve(steps, whole, limits())

    first = Script()
    for number, prompt in enumerate(prompts):
        first.add(1, request(number, prompt, params))
    engine = OnlineRun(
        channel=first,
        executor=fresh(steps, 1),
        limits=limits(),
        order=queue_order("fcfs"),
        model=ModelLimits(max_model_len=40, vocab_size=VOCAB),
        clock=Clock(),
    )
    steps.fails_at = 6
    with pytest.raises(StageError, match="SIGKILL"):
        engine.run()

    second = Script()
    for number, prompt in enumerate(prompts):
        known = tuple(first.tokens(f"r{number}"))
        assert 0 < len(known) < 12
        second.add(1, request(number, prompt, params), token_ids=known)
    serve(steps, second, limits())
    for number in range(2):
        name = f"r{number}"
        assert first.tokens(name) + second.tokens(name) == whole.tokens(name)
        assert second.outputs[name][-1].finish_reason == "length"


def test_counters_are_sent_while_it_runs(steps):
    script = Script()
    for number in range(3):
        script.add(1, request(number, [3 + number] * 9, replace(FREE, max_tokens=9)))
    script.add(60, request(9, [3]))
    serve(steps, script, limits(max_sequences=2))
    assert script.stats["num_blocks"] == 64
    assert script.stats["prefix_cache_queries"] > 0


FORM = StructuredOutputsParams(choice=("a text of the form",))


class Panic(BaseException):
    """As pyo3's PanicException, no Exception."""


class Grammars:
    """Compiles forms when a test lets it, and fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.asked: list[StructuredOutputsParams] = []
        self.may_compile = threading.Event()

    def compiled(self, form):
        assert form == FORM

    def compile(self, form):
        self.asked.append(form)
        assert self.may_compile.wait(PATIENCE_S)
        raise self.error


class Patient(Script):
    """Waits for forms that are compiled; they may be once every message was taken."""

    grammars: Grammars

    def receive(self, timeout_s=None):
        if not self.messages and not self.due:
            self.grammars.may_compile.set()
        try:
            return super().receive(timeout_s)
        except EOFError:
            if timeout_s != COMPILE_POLL_S:
                raise
            time.sleep(COMPILE_POLL_S)
            return None


@pytest.mark.parametrize("error", [Panic("a text of the form"), ValueError("a text of the form")])
def test_a_compiler_that_fails_refuses_its_request_alone(steps, error):
    script = Patient()
    script.grammars = Grammars(error)
    script.add(1, request(0, [3, 4], replace(FREE, structured_outputs=FORM)))
    script.add(1, request(1, [3, 4]))
    serve(steps, script, limits(), grammars=script.grammars)
    assert script.refused == {"r0": f"structured_outputs: {type(error).__name__}"}
    assert script.tokens("r1") == greedy(steps, [3, 4], 6)


def test_the_forms_of_aborted_requests_are_not_compiled(steps):
    script = Patient()
    script.grammars = Grammars(SpecError("no form"))
    for number in range(20):
        script.add(1, request(number, [3, 4], replace(FREE, structured_outputs=FORM)))
        script.abort(2, f"r{number}")
    script.add(3, request(20, [3, 4]))
    engine = serve(steps, script, limits(), grammars=script.grammars)
    assert len(script.grammars.asked) <= COMPILE_THREADS
    assert script.refused == {}
    assert script.tokens("r20") == greedy(steps, [3, 4], 6)
    assert engine.scheduler.is_idle
