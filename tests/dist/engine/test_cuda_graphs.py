"""Decode steps at fixed places say what the layers say; only CUDA's own capture needs a GPU.

The layers attend by the compiled kernels of CPUs, the graphs by operators of torch in place of
Triton's kernels, which ``tests/kernels/paged_decode_interpreted.py`` compares with float64.

What stands in for it here runs the captured operators again at the addresses of the capture, and
fails when memory that they use has been given away.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from helpers import decode_attention
from helpers.ranks import make_plan, run_threads
from helpers.recorded_capture import CalledAgain, GivenAwayError, RecordedCapture
from helpers.tiny_models import load_stage
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.dist.engine.cuda_graphs import (
    MOST_GRAPHS,
    DecodeGraphs,
    DecodeSizes,
    _Graph,
    graphs_of,
    host_syncs,
)
from llmpq.dist.io.prompts import Request
from llmpq.dist.kv.cache import KVCache
from llmpq.errors import CapacityError, StageError
from llmpq.models import PackedBatch, kv_shapes

torch.set_num_threads(1)

SLOTS, TOKENS = 6, 300
FAMILIES = {
    "llama": {},
    "opt": {},
    "bloom": {"n_head": 3, "hidden_size": 24},
    "gemma2": {"attn_logit_softcapping": 2.0},
    "gemma3": {},
    "mistral": {"sliding_window": 6},
    "gpt_oss": {},
    "phi3": {},
    "gpt_neox": {},
    "mixtral": {},
}


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    decode_attention.use(monkeypatch)


def _batch(slots, starts, counts):
    tables = [
        slot_blocks(slot, TOKENS, start + count)
        for slot, start, count in zip(slots, starts, counts, strict=True)
    ]
    return PackedBatch(block_tables=tables, starts=list(starts), counts=list(counts))


def _cache(stage, kv_bits=None):
    return KVCache(
        kv_shapes(stage.config, 0, len(stage.layers)),
        0,
        num_blocks=SLOTS * blocks_of(TOKENS),
        dtype=torch.float32,
        kv_bits=kv_bits,
    )


def _graphs(stage, cache, rows=2, capture=None):
    """Graphs of all decode steps of so many rows, captured before the cache has any tokens."""
    graphs = DecodeGraphs(stage, cache, capture=capture or RecordedCapture())
    graphs.capture(DecodeSizes(rows=rows, most_tokens=256).shapes(), 256)
    return graphs


def _prefilled(stage, starts, kv_bits=None, **options):
    """Two caches with the same tokens in every row, and graphs on the second one."""
    caches = [_cache(stage, kv_bits) for _ in range(2)]
    graphs = _graphs(stage, caches[1], **options)
    torch.manual_seed(0)
    prompt = torch.randn(1, sum(starts), stage.config.hidden_size)
    for cache in caches:
        stage(prompt, _batch(range(len(starts)), [0] * len(starts), starts), cache)
    return caches, graphs


def _ties(stage, caches):
    """Whether a code of the caches differs: a number near a tie may be rounded either way.

    Codes differ by one at most; the second cache gets those of the first.
    """
    found = False
    for layer in range(len(stage.layers)):
        first, second = (cache.heads_of(layer) for cache in caches)
        for codes, scales in (("keys", "key_scales"), ("values", "value_scales")):
            if getattr(first, scales) is None:
                continue
            one, other = getattr(first, codes), getattr(second, codes)
            assert (one.int() - other.int()).abs().max() <= 1
            torch.testing.assert_close(
                getattr(second, scales), getattr(first, scales), atol=0, rtol=2**-7
            )
            found = found or not torch.equal(one, other)
            for name in (codes, scales):
                getattr(second, name).copy_(getattr(first, name))
    return found


def _compare(stage, caches, graphs, steps):
    """Every step by graphs and by layers; ``steps`` are lists of (slot, tokens it has).

    Steps in which a code is rounded the other way are not compared: most are not of these.
    """
    torch.manual_seed(1)
    ties = 0
    for rows in steps:
        slots, starts = zip(*rows, strict=True)
        batch = _batch(slots, starts, [1] * len(rows))
        hidden = torch.randn(1, len(rows), stage.config.hidden_size)
        expected = stage(hidden, batch, caches[0])
        found = graphs.forward(hidden, batch)
        if _ties(stage, caches):
            ties += 1
        else:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert ties <= len(steps) // 2


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_graphs_read_the_blocks_of_windows(tiny_model, family):
    """The last block of a slot stands for the first one, which the window has left."""
    stage = load_stage(tiny_model(family, seed=1, sliding_window=6), 0, 3)
    shapes, blocks = kv_shapes(stage.config, 0, 3), 2 * blocks_of(TOKENS)

    def batch(starts, counts):
        found = _batch(range(2), starts, counts)
        tables = [slot_blocks(slot, TOKENS, TOKENS) for slot in range(2)]
        windows = [
            tuple(tables[slot][place % 9] for place in range(len(table)))
            for slot, table in enumerate(found.block_tables)
        ]
        return replace(found, window_tables=windows)

    caches = [
        KVCache(shapes, 0, num_blocks=blocks, num_window_blocks=blocks, dtype=torch.float32)
        for _ in range(2)
    ]
    graphs = _graphs(stage, caches[1])
    torch.manual_seed(0)
    prompt = torch.randn(1, 2 * 130, stage.config.hidden_size)
    for cache in caches:
        stage(prompt, batch([0, 0], [130, 130]), cache)
    for step in range(40):
        hidden = torch.randn(1, 2, stage.config.hidden_size)
        now = batch([130 + step] * 2, [1, 1])
        expected = stage(hidden, now, caches[0])
        torch.testing.assert_close(graphs.forward(hidden, now), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_bits", [None, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_compute_what_the_layers_do(tiny_model, family, kv_bits):
    """Between the steps other tensors come and go, larger ones are read, and sequences end.

    A replay whose memory from outside the capture is gone, or lies elsewhere, fails.
    """
    stage = load_stage(tiny_model(family, seed=1, **FAMILIES[family]), 0, 3)
    starts = [9, 2, 15, 1, 126, 30]
    capture = RecordedCapture()
    caches, graphs = _prefilled(stage, starts, kv_bits, capture=capture)
    assert graphs.shapes == (1, 2)
    # Neighbours, scattered, fewer rows than a full micro-batch, and across blocks.
    for step in range(4):
        at = [start + step for start in starts]
        graph_steps = [[(0, at[0]), (1, at[1])], [(5, at[5]), (2, at[2])], [(4, at[4])]]
        _compare(stage, caches, graphs, graph_steps)
        _compare(stage, caches, graphs, [[(3, at[3]), (4, at[4]), (0, at[0])]])  # by the layers
    assert capture.replayed >= 3 * 4 * 2  # positions and masks, then the layers


@pytest.mark.parametrize("kv_bits", [None, 8])
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_any_rows_in_any_blocks(tiny_model, kv_bits, data):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    lengths = data.draw(st.lists(st.integers(1, 140), min_size=SLOTS, max_size=SLOTS))
    rows = data.draw(st.integers(1, SLOTS))
    caches, graphs = _prefilled(stage, lengths, kv_bits, rows=rows)
    steps = []
    for _ in range(6):
        slots = data.draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=6, unique=True))
        steps.append([(slot, lengths[slot]) for slot in slots])
        for slot in slots:
            lengths[slot] += 1
    _compare(stage, caches, graphs, steps)


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_kept_graphs_use_the_memory_that_there_is_after_larger_steps(
    tiny_model, monkeypatch, kv_bits
):
    """Every address that a graph has seen is that of now, or the replay fails.

    As on a GPU, uncaptured steps read the blocks in place, too.
    """
    monkeypatch.setattr(KVCache, "attends", False)
    monkeypatch.setattr(KVCache, "attends_rows", True)
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    caches, graphs = _prefilled(stage, [130] * SLOTS, kv_bits)
    for at in range(130, 133):
        together = [(slot, at) for slot in range(1, SLOTS)]
        assert len(together) > graphs.shapes[-1]
        _compare(stage, caches, graphs, [[(0, at)], together])


def test_the_capture_of_these_tests_sees_memory_that_was_given_away():
    memory = [torch.ones(4)]
    replay = RecordedCapture()(lambda: memory[0].add_(1))
    replay()
    assert memory[0].tolist() == [4.0] * 4  # before the capture, in it, and replayed
    memory[0] = torch.ones(8)
    with pytest.raises(GivenAwayError):
        replay()


def test_a_missing_row_leaves_other_blocks_alone(tiny_model):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    caches, graphs = _prefilled(stage, [5, 6, 7, 8, 9, 10], rows=4)
    _compare(stage, caches, graphs, [[(4, 9 + i), (1, 6 + i), (5, 10 + i)] for i in range(3)])
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
    capture = RecordedCapture()
    caches, graphs = _prefilled(stage, [5, 6], capture=capture)
    # Positions and masks, the first layer, the last; the one between them asks the host.
    assert capture.made == 3 * len(graphs.shapes)
    before = capture.replayed
    _compare(stage, caches, graphs, [[(0, 5 + i), (1, 6 + i)] for i in range(4)])
    assert capture.replayed - before == 4 * 3


def test_what_only_a_first_call_asks_the_host_keeps_no_layer_from_its_graph(tiny_model):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    mlp, tried = stage.layers[1].mlp.forward, []

    def tries(x):
        if not tried:
            tried.append(x.sum().item())
        return mlp(x)

    stage.layers[1].mlp.forward = tries
    assert _graphs(stage, _cache(stage))._waits == [False] * 3


@pytest.mark.parametrize(
    "error", [RuntimeError("operation not permitted"), ValueError("out of resource: registers")]
)
def test_a_capture_that_fails_is_told_once_and_harms_nothing(tiny_model, caplog, error):
    """Triton's errors are not RuntimeErrors."""
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)

    def fail(work):
        raise error

    with caplog.at_level(logging.WARNING, "llmpq"):
        caches, graphs = _prefilled(stage, [5, 6], capture=fail)
        _compare(stage, caches, graphs, [[(0, 5 + i), (1, 6 + i)] for i in range(3)])
    assert [record.getMessage() for record in caplog.records] == [
        f"decoding continues without CUDA graphs: {type(error).__name__}: {error}"
    ]
    assert graphs.shapes == ()


SIZES = DecodeSizes(rows=4, most_tokens=256)


class _Rows(RecordedCapture):
    """Sees the rows of each capture first."""

    def __call__(self, work):
        if isinstance(getattr(work, "__self__", None), _Graph):
            self.see(work.__self__.rows)
        return super().__call__(work)


def test_the_largest_shape_is_captured_first(tiny_model):
    """In ascending order the pool would hold the temporaries of every shape side by side."""
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    seen, capture = [], _Rows()
    capture.see = seen.append
    _graphs(stage, _cache(stage), rows=SIZES.rows, capture=capture)
    assert seen == [4, 2, 1]


def test_a_shape_that_runs_out_of_memory_is_left_out(tiny_model, caplog):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    capture = _Rows()

    def see(rows):
        if rows > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    capture.see = see
    with caplog.at_level(logging.WARNING, "llmpq"):
        caches, graphs = _prefilled(stage, [5, 6], capture=capture)
        _compare(stage, caches, graphs, [[(0, 5), (1, 6)], [(0, 6)]])
    assert graphs.shapes == (1,)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("costs", "kept"),
    [
        ([0, 0, 0, 0, 0, 0], (1, 2, 4)),
        ([0, 50, 0, -50, 0, 0], (1, 2)),  # the largest leaves too little
        ([0, 30, 0, 30, 0, 0], (4,)),  # what the second one adds is too much
    ],
)
def test_graphs_leave_the_memory_that_other_steps_need(tiny_model, costs, kept):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    graphs = DecodeGraphs(stage, _cache(stage), capture=RecordedCapture(room=100, costs=costs))
    graphs.capture(SIZES.shapes(), SIZES.most_tokens, reserve_bytes=60)
    assert graphs.shapes == kept


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma2"])
def test_the_memory_of_graphs_does_not_grow_with_the_sequences(tiny_model, monkeypatch, family):
    """Only their tables do: four bytes for each block of a row."""
    decode_attention.use_without_kernels(monkeypatch)
    stage = load_stage(tiny_model(family, seed=1, **FAMILIES[family]), 0, 3)
    held = []
    for most_tokens in (64, 1024, 8192):
        capture = RecordedCapture()
        graphs = DecodeGraphs(stage, _cache(stage), capture=capture)
        graphs.capture([4], most_tokens)
        held.append((capture.pool_bytes, graphs._graphs[0]._tables.nbytes))
    pools, tables = zip(*held, strict=True)
    assert len({*pools}) == 1
    assert tables == tuple(64 + 4 * 4 * max(16, most // 16) for most in (64, 1024, 8192))


def test_rows_that_write_to_one_block_are_refused_before_anything_is_written(tiny_model):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    capture = RecordedCapture()
    graphs = _graphs(stage, _cache(stage), capture=capture)
    before = capture.replayed
    hidden = torch.zeros(1, 2, stage.config.hidden_size)
    short = PackedBatch(block_tables=[(0,), (1,)], starts=[16, 16], counts=[1, 1])
    for batch, error in ((_batch([0, 0], [3, 3], [1, 1]), StageError), (short, CapacityError)):
        with pytest.raises(error, match="KV cache"):
            graphs.forward(hidden, batch)
    assert capture.replayed == before


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_pipeline_gives_the_same_tokens(tiny_model, monkeypatch, family):
    plan = make_plan((0, 1, 3), prefill=2, decode=2, new_tokens=9)
    model_dir = tiny_model(family, seed=3)
    requests = [
        Request(id=number, prompt_token_ids=(number + 1,) * 3, max_new_tokens=9 - 2 * (number % 3))
        for number in range(6)
    ]
    expected, _ = run_threads(plan, model_dir, requests)
    capture = CalledAgain()

    def graphs(layers, cache):
        return DecodeGraphs(layers, cache, capture=capture)

    monkeypatch.setattr("llmpq.dist.launch.rank.step_runner_of", graphs)
    found, _ = run_threads(plan, model_dir, requests)
    assert found == expected
    assert len(found) == len(requests)
    assert capture.replayed > 2 * 8  # both stages, most of the steps


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
        tables = torch.zeros(2, 4, dtype=torch.int32, device="meta")
        positions = torch.zeros(2, dtype=torch.int32, device="meta")

        def step():
            view = cache.view_of_tensors(tables, positions)
            arguments = stage.decode_arguments(hidden, positions, view)
            current = hidden
            for index in range(3):
                current = stage.run_layer(index, current, arguments[index])
            assert current.shape == hidden.shape

        step()  # constants are brought over once
        assert host_syncs(step) == []


@given(st.integers(1, 3000))
def test_shapes_hold_all_steps_in_few_graphs(rows):
    shapes = DecodeSizes(rows=rows, most_tokens=100).shapes()
    assert len(shapes) <= MOST_GRAPHS
    assert list(shapes) == sorted({*shapes})
    assert {1, rows} <= {*shapes}
    for count in range(1, rows):
        rounded = next(shape for shape in shapes if shape >= count)
        assert rounded < max(min(2 * count, count + 8), count * 9 / 8)


def test_there_are_none_on_a_cpu(tiny_model):
    stage = load_stage(tiny_model("llama", seed=1), 0, 3)
    assert graphs_of(stage, _cache(stage)) is None


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
