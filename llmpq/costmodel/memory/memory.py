"""Memory: bytes of one stage by cause, operator by operator (LLM-PQ, Sec. 4.1).

Weights and slots are exact: the tensor side allocates to the same formulas. What only lives during
a step is measured on CPUs (``cpu_memory``); elsewhere it is one documented upper estimate of what a
decoder layer of transformers holds at its worst moment, with a tenth of safety for the allocator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llmpq.costmodel.features import kv_scale_bytes
from llmpq.costmodel.memory import cpu_memory
from llmpq.spec.cluster import DeviceKind
from llmpq.spec.model import LayerSpec, LinearSpec, ModelSpec
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import DTYPE_BYTES, Dtype, stored_bytes
from llmpq.spec.workload import Workload
from llmpq.units import MIB

SAFETY = 1.1
WORKSPACE_BYTES = 4 * MIB
"""What kernels hold whatever the shape: blocks of a weight being widened, thread buffers."""
EAGER_ATTENTION = (*cpu_memory.EAGER_ATTENTION, *cpu_memory.BIASED_ATTENTION)
"""Families whose attention writes out its scores. BLOOM's writes out a block's alone, which was not
measured on a GPU: this stays the upper estimate that shipped plans were made with."""
STEPWISE_ACTIVATION = ("bloom", "phi")
"""Families whose activation is a formula of tensor operations, with three results alive."""


def layer_weight_bytes(
    model: ModelSpec, kind: int, bits: int, dtype: Dtype, kernel: str | None = None
) -> int:
    """Return the bytes of one decoder layer's weights, scales, zero points, norms and biases.

    Args:
        model: the model.
        kind: index into its ``layer_types``.
        bits: bitwidth of the layer.
        dtype: number format of the run.
        kernel: the kernel asked for by name, ``None`` for the default ones.
    """
    layer, precision = model.layer_types[kind], model.precision(bits)
    total = layer.weight_bytes(precision, DTYPE_BYTES[dtype])
    for op in layer.linears:
        if op.quantizable:
            shape = op.out_features, op.in_features
            plain = stored_bytes(None, precision, dtype, *shape)
            total += op.count * (stored_bytes(kernel, precision, dtype, *shape) - plain)
    return total


def layer_kv_bytes(model: ModelSpec, kind: int, slots: int, max_tokens: int, kv_bits: int) -> int:
    """Return the bytes of one layer's preallocated slots ``2 v (s + n) k d`` values.

    At 8 bits a token keeps a 16-bit scale for each of its ``2 k`` keys and values besides.
    """
    layer = model.layer_types[kind]
    per_token = layer.kv_bytes_per_token(kv_bits / 8) + kv_scale_bytes(layer, kv_bits)
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
    dense_layers: int | None = None,
    kv_bytes: int = 0,
) -> int:
    """Return the peak bytes that live only during a step.

    On a CPU, ``cpu_memory`` tells: the worst moment and the holes it leaves in the heap. There
    ``kv_bits`` counts, and what a finished plan knows of a stage: ``is_last``, ``dense_layers``,
    how many have 16 bits, and ``kv_bytes`` of its slots; who knows none is told enough. Elsewhere,
    with ``R`` rows of a step, value size ``e``, and widths as in ``LayerSpec``::

        4 MiB + 1.1 * max over (prefill, decode) of
              2 R h e                      messages: received, to be sent
            + 2 R h e                      the residual and the normed copy
            + max( 2 R h 4                 norm in float32
                   attention, feed-forward, worst operator's rows )
            + widened                      the largest weight matrix in the dtype: out in e
            + v V (e + 2 * 4)              on the master: logits, in float32, and their sorted copy

        attention    = R (2 (q + k) d + k d + q d) e         q and k, rotated too, v, and the output
                     + 2 v C (k + x) d e                     keys and values picked from the slots
                     + v T C e                               mask of T query and C context tokens
                     + v q T C (2 e + 8)                     scores, where they are written out
        feed-forward = R a (p + c f) e                       outputs of its operators, activated
        rows         = R a ((in + out) e + w in + 4 out)     8-bit rows and their 32-bit sums

    ``x`` is ``q`` where heads are grouped and repeated (a masked prefill, written-out scores), else
    0; ``a`` experts a token; ``p`` the sum and ``f`` the largest of the feed-forward operators'
    outputs; ``c`` results of the activation alive at once; ``w`` bytes of a value on its way to 8
    bits, 1 (float32 runs widen instead).
    What quantized layers need is counted always: the planner asks before it knows.
    """
    sizes = (
        (micro_batching.prefill, workload.prompt_tokens, workload.prompt_tokens),
        (micro_batching.decode, 1, workload.max_context_tokens),
    )
    if device_kind == "cpu":
        steps = [
            cpu_memory.Step(
                model=model,
                dtype=dtype,
                kv_bits=kv_bits,
                batch=batch,
                tokens=tokens,
                context=context,
            )
            for batch, tokens, context in sizes
        ]
        return cpu_memory.step_bytes(
            steps,
            is_master=is_master,
            is_last=is_last,
            dense_layers=model.num_layers if dense_layers is None else dense_layers,
            batches=-(-workload.batch // micro_batching.prefill),
            kv_bytes=kv_bytes,
        )
    worst = 0
    for batch, tokens, context in sizes:
        step = _Step(batch=batch, tokens=tokens, context=context)
        shape = _Shape(model=model, step=step, dtype=dtype)
        peak = max(shape.layer_peak(layer) for layer in model.layer_types)
        logits = batch * model.vocab_size * (shape.value_bytes + 8) if is_master else 0
        worst = max(worst, 2 * shape.hidden_bytes + peak + logits)
    return WORKSPACE_BYTES + math.ceil(SAFETY * worst)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """A step of a model in a dtype; its methods are the formula's terms."""

    model: ModelSpec
    step: _Step
    dtype: Dtype

    @property
    def value_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def hidden_bytes(self) -> int:
        return self.step.rows * self.model.hidden_size * self.value_bytes

    def layer_peak(self, layer: LayerSpec) -> int:
        norm = 2 * self.step.rows * self.model.hidden_size * 4
        quantizable = [op for op in layer.linears if op.quantizable]
        rows = max(self._operator_rows(op) for op in quantizable)
        widened = max(op.out_features * op.in_features for op in quantizable) * self.value_bytes
        worst = max(norm, self._attention(layer), self._feed_forward(layer), rows)
        return 2 * self.hidden_bytes + worst + widened

    def _attention(self, layer: LayerSpec) -> int:
        step = self.step
        query = layer.num_heads * layer.head_dim
        key = layer.num_kv_heads * layer.head_dim
        is_eager = self.model.family in EAGER_ATTENTION
        is_repeated = layer.num_kv_heads < layer.num_heads and (step.tokens > 1 or is_eager)
        picked = key + (query if is_repeated else 0)
        values = (
            step.rows * (2 * (query + key) + key + query)
            + 2 * step.batch * step.context * picked
            + step.batch * step.tokens * step.context
        )
        scores = step.batch * layer.num_heads * step.tokens * step.context if is_eager else 0
        return values * self.value_bytes + scores * (2 * self.value_bytes + 8)

    def _feed_forward(self, layer: LayerSpec) -> int:
        outputs = [op.active * op.out_features for op in layer.linears if not _is_attention(op)]
        copies = 3 if self.model.family in STEPWISE_ACTIVATION else 1
        return self.step.rows * (sum(outputs) + copies * max(outputs)) * self.value_bytes

    def _operator_rows(self, op: LinearSpec) -> int:
        one = (op.in_features + op.out_features) * self.value_bytes
        if self.dtype != "float32":
            one += op.in_features + 4 * op.out_features
        return self.step.rows * op.active * one


def _is_attention(op: LinearSpec) -> bool:
    return op.name.startswith(("self_attn.", "self_attention.", "attention."))
