"""What decides which tensors a layer holds: the step, its family, and the places of its operators.

The counts by family are those of transformers' code; ``tests/costmodel/test_family_memory.py``
compares them with the tensors that are alive while layers of every tested family run.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.spec.model import LinearSpec, ModelSpec
from llmpq.spec.precision import DTYPE_BYTES, Dtype
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS

SCORES_ATTENTION = ("gemma2", "gpt_oss", "vaultgemma")
"""Families whose attention writes out its scores, as they are capped or have sinks: for a block of
queries of one row at a time."""
BIASED_ATTENTION = ("bloom", "mpt")
"""Families whose attention adds a bias of the keys: for a block of queries at a time."""
STEPWISE_ACTIVATION = {"bloom": 4, "phi": 3}
"""Families whose activation is a formula of tensor operations: results alive besides its input."""
INNER_TENSORS = {
    "apertus": 6,
    **dict.fromkeys(("codegen", "gpt2", "gptj"), 4),
    **dict.fromkeys(("arcee", "jais2", "nanochat", "nemotron"), 3),
}
"""Other families without a gate whose activation is one: tensors of the inner size; of others 2."""
MORE_HELD = {
    **dict.fromkeys(("afmoe", "apertus", "codegen", "ernie4_5", "ernie4_5_moe", "gpt2"), 1),
    **dict.fromkeys(("gpt_neox", "helium", "hunyuan_v1_moe", "phi3", "stablelm"), 1),
    **dict.fromkeys(("dbrx", "gptj", "phi"), 2),
    **dict.fromkeys(("diffllama", "gpt_oss"), 3),
    **dict.fromkeys(("llama4_text", "persimmon"), 4),
}
"""Tensors as large as hidden states that layers of a family hold in a prompt on a CPU, beyond those
of Llama's: parts that are rotated apart, a gate, steps of an activation."""
IN_FLOAT32 = {
    **dict.fromkeys(("gemma3_text", "gemma4_text", "nanochat"), 1),
    **dict.fromkeys(("afmoe", "diffllama"), 2),
    "hy_v3": 3,
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "flex_olmo", "olmo", "olmo2", "olmo3"), 4),
    **dict.fromkeys(("cohere", "cohere2"), 6),
}
"""How many of the tensors as large as hidden states at their worst moment layers of a family hold
in float32, whatever the run's dtype: rotated queries, norms of heads, sums of experts."""

_ATTENTION_PREFIXES = (
    *("self_attn.", "self_attention.", "attention.", "attn.", "norm_attn_norm."),
    *("linear_attn.", "conv."),  # what some layers have in its place
)


_BESIDE_PREFIXES = ("per_layer_", "laurel.", "altup.")
"""What layers of Gemma 3n and 4 have beside attention and feed-forward; all of it is narrower."""


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
    def apart(self) -> int:
        """Bytes of a message being taken apart, or put together again; 0 for one part."""
        return 2 * self.of(self.model.message_features) if self.model.sent_features else 0


def is_attention(op: LinearSpec) -> bool:
    """Whether an operator belongs to attention, or to what a layer has in its place."""
    return op.name.startswith(_ATTENTION_PREFIXES)


def is_beside(op: LinearSpec) -> bool:
    """Whether an operator belongs to neither attention nor feed-forward."""
    return op.name.startswith(_BESIDE_PREFIXES)


def runs_in_blocks(op: LinearSpec) -> bool:
    """Whether a CPU computes the operator for ``ROW_BLOCK`` rows at a time.

    These are the feed-forwards that are modules, and experts of two matrices.
    """
    is_single_stack = op.count > 1 and not op.name.endswith("_proj")
    return "." in op.name and not is_attention(op) and not is_single_stack
