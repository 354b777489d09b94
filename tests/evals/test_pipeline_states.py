"""What the ranks of a plan compute is what one process computes, bit for bit."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from helpers.clocks import PATIENCE_S
from helpers.in_process_ring import in_process_ring
from helpers.ranks import make_plan, rank_contexts

from llmpq.dist.engine.master_tasks import micro_batches, run_teacher_forcing
from llmpq.dist.launch.rank import frame_limits, run_stage
from llmpq.errors import SpecError
from llmpq.evals.evaluate import (
    LayerSource,
    evaluation_plan,
    perplexity_and_kl,
    pipeline_hidden,
    stream_hidden,
)
from llmpq.evals.windows import Windows
from llmpq.quant.loading.master import load_master

torch.set_num_threads(1)

CPU = torch.device("cpu")
# Three micro-batches of two windows, one of one, and the rest of the text.
WINDOWS = Windows.cut([(11 * i) % 61 for i in range(75)], window=10, rows=2)
BITS = (4, 16, 8)


def _alone(model_dir, dtype, kv_bits=None):
    source = LayerSource(model_dir=model_dir, bits=BITS, dtype=dtype, device=CPU)
    master = load_master(model_dir, dtype=dtype, device="cpu")
    return master, stream_hidden(source, master, WINDOWS, kv_bits=kv_bits)


def _in_threads(plan, model_dir):
    """Play the plan's ranks as threads of this process."""
    plan = evaluation_plan(plan, WINDOWS)
    num_ranks = len(plan.stages)
    ring = in_process_ring(num_ranks, frame_limits(plan, model_dir)) if num_ranks > 1 else ()
    contexts = rank_contexts(plan, model_dir, ring, task="hidden")
    threads = [threading.Thread(target=run_stage, args=(item,)) for item in contexts[1:]]
    for thread in threads:
        thread.start()
    rows = [tuple(row) for batch in WINDOWS.batches() for row in batch.inputs.tolist()]
    states = {}
    measured = run_teacher_forcing(contexts[0], rows, states.__setitem__)
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
        assert not thread.is_alive()
    assert (measured.requests, len(measured.stages)) == (len(rows), num_ranks)
    return [states[number] for number in range(len(states))]


@pytest.mark.parametrize(
    ("family", "dtype", "kv_bits", "cuts"),
    [
        ("llama", "float32", 32, (0, 1, 2, 3)),
        ("opt", "bfloat16", 16, (0, 2, 3)),
        ("bloom", "float32", 8, (0, 0, 2, 3)),
        ("llama", "bfloat16", 8, (0, 3)),
    ],
)
def test_pipeline_states_equal_those_of_one_process(tiny_model, family, dtype, kv_bits, cuts):
    model_dir = tiny_model(family, seed=1)
    plan = replace(make_plan(cuts, bits=BITS), dtype=dtype, kv_bits=kv_bits)
    states = _in_threads(plan, model_dir)
    master, expected = _alone(model_dir, getattr(torch, dtype), kv_bits)
    assert len(states) == len(expected) == 5
    for state, alone in zip(states, expected, strict=True):
        assert torch.equal(state, alone)
    found, own = (perplexity_and_kl(master, WINDOWS, run) for run in (states, expected))
    assert found == own


@pytest.mark.dist
@pytest.mark.slow
def test_separate_processes_equal_one_process(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    plan = make_plan((0, 1, 3), bits=BITS)
    states = pipeline_hidden(plan, model_dir, WINDOWS, step_timeout_s=30)
    _, expected = _alone(model_dir, torch.float32)
    for state, alone in zip(states, expected, strict=True):
        assert torch.equal(state, alone)


def test_plan_for_another_model_raises_an_error(tiny_model):
    with pytest.raises(SpecError, match="found 3 decoder layers"):
        pipeline_hidden(make_plan((0, 1, 2)), tiny_model("llama", seed=1), WINDOWS)


def test_evaluation_plan_keeps_layers_and_uses_windows_as_workload():
    plan = make_plan((0, 1, 3), bits=BITS)
    found = evaluation_plan(plan, WINDOWS)
    assert found.stages == plan.stages
    assert (found.workload.batch, found.workload.prompt_tokens) == (2, 9)
    assert found.micro_batching.prefill == 2


def test_hidden_states_task_batches_windows_like_the_evaluation():
    rows = [tuple(row) for batch in WINDOWS.batches() for row in batch.inputs.tolist()]
    groups = list(micro_batches(rows, 2))
    expected = [[tuple(row) for row in b.inputs.tolist()] for b in WINDOWS.batches()]
    assert groups == expected
