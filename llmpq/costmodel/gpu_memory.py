"""Temporary memory of a step on a GPU: one documented upper estimate (``costmodel.memory``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmpq.costmodel.layer_tensors import (
    BIASED_ATTENTION,
    SCORES_ATTENTION,
    STEPWISE_ACTIVATION,
    Step,
    is_attention,
)
from llmpq.spec.model import LayerSpec, LinearSpec
from llmpq.spec.precision import DTYPE_BYTES
from llmpq.spec.runtime_constants import SCORE_BLOCK_TOKENS
from llmpq.units import MIB

GPU_MARGIN = 0.1
"""Share added to the temporaries of a GPU."""
SCORE_BYTES = 4
"""Bytes of a score that is written out, in float32."""
GPU_WORKSPACE_BYTES = 4 * MIB
"""What kernels of a GPU hold whatever the shape: blocks of a weight being widened."""


def gpu_bytes(steps: Sequence[Step], *, is_master: bool) -> int:
    """Return the peak bytes that live only during one of the steps."""
    worst = max(_gpu_peak(step, is_master=is_master) for step in steps)
    return GPU_WORKSPACE_BYTES + math.ceil((1.0 + GPU_MARGIN) * worst)


def _gpu_peak(step: Step, *, is_master: bool) -> int:
    """Return the upper estimate of the bytes alive in a step; see ``temporary_bytes``."""
    value_bytes = DTYPE_BYTES[step.dtype]
    peaks = []
    for layer in step.model.layer_types:
        quantizable = [op for op in layer.linears if op.quantizable]
        widened = max(op.out_features * op.in_features for op in quantizable) * value_bytes
        worst = max(
            step.of(2 * step.model.hidden_size, 4),  # a norm in float32
            _gpu_attention(step, layer),
            _gpu_feed_forward(step, layer),
            *(_gpu_operator_rows(step, op) for op in quantizable),
        )
        peaks.append(worst + widened)
    logits = step.batch * step.model.vocab_size * (value_bytes + 8) if is_master else 0
    return 2 * (step.hidden + step.message) + step.apart + max(peaks) + logits


def _gpu_attention(step: Step, layer: LayerSpec) -> int:
    if layer.value_dim is not None:
        return _gpu_latents(step, layer, layer.value_dim)
    value_bytes, family = DTYPE_BYTES[step.dtype], step.model.family
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    is_written_out = family in SCORES_ATTENTION
    repeated = query if key < query and not is_written_out else 0  # for grouped heads
    picked = 2 * (key + repeated)  # gathered
    values = step.rows * (2 * (query + key) + key + query)
    # Prompts attend to their own keys and values; chunks gather those of one sequence.
    read = step.batch * step.context if step.tokens == 1 else max(step.rows, step.context)
    # A mask, a bias and scores are those of a block of queries.
    seen = step.batch * min(step.tokens, SCORE_BLOCK_TOKENS) * step.context
    total = (values + read * picked + seen) * value_bytes
    if family in BIASED_ATTENTION:
        total += seen * layer.num_heads * (2 * value_bytes + 8)
    if is_written_out:  # of one prompt at a time, with its keys or values in float32
        alone = 1 if step.tokens == 1 else step.batch
        total += seen // alone * layer.num_heads * SCORE_BYTES
        total += step.batch // alone * step.context * key * 4
    return total


def _gpu_latents(step: Step, layer: LayerSpec, value_dim: int) -> int:
    """Queries and outputs; latent vectors of the context, and what is made of them for all heads.

    Whole prompts and chunks attend to what the cache returns of all their sequences.
    """
    made = sum(op.out_features for op in layer.linears if op.name.endswith("kv_b_proj"))
    value, query = layer.num_heads * value_dim, layer.num_heads * layer.head_dim
    own = step.rows * (4 * query + made + 2 * value)
    seen = step.batch * min(step.tokens, SCORE_BLOCK_TOKENS) * step.context
    read = step.batch * step.context * 2 * (layer.kv_values_per_token + made + value)
    return (own + read + seen) * DTYPE_BYTES[step.dtype]


def _gpu_feed_forward(step: Step, layer: LayerSpec) -> int:
    outputs = [op.active * op.out_features for op in layer.linears if not is_attention(op)]
    copies = 3 if step.model.family in STEPWISE_ACTIVATION else 1
    return step.of(sum(outputs) + copies * max(outputs))


def _gpu_operator_rows(step: Step, op: LinearSpec) -> int:
    one = (op.in_features + op.out_features) * DTYPE_BYTES[step.dtype]
    if step.dtype != "float32":
        one += op.in_features + 4 * op.out_features
    return step.rows * op.active * one
