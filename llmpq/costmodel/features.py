"""Features: arithmetic and values moved by one decoder layer or by the master, by phase.

They do not depend on a device. A sliding window does not reduce them: the runtime keeps whole
sequences in its slots and masks what is outside the window.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.precision import Phase, Precision, linear_bytes

KV_SCALE_BYTES = 2
"""One 16-bit scale for every key or value of a token and head that is cached at 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work of one micro-batch in one decoder layer.

    ``rows`` tokens pass through it (``v s``, or ``v`` in decode), at ``linear_flops`` each;
    attention counts the whole square in prefill and reads ``kv_values`` keys and values.
    """

    rows: float
    linear_flops: float
    attention_flops: float
    kv_values: float


def layer_work(layer: LayerSpec, phase: Phase, batch: int, tokens: float) -> LayerWork:
    """Count the work of one layer; ``tokens`` is the prompt length, in decode the context's."""
    rows = batch * tokens if phase is Phase.PREFILL else float(batch)
    width = layer.num_heads * layer.head_dim
    return LayerWork(
        rows=rows,
        linear_flops=2.0 * layer.active_weight_parameters,
        attention_flops=4.0 * rows * tokens * width,
        kv_values=2.0 * batch * tokens * layer.num_kv_heads * layer.head_dim,
    )


def kv_scale_bytes(layer: LayerSpec, kv_bits: int) -> int:
    """Return the bytes of the scales of one token's keys and values in a layer."""
    return 2 * layer.num_kv_heads * KV_SCALE_BYTES if kv_bits == 8 else 0


def experts_hit(op: LinearSpec, rows: float) -> float:
    """Return how many of an operator's matrices ``rows`` tokens are expected to visit.

    With even, independent routing an expert of ``E`` is missed by all of ``T`` tokens with
    probability ``(1 - k/E)^T``, so ``E (1 - (1 - k/E)^T)`` are read: an upper estimate.
    """
    if op.count == op.active:
        return float(op.count)
    missed: float = (1.0 - op.active / op.count) ** rows
    return op.count * (1.0 - missed)


def touched_bytes(
    layer: LayerSpec, precision: Precision, dtype_bytes: int, rows: float
) -> tuple[float, float]:
    """Return the bytes of weights that ``rows`` tokens make a layer read.

    They are those of the quantizable operators at ``precision``, and of what stays in the dtype.
    """
    stored = 0.0
    kept = float(layer.norm_parameters * dtype_bytes)
    for op in layer.linears:
        hits = experts_hit(op, rows)
        if op.quantizable:
            stored += hits * linear_bytes(op.out_features, op.in_features, precision, dtype_bytes)
        else:
            kept += hits * op.out_features * op.in_features * dtype_bytes
        kept += hits * (op.out_features * dtype_bytes if op.bias else 0)
    return stored, kept


def quantizable_parameters(layer: LayerSpec, rows: float) -> float:
    """Return the quantizable weights that ``rows`` tokens make a layer read."""
    return sum(
        experts_hit(op, rows) * op.out_features * op.in_features
        for op in layer.linears
        if op.quantizable
    )


def head_weights(model: ModelSpec) -> int:
    """Return the weights of the LM head, tied or not ``V x h``."""
    return model.vocab_size * model.head_in_features
