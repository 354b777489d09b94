"""Run a model of any size layer by layer on one host.

Each layer is loaded, applied to all windows and freed before the next one is loaded. Memory holds
one layer and the hidden states of all windows, ``tokens x H`` values.

Shapes: R windows, T tokens of each, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmpq.batching.blocks import blocks_of
from llmpq.dist.kv.cache import KVCache
from llmpq.evals.windows import Windows
from llmpq.models import DecoderStage, Master, kv_shapes
from llmpq.quant.loading.loader import load_stage

Progress = Callable[[int, int], None]
"""Called with the layers done and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """The layers of a checkpoint, one at a time; a plain one is quantized while it is loaded.

    Attributes:
        model_dir: directory with ``config.json`` and safetensors weights, plain or GPTQ.
        bits: bitwidth of every layer; 16 is not quantized, ``None`` is as stored.
        dtype: dtype of the run.
        device: device of the run.
        backend: preferred kernel; ``None`` for the default.
    """

    model_dir: Path
    bits: Sequence[int | None]
    dtype: torch.dtype
    device: torch.device
    backend: str | None = None

    def each(self) -> Iterator[DecoderStage]:
        """Load the layers in order; the caller drops each one before it requests the next."""
        for index, width in enumerate(self.bits):
            yield load_stage(
                self.model_dir,
                index,
                index + 1,
                None if width is None else [width],
                dtype=self.dtype,
                device=self.device,
                backend=self.backend,
            )


def stream_hidden(
    source: LayerSource,
    master: Master,
    windows: Windows,
    *,
    kv_bits: int | None = None,
    progress: Progress | None = None,
) -> list[Tensor]:
    """Run all windows through all layers, one layer at a time.

    Args:
        source: the layers.
        master: the model's embedding.
        windows: the text.
        kv_bits: 8 for an 8-bit KV cache, ``None`` for a KV cache in the dtype of the run.
        progress: called after each layer.

    Returns:
        Hidden states after the last layer, ``[R, T, H]`` for each micro-batch of ``windows``.
    """
    states = [
        master.embed(batch.inputs.to(source.device), batch.positions) for batch in windows.batches()
    ]
    for done, layer in enumerate(source.each(), start=1):
        cache = None if kv_bits is None else _cache(layer, windows, states[0], kv_bits)
        for number, hidden in enumerate(states):
            states[number] = layer.run_whole(hidden, cache)
        if progress is not None:
            progress(done, len(source.bits))
    return states


def _cache(layers: DecoderStage, windows: Windows, hidden: Tensor, kv_bits: int) -> KVCache:
    return KVCache(
        kv_shapes(layers.config, layers.first_layer, layers.end_layer),
        layers.first_layer,
        num_blocks=windows.rows * blocks_of(windows.longest),
        dtype=hidden.dtype,
        device=hidden.device,
        kv_bits=kv_bits,
        states=layers.new_states(windows.rows),
    )
