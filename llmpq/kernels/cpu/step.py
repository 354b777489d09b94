"""A decode step in one call: the operators of several layers, for a few rows (``csrc/step.c``).

``StepProgram`` is a list of operators on fixed buffers. Python appends them once; every step then
passes the rows' block tables and positions and calls compiled code. Operators on heads take views
``[R, H, d]`` of buffers by any strides, such as the parts of a fused projection.

Shapes: R rows (single tokens), H heads, h KV heads, d head_dim, C columns, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.dense import DENSE_BACKEND, few_dense_rows
from llmpq.kernels.cpu.dispatch import OUTLIER_THRESHOLD
from llmpq.kernels.cpu.native import (
    TYPES,
    Attention,
    Norm,
    Product,
    Weight,
    has_bf16_products,
    library,
)
from llmpq.kernels.cpu.paged_attention import STORED_TYPES, PagedHeads
from llmpq.kernels.cpu.switch import few_rows_limit, is_float_faster

MOST_ROWS = 32
"""Most rows of a step."""
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""In the order of ``csrc/rows.c``."""
_NORM, _ADD, _ROTATE, _GATE, _PREPARE, _STORE, _PRODUCTS, _ATTEND = range(8)
_DENSE_BF16, _PLAIN_FLOAT, _PACKED_BF16, _PACKED_FLOAT, _LLM_INT8, _PACKED_INT8 = range(6)
_BLOCK = 128  # columns of a sum: kernels.h
_MOST_PRODUCTS = 3


class _Heads(Structure):
    _fields_ = (("data", c_void_p), *((name, c_int64) for name in ("row", "head")))


class _NormRows(Structure):
    _fields_ = (
        ("norm", Norm),
        *((name, _Heads) for name in ("x", "y")),
        *((name, c_int64) for name in ("heads", "weight_head")),
    )


class _AddRows(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "more")),
        ("columns", c_int64),
        ("factor", c_float),
    )


class _RotateRows(Structure):
    _fields_ = (
        ("x", _Heads),
        *((name, c_void_p) for name in ("cos", "sin")),
        *((name, c_int64) for name in ("heads", "turned")),
        *((name, c_int32) for name in ("pairs", "table_type")),
    )


class _GateRows(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("gate", "up", "y")),
        *((name, c_int64) for name in ("gate_row", "up_row", "columns")),
        ("activation", c_int32),
    )


class _Prepared(Structure):
    _fields_ = (
        ("x", c_void_p),
        *((name, c_int64) for name in ("columns", "block")),
        *((name, c_void_p) for name in ("sums", "codes", "scale", "sum")),
        *((name, c_void_p) for name in ("start", "end", "column", "value")),
        ("threshold", c_float),
        *((name, c_int32) for name in ("type", "bits")),
    )


class _PrepareRows(Structure):
    _fields_ = (("prepared", _Prepared), ("kernel", c_int32))


class _Products(Structure):
    _fields_ = (
        ("products", Product * _MOST_PRODUCTS),
        ("prepared", c_void_p),
        *((name, c_int64) for name in ("count", "few_limit")),
        ("kernel", c_int32),
    )


class _Operator(Structure):
    _fields_ = (("kind", c_int32), ("what", c_void_p))


class _Step(Structure):
    _fields_ = (
        ("operators", c_void_p),
        *((name, c_int64) for name in ("count", "rows")),
        *((name, c_void_p) for name in ("tables", "starts", "lengths")),
        *((name, c_int32) for name in ("type", "threads")),
    )


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
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    has_bias: bool = False


class StepProgram:
    """Operators in the order in which they run, all on buffers of this program.

    Args:
        dtype: float32 or bfloat16, of all rows.

    Attributes:
        most_rows: most rows for which the kernels of its products are the fastest.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise UnsupportedStepError(f"numbers of {dtype}")
        self.dtype = dtype
        self.most_rows = MOST_ROWS
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._operators: list[tuple[int, Structure]] = []
        self._kept: list[Tensor | PreparedWeight] = []  # whose addresses operators hold
        self._handles: list[Weight] = []  # of plain weights
        self._list: Array[_Operator] | None = None
        self._biased: list[Attention] = []
        self._bias: Tensor | None = None

    def buffer(self, name: str, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the rows of a name and width, ``[MOST_ROWS, columns]``: one for all layers."""
        key = (name, columns, dtype or self.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(MOST_ROWS, columns, dtype=key[2])
        return self._buffers[key]

    def norm(self, x: Tensor, y: Tensor, norm: RowNorm) -> None:
        """Append a norm of each head of ``x`` ``[R, H, C]``, written to ``y``."""
        heads, columns = x.shape[1:]
        weight, bias = norm.weight, norm.bias
        shapes = ((columns,), (heads, columns))
        if columns % 16 or any(v is not None and v.shape not in shapes for v in (weight, bias)):
            raise UnsupportedStepError(f"a norm of {heads} heads of {columns} numbers")
        call = Norm(
            weight=None if weight is None else self._address(weight),
            bias=None if bias is None else self._address(bias),
            columns=columns,
            epsilon=norm.epsilon,
            type=TYPES[self.dtype],
            weight_type=TYPES[torch.float32],
            centers=norm.centers,
            rounds=norm.rounds,
        )
        rows = _NormRows(norm=call, x=_heads(x), y=_heads(y), heads=heads)
        if weight is not None and weight.dim() > 1:
            rows.weight_head = columns
        self._append(_NORM, rows)

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
        self._append(_ADD, _AddRows(x=x.data_ptr(), more=more, columns=columns, factor=factor))

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
        rotate = _RotateRows(
            x=_heads(x),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            heads=x.shape[1],
            turned=turned,
            pairs=pairs,
            table_type=TYPES[cos.dtype],
        )
        self._append(_ROTATE, rotate)

    def gate(self, gate: Tensor, up: Tensor | None, y: Tensor, activation: str) -> None:
        """Append ``y = activation(gate) * up``, ``[R, C]``.

        Args:
            gate: rows by any stride.
            up: likewise; ``None`` for ones.
            y: rows.
            activation: one of ``ACTIVATIONS``.
        """
        columns = gate.shape[1]
        if columns % 16:
            raise UnsupportedStepError(f"rows of {columns} numbers")
        call = _GateRows(
            gate=gate.data_ptr(),
            up=None if up is None else up.data_ptr(),
            y=y.data_ptr(),
            gate_row=gate.stride(0),
            up_row=0 if up is None else up.stride(0),
            columns=columns,
            activation=ACTIVATIONS.index(activation),
        )
        self._append(_GATE, call)

    def products(
        self, x: Tensor, outputs: Sequence[tuple[Tensor, PreparedWeight | Tensor, Tensor | None]]
    ) -> None:
        """Append products of ``x``: each writes ``y = x @ weight.T + bias``.

        Args:
            x: rows.
            outputs: up to three of y, weight and bias; a plain weight is float32.
        """
        found = [self._kernel(weight) for _, weight, _ in outputs]
        if len(set(found)) > 1 or len(found) > _MOST_PRODUCTS:
            raise UnsupportedStepError("products of one input by different kernels")
        kernel, block, limit = found[0]
        call = _Products(count=len(outputs), kernel=kernel)
        if kernel == _PACKED_BF16:
            call.few_limit = limit
        if kernel in (_PACKED_BF16, _PACKED_FLOAT, _PACKED_INT8, _LLM_INT8):
            prepare = self._prepare(x, kernel, block, limit)
            self._append(_PREPARE, prepare)
            call.prepared = addressof(prepare)
        for place, (y, weight, bias) in enumerate(outputs):
            handle = self._handle(weight)
            if (handle.rows, handle.columns) != (y.shape[1], x.shape[1]) or handle.rows % 16:
                raise UnsupportedStepError(f"a weight [{handle.rows}, {handle.columns}]")
            call.products[place] = Product(
                weight=addressof(handle),
                x=x.data_ptr(),
                bias=None if bias is None else self._address(bias.to(self.dtype)),
                y=y.data_ptr(),
                in_float=kernel == _PACKED_BF16 and is_float_faster(),
            )
        self._append(_PRODUCTS, call)

    def attend(
        self, parts: tuple[Tensor, Tensor, Tensor], out: Tensor, heads: PagedHeads,
        scores: StepScores,
    ) -> None:  # fmt: skip
        """Append attention on the blocks of a layer, which first stores the new keys and values.

        Args:
            parts: query ``[R, H, d]``, key and value ``[R, h, d]``.
            out: buffer ``[R, H d]``.
            heads: of the layer.
            scores: how they become weights.
        """
        query, key, value = parts
        _, kv_heads, block_size, dim = heads.keys.shape
        if {key.shape[1:], value.shape[1:]} != {(kv_heads, dim)} or query.shape[1] % kv_heads:
            raise UnsupportedStepError(f"keys of {list(key.shape[1:])}, not {[kv_heads, dim]}")
        scales = heads.key_scales, heads.value_scales
        call = Attention(
            query=query.data_ptr(),
            out=out.data_ptr(),
            new_key=key.data_ptr(),
            new_value=value.data_ptr(),
            keys=self._address(heads.keys),
            values=self._address(heads.values),
            key_scales=None if scales[0] is None else self._address(scales[0]),
            value_scales=None if scales[1] is None else self._address(scales[1]),
            kv_heads=kv_heads,
            group=query.shape[1] // kv_heads,
            dim=dim,
            block_bits=block_size.bit_length() - 1,
            window=scores.window or 0,
            scaling=scores.scaling,
            softcap=scores.softcap or 0.0,
            type=TYPES[self.dtype],
            stored=STORED_TYPES[heads.keys.dtype],
        )
        call.query_token, call.query_head = query.stride()[:2]
        call.key_token, call.key_head = key.stride()[:2]
        call.value_token, call.value_head = value.stride()[:2]
        call.block_stride, call.head_stride = heads.keys.stride()[:2]
        if scores.has_bias:
            self._biased.append(call)
        self._append(_STORE, call)
        self._append(_ATTEND, call)

    def set_bias(self, bias: Tensor) -> None:
        """Set what is added to the scores of a sequence's first P tokens, float32 ``[H, P]``."""
        self._bias = bias  # kept
        for call in self._biased:
            call.bias, call.bias_head = bias.data_ptr(), bias.stride(0)

    def run(self, block_tables: Sequence[Sequence[int]], positions: Sequence[int]) -> None:
        """Run all operators for the first R rows of the buffers.

        Args:
            block_tables: blocks of each row's sequence.
            positions: of each row's token; no two rows of a sequence have the same.
        """
        sizes = [len(table) for table in block_tables]
        blocks = np.fromiter((b for table in block_tables for b in table), np.int32, sum(sizes))
        offsets = np.cumsum([0, *sizes[:-1]])
        lengths = np.array(positions) + 1
        assert len(positions) <= MOST_ROWS
        if self._list is None:
            self._list = (_Operator * len(self._operators))(
                *(_Operator(kind=kind, what=addressof(what)) for kind, what in self._operators)
            )
        step = _Step(
            operators=addressof(self._list),
            count=len(self._operators),
            rows=len(positions),
            tables=blocks.ctypes.data,
            starts=offsets.ctypes.data,
            lengths=lengths.ctypes.data,
            type=TYPES[self.dtype],
            threads=torch.get_num_threads(),
        )
        loaded = library()
        assert loaded is not None
        loaded.kernels_step(byref(step))

    def _append(self, kind: int, what: Structure) -> None:
        self._operators.append((kind, what))
        self._list = None

    def _address(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _kernel(self, weight: PreparedWeight | Tensor) -> tuple[int, int, int]:
        """Return the kernel of a weight, the columns of its sums, and a number of that kernel.

        That is the limit of few rows of weight-only products, and the bits of 8-bit activations'.
        """
        if isinstance(weight, Tensor):
            if weight.dtype != torch.float32 or self.dtype != torch.float32:
                raise UnsupportedStepError(f"a plain weight of {weight.dtype}")
            return _PLAIN_FLOAT, 0, 0
        if not isinstance(weight.handle, Weight):
            raise UnsupportedStepError(f"a weight of '{weight.backend}' without a compiled kernel")
        is_bf16 = self.dtype == torch.bfloat16
        if weight.backend == DENSE_BACKEND and is_bf16:
            self.most_rows = min(self.most_rows, few_dense_rows())
            return _DENSE_BF16, 0, 0
        block = _BLOCK
        while weight.handle.group % block:
            block //= 2
        if weight.backend == "cpu_packed" and is_bf16 and has_bf16_products():
            return _PACKED_BF16, block, few_rows_limit(weight.precision.bits)
        if weight.backend == "cpu_packed":
            return _PACKED_FLOAT, block, 0
        if weight.backend == "cpu_packed_int8":
            return _PACKED_INT8, block, weight.precision.bits
        if weight.backend == "cpu_llm_int8":
            return _LLM_INT8, 0, 0
        raise UnsupportedStepError(f"a weight of '{weight.backend}' in {self.dtype}")

    def _handle(self, weight: PreparedWeight | Tensor) -> Weight:
        self._kept.append(weight)
        if isinstance(weight, PreparedWeight):
            assert isinstance(weight.handle, Weight)
            return weight.handle
        if not weight.is_contiguous():
            raise UnsupportedStepError("a plain weight that is not contiguous")
        rows, columns = weight.shape
        handle = Weight(tiles=weight.data_ptr(), rows=rows, columns=columns, bits=32)
        self._handles.append(handle)
        return handle

    def _prepare(self, x: Tensor, kernel: int, block: int, bits: int) -> _PrepareRows:
        columns = x.shape[1]

        def place(name: str, dtype: torch.dtype) -> int:
            return self.buffer(name, columns, dtype).data_ptr()

        prepared = _Prepared(x=x.data_ptr(), columns=columns, block=block, type=TYPES[self.dtype])
        if kernel == _LLM_INT8:
            prepared.threshold = OUTLIER_THRESHOLD
            prepared.codes = place("codes", torch.int8)
            prepared.column = place("outlier columns", torch.int32)
            prepared.value = place("outlier values", torch.float32)
            rows = torch.empty(4, MOST_ROWS, dtype=torch.int64)
            self._kept.append(rows)
            prepared.scale, prepared.sum, prepared.start, prepared.end = (
                row.data_ptr() for row in rows
            )
        else:
            prepared.sums = place("sums", torch.float32)
        if kernel == _PACKED_INT8:
            prepared.codes = place("codes", torch.int8)
            prepared.scale = place("scales", torch.float32)
            prepared.bits = bits
        return _PrepareRows(prepared=prepared, kernel=kernel)


def _heads(x: Tensor) -> _Heads:
    """Return the strides of heads ``[R, H, d]``."""
    row, head, one = x.stride()
    assert one == 1
    return _Heads(data=x.data_ptr(), row=row, head=head)
