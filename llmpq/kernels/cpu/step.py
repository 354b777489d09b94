"""A step in one call: the operators of several layers, for some tokens (``csrc/step.c``).

``StepProgram`` is a list of operators on fixed buffers. Python appends them once; every step then
passes where the tokens are and calls compiled code. Operators on heads take views ``[R, H, d]`` of
buffers by any strides, such as the parts of a fused projection.

``llmpq.kernels.cpu.experts`` has the operators of experts.

Shapes: R rows (tokens), H heads, h KV heads, d head_dim, C columns, P positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p, sizeof
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.dense import DENSE_BACKEND, few_dense_rows, multiplies_pairs
from llmpq.kernels.cpu.kernel_choice import gemv_max_rows, is_float_faster
from llmpq.kernels.cpu.native import (
    TYPES,
    WITH_VNNI,
    AttentionCall,
    Norm,
    Product,
    Weight,
    instruction_set,
    library,
)
from llmpq.kernels.cpu.paged_attention import STORED_TYPES, PagedHeads, PagedTokens
from llmpq.kernels.cpu.torch_kernels import OUTLIER_THRESHOLD
from llmpq.spec.runtime_constants import STEP_ROWS

MOST_PRODUCTS = 4
"""Most products of one operator."""


class Kind(IntEnum):
    """Kinds of operators, in the order of ``csrc/step.c``."""

    NORM = 0
    ADD = auto()
    ROTATE = auto()
    GATE = auto()
    PREPARE = auto()
    STORE = auto()
    ROUTE = auto()
    COMBINE = auto()
    DELTA_FACTORS = auto()
    DELTA_GATE = auto()
    MAMBA_FACTORS = auto()
    MAMBA_NORM = auto()
    COPY = auto()
    PRODUCTS = auto()
    ATTEND = auto()
    GATHER = auto()
    ACTIVATE = auto()
    EXPERTS = auto()
    CONVOLVE = auto()
    DELTA = auto()
    MAMBA = auto()
    SUBMIT = auto()
    COLLECT = auto()


class Heads(Structure):
    """Heads of rows, by strides."""

    _fields_ = (("data", c_void_p), *((name, c_int64) for name in ("row", "head")))


class NormRows(Structure):
    """A norm of each head of a row."""

    _fields_ = (
        ("norm", Norm),
        *((name, Heads) for name in ("x", "y")),
        *((name, c_int64) for name in ("heads", "weight_head")),
    )


class AddRows(Structure):
    """A sum of rows, or a product by a factor."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "more")),
        ("columns", c_int64),
        ("factor", c_float),
    )


class RotateRows(Structure):
    """A rotary embedding of heads."""

    _fields_ = (
        ("x", Heads),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("heads", "turned")),
        *((name, c_int32) for name in ("pairs", "table_type")),
    )


class GateRows(Structure):
    """An activation of rows (``csrc/rows.h``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("gate", "up", "y")),
        *((name, c_int64) for name in ("gate_row", "up_row", "y_row", "columns")),
        *((name, c_float) for name in ("alpha", "limit")),
        ("activation", c_int32),
    )


class CopyRows(Structure):
    """A copy of heads of rows, each with its strides."""

    _fields_ = (
        *((name, Heads) for name in ("x", "y")),
        *((name, c_int64) for name in ("heads", "columns")),
    )


class Prepared(Structure):
    """What products need of rows (``csrc/step.h``)."""

    _fields_ = (
        ("x", c_void_p),
        *((name, c_int64) for name in ("columns", "block")),
        *((name, c_void_p) for name in ("sums", "codes", "scale", "sum")),
        *((name, c_void_p) for name in ("start", "end", "column", "value", "used")),
        ("threshold", c_float),
        *((name, c_int32) for name in ("type", "bits")),
    )


class PrepareRows(Structure):
    """What products need of rows (``csrc/experts.h``)."""

    _fields_ = (("prepared", Prepared), ("kernel", c_int32))


class Products(Structure):
    """Up to ``MOST_PRODUCTS`` products of the same rows."""

    _fields_ = (
        ("products", Product * MOST_PRODUCTS),
        ("prepared", c_void_p),
        *((name, c_int64) for name in ("count", "few_limit")),
        *((name, c_int32) for name in ("kernel", "out")),
    )


class Operator(Structure):
    """A kind of operator, and the structure with its arguments."""

    _fields_ = (("kind", c_int32), ("what", c_void_p))


class Step(Structure):
    """A call of the compiled step."""

    _fields_ = (
        ("operators", c_void_p),
        *((name, c_int64) for name in ("count", "rows")),
        *((name, c_void_p) for name in ("tables", "starts", "lengths", "chosen", "runs")),
        ("window_tables", c_void_p),
        *((name, c_int64) for name in ("chosen_count", "run_count")),
        ("sequences", c_void_p),
        ("sequence_count", c_int64),
        *((name, c_int32) for name in ("type", "threads")),
    )


FEW_ROWS = 64
"""Rows up to which plain weights are multiplied as fast as by torch."""
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid")
"""In the order of ``csrc/rows.c``."""
_DENSE_BF16, _PLAIN, _PACKED_BF16, _PACKED_FLOAT, _LLM_INT8, _PACKED_INT8 = range(6)
_BLOCK = 128  # columns of a sum: kernels.h


class StepKernel(NamedTuple):
    """How a weight is multiplied.

    Attributes:
        number: of the kernel in ``csrc/step.c``.
        block: columns of a sum of the rows; 0 where the kernel needs none.
        option: limit of few rows of weight-only products and of products of bf16 pairs, 0 for
            none; bits of those with 8-bit activations.
    """

    number: int
    block: int
    option: int

    @property
    def few_limit(self) -> int:
        """Rows up to which another algorithm is the faster; see ``option``."""
        return self.option if self.number in (_PACKED_BF16, _DENSE_BF16) else 0

    @property
    def in_float(self) -> bool:
        """Whether more rows are multiplied as float32."""
        return self.number == _PACKED_BF16 and is_float_faster()


class UnsupportedStepError(Exception):
    """An operator that the compiled step does not have; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowNorm:
    """A norm of each row or head: ``(x - mean) / sqrt(mean square + epsilon) * weight + bias``.

    Attributes:
        weight: float32 ``[C]``, or ``[H, C]`` if heads differ; ``None`` for ones.
        bias: float32 ``[C]``; ``None`` for zeros.
        epsilon: added to the mean square.
        centers: whether the mean is subtracted, as in a layer norm.
        rounds: whether a row is rounded to its dtype before the weight multiplies it.
    """

    weight: Tensor | None
    bias: Tensor | None
    epsilon: float
    centers: bool
    rounds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """How the scores of attention become weights.

    Attributes:
        scaling: factor of the scores.
        window: tokens a query sees; ``None`` for all.
        softcap: bound of the scores, by a hyperbolic tangent; ``None`` for none.
        has_bias: whether the bias of :meth:`StepProgram.set_bias` is added.
        has_sinks: whether each head has one more score, without a value.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    has_bias: bool = False
    has_sinks: bool = False


class StepProgram:
    """Operators in the order in which they run, all on buffers of this program.

    Args:
        dtype: of all rows.
        shares: a program whose buffers this one uses: the two never run at the same time.

    Attributes:
        most_rows: most rows of a call.
        few_rows: rows up to which the kernels of its products are the fastest; ``None`` for any.
        margins: functions of a number of rows R: how clearly routers chose the experts of these
            rows in the last run, ``[R]``, in standard deviations of their scores.
    """

    def __init__(self, dtype: torch.dtype, shares: StepProgram | None = None) -> None:
        if dtype not in TYPES:
            raise UnsupportedStepError(f"numbers of {dtype}")
        self.dtype = dtype
        self.most_rows = STEP_ROWS
        self.few_rows: int | None = None
        self.margins: list[Callable[[int], Tensor]] = []
        self._buffers: dict[tuple[str, int, int, torch.dtype], Tensor]
        self._buffers = {} if shares is None else shares._buffers
        self._operators: list[tuple[int, Structure]] = []
        self._kept: list[object] = []  # whose addresses operators hold
        self._list: Array[Operator] | None = None
        self._biased: list[AttentionCall] = []
        self._bias: Tensor | None = None

    def buffer(
        self, name: str, columns: int, dtype: torch.dtype | None = None, rows: int = STEP_ROWS
    ) -> Tensor:
        """Return the rows of a name and shape, ``[rows, columns]``: one for all layers."""
        key = (name, rows, columns, dtype or self.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(rows, columns, dtype=key[3])
        return self._buffers[key]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def norm(self, x: Tensor, y: Tensor, norm: RowNorm) -> None:
        """Append a norm of each head of ``x`` ``[R, H, C]``, written to ``y``."""
        heads, columns = x.shape[1:]
        weight, bias = norm.weight, norm.bias
        shapes = ((columns,), (heads, columns))
        if columns % 16 or any(v is not None and v.shape not in shapes for v in (weight, bias)):
            raise UnsupportedStepError(f"a norm of {heads} heads of {columns} numbers")
        call = Norm(
            weight=None if weight is None else self.keep(weight),
            bias=None if bias is None else self.keep(bias),
            columns=columns,
            epsilon=norm.epsilon,
            type=TYPES[self.dtype],
            weight_type=TYPES[torch.float32],
            centers=norm.centers,
            rounds=norm.rounds,
        )
        rows = NormRows(norm=call, x=_heads(x), y=_heads(y), heads=heads)
        if weight is not None and weight.dim() > 1:
            rows.weight_head = columns
        self.append(Kind.NORM, rows)

    def add(self, x: Tensor, more: Tensor, factor: float = 1.0) -> None:
        """Append ``x += factor * more``, ``[R, C]``."""
        self._add(x, more.data_ptr(), factor)

    def scale(self, x: Tensor, factor: float) -> None:
        """Append ``x *= factor``, ``[R, C]``."""
        self._add(x, None, factor)

    def _add(self, x: Tensor, more: int | None, factor: float) -> None:
        columns = x.shape[1]
        if columns % 16:
            raise UnsupportedStepError(f"rows of {columns} numbers")
        self.append(Kind.ADD, AddRows(x=x.data_ptr(), more=more, columns=columns, factor=factor))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, pairs: bool) -> None:
        """Append the rotary embedding of the first features of the heads ``[R, H, d]`` of ``x``.

        Args:
            x: heads.
            cos: buffer of the rows, ``[R, features that are rotated]``; products of a float32 one
                are not rounded.
            sin: likewise.
            pairs: whether a feature is rotated with its neighbour, not with the one half of them
                away. The tables have the cosines of all pairs twice, one half after the other.
        """
        turned, dim = cos.shape[1], x.shape[2]
        if turned % 2 or turned > dim:
            raise UnsupportedStepError(f"a rotary embedding of {turned} of {dim} features")
        rotate = RotateRows(
            x=_heads(x),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            heads=x.shape[1],
            turned=turned,
            pairs=pairs,
            table_type=TYPES[cos.dtype],
        )
        self.append(Kind.ROTATE, rotate)

    def gate(self, gate: Tensor, up: Tensor | None, y: Tensor, activation: str) -> None:
        """Append ``y = activation(gate) * up``, ``[R, C]``.

        Args:
            gate: rows by any stride.
            up: likewise; ``None`` for ones.
            y: likewise.
            activation: one of ``ACTIVATIONS``.
        """
        self.append(Kind.GATE, gate_rows(gate, up, y, activation))

    def copy(self, x: Tensor, y: Tensor) -> None:
        """Append ``y = x``, ``[R, H, d]``, both by any stride of rows and heads."""
        heads, columns = x.shape[1:]
        self.append(Kind.COPY, CopyRows(x=_heads(x), y=_heads(y), heads=heads, columns=columns))

    def products(
        self, x: Tensor, outputs: Sequence[tuple[Tensor, PreparedWeight | Tensor, Tensor | None]]
    ) -> None:
        """Append products of ``x``: each writes ``y = x @ weight.T + bias``.

        Args:
            x: rows.
            outputs: up to four of y, weight and bias; a plain weight has the dtype of the rows,
                and its y may be float32.
        """
        found = {self.kernel_of(weight) for _, weight, _ in outputs}
        if len(found) > 1 or len(outputs) > MOST_PRODUCTS:
            raise UnsupportedStepError("products of one input by different kernels")
        kernel = found.pop()
        call = Products(
            count=len(outputs),
            kernel=kernel.number,
            few_limit=kernel.few_limit,
            out=TYPES[outputs[0][0].dtype],
        )
        prepare = self.prepared(x, kernel)
        if prepare is not None:
            self.append(Kind.PREPARE, prepare)
            call.prepared = addressof(prepare)
        for place, (y, weight, bias) in enumerate(outputs):
            call.products[place] = Product(
                weight=self.handle_of(weight, y.shape[1], x.shape[1]),
                x=x.data_ptr(),
                bias=None if bias is None else self.keep(bias.to(self.dtype)),
                y=y.data_ptr(),
                in_float=kernel.in_float,
            )
        self.append(Kind.PRODUCTS, call)

    def attend(
        self, parts: tuple[Tensor, Tensor, Tensor], out: Tensor, heads: PagedHeads,
        scores: StepScores, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Append attention on the blocks of a layer, which first stores the new keys and values.

        Args:
            parts: query ``[R, H, d]``, key and value ``[R, h, d]``.
            out: buffer ``[R, H d]``.
            heads: of the layer.
            scores: how they become weights.
            sinks: ``[H]``, one more score of each head; for those that have sinks.
        """
        query, key, value = parts
        (_, kv_heads, block_size, _), dim = heads.keys.shape, heads.dim
        if {key.shape[1:], value.shape[1:]} != {(kv_heads, dim)} or query.shape[1] % kv_heads:
            raise UnsupportedStepError(f"keys of {list(key.shape[1:])}, not {[kv_heads, dim]}")
        scales = heads.key_scales, heads.value_scales
        call = AttentionCall(
            query=query.data_ptr(),
            out=out.data_ptr(),
            new_key=key.data_ptr(),
            new_value=value.data_ptr(),
            keys=self.keep(heads.keys),
            values=self.keep(heads.values),
            key_scales=None if scales[0] is None else self.keep(scales[0]),
            value_scales=None if scales[1] is None else self.keep(scales[1]),
            kv_heads=kv_heads,
            group=query.shape[1] // kv_heads,
            dim=dim,
            block_bits=block_size.bit_length() - 1,
            window=scores.window or 0,
            scaling=scores.scaling,
            sinks=None if sinks is None else self.keep(sinks.detach().float()),
            softcap=scores.softcap or 0.0,
            type=TYPES[self.dtype],
            stored=STORED_TYPES[heads.keys.dtype],
        )
        call.query_token, call.query_head = query.stride()[:2]
        call.key_token, call.key_head = key.stride()[:2]
        call.value_token, call.value_head = value.stride()[:2]
        call.block_stride, call.head_stride = heads.strides
        if scores.has_bias:
            self._biased.append(call)
        self.append(Kind.STORE, call)
        self.append(Kind.ATTEND, call)

    def set_bias(self, bias: Tensor) -> None:
        """Set what is added to the scores of a sequence's first P tokens, float32 ``[H, P]``."""
        self._bias = bias  # kept
        for call in self._biased:
            call.bias, call.bias_head = bias.data_ptr(), bias.stride(0)

    def limit(self, rows: int | None) -> None:
        """State that a product is the fastest for at most ``rows`` rows; for any if ``None``."""
        if rows is not None:
            self.few_rows = min(rows, self.few_rows or rows)

    def __len__(self) -> int:
        """Number of operators."""
        return len(self._operators)

    def run(
        self,
        tokens: PagedTokens,
        sequences: Tensor | None = None,
        operators: range | None = None,
    ) -> None:
        """Run operators for the first R rows of the buffers.

        Args:
            tokens: of the rows; no two of a sequence have the same position.
            sequences: of the rows, as :attr:`llmpq.models.PackedBatch.sequence_rows`; for mixers.
            operators: consecutive ones to run, by default all.
        """
        assert len(tokens) <= self.most_rows
        chosen = range(len(self)) if operators is None else operators
        step = Step(
            operators=self.operators() + chosen.start * sizeof(Operator),
            count=len(chosen),
            rows=len(tokens),
            **tokens.fields,
            window_tables=tokens.window_blocks.ctypes.data,
            chosen_count=tokens.single_count,
            run_count=tokens.run_count,
            sequences=None if sequences is None else sequences.data_ptr(),
            sequence_count=0 if sequences is None else len(sequences),
            type=TYPES[self.dtype],
            threads=torch.get_num_threads(),
        )
        loaded = library()
        assert loaded is not None
        loaded.kernels_step(byref(step))

    def operators(self) -> int:
        """Return the address of the operators, which live until another is appended."""
        if self._list is None:
            self._list = (Operator * len(self._operators))(
                *(Operator(kind=kind, what=addressof(what)) for kind, what in self._operators)
            )
        return addressof(self._list)

    def append(self, kind: Kind, what: Structure) -> None:
        """Append an operator."""
        self._operators.append((kind, what))
        self._list = None

    def keep(self, data: Tensor | Structure) -> int:
        """Return the address of data, which then live as long as this program."""
        self._kept.append(data)
        return data.data_ptr() if isinstance(data, Tensor) else addressof(data)

    def hold(self, *owners: object) -> None:
        """Let owners of memory, whose addresses operators have, live as long as this program."""
        self._kept += owners

    def kernel_of(self, weight: PreparedWeight | Tensor) -> StepKernel:
        """Return the kernel of a weight.

        Raises:
            UnsupportedStepError: there is none.
        """
        if isinstance(weight, Tensor):
            if weight.dtype != self.dtype or not weight.is_contiguous() or weight.shape[1] % 16:
                raise UnsupportedStepError(f"a plain weight {list(weight.shape)} of {weight.dtype}")
            return StepKernel(_PLAIN, 0, 0)
        if not isinstance(weight.handle, Weight):
            raise UnsupportedStepError(f"a weight of '{weight.backend}' without a compiled kernel")
        if weight.backend == DENSE_BACKEND and weight.tensors[0].dtype == self.dtype:
            if multiplies_pairs(self.dtype):
                return StepKernel(_DENSE_BF16, 0, few_dense_rows() or 0)
            return StepKernel(_PACKED_FLOAT, 0, 0)
        block = _BLOCK
        while weight.handle.group % block:
            block //= 2
        bits = weight.precision.bits
        kernels = {
            "cpu_packed": StepKernel(_PACKED_FLOAT, block, 0),
            "cpu_packed_int8": StepKernel(_PACKED_INT8, block, bits),
            "cpu_llm_int8": StepKernel(_LLM_INT8, 0, 0),
        }
        if weight.backend not in kernels:
            raise UnsupportedStepError(f"a weight of '{weight.backend}' in {self.dtype}")
        if weight.backend == "cpu_packed" and multiplies_pairs(self.dtype):
            return StepKernel(_PACKED_BF16, block, gemv_max_rows(bits))
        return kernels[weight.backend]

    def handle_of(self, weight: PreparedWeight | Tensor, rows: int, columns: int) -> int:
        """Return the address of the handle of a weight ``[rows, columns]``.

        Raises:
            UnsupportedStepError: it has another shape.
        """
        if isinstance(weight, PreparedWeight):
            handle = weight.handle
        else:
            bits = 8 * weight.itemsize
            handle = Weight(
                tiles=weight.data_ptr(),
                rows=len(weight),
                columns=weight.shape[1],
                bits=bits,
                scale_type=TYPES[weight.dtype],
            )
        assert isinstance(handle, Weight)
        if (handle.rows, handle.columns) != (rows, columns):
            raise UnsupportedStepError(f"a weight [{handle.rows}, {handle.columns}]")
        self._kept += (weight, handle)
        return addressof(handle)

    def prepared(self, x: Tensor, kernel: StepKernel) -> PrepareRows | None:
        """Return where a kernel finds what it needs of rows ``x``; ``None`` if it needs no more."""
        if kernel.number == _PLAIN or not (kernel.block or kernel.number == _LLM_INT8):
            return None
        rows, columns = x.shape

        def place(name: str, dtype: torch.dtype, each: int = 1) -> int:
            return self.buffer(name, columns // each, dtype, rows).data_ptr()

        prepared = Prepared(
            x=x.data_ptr(), columns=columns, block=kernel.block, type=TYPES[self.dtype]
        )
        if kernel.number == _LLM_INT8:
            has_vnni = instruction_set() in WITH_VNNI
            prepared.threshold = OUTLIER_THRESHOLD
            prepared.codes = place("codes", torch.int8 if has_vnni else torch.int16)
            prepared.column = place("outlier columns", torch.int32)
            prepared.value = place("outlier values", torch.float32)
            of_rows = torch.empty(5, rows, dtype=torch.int64)
            self._kept.append(of_rows)
            prepared.scale, prepared.sum, prepared.start, prepared.end, prepared.used = (
                row.data_ptr() for row in of_rows
            )
        else:
            prepared.sums = place("sums", torch.float32, kernel.block)
        if kernel.number == _PACKED_INT8:
            prepared.codes = place("codes", torch.int8)
            prepared.scale = place("scales", torch.float32, kernel.block)
            prepared.bits = kernel.option
        return PrepareRows(prepared=prepared, kernel=kernel.number)


def gate_rows(gate: Tensor, up: Tensor | None, y: Tensor, activation: str) -> GateRows:
    """Return the operator of :meth:`StepProgram.gate`."""
    columns = gate.shape[1]
    if columns % 16:
        raise UnsupportedStepError(f"rows of {columns} numbers")
    return GateRows(
        gate=gate.data_ptr(),
        up=None if up is None else up.data_ptr(),
        y=y.data_ptr(),
        gate_row=gate.stride(0),
        up_row=0 if up is None else up.stride(0),
        y_row=y.stride(0),
        columns=columns,
        activation=ACTIVATIONS.index(activation),
    )


def _heads(x: Tensor) -> Heads:
    """Return the strides of heads ``[R, H, d]``."""
    row, head, one = x.stride()
    assert one == 1
    return Heads(data=x.data_ptr(), row=row, head=head)
