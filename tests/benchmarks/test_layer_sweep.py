"""A layer sweep compared with a full run of the model for every replacement."""

from __future__ import annotations

import pytest
import torch

from benchmarks.layer_sweep import sweep_layers
from llmpq.errors import SpecError
from llmpq.evals.evaluate import LayerSource, perplexity_and_kl, stream_hidden
from llmpq.evals.windows import Windows
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master

pytestmark = pytest.mark.nightly

torch.set_num_threads(1)

CPU = torch.device("cpu")
WINDOWS = Windows.cut([(7 * i) % 61 for i in range(50)], window=9, rows=2)


def _stage(model_dir, first, end, bits, dtype=torch.float32):
    return load_stage(model_dir, first, end, [bits] * (end - first), dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["opt", "llama", "bloom"])
def test_sweep_equals_full_runs(tiny_model, family, dtype):
    model_dir = tiny_model(family, seed=1)
    master = load_master(model_dir, dtype=dtype, device="cpu")
    changes = {(0, 4): (4, 16, 16), (1, 3): (16, 3, 16), (2, 8): (16, 16, 8)}
    replacements = {(i, bits): _stage(model_dir, i, i + 1, bits, dtype) for i, bits in changes}
    replacements["two"] = _stage(model_dir, 1, 3, 4, dtype)
    changes["two"] = (16, 4, 4)
    found = sweep_layers(_stage(model_dir, 0, 3, 16, dtype), replacements, master, WINDOWS)

    def run(bits):
        source = LayerSource(model_dir=model_dir, bits=bits, dtype=dtype, device=CPU)
        return stream_hidden(source, master, WINDOWS)

    reference = run((16, 16, 16))
    assert found.base == perplexity_and_kl(master, WINDOWS, reference, reference)
    for key, bits in changes.items():
        assert found.changed[key] == perplexity_and_kl(master, WINDOWS, run(bits), reference)
        assert found.changed[key].kl_to_16bit > 0


def test_quantized_base_is_compared_with_the_reference(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    master = load_master(model_dir, dtype=torch.float32, device="cpu")
    base, reference = _stage(model_dir, 0, 3, 4), _stage(model_dir, 0, 3, 16)
    whole = _stage(model_dir, 0, 3, 16)
    steps = []
    found = sweep_layers(
        base,
        {"back": whole},
        master,
        WINDOWS,
        reference=reference,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert found.base.kl_to_16bit > 0
    assert found.changed["back"].kl_to_16bit == 0
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_sweep_rejects_a_part_of_the_model_as_base(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    master = load_master(model_dir, dtype=torch.float32, device="cpu")
    with pytest.raises(SpecError, match=r"found layers \[0, 2\) as the base, expected all 3"):
        sweep_layers(_stage(model_dir, 0, 2, 16), {}, master, WINDOWS)
    part = _stage(model_dir, 0, 2, 16)
    with pytest.raises(SpecError, match=r"\[0, 2\) as the reference"):
        sweep_layers(_stage(model_dir, 0, 3, 16), {}, master, WINDOWS, reference=part)
