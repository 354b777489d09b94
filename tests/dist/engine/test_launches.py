"""How many kernels a decode step launches for a layer, counted over the code that a GPU runs.

The layers have no memory (meta device): operators of torch are counted as they are dispatched, and
Triton's kernels where they would be launched. The table is in ``docs/operations/gpu.md``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from helpers.launches import counted, quantize_without_memory, use_kernels_of_a_gpu
from torch import nn
from transformers import AutoConfig

from llmpq.dist.engine.compiled_steps import _form_of, _parts_of
from llmpq.dist.kv.cache import KVCache
from llmpq.models import DecoderStage, kv_shapes
from llmpq.models.adapter import Skeleton
from llmpq.models.attention import ScoreOptions
from llmpq.quant.modules.fused_layer import FusedLayer

DTYPE = torch.bfloat16
MOST = 12
"""Kernels of a layer in a captured decode step, at any bitwidth."""
PRODUCTS = 4
BETWEEN = (
    "add_norm_kernel", "rotate_store_kernel", "paged_decode_kernel", "join_splits_kernel",
    "add_norm_kernel", "gate_kernel", "add_norm_kernel",
)  # fmt: skip
"""What runs between the products, in order."""
FAMILIES = {"Llama": "llama", "Qwen3": "qwen3"}
WIDTHS = [(bits, kv_bits) for bits in (16, 8, 4, 3) for kv_bits in (None, 8)]
PAGE = Path(__file__).parents[3] / "docs" / "operations" / "gpu.md"


def _layer_of_8b(family, bits):
    """A layer of the sizes of Llama 3 8B; its norms alone have numbers."""
    config = AutoConfig.for_model(
        family, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, num_hidden_layers=1, vocab_size=8,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    layer = Skeleton.of(config).build_layer(config, 0).to(DTYPE)
    quantize_without_memory(layer, bits)
    return DecoderStage(config, [layer], 0)


def _fuse(stage, cache):
    layer, parts = stage.layers[0], _parts_of(stage, 0, _form_of(stage, 0))
    for name, part in layer.named_modules():
        if "norm" in name:
            part.to_empty(device="cpu")
            nn.init.ones_(part.weight)
    options = ScoreOptions(scaling=0.1)
    fused = FusedLayer(layer, parts, options, cache.heads_of(0), layer_idx=0, dtype=DTYPE)
    fused.join()
    stage.layers[0] = fused


def _count(monkeypatch, family, bits, kv_bits, *, rows, is_fused):
    """Launches of a layer in a decode step."""
    triton = use_kernels_of_a_gpu(monkeypatch)
    stage = _layer_of_8b(family, bits)
    with torch.inference_mode():
        cache = KVCache(
            kv_shapes(stage.config, 0, 1), 0, num_blocks=64, dtype=DTYPE, device="meta",
            kv_bits=kv_bits,
        )  # fmt: skip
        if is_fused:
            _fuse(stage, cache)
        stage.rotary.to("meta")
        hidden = torch.empty(1, rows, 4096, dtype=DTYPE, device="meta")
        tables = torch.zeros(rows, 16, dtype=torch.int32, device="meta")
        view = cache.view_of_tensors(tables, tables[:, 0])
        arguments = stage.decode_arguments(hidden, tables[:, 0], view)
        return counted(lambda: stage.run_layer(0, hidden, arguments[0]), triton)


@pytest.mark.parametrize("rows", [1, 16, 48])
@pytest.mark.parametrize(("bits", "kv_bits"), WIDTHS)
@pytest.mark.parametrize("family", FAMILIES.values())
def test_a_fused_layer_launches_few_kernels(monkeypatch, family, bits, kv_bits, rows):
    found = _count(monkeypatch, family, bits, kv_bits, rows=rows, is_fused=True)
    assert len(found) <= MOST
    own = tuple(name for name in found.kernels if name != "matrix_kernel")
    assert own == BETWEEN
    # Every other launch is a product: none copies, casts or adds.
    products = [*found.operators, *(name for name in found.kernels if name == "matrix_kernel")]
    expected = {16: "mm", 4: "_weight_int4pack_mm"}.get(bits, "matrix_kernel")
    assert products == [expected] * PRODUCTS


def _numbers(text):
    return [int(number) for number in re.findall(r"[0-9]+", text)]


@pytest.mark.parametrize(("place", "family"), [*enumerate(FAMILIES, 1)])
def test_the_page_has_the_numbers(monkeypatch, place, family):
    """Of the code of transformers, least and most over widths of weights, keys and values."""
    rows = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("|")
    ]
    (heading,) = (row for row in rows if row[0].startswith("kernels of a layer"))
    assert heading[place] == family
    for start, is_fused in (("transformers", False), ("fused", True)):
        (row,) = (row for row in rows if row[0].startswith(start))
        found = {
            len(_count(monkeypatch, FAMILIES[family], *width, rows=16, is_fused=is_fused))
            for width in WIDTHS
        }
        assert _numbers(row[place]) == sorted({min(found), max(found)})
