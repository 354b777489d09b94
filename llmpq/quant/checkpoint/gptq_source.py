"""Layers of a GPTQ checkpoint as pieces for the loader: codes go to their kernels as they are.

Nothing is quantized, so nothing is kept in the store either. This module refuses to know the
format: that is ``quant.checkpoint``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from llmpq.quant.checkpoint.reader import GptqCheckpoint
from llmpq.quant.loading.assembly import matrices_of
from llmpq.quant.loading.layer_source import Prepared, Reader
from llmpq.quant.loading.pieces import LayerEnd, Reading, Ready
from llmpq.spec.precision import Precision


class GptqSource:
    """A checkpoint of codes.

    Args:
        checkpoint: what reads them.
    """

    def __init__(self, checkpoint: GptqCheckpoint) -> None:
        self._gptq = checkpoint

    def prepare(self, index: int, precision: Precision) -> Prepared:
        """Make a layer ready to be read; may run in another thread.

        Raises:
            SpecError: what ``GptqCheckpoint`` refuses.
        """
        plain = self._gptq.checkpoint
        layer = plain.empty_layer(index)
        keys = self._gptq.packed_keys(index)
        return Prepared(
            index=index,
            precision=precision,
            layer=layer,
            sources=plain.layer_sources(index, layer, without=keys),
            matrices=[matrix for matrix in matrices_of(layer) if matrix.key in keys],
        )

    def pieces(self, layer: Prepared, reader: Reader) -> Iterator[Reading]:
        """Yield what fills a layer, reading each piece when it is asked for.

        Raises:
            SpecError: what ``GptqCheckpoint`` refuses.
        """
        plain = self._gptq.checkpoint
        matrices = layer.matrices
        job = reader.job(layer)
        job.origin = "as stored" if matrices else ""
        for key, source in layer.sources.items():
            yield reader.plain(job, plain.tensors, key, source)
        for matrix in matrices:
            # Codes as stored, unpacked to a byte each, and packed again: within 16 bits a weight.
            held = 2 * matrix.out_features * matrix.in_features
            reader.budget.take(held)
            packed = self._gptq.packed(layer.index, matrix.name, reader.dtype)
            assert packed is not None
            yield partial(Ready, job=job, matrix=matrix, packed=packed, held_bytes=held)
            del packed  # or it would live until the next one comes
        yield partial(LayerEnd, job=job)
