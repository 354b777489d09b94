"""What a CPU worker's process holds at the worst moments of a step, tensor by tensor.

Every moment is a list of the tensors alive in one statement of transformers' decoder layers; the
lists were read off the running layers (``tests/costmodel/test_cpu_memory.py`` does it again). What
the process takes for them is more: tensors below 16 MiB share glibc's heap, which keeps the holes
that differing sizes leave. ``HEAP_FACTOR`` is that share, measured (docs/memory.md). Loading has a
peak of its own, which is here too: a stage needs the larger of both.

Shape legend: R rows of a step, T tokens a sequence, C context tokens, h hidden, e bytes a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype
from llmpq.spec.storage import needs_scratch
from llmpq.units import MIB

HEAP_FACTOR = 1.7
"""Bytes the process takes for a byte of temporaries at their peak, beside ``FIRST_USE_BYTES``."""
RAGGED_FACTOR = 3.4
"""Likewise where experts take turns: hardly a tensor has the size of the one before."""
FIRST_USE_BYTES = 15_000_000
"""What a first step leaves for good whatever its size: scratch of kernels, code of libraries."""
MAPPED_BYTES = 16 * MIB
"""Tensors above it lie apart (``dist.allocator``): no hole is larger."""
MESSAGES = 3
"""Hidden states held on a ring beside a step's own: the buffer they arrive in, two on their way
out. A pipeline of one stage holds its embedded tokens."""
MATRICES_UNDER_WAY = 3
"""16-bit matrices a loader holds beside what it has placed (``quant.loader``)."""
EXPERT_SHARE = 2.0
"""Rows of the busiest expert, as a multiple of an even share."""
EAGER_ATTENTION = ("bloom", "gemma2")
"""Families whose attention writes out its scores (alibi added, or scores capped)."""
STEPWISE_ACTIVATION = ("bloom", "phi")
"""Families whose activation is a formula of tensor operations, with five tensors alive."""

Moment = list[int]
"""Bytes of each tensor alive at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward step of a micro-batch: ``batch`` sequences of ``tokens``, over ``context``."""

    model: ModelSpec
    dtype: Dtype
    kv_bits: int
    batch: int
    tokens: int
    context: int

    @property
    def rows(self) -> int:
        """Tokens of the step."""
        return self.batch * self.tokens

    def of(self, features: int, value_bytes: int | None = None) -> int:
        """Bytes of ``[rows, features]``, in the run's dtype unless told otherwise."""
        return self.rows * features * (value_bytes or DTYPE_BYTES[self.dtype])

    @property
    def hidden(self) -> int:
        """Bytes of the hidden states."""
        return self.of(self.model.hidden_size)


def step_bytes(steps: Sequence[Step], *, is_master: bool, is_alone: bool) -> int:
    """Return the most bytes a CPU worker takes for one of these steps, or for loading.

    Args:
        steps: the largest prefill and decode steps.
        is_master: whether logits are made here too; by then the layers' own tensors are gone.
        is_alone: whether nothing is sent.
    """
    worst = 0
    for step in steps:
        messages = step.hidden * (1 if is_alone else MESSAGES)
        found = [_layer_bytes(step, layer) for layer in step.model.layer_types]
        if is_master:
            found.append(_resident(_logits(step)))
        worst = max(worst, messages + max(found))
    kept = FIRST_USE_BYTES + _scratch_bytes(steps[0].model, steps[0].dtype)
    return max(worst + kept + read_buffer_bytes(steps), loading_bytes(steps[0].model))


def loading_bytes(model: ModelSpec) -> int:
    """Return what loading takes beside what it has placed.

    Slots are not written by then, so a stage with many of them peaks later than this counts on.
    """
    largest = max(
        op.out_features * op.in_features
        for layer in model.layer_types
        for op in layer.linears
        if op.quantizable
    )
    return MATRICES_UNDER_WAY * 2 * largest


def read_buffer_bytes(steps: Sequence[Step]) -> int:
    """Return the bytes that 8-bit keys and values are read into, once for all layers of a stage."""
    step = steps[0]
    if step.kv_bits != 8:
        return 0
    widest = max(layer.num_kv_heads * layer.head_dim for layer in step.model.layer_types)
    tokens = max(one.batch * one.context for one in steps)
    return 2 * tokens * widest * DTYPE_BYTES[step.dtype]


def _resident(moment: Moment, factor: float = HEAP_FACTOR) -> int:
    """Return the bytes taken for tensors: their own, and holes no larger than the heap takes."""
    holes = sum(min(size, MAPPED_BYTES) for size in moment)
    return sum(moment) + math.ceil((factor - 1) * holes)


def _layer_bytes(step: Step, layer: LayerSpec) -> int:
    """Return the bytes taken at the worst moment of a layer."""
    moments = [
        [step.hidden, *[step.of(step.model.hidden_size, 4)] * 2],  # a norm in float32
        _attention(step, layer),
        *_products(step, layer),
    ]
    if any(op.count > 1 for op in layer.linears if op.quantizable):
        return max(*map(_resident, moments), _resident(_experts(step, layer), RAGGED_FACTOR))
    return max(map(_resident, [*moments, _feed_forward(step, layer)]))


def _attention(step: Step, layer: LayerSpec) -> Moment:
    """Queries, keys and values, rotated too, and the output; or scores, where they are written.

    A decode step's rows are of unlike length and their slots anywhere: keys and values are picked
    from the slots, and where heads are grouped, repeated for every query head.
    """
    value_bytes = DTYPE_BYTES[step.dtype]
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    own = [step.hidden, *[step.of(query)] * 3, *[step.of(key)] * 2]
    cached = step.batch * step.context * value_bytes
    mask = step.rows * step.context * value_bytes
    if step.model.family in EAGER_ATTENTION:
        scores = step.rows * layer.num_heads * step.context
        return [*own[:5], mask, *[scores * value_bytes] * 2, *[scores * 4] * 2]
    if step.tokens > 1:
        return own
    picked = [cached * key] * 2 if step.kv_bits != 8 else [cached * key // value_bytes]
    repeated = [cached * query] * 2 if key < query else []
    return [*own, mask, *picked, *repeated]


def _feed_forward(step: Step, layer: LayerSpec) -> Moment:
    """The inner tensors of the feed-forward, beside the residual and the normed copy."""
    *ups, down = [op for op in layer.linears if not _is_attention(op)]
    inner = step.of(down.in_features)
    residual = [step.hidden] * 2
    if step.model.family in STEPWISE_ACTIVATION:
        heads = layer.num_heads if step.model.family in EAGER_ATTENTION else 0
        kept = step.rows * heads * step.context * DTYPE_BYTES[step.dtype]  # attention's weights
        return [*residual, kept, *[inner] * 5]
    if sum(op.out_features for op in ups) == down.in_features:
        return [step.hidden, inner, inner]
    joined = [2 * inner] if len(ups) == 1 else [inner]
    return [*residual, *joined, inner, inner]  # gate and up, or up; activated gate; product


def _experts(step: Step, layer: LayerSpec) -> Moment:
    """One expert after the other, each on the rows that chose it; their sum besides."""
    *_, down = [op for op in layer.linears if op.count > 1]
    inner = math.ceil(step.of(down.in_features) * _share(down))
    return [*[step.hidden] * 3, 2 * inner, inner, inner]


def _share(op: LinearSpec) -> float:
    """Return the part of a step's rows that one operator sees at once."""
    return 1.0 if op.count == 1 else min(1.0, EXPERT_SHARE * op.active / op.count)


def _products(step: Step, layer: LayerSpec) -> list[Moment]:
    """Every operator's input and output; rounded to 8 bits, or in float32 where a kernel needs."""
    found = []
    for op in layer.linears:
        if not op.quantizable:
            continue
        operands = [
            step.of(op.in_features),
            step.of(op.out_features),
            step.of(op.in_features, 1),
            *([step.of(op.in_features + op.out_features, 4)] if step.dtype == "float16" else []),
        ]
        share = _share(op)
        found.append([*[step.hidden] * 2, *(math.ceil(share * size) for size in operands)])
    return found


def _logits(step: Step) -> Moment:
    """Scores of the vocabulary, in float32, and a sampler's sorted copy."""
    scores = step.batch * step.model.vocab_size
    return [scores * DTYPE_BYTES[step.dtype], scores * 4, scores * 4]


def _scratch_bytes(model: ModelSpec, dtype: Dtype) -> int:
    """Return the largest weight that no compiled kernel takes, widened; it stays for good."""
    widened = [
        op.out_features * op.in_features * DTYPE_BYTES[dtype]
        for layer in model.layer_types
        for op in layer.linears
        for bits in BITS
        if op.quantizable and needs_scratch(model.precision(bits), op.out_features, op.in_features)
    ]
    return max(widened, default=0)


def _is_attention(op: LinearSpec) -> bool:
    return op.name.startswith(("self_attn.", "self_attention.", "attention."))
