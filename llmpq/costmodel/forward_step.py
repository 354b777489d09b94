"""What decides which tensors a layer holds: the step, and the places of its operators."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.precision import DTYPE_BYTES, Dtype
from llmpq.spec.runtime_constants import (
    HEAD_LANES,
    MAX_PAGED_HEAD_DIM,
    PROMPT_CHUNK_TOKENS,
    ROW_BLOCK,
)

SCORES_ATTENTION = ("gemma2", "gpt_oss", "vaultgemma")
"""Families whose attention writes out its scores, as they are capped or have sinks: for a block of
queries of one row at a time."""
BIASED_ATTENTION = ("bloom", "mpt")
"""Families whose attention adds a bias of the keys: for a block of queries at a time."""
STEPWISE_ACTIVATION = ("bloom", "phi")
"""Families whose activation is a formula of tensor operations."""
EXPERT_SHARE = 2.0
"""Rows of the busiest expert, as a multiple of an even share."""

_ATTENTION_PREFIXES = (
    *("self_attn.", "self_attention.", "attention.", "attn.", "norm_attn_norm."),
    *("linear_attn.", "conv."),  # what some layers have in its place
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward step of a micro-batch: ``batch`` sequences of ``tokens``, over ``context``.

    ``prompt`` are the tokens of each sequence in the message of the step: more than ``tokens``
    where layers compute it in chunks, of which the step is the last; by default as many.
    """

    model: ModelSpec
    dtype: Dtype
    kv_bits: int
    batch: int
    tokens: int
    context: int
    prompt: int | None = None

    @classmethod
    def of_prompts(
        cls, model: ModelSpec, dtype: Dtype, kv_bits: int, batch: int, tokens: int
    ) -> Step:
        """Return the largest step of ``batch`` prompts of ``tokens``: their last whole chunk."""
        return cls(
            model=model, dtype=dtype, kv_bits=kv_bits, batch=batch,
            tokens=min(tokens, PROMPT_CHUNK_TOKENS), context=tokens, prompt=tokens,
        )  # fmt: skip

    @property
    def is_chunk(self) -> bool:
        """Whether keys and values of earlier chunks are read."""
        return 1 < self.tokens < self.context

    @property
    def rows(self) -> int:
        """Tokens of the step."""
        return self.batch * self.tokens

    def of(self, features: int, value_bytes: int | None = None) -> int:
        """Bytes of ``[rows, features]``, in the run's dtype by default."""
        return self.rows * features * (value_bytes or DTYPE_BYTES[self.dtype])

    def rows_of(self, op: LinearSpec, *, on_cpu: bool) -> int:
        """Rows that an operator computes at a time, those of all its experts."""
        if not (on_cpu and runs_in_blocks(op)):
            return self.rows * op.active
        share = 1.0 if op.count == 1 else min(1.0, EXPERT_SHARE * op.active / op.count)
        return min(math.ceil(share * self.rows), ROW_BLOCK)

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states."""
        return self.of(self.model.hidden_size)

    @property
    def message(self) -> int:
        """Bytes that a stage sends: the hidden states, and what travels with them."""
        rows = self.batch * (self.prompt or self.tokens)
        return rows * self.model.message_features * DTYPE_BYTES[self.dtype]

    @property
    def joined(self) -> int:
        """Bytes of the outputs of all chunks, put together; 0 for whole prompts."""
        return self.message if self.is_chunk else 0

    @property
    def apart(self) -> int:
        """Bytes of a message being taken apart, or put together again; 0 for one part."""
        return 2 * self.of(self.model.message_features) if self.model.sent_features else 0


def fits_kernel(layer: LayerSpec) -> bool:
    """Whether the kernel of CPUs that reads blocks in place takes a layer's heads."""
    lanes = layer.head_dim % HEAD_LANES
    return layer.value_dim is None and lanes == 0 and layer.head_dim <= MAX_PAGED_HEAD_DIM


def is_attention(op: LinearSpec) -> bool:
    """Whether an operator belongs to attention, or to what a layer has in its place."""
    return op.name.startswith(_ATTENTION_PREFIXES)


def runs_in_blocks(op: LinearSpec) -> bool:
    """Whether a CPU computes the operator for ``ROW_BLOCK`` rows at a time.

    These are the feed-forwards that are modules, and experts of two matrices.
    """
    is_single_stack = op.count > 1 and not op.name.endswith("_proj")
    return "." in op.name and not is_attention(op) and not is_single_stack
