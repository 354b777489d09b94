"""Memory: bytes of one stage by cause, operator by operator (LLM-PQ, Sec. 4.1).

Weights and slots are exact: the tensor side allocates to the same formulas. Temporary memory is one
documented upper estimate of what a decoder layer of transformers holds at its worst moment; it
refuses to model an allocator beyond a tenth of safety.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmpq.spec.cluster import DeviceKind
from llmpq.spec.model import LayerSpec, ModelSpec
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import DTYPE_BYTES, Dtype, default_precision
from llmpq.spec.workload import Workload

SAFETY = 1.1
UNFUSED_FAMILIES = ("bloom", "gemma2")
"""Families whose attention writes out its scores (alibi added, or scores capped)."""


def layer_weight_bytes(
    model: ModelSpec, kind: int, bits: int, dtype: Dtype, device_kind: DeviceKind
) -> int:
    """Return the bytes of one decoder layer's weights, scales, zero points, norms and biases.

    A CPU's 8-bit kernel, which runs in the 16-bit formats, keeps a float32 an output channel more.
    """
    layer = model.layer_types[kind]
    total = layer.weight_bytes(default_precision(bits), DTYPE_BYTES[dtype])
    if device_kind == "cpu" and bits == 8 and dtype != "float32":
        total += sum(4 * op.count * op.out_features for op in layer.linears if op.quantizable)
    return total


def layer_kv_bytes(model: ModelSpec, kind: int, slots: int, max_tokens: int, kv_bits: int) -> int:
    """Return the bytes of one layer's preallocated slots ``2 v (s + n) k d`` values."""
    per_token = model.layer_types[kind].kv_bytes_per_token(kv_bits / 8)
    return math.ceil(slots * max_tokens * per_token)


def master_bytes(model: ModelSpec, dtype: Dtype) -> int:
    """Return the bytes of embeddings, final norm and head, tied ones once."""
    return model.master_parameters * DTYPE_BYTES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One forward step of a micro-batch: ``batch`` sequences of ``tokens``, over ``context``."""

    batch: int
    tokens: int
    context: int

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


def temporary_bytes(
    model: ModelSpec,
    workload: Workload,
    micro_batching: MicroBatching,
    *,
    dtype: Dtype,
    is_master: bool,
) -> int:
    """Return the peak bytes that live only during a step.

    With ``R`` rows of a step, value size ``e``, and widths as in ``LayerSpec``::

        1.1 * max over (prefill, decode) of
              2 R h e                      messages: received, to be sent
            + 2 R h e                      the residual and the normed copy
            + max( 2 R h 4                 norm in float32,
                   attention, feed-forward )
            + scratch                      the largest operator widened, its 8-bit rows and sums
            + v V (e + 2 * 4)              on the master: logits, in float32, and their sorted copy

        attention    = R (2 (q + k) d + k d + q d) e         q and k, rotated too, v, and the output
                     + 2 v C (k + x) d e                     keys and values picked from the slots
                     + v T C e                               mask of T query and C context tokens
                     + v q T C (2 e + 4)                     scores, where they are written out
        feed-forward = R a (p + f) e                         outputs of its operators, activated

    ``x`` is ``q`` where heads are grouped (a masked prefill repeats them, a decode step does not),
    else 0; ``a`` experts a token; ``p`` the sum and ``f`` the largest of the feed-forward
    operators' outputs.
    Scratch is counted even when no layer ends up quantized: the planner asks before it knows.
    """
    prefill = _Step(
        batch=micro_batching.prefill,
        tokens=workload.prompt_tokens,
        context=workload.prompt_tokens,
    )
    decode = _Step(batch=micro_batching.decode, tokens=1, context=workload.max_context_tokens)
    value_bytes = DTYPE_BYTES[dtype]
    worst = 0
    for step in (prefill, decode):
        peaks = [_layer_peak(model, layer, step, value_bytes) for layer in model.layer_types]
        logits = step.batch * model.vocab_size * (value_bytes + 8) if is_master else 0
        worst = max(worst, 2 * step.rows * model.hidden_size * value_bytes + max(peaks) + logits)
    return math.ceil(SAFETY * worst)


def _layer_peak(model: ModelSpec, layer: LayerSpec, step: _Step, value_bytes: int) -> int:
    held = 2 * step.rows * model.hidden_size * value_bytes
    norm = 2 * step.rows * model.hidden_size * 4
    is_fused = model.family not in UNFUSED_FAMILIES
    attention = _attention_values(layer, step) * value_bytes
    if not is_fused:
        scores = step.batch * layer.num_heads * step.tokens * step.context
        attention += scores * (2 * value_bytes + 4)
    feed_forward = _feed_forward_values(layer, step) * value_bytes
    return held + max(norm, attention, feed_forward) + _scratch_bytes(layer, step, value_bytes)


def _attention_values(layer: LayerSpec, step: _Step) -> int:
    query = layer.num_heads * layer.head_dim
    key = layer.num_kv_heads * layer.head_dim
    is_repeated = layer.num_kv_heads < layer.num_heads and step.tokens > 1
    picked = key + (query if is_repeated else 0)
    return (
        step.rows * (2 * (query + key) + key + query)
        + 2 * step.batch * step.context * picked
        + step.batch * step.tokens * step.context
    )


def _feed_forward_values(layer: LayerSpec, step: _Step) -> int:
    outputs = [
        op.active * op.out_features
        for op in layer.linears
        if "attn" not in op.name and "attention" not in op.name
    ]
    return step.rows * (sum(outputs) + max(outputs))


def _scratch_bytes(layer: LayerSpec, step: _Step, value_bytes: int) -> int:
    """Return what the worst quantized operator needs: its matrix widened, or 8-bit rows and sums.

    Kernels do one or the other; a short step widens, a long one may convert its rows.
    """
    return max(
        max(
            op.out_features * op.in_features * value_bytes,
            step.rows * op.active * (op.in_features + 4 * op.out_features),
        )
        for op in layer.linears
        if op.quantizable
    )
