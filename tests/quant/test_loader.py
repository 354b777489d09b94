"""A loaded stage equals the model quantized in one piece, in memory for two layers more."""

import gc
import itertools
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import load_reference
from safetensors.torch import load_file, save_file

from llmpq.errors import SpecError
from llmpq.kernels import registry
from llmpq.kernels.cpu import native
from llmpq.models import Checkpoint
from llmpq.quant import (
    QuantLinear,
    quantize_layer_,
    stored_bytes,
)
from llmpq.quant.loading import loader, weight_cache
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.quant.loading.weight_cache import WeightCache, entry_layout
from llmpq.quant.modules.layer import matrices_of
from llmpq.quant.quantizers import rtn
from llmpq.spec.precision import default_precision, linear_bytes

torch.set_num_threads(1)

SHAPE = {"layers": 4, "hidden": 64, "intermediate": 256, "heads": 4, "kv_heads": 2}
BITS = [4, 16, 3, 8]
FAMILIES = ["llama", "opt", "bloom", "mixtral", "qwen3_moe"]


def decoder_layers(model):
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return lists[0]


def run_in_stages(model_dir, token_ids, cuts, bits):
    """Return the logits of the last token, from a master and the stages between the cuts."""
    master = load_master(model_dir, dtype=torch.float32, device="cpu")
    rows, width = token_ids.shape
    hidden = master.embed(token_ids, torch.arange(width).expand(rows, -1))
    for first, end in itertools.pairwise(cuts):
        stage = load_stage(
            model_dir, first, end, bits[first:end], dtype=torch.float32, device="cpu"
        )
        hidden = stage.run_whole(hidden)
    return master.logits(hidden[:, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_equal_the_model_quantized_in_one_piece(tiny_model, family):
    model_dir = tiny_model(family, seed=1, shape=SHAPE)
    token_ids = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(0))
    model = load_reference(model_dir)
    with torch.inference_mode():
        plain = model(token_ids).logits[:, -1]
        for layer, bits in zip(decoder_layers(model), BITS, strict=True):
            quantize_layer_(layer, bits, torch.float32)
        expected = model(token_ids).logits[:, -1]
    found = run_in_stages(model_dir, token_ids, [0, 1, 4], BITS)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (found - plain).abs().max() > 1e-3  # the bits did something


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_gets_its_own_bits(tiny_model, dtype):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    stage = load_stage(model_dir, 0, 4, BITS, dtype=dtype, device="cpu")
    for layer, bits in zip(stage.layers, BITS, strict=True):
        linear = layer.self_attn.q_proj
        assert (linear.precision.bits if isinstance(linear, QuantLinear) else 16) == bits
    assert all(p.dtype == dtype for p in stage.layers.parameters())


def test_stages_are_slices_of_the_whole(tiny_model):
    model_dir = tiny_model("opt", seed=1, shape=SHAPE)
    whole = load_stage(model_dir, 0, 4, BITS, dtype=torch.float32, device="cpu")
    part = load_stage(model_dir, 2, 4, BITS[2:], dtype=torch.float32, device="cpu")
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    for mine, theirs in zip(part.layers, whole.layers[2:], strict=True):
        assert torch.equal(mine.fc1(x), theirs.fc1(x))


def test_progress_is_called_after_every_layer(tiny_model):
    calls = []
    load_stage(
        tiny_model("opt", seed=1, shape=SHAPE),
        1,
        3,
        [16, 4],
        dtype=torch.float32,
        device="cpu",
        progress=lambda *seen: calls.append(seen),
    )
    assert calls == [(1, 2, "layer 1 at w16"), (2, 2, "layer 2 at w4-rtn-g128-asym")]


@pytest.mark.parametrize(
    ("first", "end", "bits", "message"),
    [
        (0, 5, [16] * 5, r"expected a part of \[0, 4\)"),
        (2, 2, [], r"found layers \[2, 2\)"),
        (-1, 1, [16, 16], r"found layers \[-1, 1\)"),
        (0, 2, [16], "found 1 bitwidths, expected 2"),
        (0, 2, [16, 5], "found 5 bits"),
    ],
)
def test_impossible_stages_are_errors(tiny_model, first, end, bits, message):
    model_dir = tiny_model("opt", seed=1, shape=SHAPE)
    with pytest.raises(SpecError, match=message):
        load_stage(model_dir, first, end, bits, dtype=torch.float32, device="cpu")


def test_weights_do_not_depend_on_the_file_once_loaded(tiny_model, tmp_path):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    for file in tiny_model("llama", seed=1, shape=SHAPE).iterdir():
        (model_dir / file.name).write_bytes(file.read_bytes())
    stage = load_stage(model_dir, 0, 1, [16], dtype=torch.float32, device="cpu")
    before = stage.layers[0].self_attn.q_proj.weight.clone()
    weights = model_dir / "model.safetensors"
    with weights.open("r+b") as file:
        file.write(b"\0" * weights.stat().st_size)
    assert torch.equal(stage.layers[0].self_attn.q_proj.weight, before)


@pytest.fixture
def own_model(tiny_model, tmp_path):
    """Return a copy of a model that the test may damage."""
    copy = shutil.copytree(tiny_model("llama", seed=1, shape=SHAPE), tmp_path / "model")
    written_ns = (copy / "model.safetensors").stat().st_ctime_ns
    while time.time_ns() - written_ns < 30_000_000:  # a file younger than this is not stored
        time.sleep(0.005)
    return copy


@pytest.fixture
def cache(tmp_path):
    return WeightCache.opened(tmp_path / "store", 2**30)


def load_cached(model_dir, cache, first=0, end=4, bits=BITS, dtype=torch.float32, backend=None):
    """Return a stage, and which of its layers came from the cache."""
    cached = []

    def report(done, total, text):
        cached.append("from the store" in text)

    part = bits[first:end]
    stage = load_stage(
        model_dir,
        first,
        end,
        part,
        dtype=dtype,
        device="cpu",
        progress=report,
        weight_cache=cache,
        backend=backend,
    )
    return stage, cached


def weights_of(stage):
    """Return every quantized matrix in its kernel's layout."""
    modules = stage.named_modules()
    return {name: m._weight.tensors for name, m in modules if isinstance(m, QuantLinear)}


def same_weights(one, other):
    mine, theirs = weights_of(one), weights_of(other)
    assert mine.keys() == theirs.keys()
    assert mine
    return all(all(map(torch.equal, mine[name], theirs[name])) for name in mine)


def output_of(stage):
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    return stage.run_whole(x)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_second_start_quantizes_nothing(tiny_model, cache, family):
    model_dir = tiny_model(family, seed=1, shape=SHAPE)
    first, cached = load_cached(model_dir, cache)
    assert cached == [False] * 4
    second, cached = load_cached(model_dir, cache)
    assert cached == [True, False, True, True]  # the layer of 16 bits is read, not quantized
    assert torch.equal(output_of(first), output_of(second))
    assert same_weights(first, second)


@pytest.mark.skipif(rtn.library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_quantized_in_blocks_equals_one_quantized_whole(tiny_model, monkeypatch, dtype):
    model_dir = tiny_model("llama", seed=1, shape=SHAPE)
    whole, _ = load_cached(model_dir, None, dtype=dtype)
    monkeypatch.setattr(loader, "BLOCK_WEIGHTS", 2000)
    blocks, _ = load_cached(model_dir, None, dtype=dtype)
    assert same_weights(whole, blocks)


@pytest.mark.parametrize(("writer", "reader"), [("reference", None), (None, "reference")])
def test_kernels_of_tiles_and_of_rows_have_entries_of_their_own(own_model, cache, writer, reader):
    load_cached(own_model, cache, backend=writer)
    found, _ = load_cached(own_model, cache, backend=reader)
    expected, _ = load_cached(own_model, None, backend=reader)
    assert same_weights(found, expected)
    for backend in (writer, reader):
        again, cached = load_cached(own_model, cache, backend=backend)
        assert cached == [True, False, True, True]
        if backend == reader:
            assert same_weights(again, expected)


def test_without_a_compiler_layers_are_cached_as_well(own_model, cache, monkeypatch):
    first, _ = load_cached(own_model, cache)
    expected = output_of(first)
    for module in (registry, native, rtn):
        monkeypatch.setattr(module, "library", lambda: None)
    second, _ = load_cached(own_model, cache)
    third, cached = load_cached(own_model, cache)
    assert cached == [True, False, True, True]
    assert same_weights(second, third)
    kernels = {m.backend_name for m in third.modules() if isinstance(m, QuantLinear)}
    assert not kernels & {"cpu_packed", "cpu_llm_int8"}
    assert (expected - output_of(third)).abs().max() < 1e-4


@pytest.mark.parametrize("place", [0.5, 0.999])
def test_a_damaged_entry_is_deleted_and_its_layer_quantized_again(own_model, cache, caplog, place):
    expected, _ = load_cached(own_model, cache)
    for path in cache.directory.iterdir():
        content = bytearray(path.read_bytes())
        content[int(len(content) * place)] ^= 4
        path.write_bytes(content)
    found, cached = load_cached(own_model, cache)
    assert not any(cached)
    assert same_weights(found, expected)
    assert caplog.text.count("will be quantized again") == 3
    again, cached = load_cached(own_model, cache)
    assert cached == [True, False, True, True]
    assert same_weights(again, expected)


def maps_of(directory):
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if str(directory) in line}


def test_cached_tiles_are_mapped_for_as_long_as_they_are_used(own_model, cache):
    load_cached(own_model, cache)
    stage, _ = load_cached(own_model, cache)
    entries = {str(path) for path in cache.directory.iterdir()}
    assert maps_of(cache.directory) == entries
    expected = output_of(stage)
    for path in cache.directory.iterdir():
        path.unlink()
    assert torch.equal(output_of(stage), expected)
    del stage
    gc.collect()
    assert not maps_of(cache.directory)


def test_entries_that_cannot_be_mapped_are_not_used(own_model, cache, monkeypatch, caplog):
    def fail(*_, **__):
        raise OSError("no such device")

    first, _ = load_cached(own_model, cache)
    monkeypatch.setattr(weight_cache, "_map_entry", fail)
    second, cached = load_cached(own_model, cache)
    assert not any(cached)
    assert "cannot read" in caplog.text
    assert same_weights(first, second)


def test_tiles_of_a_layer_begin_at_cache_lines_and_nothing_lies_between(tiny_model):
    matrices = matrices_of(Checkpoint(tiny_model("llama", shape=SHAPE)).empty_layer(0))
    for bits in (3, 4, 8):
        precision = default_precision(bits)
        names = frozenset(matrix.name for matrix in matrices)
        layout = entry_layout(matrices, precision, torch.bfloat16, names)
        begins = [begin for name, (begin, _) in layout.places.items() if name.endswith(".tiles")]
        assert len(begins) == len(matrices)
        assert {begin % 64 for begin in begins} == {0}
        held = sum(linear_bytes(m.out_features, m.in_features, precision, 2) for m in matrices)
        assert layout.file_bytes - layout.checksums[1] == held


def test_another_plan_finds_the_layers_it_shares(own_model, cache):
    load_cached(own_model, cache)
    _, cached = load_cached(own_model, cache, 2, 4, [0, 0, 4, 8])
    assert cached == [False, True]
    _, cached = load_cached(own_model, cache, dtype=torch.bfloat16)
    assert cached == [False] * 4  # scales of another dtype are other scales


def test_changed_weights_are_quantized_again(own_model, cache):
    before, _ = load_cached(own_model, cache)
    path = own_model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.up_proj.weight"].neg_()
    save_file(tensors, path, metadata={"format": "pt"})
    after, cached = load_cached(own_model, cache)
    assert not any(cached)
    assert not torch.equal(output_of(before), output_of(after))


def test_weights_that_cannot_be_quantized_are_named_and_leave_no_entry(own_model, cache):
    path = own_model / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(SpecError, match=r"layers\.0\.mlp\.up_proj\.weight.*finite"):
        load_cached(own_model, cache)
    assert list(cache.directory.iterdir()) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("load-")]


def has_storage(tensor):
    return not tensor.is_meta and not tensor.is_mkldnn


class LiveTensors:
    """Measures the peak bytes of the tensors that are made inside the block."""

    def __enter__(self):
        gc.collect()
        gc.freeze()  # what was there before is not looked at again
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        gc.unfreeze()

    def _watch(self):
        while not self._stop.is_set():
            if self._bytes() > self.peak_bytes:
                gc.collect()  # SlipCover leaves cycles with frames that it meets by chance
                self.peak_bytes = max(self.peak_bytes, self._bytes())
            self._stop.wait(0.0005)

    def _bytes(self):
        sizes = {}
        for tensor in gc.get_objects():
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and has_storage(tensor):
                storage = tensor.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
            del tensor
        return sum(sizes.values())


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_peak_of_live_tensors_is_the_result_and_two_layers(tiny_model, bits):
    shape = {"layers": 8, "hidden": 256, "intermediate": 704, "heads": 4, "kv_heads": 4}
    model_dir = tiny_model("llama", shape=shape, dtype=torch.bfloat16)
    with LiveTensors() as live:
        stage = load_stage(model_dir, 0, 8, [bits] * 8, dtype=torch.bfloat16, device="cpu")
    one = 2 * (4 * 256 * 256 + 3 * 256 * 704)
    assert stored_bytes(stage) / 2 < live.peak_bytes < stored_bytes(stage) + 2 * one


@pytest.mark.slow
def test_peak_of_large_live_tensors_is_the_result_and_two_layers(tiny_model):
    # Tensors are counted here; the benchmark measures the memory of the process.
    shape = {"layers": 8, "hidden": 1024, "intermediate": 2816, "heads": 8, "kv_heads": 8}
    model_dir = tiny_model("llama", shape=shape, dtype=torch.bfloat16)
    settings = {"dtype": torch.bfloat16, "device": "cpu"}
    one = stored_bytes(load_stage(model_dir, 0, 1, [16], **settings))
    with LiveTensors() as live:
        stage = load_stage(model_dir, 0, 8, [4] * 8, **settings)
    final = stored_bytes(stage)
    assert final < 8 * one / 3
    assert live.peak_bytes < final + 2 * one
