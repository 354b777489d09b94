"""A stage loaded on the fly is the model quantized in one piece, in memory for two layers more."""

import itertools
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import load_reference

from llmpq.errors import SpecError
from llmpq.models import MicroBatch
from llmpq.quant import QuantLinear, quantize_layer_, stored_bytes
from llmpq.quant.loader import load_master, load_stage

torch.set_num_threads(1)

SHAPE = {"layers": 4, "hidden": 64, "intermediate": 256, "heads": 4, "kv_heads": 2}
BITS = [4, 16, 3, 8]
FAMILIES = ["llama", "opt", "bloom", "mixtral", "qwen3_moe"]


def decoder_layers(model):
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return lists[0]


def run_in_stages(model_dir, token_ids, cuts, bits):
    """Logits of the last token, from ``load_master`` and one stage between each two cuts."""
    master = load_master(model_dir, dtype=torch.float32, device="cpu")
    rows, width = token_ids.shape
    batch = MicroBatch.build(range(rows), [0] * rows, [width] * rows)
    hidden = master.embed(token_ids, batch.positions)
    for first, end in itertools.pairwise(cuts):
        stage = load_stage(
            model_dir, first, end, bits[first:end], dtype=torch.float32, device="cpu"
        )
        hidden = stage(hidden, batch)
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


def test_progress_is_told_after_every_layer(tiny_model):
    told = []
    load_stage(
        tiny_model("opt", seed=1, shape=SHAPE),
        1,
        3,
        [16, 4],
        dtype=torch.float32,
        device="cpu",
        progress=lambda *seen: told.append(seen),
    )
    assert told == [(1, 2, "layer 1 at w16"), (2, 2, "layer 2 at w4-rtn-g128-asym")]


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
def test_impossible_stages_are_refused(tiny_model, first, end, bits, message):
    model_dir = tiny_model("opt", seed=1, shape=SHAPE)
    with pytest.raises(SpecError, match=message):
        load_stage(model_dir, first, end, bits, dtype=torch.float32, device="cpu")


def test_weights_do_not_hang_on_the_file(tiny_model, tmp_path):
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


class PeakMemory:
    """Highest private memory of this process while the block runs, sampled every millisecond."""

    def __enter__(self):
        self._stop = threading.Event()
        self.start_bytes = self.peak_bytes = _private_bytes()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _sample(self):
        while not self._stop.is_set():
            self.peak_bytes = max(self.peak_bytes, _private_bytes())
            time.sleep(0.001)


def _private_bytes():
    # Pages of the checkpoint mapped from its file can be dropped at any time, and do not count.
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_the_result_and_two_layers(tiny_model):
    shape = {"layers": 8, "hidden": 1024, "intermediate": 2816, "heads": 8, "kv_heads": 8}
    model_dir = tiny_model("llama", shape=shape, dtype=torch.bfloat16)
    settings = {"dtype": torch.bfloat16, "device": "cpu"}
    one = stored_bytes(load_stage(model_dir, 0, 1, [16], **settings))
    load_stage(model_dir, 0, 1, [4], **settings)  # whatever a first call allocates for good
    with PeakMemory() as memory:
        stage = load_stage(model_dir, 0, 8, [4] * 8, **settings)
    grown = memory.peak_bytes - memory.start_bytes
    final = stored_bytes(stage)
    assert final < 8 * one / 3
    assert grown < final + 2 * one
