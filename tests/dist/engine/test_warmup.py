"""Warming up runs both phases once at the plan's own sizes, and changes no answer."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import make_plan, run_threads

from llmpq.dist.engine import executor
from llmpq.dist.engine.executor import warm_up, warm_up_master
from llmpq.dist.io.prompts import Request
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS
from llmpq.spec.workload import Workload

CPU = torch.device("cpu")


class Runner:
    """Keeps what it was asked to run."""

    def __init__(self, layers: object = "layers", steps: object = None) -> None:
        self.layers = layers
        self.device = CPU
        self.steps = steps
        self.calls: list[tuple[tuple[int, ...], list[tuple[tuple[int, ...], int, int]]]] = []
        self.only: list[list[int] | None] = []

    def run(self, hidden, rows, only=None):
        self.calls.append((tuple(hidden.shape), [(r.blocks, r.first, r.length) for r in rows]))
        self.only.append(only)
        return hidden


def plan_of(new_tokens=5, prompt_tokens=7, prefill=2, decode=3):
    plan = make_plan((0, 3), prefill=prefill, decode=decode)
    work = Workload(batch=4, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    return replace(plan, workload=work)


def test_both_phases_run_once_at_the_sizes_of_the_plan():
    runner = Runner()
    warm_up(plan_of(), plan_of().stages[0], runner, 16, torch.float32)
    prefill, decode = runner.calls
    assert prefill == ((1, 14, 16), [((0,), 0, 7), ((1,), 0, 7)])
    assert decode == ((1, 3, 16), [((0,), 7, 8), ((1,), 7, 8), ((2,), 7, 8)])


def test_prefill_runs_one_layer_of_each_bitwidth_on_a_cpu():
    plan = plan_of()
    stage = replace(plan.stages[0], bits=(8, 4, 8))
    runner = Runner()
    warm_up(plan, stage, runner, 16, torch.float32)
    assert runner.only == [[0, 1], None]
    runner.device = torch.device("meta")  # stands for an accelerator
    warm_up(plan, stage, runner, 16, torch.float32)
    assert runner.only[2:] == [None, None]


@pytest.mark.parametrize("takes_prompts", [True, False])
def test_prefill_needs_none_where_prompts_are_compiled(takes_prompts):
    runner = Runner(steps=SimpleNamespace(takes_prompts=takes_prompts))
    warm_up(plan_of(), plan_of().stages[0], runner, 16, torch.float32)
    assert [shape for shape, _ in runner.calls] == [(1, 14, 16)] * (not takes_prompts) + [
        (1, 3, 16)
    ]


def test_answers_of_one_token_have_no_decode_to_warm_up():
    runner = Runner()
    warm_up(plan_of(new_tokens=1), plan_of().stages[0], runner, 16, torch.float32)
    assert [shape for shape, _ in runner.calls] == [(1, 14, 16)]


def test_a_stage_without_layers_has_nothing_to_warm_up():
    runner = Runner(layers=None)
    warm_up(plan_of(), plan_of().stages[0], runner, 16, torch.float32)
    assert runner.calls == []


def test_a_large_prefill_is_warmed_up_with_fewer_rows_and_whole_prompts(monkeypatch):
    monkeypatch.setattr(executor, "WARM_UP_TOKENS", 15)
    runner = Runner()
    warm_up(plan_of(prefill=4), plan_of().stages[0], runner, 16, torch.float32)
    assert runner.calls[0][0] == (1, 14, 16)
    runner = Runner()
    warm_up(plan_of(prefill=4, prompt_tokens=40), plan_of().stages[0], runner, 16, torch.float32)
    assert runner.calls[0][0] == (1, 40, 16)
    runner = Runner()
    warm_up(plan_of(prompt_tokens=3000), plan_of().stages[0], runner, 16, torch.float32)
    assert [shape for shape, _ in runner.calls] == [(1, PROMPT_CHUNK_TOKENS, 16), (1, 3, 16)]


def test_the_master_embeds_and_projects_as_in_either_phase():
    seen = []

    class Master:
        def embed(self, ids, positions):
            seen.append(("embed", tuple(ids.shape), tuple(positions.shape)))
            return torch.zeros(*ids.shape, 16)

        def logits(self, hidden):
            seen.append(("logits", tuple(hidden.shape)))

    warm_up_master(plan_of(), Master(), Runner())
    assert seen == [
        ("embed", (1, 14), (1, 14)),
        ("logits", (2, 16)),
        ("embed", (1, 3), (1, 3)),
        ("logits", (3, 16)),
    ]


@pytest.mark.parametrize("stages", [(0, 3), (0, 1, 3)])
def test_answers_are_those_of_a_run_that_was_not_warmed_up(stages, tiny_model, monkeypatch):
    plan = make_plan(stages, prefill=2, decode=2, new_tokens=6)
    model_dir = tiny_model("llama", seed=3)
    requests = [
        Request(id=number, prompt_token_ids=(number + 1,) * 3, max_new_tokens=6)
        for number in range(4)
    ]
    warm, _ = run_threads(plan, model_dir, requests)
    monkeypatch.setattr("llmpq.dist.launch.rank.warm_up", lambda *_: None)
    monkeypatch.setattr("llmpq.dist.launch.rank.warm_up_master", lambda *_: None)
    cold, _ = run_threads(plan, model_dir, requests)
    assert warm == cold
    assert len(warm) == 4
