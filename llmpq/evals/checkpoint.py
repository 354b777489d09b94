"""A checkpoint that is already quantized, layer by layer: what a GPTQ file costs in quality."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from llmpq.models import DecoderStage
from llmpq.quant.checkpoint.reader import GptqCheckpoint, gptq_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqLayers:
    """The layers of a GPTQ checkpoint, for ``stream_hidden``.

    Attributes:
        checkpoint: the files.
        dtype: of the run.
        device: where it runs.
        backend: kernel to prefer; ``None`` leaves it to the registry.
    """

    checkpoint: GptqCheckpoint
    dtype: torch.dtype
    device: torch.device
    backend: str | None = None

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return int(self.checkpoint.config.num_hidden_layers)

    def each(self) -> Iterator[DecoderStage]:
        """Load one layer after the other."""
        for index in range(self.num_layers):
            layer = gptq_layer(
                self.checkpoint, index, dtype=self.dtype, device=self.device, backend=self.backend
            )
            yield DecoderStage(self.checkpoint.config, [layer], index).to(self.device)
