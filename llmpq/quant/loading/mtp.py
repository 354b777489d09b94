"""Loads a model's layer for multi-token prediction, and what is around it."""

from __future__ import annotations

from pathlib import Path

import torch

from llmpq.models import DecoderStage, MtpCheckpoint, MtpEnds
from llmpq.quant.loading.loader import load_stage, use_huge_pages
from llmpq.quant.loading.weight_cache import WeightCache
from llmpq.quant.modules.layer import quantize_layer_


def load_mtp(
    model_dir: Path | str,
    bits: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str | None = None,
    weight_cache: WeightCache | None = None,
) -> tuple[DecoderStage, MtpEnds]:
    """Load the layer, and what is around it.

    Args:
        model_dir: directory of the weights.
        bits: 3, 4, 8 or 16, of the layer and of the projection before it.
        dtype: as for :func:`load_stage`.
        device: likewise.
        backend: likewise.
        weight_cache: likewise, of the layer.

    Raises:
        SpecError: as :func:`load_stage`, or the checkpoint has no such layer.
    """
    checkpoint = MtpCheckpoint(model_dir)
    layer = load_stage(
        model_dir,
        checkpoint.layer,
        checkpoint.layer + 1,
        [bits],
        dtype=dtype,
        device=device,
        backend=backend,
        weight_cache=weight_cache,
        checkpoint=checkpoint,
    )
    ends = MtpEnds(checkpoint.config, checkpoint.skeleton)
    sources = checkpoint.head_sources(ends)
    state = {key: checkpoint.tensors.load(one).to(device, dtype) for key, one in sources.items()}
    ends.load_state_dict(state, assign=True)
    with torch.no_grad():
        quantize_layer_(ends, bits, dtype, backend=backend)
    use_huge_pages(ends)
    return layer, ends
