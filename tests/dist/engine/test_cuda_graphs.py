"""Decode steps at fixed places say what the layers say; only CUDA's own capture needs a GPU.

What stands in for it here calls the captured work again, which reads and writes the same places.
"""

from __future__ import annotations

import logging

import pytest
import torch
from helpers.ranks import make_plan, run_threads
from helpers.tiny_models import load_stage
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.dist.engine import cuda_graphs as decode_graphs
from llmpq.dist.engine.cuda_graphs import DecodeGraphs, StepShape, graphs_of
from llmpq.dist.io.prompts import Request
from llmpq.dist.kv.blocks import blocks_of, slot_blocks
from llmpq.dist.kv.cache import KVCache
from llmpq.errors import CapacityError, StageError
from llmpq.models import PackedBatch, kv_shapes
from llmpq.models.host_sync import host_syncs

torch.set_num_threads(1)

SLOTS, TOKENS = 6, 300
FAMILIES = {
    "llama": {},
    "opt": {},
    "bloom": {"n_head": 3, "hidden_size": 24},
    "gemma2": {"attn_logit_softcapping": 2.0},
    "gemma3": {},
    "mistral": {"sliding_window": 6},
    "phi3": {},
    "gpt_neox": {},
    "mixtral": {},
}


def _batch(slots, starts, counts):
    tables = [
        slot_blocks(slot, TOKENS, start + count)
        for slot, start, count in zip(slots, starts, counts, strict=True)
    ]
    return PackedBatch(block_tables=tables, starts=list(starts), counts=list(counts))


class Captures:
    """Replays by calling again; counts what was captured and replayed."""

    def __init__(self):
        self.made = self.replayed = 0

    def __call__(self, work):
        self.made += 1

        def replay():
            self.replayed += 1
            work()

        return replay


def _cache(stage, kv_bits=None):
    return KVCache(
        kv_shapes(stage.config, 0, len(stage.layers)),
        0,
        num_blocks=SLOTS * blocks_of(TOKENS),
        dtype=torch.float32,
        kv_bits=kv_bits,
    )


def _graphs(stage, cache, full_rows=2, capture=None):
    return DecodeGraphs(stage, cache, full_rows=full_rows, capture=capture or Captures())


def _prefilled(stage, starts, kv_bits=None):
    """Two caches with the same tokens in every row."""
    caches = [_cache(stage, kv_bits) for _ in range(2)]
    torch.manual_seed(0)
    prompt = torch.randn(1, sum(starts), stage.config.hidden_size)
    for cache in caches:
        stage(prompt, _batch(range(len(starts)), [0] * len(starts), starts), cache)
    return caches


def _compare(stage, caches, graphs, steps):
    """Every step by graphs and by layers; ``steps`` are lists of (slot, tokens it has)."""
    torch.manual_seed(1)
    for rows in steps:
        slots, starts = zip(*rows, strict=True)
        batch = _batch(slots, starts, [1] * len(rows))
        hidden = torch.randn(1, len(rows), stage.config.hidden_size)
        expected = stage(hidden, batch, caches[0])
        found = graphs.forward(hidden, batch)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_compute_what_the_layers_do(tiny_model, family):
    stage = load_stage(tiny_model(family, seed=1, **FAMILIES[family]), 0, 3)
    starts = [9, 2, 5, 1, 126, 30]
    caches = _prefilled(stage, starts)
    graphs = _graphs(stage, caches[1])
    # Neighbours, scattered, fewer rows than a full micro-batch, and across 128 tokens.
    steps = []
    for step in range(4):
        at = [start + step for start in starts]
        steps += [[(0, at[0]), (1, at[1])], [(5, at[5]), (2, at[2])], [(4, at[4])]]
    _compare(stage, caches, graphs, steps)
    assert {(shape.rows, shape.tokens) for shape in graphs.shapes} == {
        (2, 128),
        (1, 128),
        (1, 256),
    }


@pytest.mark.parametrize("kv_bits", [None, 8])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_rows_in_any_blocks(tiny_model, kv_bits, data):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=SLOTS, max_size=SLOTS))
    caches = _prefilled(stage, lengths, kv_bits)
    graphs = _graphs(stage, caches[1], full_rows=data.draw(st.integers(1, SLOTS)))
    steps = []
    for _ in range(6):
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=6, unique=True))
        steps.append([(slot, lengths[slot]) for slot in slots])
        for slot in slots:
            lengths[slot] += 1
    _compare(stage, caches, graphs, steps)


def test_a_missing_row_leaves_other_blocks_alone(tiny_model):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    caches = _prefilled(stage, [5, 6, 7, 8, 9, 10])
    graphs = _graphs(stage, caches[1], full_rows=4)
    _compare(stage, caches, graphs, [[(4, 9 + i), (1, 6 + i), (5, 10 + i)] for i in range(3)])
    assert [shape.rows for shape in graphs.shapes] == [4]
    everything = _batch(range(6), [5, 9, 7, 8, 12, 13], [1] * 6)
    hidden = torch.zeros(1, 6, stage.config.hidden_size)
    kept = [stage(hidden, everything, cache) for cache in caches]
    torch.testing.assert_close(*kept, atol=1e-5, rtol=1e-5)


def test_layers_that_wait_run_between_graphs(tiny_model):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    mlp = stage.layers[1].mlp.forward

    def looks(x):
        return mlp(x) if x.abs().amax().item() < 1e9 else x

    stage.layers[1].mlp.forward = looks
    caches = _prefilled(stage, [5, 6])
    capture = Captures()
    graphs = _graphs(stage, caches[1], capture=capture)
    _compare(stage, caches, graphs, [[(0, 5 + i), (1, 6 + i)] for i in range(4)])
    # Positions and masks, the first layer, the last; the one between them asks the host.
    assert capture.made == 3
    assert capture.replayed == 1 + 4 * 3


def test_a_capture_that_fails_is_told_once_and_harms_nothing(tiny_model, caplog):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    caches = _prefilled(stage, [5, 6])

    def refuse(work):
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = _graphs(stage, caches[1], capture=refuse)
    with caplog.at_level(logging.WARNING, "llmpq"):
        _compare(stage, caches, graphs, [[(0, 5 + i), (1, 6 + i)] for i in range(3)])
    assert [record.getMessage() for record in caplog.records] == [
        "decoding continues without CUDA graphs: operation not permitted when stream is capturing"
    ]
    assert graphs.shapes == ()


def test_a_shape_of_few_rows_is_captured_when_it_comes_again(tiny_model):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    caches = _prefilled(stage, [5, 6, 7])
    graphs = _graphs(stage, caches[1], full_rows=3)
    _compare(stage, caches, graphs, [[(1, 6)]])
    assert graphs.shapes == ()
    _compare(stage, caches, graphs, [[(1, 7)]])
    assert graphs.shapes == (StepShape(rows=1, tokens=128),)


def test_graphs_give_way_only_when_stale(tiny_model, monkeypatch):
    monkeypatch.setattr(decode_graphs, "MOST_GRAPHS", 4)
    monkeypatch.setattr(decode_graphs, "STALE_STEPS", 10)
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    graphs = _graphs(stage, _cache(stage), full_rows=1)

    def step(rows):
        hidden = torch.zeros(1, rows, stage.config.hidden_size)
        graphs.forward(hidden, _batch(range(rows), [3] * rows, [1] * rows))

    def kept():
        return sorted(shape.rows for shape in graphs.shapes)

    for rows in range(1, 6):
        step(rows)
    assert kept() == [1, 2, 3, 4]
    for _ in range(5):
        step(1)
        step(2)
    step(6)
    assert kept() == [1, 2, 4, 6]  # three rows had waited longest


def test_rows_that_write_to_one_block_are_refused_before_anything_is_written(tiny_model):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    capture = Captures()
    graphs = _graphs(stage, _cache(stage), capture=capture)
    hidden = torch.zeros(1, 2, stage.config.hidden_size)
    short = PackedBatch(block_tables=[(0,), (1,)], starts=[16, 16], counts=[1, 1])
    for batch, error in ((_batch([0, 0], [3, 3], [1, 1]), StageError), (short, CapacityError)):
        with pytest.raises(error, match="KV cache"):
            graphs.forward(hidden, batch)
    assert capture.made == 0


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 5000))
def test_shapes_hold_their_steps_and_waste_little(rows, full_rows, length):
    batch = PackedBatch(block_tables=[()] * rows, starts=[length - 1] * rows, counts=[1] * rows)
    shape = StepShape.of(batch, full_rows)
    assert rows <= shape.rows < max(2 * rows, rows + 8)
    assert shape.rows <= max(rows, full_rows)
    assert length <= shape.tokens <= max(length + 127, length * 9 / 8)


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_pipeline_gives_the_same_tokens(tiny_model, monkeypatch, family):
    plan = make_plan((0, 1, 3), prefill=2, decode=2, new_tokens=9)
    model_dir = tiny_model(family, seed=3)
    requests = [
        Request(id=number, prompt_token_ids=(number + 1,) * 3, max_new_tokens=9 - 2 * (number % 3))
        for number in range(6)
    ]
    expected, _ = run_threads(plan, model_dir, requests)
    capture = Captures()

    def graphs(layers, cache, full_rows):
        return DecodeGraphs(layers, cache, full_rows=full_rows, capture=capture)

    monkeypatch.setattr("llmpq.dist.launch.rank.step_runner_of", graphs)
    found, _ = run_threads(plan, model_dir, requests)
    assert found == expected
    assert len(found) == len(requests)
    assert capture.replayed > 2 * 8  # both stages, most of the steps


def test_there_are_none_on_a_cpu(tiny_model):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    assert graphs_of(stage, _cache(stage), 2) is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_waits_are_found_on_any_device(mode):
    with mode():
        x = torch.arange(6)
        _check_waits(x)


def _check_waits(x):
    assert host_syncs(lambda: x + 1) == []
    assert host_syncs(lambda: x.sum().item()) == ["aten::_local_scalar_dense"]
    assert host_syncs(lambda: x[x > 2]) == ["aten::index"]
    assert host_syncs(lambda: x[torch.tensor([1])]) == []
    assert host_syncs(lambda: x.repeat_interleave(x)) == ["aten::repeat_interleave"]
    assert host_syncs(lambda: x.repeat_interleave(x, output_size=15)) == []
    assert host_syncs(lambda: x.to("meta")) == ["aten::_to_copy"]
    assert host_syncs(x.nonzero) == ["aten::nonzero"]
    assert host_syncs(lambda: torch.where(x > 2)) == ["aten::nonzero"]
    assert host_syncs(lambda: bool((x > 2).any())) == ["aten::_local_scalar_dense"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_bits", [None, 8])
def test_nothing_a_graph_refuses_is_in_a_step(tiny_model, family, kv_bits):
    """On the meta device: what the host reads fails there, what it brings shows."""
    stage = load_stage(tiny_model(family, seed=1, **FAMILIES[family]), 0, 3)
    stage.to("meta", torch.bfloat16)
    with torch.inference_mode():
        cache = KVCache(
            kv_shapes(stage.config, 0, 3),
            0,
            num_blocks=SLOTS * blocks_of(TOKENS),
            dtype=torch.bfloat16,
            device="meta",
            kv_bits=kv_bits,
        )
        hidden = torch.empty(1, 2, stage.config.hidden_size, dtype=torch.bfloat16, device="meta")
        places = torch.zeros(2, 5, dtype=torch.int64, device="meta")
        view = cache.view_of_tensors(places[:, :-1], places[:, -1])

        def step():
            arguments = stage.decode_arguments(hidden, places[:, -1], view, 64)
            current = hidden
            for index in range(3):
                current = stage.run_layer(index, current, arguments[index])
            assert current.shape == hidden.shape

        step()  # constants are brought over once
        assert host_syncs(step) == []
