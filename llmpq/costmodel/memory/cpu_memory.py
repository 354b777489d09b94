"""What a CPU worker's process holds at the worst moments of a step, tensor by tensor.

Every moment is a list of the tensors alive in one statement of transformers' decoder layers; the
lists were read off the running layers (``tests/costmodel/test_cpu_memory.py`` does it again). What
the process takes for them is more: tensors below 16 MiB share glibc's heap, which keeps the holes
that differing sizes leave. ``HEAP_FACTOR`` is that share, (docs/how/costs.md). Loading has a
peak of its own, which is here too: a stage needs the larger of both.

Shape legend: R rows of a step, T tokens a sequence, C context tokens, h hidden, e bytes a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.precision import BITS, DTYPE_BYTES, Dtype, needs_scratch
from llmpq.spec.runtime_constants import SHARED_BUFFERS, SHARED_FROM_BYTES
from llmpq.units import MIB

HEAP_FACTOR = 1.45
"""Bytes the process takes for a byte of temporaries at their peak."""
RAGGED_FACTOR = 2.6
"""Likewise where experts take turns: hardly a tensor has the size of the one before."""
MASTER_USE_BYTES = 2_000_000
"""What embedding, projecting and choosing tokens leave on the master for good."""
DENSE_USE_BYTES = 7_000_000
"""What products of 16-bit layers take for good: pages of oneDNN's code, what it compiled, its work
space."""
KERNEL_BYTES, KEPT_KERNELS = 300_000, 64
"""oneDNN compiles a product for every number of rows it meets, and keeps as many of them
(``dist.environment``): experts at 16 bits meet many."""
ROWS_APART = 16
"""An expert's rows are filled up to multiples of it (``quant.layer``)."""
MAPPED_BYTES = 16 * MIB
"""Tensors above it lie apart (``dist.allocator``): no hole is larger."""
LINK_MESSAGES = 1
"""Hidden states held for each link that carries whole ones, beside a step's own: the buffer they
arrive in, or those of the micro-batch before on their way out. Large ones lie in places shared with
that neighbour (``dist.arena``). The link from the last stage to the first carries last tokens only.
A pipeline of one stage holds its embedded tokens."""
MATRICES_UNDER_WAY = 3
"""16-bit matrices a loader holds beside what it has placed (``quant.loader``)."""
EXPERT_SHARE = 2.0
"""Rows of the busiest expert, as a multiple of an even share."""
EAGER_ATTENTION = ("gemma2",)
"""Families whose attention writes out its scores (they are capped)."""
BIASED_ATTENTION = ("bloom",)
"""Families whose attention adds a bias of the keys: it is written out for a block of queries."""
BIAS_TOKENS = 64
"""Queries of such a block (``models.alibi``)."""
STEPWISE_ACTIVATION = {"bloom": 4, "phi": 3}
"""Families whose activation is a formula of tensor operations: how many live beside its input."""
STEP_VALUES = 2**18
"""Values of each of them at most (``models.activation``)."""
KV_BLOCK_TOKENS = 128
"""Tokens whose keys and values are on their way to 8 bits at a time (``dist.kv_store``)."""

SLOT_LANES, MOST_SLOT_DIM = 16, 256
"""Heads that ``kernels.slot_attention`` takes: of a multiple of the one size, up to the other."""
INDEX_BYTES = 48
"""Positions and places in the slots of one row of a step: six 64-bit integers."""

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


def step_bytes(
    steps: Sequence[Step],
    *,
    is_master: bool,
    is_last: bool,
    dense_layers: int,
    batches: int,
    kv_bytes: int = 0,
) -> int:
    """Return the most bytes a CPU worker takes for one of these steps, or for loading.

    Args:
        steps: the largest prefill and decode steps, in this order.
        is_master: whether it is the first stage, and logits are made here too; by then the layers'
            own tensors are gone.
        is_last: whether it is the last stage.
        dense_layers: how many of its layers have 16 bits.
        batches: micro-batches of prefill.
        kv_bytes: of the stage's slots, which are not written by the time it loads.
    """
    worst = 0
    for step in steps:
        messages = step.hidden * _messages(step, is_master, is_last)
        found = [_layer_bytes(step, layer) for layer in step.model.layer_types]
        if is_master:
            found.append(_resident(_logits(step)))
        worst = max(worst, messages + max(found))
    kept = _scratch_bytes(steps[0].model, steps[0].dtype)
    kept += MASTER_USE_BYTES if is_master else 0
    if dense_layers:
        kept += DENSE_USE_BYTES + _expert_kernel_bytes(steps[0], dense_layers * batches)
    loading = loading_bytes(steps[0].model) - kv_bytes
    return max(worst + kept + read_buffer_bytes(steps), loading)


def _messages(step: Step, is_master: bool, is_last: bool) -> int:
    """Return how many hidden states of a step are held for links."""
    links = (not is_master) + (not is_last)
    each = SHARED_BUFFERS if step.hidden >= SHARED_FROM_BYTES else LINK_MESSAGES
    return max(1, links * each)


def _expert_kernel_bytes(step: Step, layers: int) -> int:
    """Return what the products keep that experts at 16 bits have compiled.

    Of ``K`` numbers of rows that an expert may get, ``n`` experts are expected to get
    ``K (1 - (1 - 1 / K) ** n)`` different ones.

    Args:
        step: the prefill step.
        layers: layers that run it, each of them counted once a micro-batch.
    """
    kernels = 0.0
    experts = {
        (op.out_features, op.in_features): op
        for layer in step.model.layer_types
        for op in layer.linears
        if op.quantizable and op.count > 1
    }
    for op in experts.values():
        numbers = math.ceil(step.rows * _share(op) / ROWS_APART)
        kernels += numbers * (1 - (1 - 1 / numbers) ** (layers * op.count))
    return math.ceil(KERNEL_BYTES * min(KEPT_KERNELS, kernels))


def loading_bytes(model: ModelSpec) -> int:
    """Return what loading takes beside what it has placed."""
    largest = max(
        op.out_features * op.in_features
        for layer in model.layer_types
        for op in layer.linears
        if op.quantizable
    )
    return MATRICES_UNDER_WAY * 2 * largest


def live_bytes(step: Step) -> int:
    """Return the most bytes of tensors alive at once in a layer, what it was given among them."""
    return max(
        sum(_shared(step, layer)) + max(map(sum, _moments(step, layer)))
        for layer in step.model.layer_types
    )


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
    shared = sum(_shared(step, layer))  # taken first, so no holes between
    *dense, last = _moments(step, layer)
    factor = RAGGED_FACTOR if _has_experts(layer) else HEAP_FACTOR
    return shared + max(*map(_resident, dense), _resident(last, factor))


def _moments(step: Step, layer: LayerSpec) -> list[Moment]:
    """Return what is alive in a layer's worst statements, its feed-forward last."""
    found = [
        [step.hidden, *[step.of(step.model.hidden_size, 4)] * 2],  # a norm in float32
        _attention(step, layer),
        *_products(step, layer),
    ]
    if step.kv_bits == 8 and not _reads_in_place(step, layer):
        found.append(_quantized_slots(step, layer))
    return [*found, _experts(step, layer) if _has_experts(layer) else _feed_forward(step, layer)]


def _has_experts(layer: LayerSpec) -> bool:
    return any(op.count > 1 for op in layer.linears if op.quantizable)


def _shared(step: Step, layer: LayerSpec) -> Moment:
    """What all layers of a step share: cosines, sines, a bias, and where rows and tokens lie."""
    bias = layer.num_heads * step.context * 4 if step.model.family in BIASED_ATTENTION else 0
    return [*[step.of(layer.head_dim)] * 2, bias, INDEX_BYTES * step.rows]


def _attention(step: Step, layer: LayerSpec) -> Moment:
    """Queries and keys being rotated, or keys repeated for groups; or scores, where written out.

    Where the slots' own kernel attends, nothing is picked from them in decode. Elsewhere rows are
    of unlike length and their slots anywhere: keys and values are picked, and where heads are
    grouped, repeated for every query head.
    """
    value_bytes = DTYPE_BYTES[step.dtype]
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    cached = step.batch * step.context * value_bytes
    mask = step.rows * step.context * value_bytes
    picked = [cached * key] * 2
    repeated = [cached * query] * 2 if key < query else []
    own = [*[step.hidden] * 2, *[step.of(query)] * 4, *[step.of(key)] * 2]
    if step.model.family in BIASED_ATTENTION and not _reads_in_place(step, layer):
        return _biased_attention(step, layer, picked)
    if step.model.family in EAGER_ATTENTION:
        scores = step.rows * layer.num_heads * step.context
        own = [*[step.hidden] * 2, *[step.of(query)] * 2, *[step.of(key)] * 2]
        return [*own, *picked, *repeated, mask, *[scores * value_bytes] * 2, *[scores * 4] * 2]
    if step.tokens > 1 or _reads_in_place(step, layer):
        return own
    if step.kv_bits == 8:
        picked = [cached * key // value_bytes]
    return [*own, mask, *picked, *repeated]


def _biased_attention(step: Step, layer: LayerSpec, picked: Moment) -> Moment:
    """One joined product, what was picked, the output; of a block of queries, bias and output."""
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    value_bytes = DTYPE_BYTES[step.dtype]
    tokens = min(step.tokens, BIAS_TOKENS)
    # Rows that begin together share the bias of a prefill; in decode each has its own length.
    rows = step.batch if step.tokens == 1 else 1
    bias = rows * layer.num_heads * tokens * step.context * value_bytes
    block = step.batch * tokens * query * value_bytes
    return [*[step.hidden] * 2, step.of(query + 2 * key), step.of(query), *picked, bias, block]


def _reads_in_place(step: Step, layer: LayerSpec) -> bool:
    """Whether a decode step's attention reads the slots where they lie (``slot_attention``)."""
    fits = layer.head_dim % SLOT_LANES == 0 and layer.head_dim <= MOST_SLOT_DIM
    return step.tokens == 1 and fits and step.model.family not in EAGER_ATTENTION


def _quantized_slots(step: Step, layer: LayerSpec) -> Moment:
    """New keys and values on their way to 8 bits (``dist.kv_store``): all codes, and a block.

    The block's are joined, in float32 twice, and codes.
    """
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    codes = step.of(2 * key, 1)
    scales = step.of(2 * layer.num_kv_heads, 4 + 4 + 2)
    block = min(step.rows, KV_BLOCK_TOKENS) * 2 * key
    on_the_way = [block * DTYPE_BYTES[step.dtype], *[4 * block] * 2, block]
    return [*[step.hidden] * 2, step.of(query), *[step.of(key)] * 2, codes, scales, *on_the_way]


def _feed_forward(step: Step, layer: LayerSpec) -> Moment:
    """The inner tensors of the feed-forward, beside the layer's input, the residual, the normed."""
    *ups, down = [op for op in layer.linears if not _is_attention(op)]
    inner = step.of(down.in_features)
    residual = [step.hidden] * 2
    alive = STEPWISE_ACTIVATION.get(step.model.family)
    if alive is not None:
        block = min(inner, STEP_VALUES * DTYPE_BYTES[step.dtype])
        return [*residual, step.hidden, inner, *[block] * alive]
    if sum(op.out_features for op in ups) == down.in_features:
        return [*residual, inner, inner]
    joined = [2 * inner] if len(ups) == 1 else [inner]
    # Gate and up, or up; activated gate; product.
    return [*residual, step.hidden, *joined, inner, inner]


def _experts(step: Step, layer: LayerSpec) -> Moment:
    """One expert after the other, each on the rows that chose it; their sum besides."""
    *_, down = [op for op in layer.linears if op.count > 1]
    inner = math.ceil(step.of(down.in_features) * _share(down))
    return [*[step.hidden] * 4, 2 * inner, inner, inner]


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
