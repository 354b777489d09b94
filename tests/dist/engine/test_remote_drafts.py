"""A draft model on a device of its own: the same drafts and answers, and answers without it."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.answer_drafts import draft_freely
from helpers.block_steps import BlockSteps
from helpers.draft_plans import with_draft, with_idle_device
from helpers.links import TRANSPORTS
from helpers.online_runs import fresh
from helpers.ranks import (
    connected_channels,
    make_plan,
    make_split_plan,
    run_draft_rank,
    run_threads,
)
from helpers.ranks import rank_contexts as contexts_of
from helpers.scripted_channel import Script
from helpers.tiny_models import generate_alone, load_reference
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.assigner.draft_placement import DraftRequest, _memory_bytes
from llmpq.batching.engine_step import DraftLimits, DraftModelSchedule, DraftWork
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.costmodel import build_costs
from llmpq.dist.engine.drafters import DraftModel, DraftWorker, RemoteDraftModel
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.launch.draft_runner import load_draft_model, run_draft_model
from llmpq.dist.launch.rank import frame_limits, master_rank, ring_errors, run_stage
from llmpq.dist.metrics.stats import StageClock
from llmpq.dist.transport.frames import Frame, FrameKind, Row
from llmpq.errors import CapacityError, StageError
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits, max_model_len
from llmpq.spec.huggingface.families import load_model_dir

torch.set_num_threads(1)
SMALL = {"layers": 1, "hidden": 16, "intermediate": 32, "heads": 2, "kv_heads": 1}
PROMPTS = [[3 + number, *range(4, 4 + 3 * number)] for number in range(6)]
NEW_TOKENS = 12
BLOCK = 16


@pytest.fixture(scope="module")
def small(tiny_model) -> BlockSteps:
    return BlockSteps(tiny_model("llama", seed=7, shape=SMALL), num_blocks=32, block_size=BLOCK)


@pytest.fixture(scope="module")
def model_dir(tiny_model) -> Path:
    return tiny_model("llama", seed=1)


@pytest.fixture(scope="module")
def expected(model_dir) -> list[list[int]]:
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    return [generate_alone(model, prompt, NEW_TOKENS)[0][len(prompt) :] for prompt in PROMPTS]


def requests() -> list[Request]:
    return [
        Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=NEW_TOKENS)
        for number, prompt in enumerate(PROMPTS)
    ]


def config_of(model_dir: Path) -> SpeculativeConfig:
    return SpeculativeConfig(method="draft_model", model=str(model_dir), num_speculative_tokens=3)


def placed(model_dir: Path, stages: int, place: str):
    """A plan whose draft model is beside the last stage, or on a device without a stage."""
    cuts = {1: (0, 3), 3: (0, 1, 2, 3)}
    values = {"batch": 4, "prompt_tokens": 24, "new_tokens": NEW_TOKENS}
    if stages == 2:
        plan = make_split_plan((0, 3), (0, 3), **values)
    else:
        plan = make_plan(cuts[stages], prefill=2, decode=2, **values)
    if place == "idle":
        plan = with_idle_device(plan)
    return with_draft(plan, model_dir, device=len(plan.cluster.devices) - 1)


def pair(plan, model_dir: Path):
    """The two ends of the link of drafts."""
    limits = frame_limits(plan, model_dir, has_drafts=True)
    first, *_, last = connected_channels(plan, limits)
    assert first.draft is not None
    assert last.communicator is not None
    return first.draft, last.communicator


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_drafts_are_those_of_the_model_beside_the_master(small, model_dir, monkeypatch, data):
    draft_freely(monkeypatch)
    plan = placed(model_dir, 1, "idle")
    master, worker = pair(plan, model_dir)
    models = [DraftModel(fresh(small, 1), block_size=BLOCK, token_budget=7) for _ in range(2)]
    clock = StageClock(micro_batching=plan.micro_batching)
    served = DraftWorker(
        model=models[1], communicator=worker, clock=clock, device=torch.device("cpu")
    )
    thread = threading.Thread(target=served.run)
    thread.start()
    remote = RemoteDraftModel(master)
    schedule = DraftModelSchedule(DraftLimits(num_blocks=8, cost=0.2), BLOCK)
    texts = {number: [3 + number] * (1 + 5 * number) for number in range(3)}
    for _ in range(4):
        for number, text in texts.items():
            schedule.reserve(number, len(text), data.draw(st.integers(1, 4)))
        works = schedule.take_works()
        tokens = [texts[work.request] for work in works]
        found = remote.propose(works, tokens)
        assert found == models[0].propose(works, tokens)
        assert [len(draft) for draft in found] == [work.length for work in works]
        for number, text in texts.items():
            accepted = data.draw(st.integers(0, 4))
            draft = dict(zip([work.request for work in works], found, strict=True)).get(number, [])
            text += [*draft[:accepted], data.draw(st.integers(3, 6))]
            schedule.verify(number, min(accepted, len(draft)), 3)
    stats = remote.finish()
    thread.join(10)
    assert stats is not None
    assert stats.rank == 1
    assert stats.busy_s > 0
    for end in (master, worker):
        end.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("stages", "place"), [(1, "idle"), (3, "idle"), (3, "stage"), (2, "idle")])
def test_a_placed_draft_model_changes_no_token(
    model_dir, expected, monkeypatch, stages, place, transport
):
    draft_freely(monkeypatch)
    plan, config = placed(model_dir, stages, place), config_of(model_dir)
    answers, made = run_threads(
        plan, model_dir, requests(), speculative=config, transport=transport
    )
    assert [list(answers[number][0]) for number in range(len(PROMPTS))] == expected
    assert 0 < made.accepted_tokens == made.draft_tokens
    assert made.draft is not None
    assert made.draft.rank == len(plan.stages) == len(made.stages)


def serve_online(
    plan, model_dir: Path, script: Script, config, run_drafts=run_draft_rank, transport="sockets"
) -> int:
    """Run the ranks of a plan in threads, the master in this one; return the accepted tokens."""
    engine = EngineOptions(speculative_config=config)
    own = engine_limits(plan, engine)
    longest = max_model_len(plan, engine, None)
    limits = frame_limits(plan, model_dir, own, longest)
    channels = connected_channels(plan, limits, transport=transport)
    contexts = [
        replace(one, channels=own)
        for one, own in zip(
            contexts_of(plan, model_dir, task="online", engine=engine), channels, strict=True
        )
    ]
    runs = [run_drafts if one.rank == plan.draft_rank else run_stage for one in contexts]
    threads = [
        threading.Thread(target=run, args=(one,))
        for run, one in zip(runs[1:], contexts[1:], strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        with master_rank(contexts[0]) as master:
            master.serve_online(script)
            made = master.finish()
    finally:
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    return made


def script_of() -> Script:
    script = Script()
    params = SamplingParams(ignore_eos=True, max_tokens=NEW_TOKENS)
    for number, prompt in enumerate(PROMPTS):
        item = GenerationRequest(id=str(number), prompt_token_ids=tuple(prompt), sampling=params)
        script.add(1 + 3 * number, item)
    return script


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("stages", "place"), [(1, "idle"), (3, "stage")])
def test_an_engine_answers_as_without_it(
    model_dir, expected, monkeypatch, stages, place, transport
):
    draft_freely(monkeypatch)
    script, plan = script_of(), placed(model_dir, stages, place)
    made = serve_online(plan, model_dir, script, config_of(model_dir), transport=transport)
    assert [script.tokens(str(number)) for number in range(len(PROMPTS))] == expected
    sizes = [len(output.token_ids) for outputs in script.outputs.values() for output in outputs]
    assert max(sizes) == 4
    assert made.draft is not None


class Mortal:
    """A communicator that breaks after some drafts.

    ``how``: it closes the connection, or it sends an error, as a rank that failed.
    """

    def __init__(self, inner, steps: int, how: str) -> None:
        self.__dict__.update(inner=inner, steps=steps, how=how)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def send(self, frame: Frame) -> None:
        if frame.kind is FrameKind.MIXED:
            self.__dict__["steps"] -= 1
            if self.steps < 0:
                if self.how == "error":
                    raise CapacityError("no memory left")
                self.inner.close()
                raise SystemExit  # ends the thread
        self.inner.send(frame)


def dying(how: str):
    def run(context) -> None:
        channels = replace(context.channels, communicator=Mortal(context.communicator, 3, how))
        own = replace(context, channels=channels)
        if how == "error":
            with pytest.raises(CapacityError):
                run_draft_rank(own)
            return
        device = torch.device("cpu")
        with contextlib.suppress(SystemExit):
            run_draft_model(own.job, own.plan, device, own.communicator, own.progress)

    return run


@pytest.mark.parametrize("how", ["close", "error"])
def test_answers_go_on_without_a_draft_model_that_has_ended(
    model_dir, expected, monkeypatch, caplog, how
):
    draft_freely(monkeypatch)
    plan = placed(model_dir, 1, "idle")
    answers, made = run_threads(
        plan, model_dir, requests(), speculative=config_of(model_dir), run_drafts=dying(how)
    )
    assert [list(answers[number][0]) for number in range(len(PROMPTS))] == expected
    assert made.draft is None
    assert made.accepted_tokens == made.draft_tokens > 0
    assert caplog.text.count("going on without drafts") == 1
    script = script_of()
    made = serve_online(plan, model_dir, script, config_of(model_dir), dying(how))
    assert [script.tokens(str(number)) for number in range(len(PROMPTS))] == expected
    assert made.draft is None


def test_one_that_cannot_be_loaded_ends_the_start(model_dir):
    def fail(context) -> None:
        with pytest.raises(CapacityError), ring_errors(context):
            raise CapacityError("no memory left")

    plan = placed(model_dir, 1, "idle")
    config = config_of(model_dir)
    with pytest.raises(CapacityError, match="no memory left"):
        run_threads(plan, model_dir, requests(), speculative=config, run_drafts=fail)


def test_its_memory_is_that_of_the_forecast(model_dir):
    """Weights, head and KV blocks of the process are those that the planner counted."""
    plan = placed(model_dir, 1, "idle")
    _, made = run_threads(plan, model_dir, requests(), speculative=config_of(model_dir))
    assert made.draft is not None
    _assert_forecast(made.draft.held, plan, model_dir)


@pytest.mark.parametrize("place", ["idle", "beside"])
def test_its_layers_with_windows_keep_all_tokens_as_forecast(tiny_model, place):
    """Its blocks have no tables of windows, so that it may begin with any sequence."""
    folder = tiny_model("mistral", sliding_window=6, max_position_embeddings=2048)
    plan = placed(folder, 1, place)
    plan = replace(plan, workload=replace(plan.workload, prompt_tokens=1200))
    engine = EngineOptions(speculative_config=config_of(folder))
    context, *_ = contexts_of(plan, folder, engine=engine)
    model = load_draft_model(context.job, plan, torch.device("cpu"))
    assert model is not None
    _assert_forecast(model.held, plan, folder)


def _assert_forecast(held, plan, model_dir):
    assert held is not None
    own = build_costs(
        load_model_dir(model_dir), plan.cluster, dtype="float32", kv_bits=32, latency="roofline"
    )
    request = DraftRequest(costs=own, source=str(model_dir), bits=None, acceptance_rate=1.0, most=3)
    place = plan.draft.device
    device = plan.cluster.devices[place]
    rest = own.temporary_bytes(
        device, plan.workload, plan.micro_batching, is_master=True, is_last=True
    )
    rest += own.runtime_bytes(device) if place != plan.stages[0].device else 0
    assert held.weights + held.master + held.kv + rest == _memory_bytes(plan, request, place)


def test_bad_frames_are_refused(model_dir):
    plan = placed(model_dir, 1, "idle")
    master, worker = pair(plan, model_dir)
    clock = StageClock(micro_batching=plan.micro_batching)
    served = DraftWorker(model=None, communicator=worker, clock=clock, device=torch.device("cpu"))
    failures = []

    def run() -> None:
        try:
            served.run()
        except StageError as error:
            failures.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    row = Row(blocks=(0,), first=2, length=4, origin=3)
    ids = torch.zeros(1, 2, 1, dtype=torch.int32)
    master.send(Frame(kind=FrameKind.MIXED, rows=(row,), hidden=ids))
    thread.join(10)
    assert failures == ["found 3 draft tokens at [2, 4), expected 1 to 2"]
    for end in (master, worker):
        end.close()


def test_works_are_lists_of_new_tokens_alone(model_dir):
    """What the worker knows is not sent again."""
    plan = placed(model_dir, 1, "idle")
    master, worker = pair(plan, model_dir)
    worker.send(Frame(kind=FrameKind.READY))
    remote = RemoteDraftModel(master)
    thread = threading.Thread(
        target=remote.propose, args=([DraftWork(5, 18, 20, 3, (4, 2, 9))], [list(range(20))])
    )
    thread.start()
    frame = worker.recv()
    assert frame.rows == (Row(blocks=(4, 2), first=18, length=22, origin=3),)
    assert frame.hidden.flatten().tolist() == [18, 19, 0, 0]
    worker.close()
    thread.join(10)
    assert remote.propose([], []) is None
    assert remote.finish() is None
    master.close()
