"""Bytes of one stage: exact parts, and one bound a kind of device (LLM-PQ, Sec. 4.1).

Weights, KV blocks, embeddings and head are exact, by the formulas that the runtime allocates to.
So are messages, buffers of compiled steps and what loading holds. The tensors of transformers'
decoder layers are bounded by the worst operator of a layer; see :func:`temporary_bytes`. Measured
peaks of whole processes on CPUs are 1 % (with a recurrent state 2 %) more to 12 % less.

Shape legend: R rows of a step, T tokens a sequence, C context tokens, h hidden, e bytes a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.spec.devices.figures import DeviceKind
from llmpq.spec.families import PIECE_TOKENS, family_of
from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec, most_absorbed
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype, needs_scratch, stored_bytes
from llmpq.spec.runtime_constants import (
    HEAD_LANES,
    HEAD_ROW_MULTIPLE,
    KV_BLOCK_SIZE,
    KV_CODE_BITS,
    MAPPED_FROM_BYTES,
    MATRICES_UNDER_WAY,
    MAX_PAGED_HEAD_DIM,
    PANEL_COLUMNS,
    PANEL_ROWS,
    PROMPT_CHUNK_TOKENS,
    ROW_BLOCK,
    SCORE_BLOCK_TOKENS,
    SHARED_BUFFERS,
    SHARED_FROM_BYTES,
    STEP_ROWS,
    STEP_SLOTS,
    decode_splits,
    kept_blocks,
    state_slots,
)
from llmpq.spec.workload import Workload
from llmpq.units import MIB

KV_SCALE_BYTES = 2
"""One 16-bit scale for every key or value of a token and head that is cached at 8 or 4 bits."""


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


def absorbed_bytes(model: ModelSpec, kind: int, dtype: Dtype) -> int:
    """Return the bytes of what takes queries of latent attention to the latent vectors on a CPU.

    It is the operator that makes keys and values, once more in the run's format, where the kernel
    takes the vectors (``llmpq/quant/modules/latent.py``).
    """
    layer = model.layer_types[kind]
    if not absorbs_latents(layer):
        return 0
    return sum(op.weight_parameters for op in _expanding(layer)) * DTYPE_BYTES[dtype]


def expert_bytes(model: ModelSpec, kind: int, bits: int, dtype: Dtype) -> int:
    """Return the bytes of one routed expert of a layer, 0 where it has none."""
    precision, value_bytes = model.precision(bits), DTYPE_BYTES[dtype]
    return sum(
        stored_bytes(None, precision, dtype, op.out_features, op.in_features)
        + op.bias * op.out_features * value_bytes
        for op in model.layer_types[kind].linears
        if op.count > 1
    )


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
    keep all tokens, too: stages that send keys and values, draft models. The states of a layer that
    keeps them count in float32.
    """
    has_window = model.layer_types[kind].sliding_window is not None and not keeps_all
    blocks = kept_blocks(max_tokens, model.window_tokens if has_window else None)
    state = state_slots(slots) * model.layer_types[kind].state_values * DTYPE_BYTES["float32"]
    return token_kv_bytes(model, kind, slots * blocks * KV_BLOCK_SIZE, kv_bits) + state


def token_kv_bytes(model: ModelSpec, kind: int, tokens: int, kv_bits: int) -> int:
    """Return the bytes of one layer's keys and values of so many tokens.

    At 8 and 4 bits a token has a 16-bit scale for each of its ``2 k`` keys and values in addition.
    """
    layer = model.layer_types[kind]
    per_token = layer.kv_bytes_per_token(kv_bits / 8) + kv_scale_bytes(layer, kv_bits)
    return math.ceil(tokens * per_token)


def kv_scale_bytes(layer: LayerSpec, kv_bits: int) -> int:
    """Return the bytes of the scales of one token's keys and values in a layer."""
    cached = 0 if layer.kv_source is not None else 2 * layer.num_kv_heads
    return cached * KV_SCALE_BYTES if kv_bits in KV_CODE_BITS else 0


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


EXPERT_SHARE = 2.0
"""Rows of the busiest expert, as a multiple of an even share."""

_ATTENTION_PREFIXES = (
    *("self_attn.", "self_attention.", "attention.", "attn.", "norm_attn_norm."),
    *("linear_attn.", "conv.", "mamba."),  # what some layers have in its place
    # Nemotron-H and Mamba have one name for all that a layer consists of.
    *(f"mixer.{name}_proj" for name in ("in", "x", "dt", "out", "q", "k", "v", "o")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardShape:
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
    ) -> ForwardShape:
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


def absorbs_latents(layer: LayerSpec) -> bool:
    """Whether the kernel of CPUs reads the latent vectors of a layer as keys and values."""
    if layer.value_dim is None:
        return False
    read = layer.head_dim + layer.value_dim
    return read % HEAD_LANES == 0 and read <= MAX_PAGED_HEAD_DIM


def _most_absorbed(layer: LayerSpec, rotated: int) -> int:
    keys_and_values = sum(op.out_features for op in _expanding(layer)) // layer.num_heads
    queries = [op.out_features for op in layer.linears if op.name.endswith(("q_proj", "q_b_proj"))]
    plain = queries[0] // layer.num_heads - rotated
    return most_absorbed(layer.head_dim, rotated, plain, keys_and_values - plain)


def _expanding(layer: LayerSpec) -> list[LinearSpec]:
    """Return the operators that make keys and values of latent vectors."""
    return [op for op in layer.linears if op.name.endswith("kv_b_proj")]


def is_attention(op: LinearSpec) -> bool:
    """Whether an operator belongs to attention, or to what a layer has in its place."""
    return op.name.startswith(_ATTENTION_PREFIXES)


def runs_in_blocks(op: LinearSpec) -> bool:
    """Whether a CPU computes the operator for ``ROW_BLOCK`` rows at a time.

    These are the feed-forwards that are modules, and experts of two matrices.
    """
    is_single_stack = op.count > 1 and not op.name.endswith("_proj")
    return "." in op.name and not is_attention(op) and not is_single_stack


GPU_MARGIN = 0.1
"""Share added to the temporaries of a GPU."""
GPU_WORKSPACE_BYTES = 4 * MIB
"""What kernels of a GPU hold whatever the shape: blocks of a weight being widened."""
HEAP_MARGIN = 0.4
"""Share added to the temporaries of a CPU worker for the holes of glibc's heap."""
HEAP_BYTES = 8 * MAPPED_FROM_BYTES
"""Temporaries of a CPU worker in the heap: about eight at once, of which larger ones are mapped."""
OTHER_TENSORS = {2: 6, 4: 4}
"""Tensors as large as hidden states that layers of any family hold on a CPU besides those counted
for all, by the bytes of a value: parts rotated apart, norms of heads and sums in float32."""
MASTER_BYTES = 2_000_000
"""What embedding, projection and sampling keep on the master."""
MAX_KERNEL = 16
"""More numbers of a state than so many a channel are those of a recurrence."""
RECURRENCE_BYTES, CONVOLUTION_BYTES = 160, 9
"""What transformers' mixer of a layer with a recurrent state makes of a token, by channel: with a
recurrence (Mamba 2: chunks of 256 tokens), and with a convolution alone, which keeps the format of
the run."""
DECODE_STATES = 6
"""States of a row that transformers' recurrences make for one token, with those read."""
SCORE_BYTES = 4
"""Bytes of a score that is written out, in float32."""
INDEX_BYTES = 48
"""Positions and block indices of one token of a step: six 64-bit integers."""


def temporary_bytes(  # noqa: PLR0913  what a step is, and where it runs
    model: ModelSpec,
    workload: Workload,
    micro_batching: MicroBatching,
    *,
    dtype: Dtype,
    device_kind: DeviceKind,
    is_master: bool,
    reads_blocks: bool = True,
    kv_bits: int = 16,
    is_last: bool = False,
    kv_bytes: int = 0,
    head_bits: int = 16,
) -> int:
    """Return the peak bytes that live only during a step.

    A prompt is computed in chunks of ``PROMPT_CHUNK_TOKENS``; the step of its last chunk counts.
    Nothing grows with the square of a prompt. With ``R = v T`` rows of a chunk, ``M`` tokens of all
    prompts, value size ``e``, and widths as in ``LayerSpec``, a layer holds::

        layer        = 2 R h e                               the residual and the normed copy
                     + R (2 d e + 48)                        cosines, sines, positions, blocks
                     + 4 q C                                 bias of kernels that read in place
                     + max( 2 R h 4                          norm in float32
                            attention, feed-forward, worst operator's rows )
        attention    = R (4 q + 2 k) d e                     q and k, rotated too, v, and the output
                     + 2 G (k + x) d e                       keys and values gathered from blocks
                       or, in decode of GPUs,
                       4 v q s (d + 1)                       of every part of a row's keys
                     + v B C e                               mask of B query and C context tokens
                     + v q B C (2 e + 8)                     scores with a bias
                     + q B C 4 + 4 C k d                     scores that are written out
                       or, with a recurrent state,
                       T (i e + 64 m) + 12 u + R h e         of one prompt; of every row in decode
        feed-forward = R a (p + c f) e                       outputs of its operators, activated
        rows         = R a ((in + out) e + w in + 4 out)     8-bit rows and their 32-bit sums

    ``i`` and ``m`` are the outputs and the channels of a mixer, ``u`` the numbers of its state.
    ``s`` parts of a row's keys are computed apart and joined (``decode_splits``): there nothing is
    gathered, masked or written out. ``B`` is at most ``SCORE_BLOCK_TOKENS``; ``G`` is ``v C`` in
    decode, else the larger of ``R`` and ``C``: chunks gather one sequence at a time. ``x`` is ``q``
    where heads are grouped, which are repeated in prefill and decode alike, else 0; ``a`` experts a
    token; ``p`` the sum and ``f`` the largest of the feed-forward operators' outputs; ``c`` results
    of the activation alive at once; ``w`` bytes of a value on its way to 8 bits, 1 (float32 runs
    widen instead). Scores that are capped or have sinks are written out, for one prompt at a time,
    in decode for ``v``, with keys or values in float32; ``x`` is then 0. Of latent attention, the
    latent vectors and what is made of them count. What quantized layers need is always counted.

    Elsewhere than on a CPU the step takes::

        4 MiB + 1.1 * max over (prefill, decode) of
              2 M h e                      messages: received, to be sent
            + layer
            + widened                      the largest weight matrix in the dtype: out in e
            + v V (e + 2 * 4)              on the master: logits, in float32, and their sorted copy

    On a CPU a kernel reads keys and values in place; feed-forwards that are modules, and experts,
    take ``ROW_BLOCK`` rows at a time and hold ``2 R h e`` of joined outputs; attention holds
    ``OTHER_TENSORS`` more, which cover the parts that only some families have. The
    result is the larger of the peak of a step and the peak of loading. There ``kv_bits`` counts,
    and what a finished plan states of a stage: ``is_last`` and ``kv_bytes`` of its blocks; without
    these the result is an upper bound. The step takes::

        links M h e                        messages of the neighbours, two of each if shared
      + M h e                              outputs of chunks; on the master also its input
      + 1.4 * max( layer, compiled buffers + R h e, logits )
    """
    prompts = ForwardShape.of_prompts(
        model, dtype, kv_bits, micro_batching.prefill, workload.max_prompt_tokens
    )
    decode = ForwardShape(
        model=model, dtype=dtype, kv_bits=kv_bits, batch=micro_batching.decode, tokens=1,
        context=workload.max_context_tokens,
    )  # fmt: skip
    steps = [prompts, decode]
    if device_kind != "cpu":
        worst = max(
            _gpu_peak(
                step, is_master=is_master, reads_blocks=reads_blocks and device_kind == "cuda"
            )
            for step in steps
        )
        return GPU_WORKSPACE_BYTES + math.ceil((1.0 + GPU_MARGIN) * worst)
    links = (not is_master) + (not is_last)
    worst = max(_cpu_peak(step, is_master=is_master, links=links) for step in steps)
    # Beside them the master keeps the embedded tokens of the chunks to come.
    worst += 0 if is_last else (1 + is_master) * prompts.joined
    worst += _scratch_bytes(model, dtype, head_bits if is_master else 16)
    worst += read_buffer_bytes(steps)
    worst += MASTER_BYTES if is_master else 0
    # Blocks are not written by the time a stage loads.
    return max(worst, loading_bytes(model) - kv_bytes)


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
    most, value_bytes, family = 0, DTYPE_BYTES[dtype], family_of(model.family)
    for layer in model.layer_types:
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        bias = 4 * heads if family.alibi is not None else 0
        if device_kind == "cpu" and fits_kernel(layer):
            most = max(most, bias)
            continue
        is_written_out = family.writes_scores
        repeated = heads if kv_heads < heads and not is_written_out else 0
        own = 2 * (kv_heads + repeated) * dim * value_bytes
        own += SCORE_BLOCK_TOKENS + 8
        if is_written_out:
            own += 4 * kv_heads * dim + SCORE_BYTES * SCORE_BLOCK_TOKENS * heads
        if family.alibi is not None:
            own += SCORE_BLOCK_TOKENS * heads * value_bytes
        most = max(most, own)
    return tokens * most


def loading_bytes(model: ModelSpec) -> int:
    """Return what loading takes on a CPU in addition to what it has placed."""
    largest = max(
        op.out_features * op.in_features
        for layer in model.layer_types
        for op in layer.linears
        if op.quantizable
    )
    return MATRICES_UNDER_WAY * 2 * largest


def live_bytes(step: ForwardShape) -> int:
    """Return the bound of the tensors of a layer alive at once on a CPU, with its input."""
    return max(_layer_bytes(step, layer, on_cpu=True) for layer in step.model.layer_types)


def compiled_bytes(step: ForwardShape) -> int:
    """Return the bytes of the buffers of compiled steps (``llmpq.kernels.cpu.step``).

    A layer has buffers of every tensor between its operators, and of these at 8 bits, for up to
    ``STEP_ROWS`` tokens; layers share those of one name and shape. Layers with a state share few
    with layers of attention.
    """
    parts = [_buffer_bytes(step, layer) for layer in step.model.layer_types]
    return sum(parts) if step.model.has_states else max(parts)


def read_buffer_bytes(steps: Sequence[ForwardShape]) -> int:
    """Return the bytes of the buffer that quantized keys and values are gathered into on a CPU."""
    step = steps[0]
    layers = [layer for layer in step.model.layer_types if not fits_kernel(layer)]
    if step.kv_bits not in KV_CODE_BITS or not layers:
        return 0
    widest = max(layer.num_kv_heads * layer.head_dim for layer in layers)
    tokens = max(one.context if one.is_chunk else one.batch * one.context for one in steps)
    return 2 * tokens * widest * DTYPE_BYTES[step.dtype]


def _gpu_peak(step: ForwardShape, *, is_master: bool, reads_blocks: bool) -> int:
    value_bytes, peaks = DTYPE_BYTES[step.dtype], []
    for layer in step.model.layer_types:
        weights = [op.out_features * op.in_features for op in layer.linears if op.quantizable]
        own = _layer_bytes(step, layer, on_cpu=False, reads_blocks=reads_blocks)
        peaks.append(own + max(weights) * value_bytes)
    return 2 * step.message + step.apart + max(peaks) + (_logits(step) if is_master else 0)


def _cpu_peak(step: ForwardShape, *, is_master: bool, links: int) -> int:
    """Return the most bytes that a step takes for tensors and the holes of the heap.

    Hidden states are held for each link that carries whole ones: received or on their way out,
    large ones in buffers shared with the neighbour. One stage alone holds its embedded tokens.
    By the time of the logits, the layers' own tensors are gone.
    """
    held = SHARED_BUFFERS if step.message >= SHARED_FROM_BYTES else 1
    logits = _logits(step) if is_master else 0
    worst = max(live_bytes(step), compiled_bytes(step) + step.hidden, logits)
    holes = math.ceil(HEAP_MARGIN * min(worst, HEAP_BYTES))
    return max(1, links * held) * step.message + step.apart + worst + holes


def _layer_bytes(
    step: ForwardShape, layer: LayerSpec, *, on_cpu: bool, reads_blocks: bool = True
) -> int:
    """Return the bound of the tensors of a layer alive at once; see :func:`temporary_bytes`."""
    quantizable = [op for op in layer.linears if op.quantizable]
    others = OTHER_TENSORS[DTYPE_BYTES[step.dtype]] * step.hidden if on_cpu else 0
    in_place = on_cpu and fits_kernel(layer)
    has_parts = not on_cpu and reads_blocks and step.tokens == 1
    has_bias = in_place and family_of(step.model.family).alibi is not None
    bias = 4 * layer.num_heads * step.context if has_bias else 0
    mixed = _recurrence(step, layer, on_cpu=on_cpu) if layer.state_values else 0
    if layer.num_heads:  # both in layers of Falcon-H1
        absorbs = on_cpu and absorbs_latents(layer)
        mixed += _attention(step, layer, in_place=in_place or has_parts or absorbs)
        mixed += decode_parts_bytes(step, layer) if has_parts else 0
    worst = max(
        step.of(2 * step.model.hidden_size, 4),  # a norm in float32
        mixed + others,
        _feed_forward(step, layer, on_cpu=on_cpu),
        *(_operator_rows(step, op, on_cpu=on_cpu) for op in quantizable),
    )
    return 2 * step.hidden + step.of(2 * layer.head_dim) + INDEX_BYTES * step.rows + bias + worst


def _attention(step: ForwardShape, layer: LayerSpec, *, in_place: bool) -> int:
    if layer.value_dim is not None:
        return _latents(step, layer, layer.value_dim, in_place=in_place)
    if not layer.num_heads:
        return 0
    value_bytes, family = DTYPE_BYTES[step.dtype], family_of(step.model.family)
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    values = step.of(4 * query + 2 * key)
    if in_place:
        return values
    is_written_out = family.writes_scores
    repeated = query if key < query and not is_written_out else 0  # for grouped heads
    picked = 2 * (key + repeated)  # gathered
    # Prompts attend to their own keys and values; chunks gather those of one sequence.
    read = step.batch * step.context if step.tokens == 1 else max(step.rows, step.context)
    # A mask, a bias and scores are those of a block of queries.
    seen = step.batch * min(step.tokens, SCORE_BLOCK_TOKENS) * step.context
    total = values + (read * picked + seen) * value_bytes
    if family.alibi is not None:
        total += seen * layer.num_heads * (2 * value_bytes + 8)
    if is_written_out:  # of one prompt at a time, with its keys or values in float32
        alone = 1 if step.tokens == 1 else step.batch
        total += seen // alone * layer.num_heads * SCORE_BYTES
        total += step.batch // alone * step.context * key * 4
    return total


def decode_parts_bytes(step: ForwardShape, layer: LayerSpec) -> int:
    """Return the bytes of what parts of the keys of all rows make on a GPU, in float32."""
    if layer.value_dim is not None or not layer.num_heads:
        return 0
    splits = decode_splits(step.batch, layer.num_kv_heads)
    return step.batch * layer.num_heads * splits * (layer.head_dim + 1) * DTYPE_BYTES["float32"]


def _recurrence(step: ForwardShape, layer: LayerSpec, *, on_cpu: bool) -> int:
    """What a mixer makes.

    On a CPU it is compiled (``llmpq.kernels.cpu.mixers``): projections of all rows, and their parts
    once more, what is convolved and what comes out in float32. Elsewhere transformers' code runs
    for the tokens of one prompt, or one token of each row: its chunked recurrence is in float32,
    with copies of the states. Where no kernel is, it does so on CPUs too, for a piece of a prompt;
    without a compiler for one row at a time, which always counts.
    """
    value_bytes = DTYPE_BYTES[step.dtype]
    mixed = _mixer(layer)
    inputs = sum(op.out_features for op in mixed[:-1])
    width = mixed[-1].in_features
    has_recurrence = layer.state_values > MAX_KERNEL * width
    own_bytes = family_of(step.model.family).recurrence_bytes
    if own_bytes is not None:
        calls, sequences = (PIECE_TOKENS, 1) if step.tokens > 1 else (step.batch, step.batch)
        copies = 3 if step.tokens > 1 else DECODE_STATES
        states = copies * sequences * layer.state_values * DTYPE_BYTES["float32"]
        return calls * (inputs * value_bytes + width * own_bytes) + states + 2 * step.hidden
    channel_bytes = RECURRENCE_BYTES if has_recurrence else CONVOLUTION_BYTES + 2 * value_bytes
    if on_cpu:
        floats = max(op.out_features for op in mixed[:-1]) + width if has_recurrence else 0
        compiled = step.of(2 * inputs + width) + step.of(floats, 4)
        piece = PIECE_TOKENS * (inputs * value_bytes + width * channel_bytes)
        states = DECODE_STATES * layer.state_values * DTYPE_BYTES["float32"]
        return max(compiled, piece + states + step.hidden) + step.hidden
    calls = step.tokens if step.tokens > 1 else step.batch
    sequences = 1 if step.tokens > 1 else step.batch
    states = 3 * sequences * layer.state_values * DTYPE_BYTES["float32"]  # read, made, of a kernel
    return calls * (inputs * value_bytes + width * channel_bytes) + states + step.hidden


def _mixer(layer: LayerSpec) -> list[LinearSpec]:
    """Return the operators of what keeps a state, its output last."""
    mixed = [op for op in layer.linears if is_attention(op)]
    path = mixed[-1].name.rpartition(".")[0]
    return [op for op in mixed if op.name.startswith(f"{path}.")]


def _latents(step: ForwardShape, layer: LayerSpec, value_dim: int, *, in_place: bool) -> int:
    """Queries and outputs; latent vectors of the context, and what is made of them for all heads.

    Whole prompts and chunks attend to what the cache returns of all their sequences. In place,
    queries and sums are latent vectors of every head, and long rows make keys and values of their
    own alone.
    """
    made = sum(op.out_features for op in _expanding(layer))
    value, query = layer.num_heads * value_dim, layer.num_heads * layer.head_dim
    own = step.rows * (4 * query + made + 2 * value)
    rows = step.batch
    if in_place:
        most = _most_absorbed(layer, value_dim)
        own += min(step.rows, step.batch * most) * 2 * query
        rows = int(step.tokens > most)
    seen = rows * min(step.tokens, SCORE_BLOCK_TOKENS) * step.context
    read = rows * step.context * 2 * (layer.kv_values_per_token + made + value)
    return (own + read + seen) * DTYPE_BYTES[step.dtype]


def _feed_forward(step: ForwardShape, layer: LayerSpec, *, on_cpu: bool) -> int:
    operators = [op for op in layer.linears if not is_attention(op)]
    if not operators:
        return 0
    outputs = [step.rows_of(op, on_cpu=on_cpu) * op.out_features for op in operators]
    is_stepwise = family_of(step.model.family).has_formula
    copies = 3 + on_cpu if is_stepwise else 1
    # Outputs of blocks of rows and of experts are joined.
    joins = on_cpu and any(op.count > 1 or runs_in_blocks(op) for op in operators)
    joined = 2 * step.hidden if joins else 0
    return (sum(outputs) + copies * max(outputs)) * DTYPE_BYTES[step.dtype] + joined


def _operator_rows(step: ForwardShape, op: LinearSpec, *, on_cpu: bool) -> int:
    one = (op.in_features + op.out_features) * DTYPE_BYTES[step.dtype]
    if step.dtype != "float32":
        one += op.in_features + 4 * op.out_features
    return step.rows_of(op, on_cpu=on_cpu) * one


def _logits(step: ForwardShape) -> int:
    """Scores of the vocabulary, in float32, and a sampler's sorted copy."""
    return step.batch * step.model.vocab_size * (DTYPE_BYTES[step.dtype] + 8)


def _buffer_bytes(step: ForwardShape, layer: LayerSpec) -> int:
    """Return the bytes of the buffers of a layer, of rows or of each row's choices of experts."""
    operators = [op for op in layer.linears if op.quantizable]
    experts = [op for op in operators if op.count > 1]
    active = max((op.active for op in experts), default=1)
    rows = min(step.rows, STEP_ROWS, STEP_SLOTS // active)
    hidden, query = step.model.hidden_size, layer.num_heads * layer.head_dim
    width = 2 * hidden + 2 * layer.head_dim + query
    width += sum(op.active * op.out_features for op in operators)
    # What experts gather and activate, and their sum; a gate beside what it multiplies.
    width += sum(op.active * op.in_features for op in experts) + (hidden if experts else 0)
    width += sum(op.out_features // 2 for op in operators if "gate_up" in op.name and op.count == 1)
    coded = {(op.active, op.in_features) for op in operators}
    # Codes of 8-bit products are 16 bits wide without VNNI; those of fewer bits have scales, sums.
    codes = 2 * sum(count * features for count, features in coded)
    choices = sum(4 * (op.count + 2 * op.active) for op in experts[:1])
    if layer.state_values:
        # What is convolved and what comes out, in float32, and the latter once more.
        mixed = _mixer(layer)
        channels, values = max(op.out_features for op in mixed[:-1]), mixed[-1].in_features
        width += values
        if any("qkvz" in op.name for op in mixed):  # by key heads; copied apart
            width += sum(op.out_features for op in mixed[:-1])
        choices += DTYPE_BYTES["float32"] * (channels + values)
    return rows * (width * DTYPE_BYTES[step.dtype] + codes + choices)


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
