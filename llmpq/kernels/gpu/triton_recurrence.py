"""Triton kernels of mixers with a recurrent state, between their projections.

Importing this module imports triton, so only ``triton_mixers`` does, and only where it is
installed. Formulas are those of ``csrc/convolution.c``, ``csrc/delta.c`` and ``csrc/mamba.c``, all
of it in float32. A program has some channels, columns or features of one row, and goes through its
tokens in order, with the state in registers: neither programs nor launches wait for one another.

A row of ``rows`` is first token, tokens, slot, whether it begins, tokens before its draft tokens,
and the slot of the state after them (``PackedBatch.sequence_rows``).

Shape legend: N tokens, R rows, C channels of the convolution, S slots; h heads, d features of a
key, e of a value; p features of a head of Mamba 2, n of its states.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """Torch's, with its threshold."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _input(
    input_ptr, factor_ptr, states_ptr, first, place, slot, is_new, c, inside, stride,
    KERNEL: tl.constexpr,
):  # fmt: skip
    """Return the inputs of a convolution at a place of a row: before it, those in its state."""
    is_own = inside & (place + tl.zeros_like(c) >= 0)
    at = (first + place) * stride + c
    x = tl.load(input_ptr + at, mask=is_own, other=0.0)
    if factor_ptr is not None:  # rounded, as transformers does
        factor = tl.load(factor_ptr + at, mask=is_own, other=0.0)
        x = (x.to(tl.float32) * factor.to(tl.float32)).to(input_ptr.dtype.element_ty)
    is_before = inside & (place + tl.zeros_like(c) < 0) & (is_new + tl.zeros_like(c) == 0)
    stored = states_ptr + (slot + c) * KERNEL + KERNEL + place
    return x.to(tl.float32) + tl.load(stored, mask=is_before, other=0.0)


@triton.jit
def convolve_kernel(
    input_ptr, factor_ptr, gate_ptr, weight_ptr, bias_ptr, states_ptr, rows_ptr, out_ptr, stride, C,
    KERNEL: tl.constexpr, IS_ACTIVATED: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the convolution ``[N, C]`` of some channels of a row; states ``[S, C, K]`` change."""
    row = rows_ptr + tl.program_id(0) * 6
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < C
    first, tokens, is_new = tl.load(row), tl.load(row + 1), tl.load(row + 3)
    slot, kept, after = tl.load(row + 2) * C, tl.load(row + 4), tl.load(row + 5) * C
    for t in range(tokens):
        total = tl.zeros([BLOCK_C], tl.float32)
        if bias_ptr is not None:
            total += tl.load(bias_ptr + c, mask=inside, other=0.0)
        for j in tl.static_range(KERNEL):
            x = _input(input_ptr, factor_ptr, states_ptr, first, t - (KERNEL - 1) + j, slot, is_new,
                       c, inside, stride, KERNEL)  # fmt: skip
            total += x * tl.load(weight_ptr + j * C + c, mask=inside, other=0.0)
        if IS_ACTIVATED:
            total = _silu(total)
        if gate_ptr is not None:
            total *= tl.load(gate_ptr + (first + t) * stride + c, mask=inside, other=0.0)
        place = out_ptr + (first + t) * C + c
        tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside)
    # What is read is never behind what was written: the state after the drafts comes first, and
    # inputs move to earlier places. Barriers, as a thread may write what others have to read.
    if kept < tokens:
        for j in tl.static_range(KERNEL):
            x = _input(input_ptr, factor_ptr, states_ptr, first, tokens - KERNEL + j, slot, is_new,
                       c, inside, stride, KERNEL)  # fmt: skip
            tl.store(states_ptr + (after + c) * KERNEL + j, x, mask=inside)
    tl.debug_barrier()
    if kept > 0:
        for j in tl.static_range(KERNEL):
            x = _input(input_ptr, factor_ptr, states_ptr, first, kept - KERNEL + j, slot, is_new,
                       c, inside, stride, KERNEL)  # fmt: skip
            tl.debug_barrier()
            tl.store(states_ptr + (slot + c) * KERNEL + j, x, mask=inside)


@triton.jit
def delta_kernel(
    convolved_ptr, beta_ptr, decay_ptr, rate_ptr, bias_ptr, states_ptr, rows_ptr, raw_ptr,
    channels, heads, share, key_dim, value_dim, scale,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the gated delta rule ``[N, h e]`` of some columns of a head of a row, before the norm.

    The states ``[S, h, d, e]`` change. ``share``: heads of a key head; ``scale``: of queries.
    """
    row = rows_ptr + tl.program_id(0) * 6
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    first, tokens, is_new = tl.load(row), tl.load(row + 1), tl.load(row + 3)
    slot, kept, after = tl.load(row + 2), tl.load(row + 4), tl.load(row + 5)
    keys = heads // share * key_dim
    inside = (d < key_dim)[:, None] & (e < value_dim)[None, :]
    place = d.to(tl.int64)[:, None] * value_dim + e[None, :]
    stored = states_ptr + (slot * heads + head) * key_dim * value_dim + place
    last = states_ptr + (after * heads + head) * key_dim * value_dim + place
    state = tl.load(stored, mask=inside & (is_new + tl.zeros_like(place) == 0), other=0.0)
    rate, bias = tl.load(rate_ptr + head), tl.load(bias_ptr + head)
    for t in range(tokens):
        own = convolved_ptr + (first + t) * channels
        of_key = own + head // share * key_dim + d
        query = tl.load(of_key, mask=d < key_dim, other=0.0)
        key = tl.load(of_key + keys, mask=d < key_dim, other=0.0)
        value = tl.load(own + 2 * keys + head * value_dim + e, mask=e < value_dim, other=0.0)
        query = query * (scale / tl.sqrt(tl.sum(query * query, 0) + 1e-6))
        key = key / tl.sqrt(tl.sum(key * key, 0) + 1e-6)
        at = (first + t) * heads + head
        decay = tl.exp(rate * _softplus(tl.load(decay_ptr + at).to(tl.float32) + bias))
        beta = 1.0 / (1.0 + tl.exp(-tl.load(beta_ptr + at).to(tl.float32)))
        state = state * decay
        delta = (value - tl.sum(state * key[:, None], 0)) * beta
        state = state + key[:, None] * delta[None, :]
        out = tl.sum(state * query[:, None], 0)
        tl.store(raw_ptr + at * value_dim + e, out, mask=e < value_dim)
        if (t + 1 == kept) & (kept < tokens):
            tl.store(stored, state, mask=inside)
    tl.store(last, state, mask=inside)


@triton.jit
def delta_gate_kernel(
    raw_ptr, gate_ptr, norm_ptr, out_ptr, value_dim, epsilon, BLOCK_E: tl.constexpr
):
    """Write the gated norm of each token's head: ``[N, h e]`` in the dtype of ``out``."""
    e = tl.arange(0, BLOCK_E)
    inside = e < value_dim
    at = tl.program_id(0).to(tl.int64) * value_dim + e
    x = tl.load(raw_ptr + at, mask=inside, other=0.0)
    x = x / tl.sqrt(tl.sum(x * x, 0) / value_dim + epsilon)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.load(norm_ptr + e, mask=inside, other=0.0) * _silu(gate)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def mamba_kernel(
    convolved_ptr, dt_ptr, rate_ptr, bias_ptr, skip_ptr, states_ptr, rows_ptr, raw_ptr,
    channels, stride, heads, share, head_dim, state_dim, least, most,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the state space ``[N, h p]`` of some features of a head of a row, before the norm.

    The states ``[S, h, p, n]`` change. ``share``: heads of a group; ``stride``: of time steps.
    """
    row = rows_ptr + tl.program_id(0) * 6
    head = tl.program_id(1)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.arange(0, BLOCK_N)
    first, tokens, is_new = tl.load(row), tl.load(row + 1), tl.load(row + 3)
    slot, kept, after = tl.load(row + 2), tl.load(row + 4), tl.load(row + 5)
    width = heads * head_dim
    inside = (p < head_dim)[:, None] & (n < state_dim)[None, :]
    place = p.to(tl.int64)[:, None] * state_dim + n[None, :]
    stored = states_ptr + (slot * heads + head) * head_dim * state_dim + place
    last = states_ptr + (after * heads + head) * head_dim * state_dim + place
    state = tl.load(stored, mask=inside & (is_new + tl.zeros_like(place) == 0), other=0.0)
    rate, bias, skip = tl.load(rate_ptr + head), tl.load(bias_ptr + head), tl.load(skip_ptr + head)
    # A row of one token that goes on, or with drafts, has none.
    has_limits = ((tokens > 1) & (kept == tokens)) | (is_new != 0)
    for t in range(tokens):
        own = convolved_ptr + (first + t) * channels
        x = tl.load(own + head * head_dim + p, mask=p < head_dim, other=0.0)
        of_group = own + width + head // share * state_dim + n
        into = tl.load(of_group, mask=n < state_dim, other=0.0)
        read = tl.load(of_group + heads // share * state_dim, mask=n < state_dim, other=0.0)
        dt = _softplus(tl.load(dt_ptr + (first + t) * stride + head).to(tl.float32) + bias)
        dt = tl.where(has_limits, tl.minimum(tl.maximum(dt, least), most), dt)
        state = state * tl.exp(rate * dt) + (x * dt)[:, None] * into[None, :]
        out = tl.sum(state * read[None, :], 1) + skip * x
        tl.store(raw_ptr + (first + t) * width + head * head_dim + p, out, mask=p < head_dim)
        if (t + 1 == kept) & (kept < tokens):
            tl.store(stored, state, mask=inside)
    tl.store(last, state, mask=inside)


@triton.jit
def mamba_norm_kernel(
    raw_ptr, gate_ptr, norm_ptr, out_ptr, stride, width, normed, epsilon, BLOCK: tl.constexpr
):
    """Write a part of each token's gated norm: ``[N, h p]`` in the dtype of ``out``."""
    token, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * normed
    i = begin + tl.arange(0, BLOCK)
    inside = i < begin + normed
    x = tl.load(raw_ptr + token * width + i, mask=inside, other=0.0)
    x = x * _silu(tl.load(gate_ptr + token * stride + i, mask=inside, other=0.0).to(tl.float32))
    x = x / tl.sqrt(tl.sum(x * x, 0) / normed + epsilon)
    x = x * tl.load(norm_ptr + i, mask=inside, other=0.0)
    tl.store(out_ptr + token * width + i, x.to(out_ptr.dtype.element_ty), mask=inside)
