"""Bytes of a stage that are exact: weights, KV blocks, embeddings and head (LLM-PQ, Sec. 4.1).

The runtime allocates to the same formulas.
"""

from __future__ import annotations

import math

from llmpq.spec.model import LayerSpec, ModelSpec
from llmpq.spec.precision import DTYPE_BYTES, Dtype, stored_bytes
from llmpq.spec.runtime_constants import (
    HEAD_ROW_MULTIPLE,
    KV_BLOCK_SIZE,
    PANEL_COLUMNS,
    PANEL_ROWS,
    kept_blocks,
)

KV_SCALE_BYTES = 2
"""One 16-bit scale for every key or value of a token and head that is cached at 8 bits."""


def layer_weight_bytes(
    model: ModelSpec, kind: int, bits: int, dtype: Dtype, kernel: str | None = None
) -> int:
    """Return the bytes of one decoder layer's weights, scales, zero points, norms and biases.

    ``kernel`` is ``None`` for the default one.
    """
    layer, precision = model.layer_types[kind], model.precision(bits)
    total = layer.weight_bytes(precision, DTYPE_BYTES[dtype])
    for op in layer.linears:
        if op.quantizable:
            shape = op.out_features, op.in_features
            plain = stored_bytes(None, precision, dtype, *shape)
            total += op.count * (stored_bytes(kernel, precision, dtype, *shape) - plain)
    return total


def layer_kv_bytes(
    model: ModelSpec,
    kind: int,
    slots: int,
    max_tokens: int,
    kv_bits: int,
    *,
    keeps_all: bool = False,
) -> int:
    """Return the bytes of one layer's preallocated blocks for ``slots`` sequences.

    A sequence takes ``ceil((s + n) / KV_BLOCK_SIZE)`` blocks of ``2 k d`` values a token, in a
    layer with a window those of the model's largest window and of a chunk. With ``keeps_all`` they
    keep all tokens, too: stages that send keys and values, draft models. The state of a layer that
    keeps one counts in float32.
    """
    has_window = model.layer_types[kind].sliding_window is not None and not keeps_all
    blocks = kept_blocks(max_tokens, model.window_tokens if has_window else None)
    state = slots * model.layer_types[kind].state_values * DTYPE_BYTES["float32"]
    return token_kv_bytes(model, kind, slots * blocks * KV_BLOCK_SIZE, kv_bits) + state


def token_kv_bytes(model: ModelSpec, kind: int, tokens: int, kv_bits: int) -> int:
    """Return the bytes of one layer's keys and values of so many tokens.

    At 8 bits a token keeps a 16-bit scale for each of its ``2 k`` keys and values in addition.
    """
    layer = model.layer_types[kind]
    per_token = layer.kv_bytes_per_token(kv_bits / 8) + kv_scale_bytes(layer, kv_bits)
    return math.ceil(tokens * per_token)


def kv_scale_bytes(layer: LayerSpec, kv_bits: int) -> int:
    """Return the bytes of the scales of one token's keys and values in a layer."""
    cached = 0 if layer.kv_source is not None else 2 * layer.num_kv_heads
    return cached * KV_SCALE_BYTES if kv_bits == 8 else 0


def master_bytes(
    model: ModelSpec, dtype: Dtype, head_bits: int = 16, *, on_cpu: bool = False
) -> int:
    """Return the bytes of embeddings, final norm and head, tied ones once.

    ``head_bits`` are those of the head's matrix, which is the token embedding's if they are tied.
    At 16 bits a CPU fills its rows up to whole panels.
    """
    if head_bits == 16:
        filled = -model.vocab_size % PANEL_ROWS * model.head_in_features if on_cpu else 0
        in_panels = DTYPE_BYTES[dtype] == 2 and model.head_in_features % PANEL_COLUMNS == 0
        return (model.master_parameters + filled * in_panels) * DTYPE_BYTES[dtype]
    kept = (model.master_parameters - model.head_weights) * DTYPE_BYTES[dtype]
    return kept + head_bytes(model, dtype, head_bits)


def head_bytes(model: ModelSpec, dtype: Dtype, bits: int) -> int:
    """Return the bytes of the head's matrix at less than 16 bits, its rows filled up."""
    return stored_bytes(
        None, model.head_precision(bits), dtype, head_rows(model), model.head_in_features
    )


def head_rows(model: ModelSpec) -> int:
    """Return the rows of the head's matrix at less than 16 bits."""
    return -(-model.vocab_size // HEAD_ROW_MULTIPLE) * HEAD_ROW_MULTIPLE
