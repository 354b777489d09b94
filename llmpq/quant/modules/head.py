"""An LM head with a quantized weight, and the token embedding that reads rows of a head's weight.

Shape legend: R rows, N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.quant.modules.linear import DenseLinear, QuantLinear


class QuantHead(nn.Module):
    """An LM head whose weight is quantized and has rows filled up to a kernel's multiple.

    Attributes:
        linear: from H to V features or a few more.
        vocab_size: V.
    """

    def __init__(self, linear: QuantLinear, vocab_size: int) -> None:
        super().__init__()
        self.linear = linear
        self.vocab_size = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scores ``[R, V]`` of ``hidden`` ``[R, H]``."""
        scores: Tensor = self.linear(hidden)
        return scores[..., : self.vocab_size]


class TiedEmbedding(nn.Module):
    """A token embedding that reads rows of the head, the only copy of the weight.

    Attributes:
        linear: of the head.
        embed_scale: factor of the embeddings in the run's dtype, ``None`` for 1.
    """

    embed_scale: Tensor | None

    def __init__(self, linear: QuantLinear | DenseLinear, replaced: nn.Module) -> None:
        """Take the place of ``replaced``.

        Raises:
            SpecError: an embedding that computes more than rows times a factor.
        """
        super().__init__()
        if not is_lookup(replaced):
            raise SpecError(
                f"{type(replaced).__name__}: found an embedding that is not rows of its weight, "
                "expected a head of 16 bits with it"
            )
        scale = getattr(replaced, "embed_scale", None)
        self.linear = linear
        factor = None if scale is None else torch.as_tensor(scale).to(linear.dtype)
        self.register_buffer("embed_scale", factor, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings ``[..., N, H]`` of ``token_ids`` ``[..., N]``."""
        rows = self.linear.rows(token_ids)
        return rows if self.embed_scale is None else rows * self.embed_scale


def is_lookup(embedding: nn.Module) -> bool:
    """Return whether an embedding is rows of its weight, or these times a factor."""
    return type(embedding) is nn.Embedding or getattr(embedding, "embed_scale", None) is not None
