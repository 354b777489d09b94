"""Temporary memory of one stage, operator by operator (LLM-PQ, Sec. 4.1).

Weights and KV blocks are exact (``costmodel.stored``). Temporaries are the tensors alive at the
worst moment of a step, times a margin for the allocator. On a CPU every moment is a list of the
tensors alive in one statement of transformers' decoder layers, and ``HEAP_MARGIN`` is added for the
holes of glibc's heap; where compiled steps run, their buffers. Measured peaks of whole processes
are 1 % more to 7 % less. Elsewhere one documented upper estimate is taken (``gpu_memory``).

Shape legend: R rows of a step, T tokens a sequence, C context tokens, h hidden, e bytes a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from llmpq.costmodel.gpu_memory import SCORE_BYTES, gpu_bytes
from llmpq.costmodel.layer_tensors import (
    BIASED_ATTENTION,
    IN_FLOAT32,
    INNER_TENSORS,
    MORE_HELD,
    SCORES_ATTENTION,
    STEPWISE_ACTIVATION,
    Step,
    is_attention,
    is_beside,
    runs_in_blocks,
)
from llmpq.costmodel.stored import head_rows
from llmpq.spec.devices.figures import DeviceKind
from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype, needs_scratch
from llmpq.spec.runtime_constants import (
    ACTIVATION_BLOCK_VALUES,
    HEAD_LANES,
    KV_BLOCK_TOKENS,
    MAPPED_FROM_BYTES,
    MATRICES_UNDER_WAY,
    MAX_PAGED_HEAD_DIM,
    ROW_BLOCK,
    SCORE_BLOCK_TOKENS,
    SHARED_BUFFERS,
    SHARED_FROM_BYTES,
    STEP_ROWS,
    STEP_SLOTS,
)
from llmpq.spec.workload import Workload

HEAP_MARGIN = 0.7
"""Share added to the temporaries of a CPU worker, up to ``MAPPED_FROM_BYTES`` of each tensor."""
MASTER_BYTES = 2_000_000
"""What embedding, projection and sampling keep on the master."""
EXPERT_SHARE = 2.0
"""Rows of the busiest expert, as a multiple of an even share."""
INDEX_BYTES = 48
"""Positions and block indices of one token of a step: six 64-bit integers."""

Moment = list[int]
"""Bytes of each tensor alive at once."""


def temporary_bytes(  # noqa: PLR0913  what a step is, and where it runs
    model: ModelSpec,
    workload: Workload,
    micro_batching: MicroBatching,
    *,
    dtype: Dtype,
    device_kind: DeviceKind,
    is_master: bool,
    kv_bits: int = 16,
    is_last: bool = False,
    kv_bytes: int = 0,
    head_bits: int = 16,
) -> int:
    """Return the peak bytes that live only during a step.

    A prompt is computed in chunks of ``PROMPT_CHUNK_TOKENS``; the step of its last chunk counts.
    Nothing grows with the square of a prompt.

    On a CPU this is the larger of the peak of a step and the peak of loading. There ``kv_bits``
    counts, and what a finished plan states of a stage: ``is_last`` and ``kv_bytes`` of its blocks;
    without these the result is an upper bound. Elsewhere, with ``R = v T`` rows of a chunk, ``M``
    tokens of all prompts, value size ``e``, and widths as in ``LayerSpec``::

        4 MiB + 1.1 * max over (prefill, decode) of
              2 M h e                      messages: received, to be sent
            + 2 R h e                      the residual and the normed copy
            + max( 2 R h 4                 norm in float32
                   attention, feed-forward, worst operator's rows )
            + widened                      the largest weight matrix in the dtype: out in e
            + v V (e + 2 * 4)              on the master: logits, in float32, and their sorted copy

        attention    = R (2 (q + k) d + k d + q d) e         q and k, rotated too, v, and the output
                     + 2 G (k + x) d e                     keys and values gathered from blocks
                     + v B C e                               mask of B query and C context tokens
                     + v q B C (2 e + 8)                     scores with a bias
                     + q B C 4 + 4 C k d                    scores that are written out
        feed-forward = R a (p + c f) e                       outputs of its operators, activated
        rows         = R a ((in + out) e + w in + 4 out)     8-bit rows and their 32-bit sums

    ``B`` is at most ``SCORE_BLOCK_TOKENS``; ``G`` is ``v C`` in decode, else the larger of ``R``
    and ``C``: chunks gather one sequence at a time. ``x`` is ``q`` where heads are grouped, which
    are repeated in prefill and decode alike, else 0; ``a`` experts a token; ``p`` the sum and ``f``
    the largest of the feed-forward operators' outputs; ``c`` results of the activation alive at
    once; ``w`` bytes of a value on its way to 8 bits, 1 (float32 runs widen instead). Scores that
    are capped or have sinks are written out, for one prompt at a time, in decode for ``v``, with
    keys or values in float32; ``x`` is then 0. Of latent attention, the latent vectors and what is
    made of them count.
    What quantized layers need is always counted.
    """
    prompts = Step.of_prompts(model, dtype, kv_bits, micro_batching.prefill, workload.prompt_tokens)
    decode = Step(
        model=model, dtype=dtype, kv_bits=kv_bits, batch=micro_batching.decode, tokens=1,
        context=workload.max_context_tokens,
    )  # fmt: skip
    steps = [prompts, decode]
    if device_kind == "cpu":
        links = (not is_master) + (not is_last)
        worst = max(
            _cpu_peak(step, is_master=is_master, links=links) + _chunk_bytes(step, is_last=is_last)
            for step in steps
        )
        worst += _scratch_bytes(model, dtype, head_bits if is_master else 16)
        worst += read_buffer_bytes(steps)
        worst += MASTER_BYTES if is_master else 0
        # Blocks are not written by the time a stage loads.
        return max(worst, loading_bytes(model) - kv_bytes)
    return gpu_bytes(steps, is_master=is_master)


def context_bytes(model: ModelSpec, dtype: Dtype, tokens: int, device_kind: DeviceKind) -> int:
    """Return the temporary bytes with which a chunk of a prompt attends to ``tokens`` before it.

    On a CPU a kernel reads keys and values in place: 4 bytes of a token for the bias of a head,
    where there is one. Elsewhere, and for heads that the kernel does not take, they are gathered
    from the blocks of one sequence at a time, layer by layer; in multiples of ``tokens``, with
    ``e`` bytes a value and ``T`` queries of a block::

        2 (k + x) d e + T + 8            keys and values, mask, positions; x is q for groups whose
                                         scores are not written out, else 0
        4 k d + 4 T q                    in float32 and scores, where scores are written out
        T q e                            bias of a block, where there is one
    """
    most, value_bytes = 0, DTYPE_BYTES[dtype]
    for layer in model.layer_types:
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        bias = 4 * heads if model.family in BIASED_ATTENTION else 0
        if device_kind == "cpu" and _fits_kernel(layer) and layer.value_dim is None:
            most = max(most, bias)
            continue
        is_written_out = model.family in SCORES_ATTENTION
        repeated = heads if kv_heads < heads and not is_written_out else 0
        own = 2 * (kv_heads + repeated) * dim * value_bytes
        own += SCORE_BLOCK_TOKENS + 8
        if is_written_out:
            own += 4 * kv_heads * dim + SCORE_BYTES * SCORE_BLOCK_TOKENS * heads
        if model.family in BIASED_ATTENTION:
            own += SCORE_BLOCK_TOKENS * heads * value_bytes
        most = max(most, own)
    return tokens * most


def _cpu_peak(step: Step, *, is_master: bool, links: int) -> int:
    """Return the most bytes that a step takes for tensors and their holes.

    Hidden states are held for each link that carries whole ones: received or on their way out,
    large ones in buffers shared with the neighbour. One stage alone holds its embedded tokens.
    """
    held = SHARED_BUFFERS if step.message >= SHARED_FROM_BYTES else 1
    found = [
        sum(_shared(step, layer)) + max(map(_with_holes, _moments(step, layer)))
        for layer in step.model.layer_types
    ]
    buffers = (_buffers(step, layer) for layer in step.model.layer_types)
    found.append(max(map(_with_holes, buffers)) + step.hidden)
    if is_master:  # by then the layers' own tensors are gone
        found.append(_with_holes(_logits(step)))
    return max(1, links * held) * step.message + step.apart + max(found)


def _chunk_bytes(step: Step, *, is_last: bool) -> int:
    """Return what a chunk takes beyond a prompt as long as it.

    The outputs of all chunks are put together, but for those of the last stage.
    """
    if not step.is_chunk:
        return 0
    joined = 0 if is_last else step.message
    return joined + context_bytes(step.model, step.dtype, step.context, "cpu")


def _with_holes(moment: Moment) -> int:
    holes = sum(min(size, MAPPED_FROM_BYTES) for size in moment)
    return sum(moment) + math.ceil(HEAP_MARGIN * holes)


def loading_bytes(model: ModelSpec) -> int:
    """Return what loading takes in addition to what it has placed."""
    largest = max(
        op.out_features * op.in_features
        for layer in model.layer_types
        for op in layer.linears
        if op.quantizable
    )
    return MATRICES_UNDER_WAY * 2 * largest


def live_bytes(step: Step) -> int:
    """Return the most bytes of tensors alive at once in a layer, with its input."""
    return max(
        sum(_shared(step, layer)) + max(map(sum, _moments(step, layer)))
        for layer in step.model.layer_types
    )


def read_buffer_bytes(steps: Sequence[Step]) -> int:
    """Return the bytes of the buffer that 8-bit keys and values are gathered into."""
    step = steps[0]
    layers = [layer for layer in step.model.layer_types if not _fits_kernel(layer)]
    if step.kv_bits != 8 or not layers:
        return 0
    widest = max(layer.num_kv_heads * layer.head_dim for layer in layers)
    tokens = max(one.context if one.is_chunk else one.batch * one.context for one in steps)
    return 2 * tokens * widest * DTYPE_BYTES[step.dtype]


def compiled_bytes(step: Step) -> int:
    """Return the bytes of the buffers of compiled steps (``llmpq.kernels.cpu.step``).

    A layer has buffers of every tensor between its operators, and of these at 8 bits, for up to
    ``STEP_ROWS`` tokens; layers share those of one name and shape.
    """
    return max(sum(_buffers(step, layer)) for layer in step.model.layer_types)


def _buffers(step: Step, layer: LayerSpec) -> list[int]:
    """Return the bytes of the buffers of a layer, of rows or of each row's choices of experts."""
    operators = [op for op in layer.linears if op.quantizable]
    experts = [op for op in operators if op.count > 1]
    active = max((op.active for op in experts), default=1)
    rows = min(step.rows, STEP_ROWS, STEP_SLOTS // active)
    hidden, query = step.model.hidden_size, layer.num_heads * layer.head_dim
    widths = [
        2 * hidden,
        2 * layer.head_dim,
        query,
        *(op.active * op.out_features for op in operators),
    ]
    # What experts gather and activate, and their sum; a gate beside what it multiplies.
    widths += [op.active * op.in_features for op in experts]
    widths += [hidden] if experts else []
    widths += [op.out_features // 2 for op in operators if "gate_up" in op.name and op.count == 1]
    coded = {(op.active, op.in_features) for op in operators}
    found = [rows * width * DTYPE_BYTES[step.dtype] for width in widths]
    # Codes of 8-bit products are 16 bits wide without VNNI; those of fewer bits have scales, sums.
    found += [rows * count * width * 2 for count, width in coded]
    return [*found, *(4 * rows * (op.count + 2 * op.active) for op in experts[:1])]


def _moments(step: Step, layer: LayerSpec) -> list[Moment]:
    """Return the tensors alive in the statements of a layer that may be its worst."""
    found = [
        _norm(step, layer),
        _attention(step, layer),
        *_products(step, layer),
    ]
    if step.kv_bits == 8 and not _fits_kernel(layer):
        found.append(_quantized(step, layer))
    has_experts = any(op.count > 1 for op in layer.linears if op.quantizable)
    if layer.value_dim is not None:
        found.append(_expanded_latents(step, layer))
    if not has_experts:
        return [*found, _feed_forward(step, layer)]
    return [*found, _experts(step, layer), _shared_expert(step, layer)]


def _norm(step: Step, layer: LayerSpec) -> Moment:
    """Two copies in float32; the layer's input, the residual, and what a norm after it norms."""
    hidden = step.model.hidden_size
    held = 3 if layer.norm_parameters >= 4 * hidden else 2
    return [*[step.hidden] * held, *[step.of(hidden, 4)] * 2]


def _shared(step: Step, layer: LayerSpec) -> Moment:
    """Tensors besides those of a moment: cosines, sines, a bias, positions, block indices."""
    bias = layer.num_heads * step.context * 4 if step.model.family in BIASED_ATTENTION else 0
    family, hidden = step.model.family, step.model.hidden_size
    more = [step.hidden] * MORE_HELD.get(family, 0)
    more += [step.of(hidden, 4) - step.hidden] * IN_FLOAT32.get(family, 0)
    if step.tokens == 1:  # inner tensors are the larger part of a decode step
        more = []
    return [*[step.of(layer.head_dim)] * 2, bias, INDEX_BYTES * step.rows, *more]


def _attention(step: Step, layer: LayerSpec) -> Moment:
    """Queries and keys being rotated; where no kernel reads blocks in place, what is copied there.

    Without the kernel prompts attend to their own new keys and values, repeated for every query
    head where heads are grouped; in decode they are gathered. Scores are those of a block.
    """
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    if _fits_kernel(layer) and step.model.family in BIASED_ATTENTION:
        return [*[step.hidden] * 2, step.of(query + 2 * key), step.of(query)]
    own = [*[step.hidden] * 2, *[step.of(query)] * 4, *[step.of(key)] * 2]
    if _fits_kernel(layer):
        return own
    value_bytes = DTYPE_BYTES[step.dtype]
    cached = step.batch * step.context * value_bytes
    picked = [cached * key] * 2
    repeated = [cached * query] * 2 if key < query else []
    if step.model.family in BIASED_ATTENTION:
        return _biased_attention(step, layer, picked)
    if step.model.family in SCORES_ATTENTION:
        rows = step.batch if step.tokens == 1 else 1  # prompts run one by one
        scores = rows * min(step.tokens, SCORE_BLOCK_TOKENS) * layer.num_heads * step.context
        wide = rows * step.context * key * 4
        own = [*[step.hidden] * 2, *[step.of(query)] * 3, *[step.of(key)] * 2]
        copies = picked if step.tokens == 1 else []
        return [*own, *copies, wide, scores * SCORE_BYTES]
    if step.tokens > 1:
        return own
    if step.kv_bits == 8:
        picked = [cached * key // value_bytes]
    return [*own, step.rows * step.context * value_bytes, *picked, *repeated]


def _biased_attention(step: Step, layer: LayerSpec, picked: Moment) -> Moment:
    """A joined product, gathered keys and values, the output; bias and output of a query block."""
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    value_bytes = DTYPE_BYTES[step.dtype]
    tokens = min(step.tokens, SCORE_BLOCK_TOKENS)
    # The rows of a prefill share a bias; in decode each has its own length.
    rows = step.batch if step.tokens == 1 else 1
    bias = rows * layer.num_heads * tokens * step.context * value_bytes
    block = step.batch * tokens * query * value_bytes
    return [*[step.hidden] * 2, step.of(query + 2 * key), step.of(query), *picked, bias, block]


def _fits_kernel(layer: LayerSpec) -> bool:
    """Whether the kernel that reads blocks in place takes a layer's heads."""
    return layer.head_dim % HEAD_LANES == 0 and layer.head_dim <= MAX_PAGED_HEAD_DIM


def _quantized(step: Step, layer: LayerSpec) -> Moment:
    """New keys and values being quantized: all codes; of a block also values, float32 and codes."""
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    codes = step.of(2 * key, 1)
    scales = step.of(2 * layer.num_kv_heads, 4 + 4 + 2)
    block = min(step.rows, KV_BLOCK_TOKENS) * 2 * key
    in_work = [block * DTYPE_BYTES[step.dtype], *[4 * block] * 2, block]
    return [*[step.hidden] * 2, step.of(query), *[step.of(key)] * 2, codes, scales, *in_work]


def _feed_forward(step: Step, layer: LayerSpec) -> Moment:
    """The layer's input, the residual, the normed copy, and the inner tensors.

    A feed-forward in blocks of rows also holds its output.
    """
    *ups, down = [op for op in layer.linears if not is_attention(op) and not is_beside(op)]
    inner = _rows_of(step, down, down.in_features)
    held = [step.hidden] * (4 if runs_in_blocks(down) and step.rows > ROW_BLOCK else 3)
    alive = STEPWISE_ACTIVATION.get(step.model.family)
    if alive is not None:
        block = min(inner, ACTIVATION_BLOCK_VALUES * DTYPE_BYTES[step.dtype])
        return [*held, inner, *[block] * alive]
    if sum(op.out_features for op in ups) == down.in_features:
        return [*held[1:], *[inner] * INNER_TENSORS.get(step.model.family, 2)]
    joined = [2 * inner] if len(ups) == 1 else [inner]
    # Gate and up, or up; activated gate; product.
    return [*held, *joined, inner, inner]


def _experts(step: Step, layer: LayerSpec) -> Moment:
    """The busiest expert on a block of the rows routed to it, and the sum of all experts."""
    *_, up, down = [op for op in layer.linears if op.count > 1]
    inner = _rows_of(step, down, down.in_features)
    if not runs_in_blocks(down):  # the outputs of all experts, and all of them in one tensor
        whole = down.active * step.of(up.out_features)
        return [*[step.hidden] * 4, down.active * step.hidden, *[whole] * 2]
    return [*[step.hidden] * 4, _rows_of(step, down, down.out_features), 2 * inner, inner]


def _shared_expert(step: Step, layer: LayerSpec) -> Moment:
    """The inner tensors of the expert that all tokens visit, and of the routed experts' sum."""
    dense = [op for op in layer.linears if op.count == 1 and op.quantizable]
    inner = [_rows_of(step, op, op.in_features) for op in dense if not is_attention(op)]
    return [*[step.hidden] * 5, *[max(inner, default=0)] * 3]


def _expanded_latents(step: Step, layer: LayerSpec) -> Moment:
    """Latent vectors read from the cache, and the keys and values of all heads made from them."""
    made = sum(op.out_features for op in layer.linears if op.name.endswith("kv_b_proj"))
    value, query = layer.num_heads * (layer.value_dim or 0), layer.num_heads * layer.head_dim
    if step.tokens > 1:  # a prompt attends to its own: queries and keys, rotated too
        own = [*[step.of(query)] * 4, step.of(made), *[step.of(value)] * 2]
        own += [step.of(layer.kv_values_per_token)] * 2
        if not step.is_chunk:
            return [*[step.hidden] * 4, *own]
        cached = step.batch * step.context * DTYPE_BYTES[step.dtype]
        read = [*[cached * layer.kv_values_per_token] * 2, *[cached * (made + value)] * 2]
        return [*[step.hidden] * 4, *own, *read]
    cached = step.batch * step.context * DTYPE_BYTES[step.dtype]
    expanded = [cached * (made + value)] * 2
    return [*[step.hidden] * 2, *[cached * layer.kv_values_per_token] * 2, *expanded]


def _rows_of(step: Step, op: LinearSpec, features: int, value_bytes: int | None = None) -> int:
    """Return the bytes of ``features`` for each row that one operator computes at a time."""
    share = 1.0 if op.count == 1 else min(1.0, EXPERT_SHARE * op.active / op.count)
    if runs_in_blocks(op):
        share = min(share, ROW_BLOCK / step.rows)
    return math.ceil(share * step.of(features, value_bytes))


def _products(step: Step, layer: LayerSpec) -> list[Moment]:
    """Every operator's input and output, and its input in 8 bits."""
    found = []
    for op in layer.linears:
        if not op.quantizable:
            continue
        operands = [
            (op.in_features, None),
            (op.out_features, None),
            (op.in_features, 1),
        ]
        found.append([*[step.hidden] * 2, *(_rows_of(step, op, *size) for size in operands)])
    return found


def _logits(step: Step) -> Moment:
    """Scores of the vocabulary, in float32, and a sampler's sorted copy."""
    scores = step.batch * step.model.vocab_size
    return [scores * DTYPE_BYTES[step.dtype], scores * 4, scores * 4]


def _scratch_bytes(model: ModelSpec, dtype: Dtype, head_bits: int) -> int:
    """Return the largest weight that no compiled kernel takes, widened; it stays allocated."""
    head = head_rows(model), model.head_in_features
    widened = [
        op.out_features * op.in_features * DTYPE_BYTES[dtype]
        for layer in model.layer_types
        for op in layer.linears
        for bits in BITS
        if op.quantizable and needs_scratch(model.precision(bits), op.out_features, op.in_features)
    ]
    if needs_scratch(model.head_precision(head_bits), *head):
        widened.append(math.prod(head) * DTYPE_BYTES[dtype])
    return max(widened, default=0)
