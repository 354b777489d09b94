"""The online engine and the simulator make the same decisions on the same clock."""

from __future__ import annotations

import argparse
import json
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmpq.assigner.planner import even_plan
from llmpq.batching.block_scheduler import BlockScheduler
from llmpq.batching.blocks import BlockCopy
from llmpq.batching.engine_step import DraftLimits, DraftWork, EngineLimits, EngineStep
from llmpq.batching.queue_order import queue_order
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.cli.engine_simulation import add_engine_options, simulated_limits
from llmpq.dist.engine import engine as engine_module
from llmpq.dist.engine.drafters import DraftModel
from llmpq.dist.engine.executor import StepResult
from llmpq.dist.engine.online_run import OnlineRun
from llmpq.dist.io.control_channel import AddedRequest, ModelLimits, added_to_json
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.launch.rank import limits_of_model
from llmpq.dist.transport.frames import Row
from llmpq.models import load_config
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits
from llmpq.sim.costs import Hop, StepSize, linear_layout
from llmpq.sim.engine import SimulatedEngine
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS, kept_blocks
from llmpq.spec.workload import TraceRequest

VOCAB = 5000


def accepts(request: int, place: int) -> bool:
    """Whether a draft token is right."""
    return (7 * request + 5 * place) % 4 != 0


class Drafts:
    """Proposes tokens that name their request and their place."""

    def __init__(self, _: SpeculativeConfig) -> None: ...

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        return [draft_token(tokens[0], len(tokens) + at) for at in range(most)]


def draft_token(request: int, place: int) -> int:
    return 1000 + 100 * request + place


def draft_s(works: Sequence[DraftWork]) -> float:
    """Return the seconds of a draft model: parts of two, so that times are exact."""
    caught_up = sum(work.tokens - work.first for work in works)
    return 0.03125 * caught_up + 0.0625 * max(work.length for work in works)


class TimedDrafts(DraftModel):
    """A draft model whose tokens name their request and their place, on the pipeline's clock."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def propose(self, works, tokens):
        self._pipeline.work(draft_s(works))
        return [
            [draft_token(text[0], work.tokens + at) for at in range(work.length)]
            for work, text in zip(works, tokens, strict=True)
        ]


class Costs:
    """Whole and half seconds, so that times are exact."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.layout = linear_layout(num_stages)

    def stage_s(self, stage: int, shape: StepSize) -> float:
        return 2.0 + stage + 0.5 * shape.tokens

    def project_s(self, shape: StepSize) -> float:
        return 0.5 * shape.rows

    def hop(self, stage: int, _: StepSize) -> Hop:
        return Hop(delay_s=0.25 * (stage + 1) if self.num_stages > 1 else 0.0, end_s=0.0)


class Pipeline:
    """Stages and a control channel on a virtual clock, with the costs of the simulator."""

    def __init__(self, costs: Costs, requests: Sequence[tuple[float, GenerationRequest]]) -> None:
        self._costs = costs
        self.now_s = 0.0
        self._free_s = [0.0] * costs.num_stages
        self._returning: deque[tuple[float, StepSize, torch.Tensor]] = deque()
        self._arrivals = deque(requests)
        self._generator = torch.Generator().manual_seed(0)

    def clock(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        """Let the master compute something."""
        self.now_s += seconds
        self._free_s[0] = self.now_s

    # The channel.

    def send(self, kind: str, **fields: object) -> None:
        assert kind != "refused", fields

    def receive(self, timeout_s: float | None = None) -> dict | None:
        if timeout_s:  # idle
            if not self._arrivals:
                raise EOFError
            self.now_s = max(self.now_s, self._arrivals[0][0])
        if not self._arrivals or self._arrivals[0][0] > self.now_s:
            return None
        arrival_s, request = self._arrivals.popleft()
        added = AddedRequest(request=request, arrival_s=arrival_s)
        return {"kind": "add"} | added_to_json(added)

    # The stages.

    def dispatch(
        self, number, phase, token_ids: np.ndarray, rows: Sequence[Row], outputs, pooled
    ) -> None:
        assert phase is None
        assert not pooled
        counts = [row.length - row.first for row in rows]
        assert sum(counts) == len(token_ids)
        shape = StepSize(len(rows), len(token_ids), 0, 0, ())
        ready_s = self.now_s
        for stage in range(self._costs.num_stages):
            done_s = max(ready_s, self._free_s[stage]) + self._costs.stage_s(stage, shape)
            self._free_s[stage] = done_s
            if stage == 0:
                self.now_s = done_s
            ready_s = done_s + self._costs.hop(stage, shape).delay_s
        self._returning.append((ready_s, number, shape, self._scores(token_ids, rows, outputs)))

    def _scores(self, token_ids: np.ndarray, rows: Sequence[Row], outputs) -> torch.Tensor:
        """Return scores that are best for the next row's token where that is a right draft."""
        scores = torch.randn(len(outputs), VOCAB, generator=self._generator)
        last = np.cumsum([row.length - row.first for row in rows]) - 1
        for place, index in enumerate(outputs):
            if index + 1 == len(rows):
                continue
            row, after = rows[index], rows[index + 1]
            token = int(token_ids[last[index + 1]])
            if (after.first, after.blocks[0]) == (row.length, row.blocks[0]):
                request = (token - 1000) // 100
                assert token == draft_token(request, after.first)
                scores[place, token] = 100.0 if accepts(request, after.first) else -100.0
        return scores

    def has_result(self) -> bool:
        return bool(self._returning) and self._returning[0][0] <= self.now_s

    def await_result(self, _: float) -> bool:
        next_s = self._returning[0][0]
        if self._arrivals:
            next_s = min(next_s, self._arrivals[0][0])
        self.now_s = max(self.now_s, next_s)
        return self.has_result()

    def collect(self) -> StepResult:
        _, number, shape, scores = self._returning.popleft()
        self.now_s += self._costs.project_s(shape)
        self._free_s[0] = self.now_s
        return StepResult(number, scores if len(scores) else None)

    def copy_blocks(self, _: Sequence[BlockCopy]) -> list[int]:
        """Copy nothing: tokens do not depend on the content of blocks here."""
        return []

    def end_step(self) -> None:
        """Time passes in the other calls."""

    def check(self) -> None:
        assert not self._returning


def recorded(scheduler: BlockScheduler) -> list[tuple[float, EngineStep]]:
    """Return the list that the scheduler's decisions are added to, with their times."""
    found: list[tuple[float, EngineStep]] = []
    real = scheduler.schedule

    def schedule(now_s: float) -> EngineStep | None:
        step = real(now_s)
        if step is not None:
            found.append((now_s, step))
        return step

    scheduler.schedule = schedule
    return found


@settings(max_examples=80)
@given(
    items=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(1, 12)),
        min_size=1,
        max_size=12,
    ),
    num_stages=st.integers(1, 3),
    budget=st.integers(1, 40),
    num_blocks=st.integers(11, 30),
    max_sequences=st.integers(1, 6),
    prefix_caching=st.booleans(),
    order=st.sampled_from(["fcfs", "spf", "no_preempt", "larry", "hrrn", "trail"]),
    drafts=st.sampled_from([0, 0, 1, 5]),
    draft_blocks=st.none() | st.integers(1, 30),
    window=st.none() | st.tuples(st.integers(1, 20), st.integers(0, 8)),
)
@example(  # a request arrives while a step is computed, and waits from then on
    items=[*[(0, 1, 1)] * 5, (1, 9, 1), (1, 1, 1)], num_stages=2, budget=1, num_blocks=11,
    max_sequences=1, prefix_caching=False, order="larry", drafts=0, draft_blocks=None, window=None,
)  # fmt: skip
@example(
    items=[(0, 8, 1), (0, 8, 2), (1, 1, 1), (0, 14, 1), (3, 8, 1)], num_stages=3, budget=8,
    num_blocks=11, max_sequences=2, prefix_caching=False, order="larry", drafts=0,
    draft_blocks=None, window=None,
)  # fmt: skip
def test_decisions_are_equal(
    items, num_stages, budget, num_blocks, max_sequences, prefix_caching, order, drafts,
    draft_blocks, window,
):  # fmt: skip
    draft = None
    if drafts and draft_blocks is not None:
        draft = DraftLimits(num_blocks=draft_blocks, cost=0.0625, max_tokens=36)
    limits = EngineLimits(
        token_budget=budget,
        max_sequences=max_sequences,
        num_blocks=num_blocks,
        block_size=4,
        prefix_caching=prefix_caching,
        steps_in_flight=1 if num_stages == 1 else num_stages + 1,
        num_speculative_tokens=drafts,
        draft=draft,
    )
    if window is not None:
        limits = windowed(limits, *window)
    arrivals = np.cumsum([8.0 * gap for gap, _, _ in items]).tolist()

    simulated = SimulatedEngine(
        Costs(num_stages),
        limits,
        queue_order(order),
        accepts if drafts else None,
        draft_s,
        predicted_tokens,
    )
    expected = recorded(simulated.scheduler)
    requests = []
    for number, (arrival_s, (_, prompt, new)) in enumerate(zip(arrivals, items, strict=True)):
        simulated.advance(arrival_s)
        simulated.add(
            number, TraceRequest(arrival_s=arrival_s, prompt_tokens=prompt, new_tokens=new)
        )
        # Prompts have no prefix in common: the simulated ones have no content.
        item = GenerationRequest(
            id=str(number),
            prompt_token_ids=(number, *[100 + number] * (prompt - 1)),
            sampling=SamplingParams(ignore_eos=True, max_tokens=new),
        )
        requests.append((arrival_s, item))
    simulated.advance(float("inf"))

    pipeline = Pipeline(Costs(num_stages), requests)
    engine = OnlineRun(
        channel=pipeline,
        executor=pipeline,
        limits=limits,
        order=queue_order(order),
        model=ModelLimits(max_model_len=1000, vocab_size=VOCAB),
        speculative=SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None,
        draft_model=None if draft is None else TimedDrafts(pipeline),
        predictor=predicted_tokens,
        clock=pipeline.clock,
    )
    found = recorded(engine.scheduler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "PromptLookup", Drafts)
        engine.run()
    assert found == expected
    assert engine.scheduler.num_preemptions == simulated.scheduler.num_preemptions
    assert (
        engine.scheduler.drafts.num_accepted_tokens
        == simulated.scheduler.drafts.num_accepted_tokens
    )
    assert engine.scheduler.free_blocks == num_blocks
    assert engine.scheduler.free_window_blocks == limits.num_window_blocks


def predicted_tokens(request):
    """Predict lengths that have nothing to do with the true ones."""
    return 1.0 + 7 * request.prompt_tokens % 11


def windowed(limits, window, more):
    """Return the limits of a model with windows, and more blocks for these than one needs."""
    needed = kept_blocks(
        limits.num_blocks * limits.block_size, window, limits.block_size, limits.token_budget
    )
    return replace(limits, window_tokens=window, num_window_blocks=needed + more)


def test_the_comparison_sees_accepted_and_rejected_drafts():
    limits = EngineLimits(
        token_budget=8, max_sequences=4, num_blocks=20, block_size=4, num_speculative_tokens=3
    )
    simulated = SimulatedEngine(Costs(1), limits, queue_order("fcfs"), accepts)
    simulated.add(1, TraceRequest(arrival_s=0.0, prompt_tokens=6, new_tokens=20))
    simulated.advance(float("inf"))
    assert (
        5
        < simulated.scheduler.drafts.num_accepted_tokens
        < simulated.scheduler.drafts.num_draft_tokens
    )
    assert simulated.report().requests[0].new_tokens == 20


def test_the_comparison_sees_drafts_of_a_model():
    limits = EngineLimits(
        token_budget=8, max_sequences=4, num_blocks=20, block_size=4, num_speculative_tokens=3,
        draft=DraftLimits(num_blocks=20, cost=0.0625),
    )  # fmt: skip
    simulated = SimulatedEngine(Costs(1), limits, queue_order("fcfs"), accepts, draft_s)
    simulated.add(2, TraceRequest(arrival_s=0.0, prompt_tokens=6, new_tokens=60))
    simulated.advance(float("inf"))
    assert (
        5
        < simulated.scheduler.drafts.num_accepted_tokens
        < simulated.scheduler.drafts.num_draft_tokens
    )


def test_the_comparison_sees_preemptions():
    limits = EngineLimits(token_budget=8, max_sequences=4, num_blocks=6, block_size=4)
    simulated = SimulatedEngine(Costs(2), limits, queue_order("fcfs"))
    for number in range(3):
        simulated.add(number, TraceRequest(arrival_s=0.0, prompt_tokens=6, new_tokens=12))
    simulated.advance(float("inf"))
    assert simulated.scheduler.num_preemptions > 0


def test_the_comparison_sees_preemptions_by_windows_alone():
    plain = EngineLimits(token_budget=8, max_sequences=4, num_blocks=40, block_size=4)
    preemptions = []
    for limits in (plain, windowed(plain, 6, 1)):
        simulated = SimulatedEngine(Costs(2), limits, queue_order("fcfs"))
        for number in range(3):
            simulated.add(number, TraceRequest(arrival_s=0.0, prompt_tokens=6, new_tokens=12))
        simulated.advance(float("inf"))
        preemptions.append(simulated.scheduler.num_preemptions)
    assert preemptions[0] == 0 < preemptions[1]


@pytest.mark.parametrize("order", ["fcfs", "spf"])
def test_orders_differ_on_the_same_arrivals(order):
    limits = EngineLimits(token_budget=8, max_sequences=1, num_blocks=20, block_size=4)
    requests = [
        (0.0, GenerationRequest(id="long", prompt_token_ids=(1,) * 9, sampling=SamplingParams())),
        (0.0, GenerationRequest(id="short", prompt_token_ids=(2,) * 3, sampling=SamplingParams())),
    ]
    pipeline = Pipeline(Costs(1), requests)
    engine = OnlineRun(
        channel=pipeline,
        executor=pipeline,
        limits=limits,
        order=queue_order(order),
        model=ModelLimits(max_model_len=40, vocab_size=VOCAB, max_tokens=2),
        clock=pipeline.clock,
    )
    found = recorded(engine.scheduler)
    engine.run()
    assert found[0][1].chunks[0].request == (0 if order == "fcfs" else 1)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_command_simulates_the_limits_that_the_engine_has(stages, tiny_model):
    """Fewer steps in flight idle where the engine's do not; a step has as many tokens."""
    folder = tiny_model("llama")
    plan = even_plan(folder, bits=(16,), stages=stages, shape=(2, 12, 4), micro_batch=(1, 2))
    simulated = simulated_limits(asked(), plan, load_model_dir(folder))
    assert simulated == engine_limits(plan, EngineOptions())
    assert simulated.token_budget < PROMPT_CHUNK_TOKENS


@pytest.mark.parametrize("blocks", [None, 70, 90, 500])
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_the_command_simulates_the_blocks_of_windows(family, blocks, tiny_model):
    folder = tiny_model(family, sliding_window=9, max_position_embeddings=2048)
    plan = even_plan(folder, bits=(16,), stages=2, shape=(3, 1200, 4), micro_batch=(1, 2))
    given_blocks = [] if blocks is None else ["--num_blocks", str(blocks)]
    simulated = simulated_limits(asked(*given_blocks), plan, load_model_dir(folder))
    served = EngineOptions(num_blocks=blocks)
    assert simulated == limits_of_model(plan, served, load_config(folder), 0)
    assert simulated.window_tokens == 9
    # A window of 9 tokens and a chunk of 1,024, wherever a block begins, of three sequences.
    assert 66 <= simulated.num_window_blocks <= 3 * 66


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 8,
}


@pytest.mark.parametrize(
    ("family", "rope", "more", "expected"),
    [
        ("phi3", LONGROPE, {"original_max_position_embeddings": 8}, (8, None)),
        ("llama", LONGROPE, {}, (8, None)),
        ("llama", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, {}, (None, 16)),
        ("llama", {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, {}, (None, None)),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_the_command_simulates_rotary_angles_that_depend_on_the_length(
    family, rope, more, expected, is_old, tiny_model, tmp_path
):
    """Also of a file of earlier releases of transformers, which has other names."""
    folder = tmp_path / "model"
    made = tiny_model(family, rope_parameters=dict(rope), max_position_embeddings=16, **more)
    shutil.copytree(made, folder)
    if is_old:
        fields = json.loads((folder / "config.json").read_text())
        old = fields.pop("rope_parameters")
        fields["rope_scaling"] = {"type": old.pop("rope_type"), **old}
        (folder / "config.json").write_text(json.dumps(fields))
    plan = even_plan(folder, bits=(16,), stages=1, shape=(2, 10, 4), micro_batch=(1, 2))
    simulated = simulated_limits(asked(), plan, load_model_dir(folder))
    assert simulated == limits_of_model(plan, EngineOptions(), load_config(folder), 0)
    assert (simulated.switches_after, simulated.grows_after) == expected


def asked(*words):
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return parser.parse_args(words)
