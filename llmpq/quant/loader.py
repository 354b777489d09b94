"""On-the-fly loader: read, cast, quantize and place a checkpoint one decoder layer at a time.

A machine never holds more of the checkpoint in its own format than the layer it is reading, so a
model loads wherever its quantized form and about two layers fit. This module refuses to decide
bitwidths: they come from a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.models import Checkpoint, DecoderStage, Master, build_layer
from llmpq.quant.layer import quantize_layer_
from llmpq.spec.precision import default_precision

Progress = Callable[[int, int, str], None]
"""Called after each layer with the layers done, the layers in all, and what was done."""


def load_stage(  # noqa: PLR0913  what a stage is, and where it goes; a worker has all of it apart
    model_dir: Path | str,
    first_layer: int,
    end_layer: int,
    bits: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
    backend: str | None = None,
) -> DecoderStage:
    """Load decoder layers ``[first_layer, end_layer)``, each at its own bitwidth.

    Args:
        model_dir: directory with ``config.json`` and safetensors weights.
        first_layer: index of the first layer in the whole model.
        end_layer: index after the last.
        bits: 3, 4, 8 or 16 for each of these layers, in order.
        dtype: dtype of the run; what is not quantized is cast to it.
        device: where the layers are quantized and stay.
        progress: called after each layer.
        backend: kernel backend to use wherever it can run; ``None`` leaves it to the registry.

    Raises:
        SpecError: no such layers, a bitwidth missing or unknown, or what ``Checkpoint`` and
            ``quantize_layer_`` refuse.
    """
    checkpoint = Checkpoint(model_dir)
    _check_range(checkpoint, first_layer, end_layer, bits)
    layers: list[nn.Module] = []
    for index, width in zip(range(first_layer, end_layer), bits, strict=True):
        layer = build_layer(checkpoint.config, index)
        _fill(layer, checkpoint.layer_state_dict(index), dtype, device)
        quantize_layer_(layer, width, dtype, backend=backend)
        layers.append(layer)
        if progress is not None:
            progress(len(layers), len(bits), f"layer {index} at {default_precision(width)}")
    return DecoderStage(checkpoint.config, layers, first_layer).to(device)


def load_master(model_dir: Path | str, *, dtype: torch.dtype, device: torch.device | str) -> Master:
    """Load the embeddings, the final norm and the head, in ``dtype``; they are never quantized.

    Raises:
        SpecError: what ``Checkpoint`` refuses.
    """
    checkpoint = Checkpoint(model_dir)
    master = Master(checkpoint.config)
    _fill(master, checkpoint.master_state_dict(), dtype, device)
    return master.to(device)


def _check_range(
    checkpoint: Checkpoint, first_layer: int, end_layer: int, bits: Sequence[int]
) -> None:
    num_layers = checkpoint.config.num_hidden_layers
    if not 0 <= first_layer < end_layer <= num_layers:
        raise SpecError(
            f"stage: found layers [{first_layer}, {end_layer}), "
            f"expected a part of [0, {num_layers}) of {checkpoint.directory}"
        )
    if len(bits) != end_layer - first_layer:
        raise SpecError(
            f"stage [{first_layer}, {end_layer}): found {len(bits)} bitwidths, "
            f"expected {end_layer - first_layer}"
        )
    for width in bits:
        default_precision(width)  # refuses an unknown one before any layer is read


def _fill(
    module: nn.Module, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device | str
) -> None:
    """Move ``state`` into ``module``, built on the meta device; empties ``state``.

    Every tensor is copied, for those just read may still be pages of the file, and a model must
    not change or vanish with its file.
    """
    placed: dict[str, Tensor] = {}
    for name in list(state):
        tensor = state.pop(name)
        target = dtype if tensor.is_floating_point() else tensor.dtype
        placed[name] = tensor.to(device=device, dtype=target, copy=True)
    module.load_state_dict(placed, assign=True)
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if left:
        raise SpecError(f"{type(module).__name__}: buffer '{left[0]}' is neither stored nor known")
