"""A decode step in one call: the operators of several layers, for a few rows (``csrc/step.c``).

``StepProgram`` is a list of operators on fixed buffers. Python appends them once; every step then
passes the rows' block tables and positions and calls compiled code.

Shapes: R rows (single tokens), H heads, h KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, Structure, addressof, byref, c_float, c_int32, c_int64, c_void_p

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
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
"""In the order of ``csrc/step.c``."""
_NORM, _ADD, _ROTATE, _GATE, _PREPARE, _STORE, _PRODUCTS, _ATTEND = range(8)
_DENSE_BF16, _PLAIN_FLOAT, _PACKED_BF16, _PACKED_FLOAT, _LLM_INT8, _PACKED_INT8 = range(6)
_BLOCK = 128  # columns of a sum: kernels.h
_MOST_PRODUCTS = 3


class _NormRows(Structure):
    _fields_ = (("norm", Norm), ("heads", c_int64))


class _AddRows(Structure):
    _fields_ = (("x", c_void_p), ("more", c_void_p), ("columns", c_int64))


class _RotateRows(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "cos", "sin")),
        *((name, c_int64) for name in ("heads", "dim", "turned")),
    )


class _GateRows(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("gate", "up", "y")),
        ("columns", c_int64),
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

    def buffer(self, name: str, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the rows of a name and width, ``[MOST_ROWS, columns]``: one for all layers."""
        if columns % 16:
            raise UnsupportedStepError(f"rows of {columns} numbers")
        key = (name, columns, dtype or self.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(MOST_ROWS, columns, dtype=key[2])
        return self._buffers[key]

    def norm(self, x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> None:
        """Append ``norm.rms_norm`` of each row, or of each head of ``weight``'s length in it."""
        columns = weight.numel()
        if weight.dtype != self.dtype or columns % 16 or x.shape[1] % columns:
            raise UnsupportedStepError(f"a norm of {columns} {weight.dtype} of {x.shape[1]}")
        norm = Norm(
            x=x.data_ptr(),
            weight=self._address(weight),
            y=y.data_ptr(),
            columns=columns,
            epsilon=epsilon,
            type=TYPES[self.dtype],
        )
        self._append(_NORM, _NormRows(norm=norm, heads=x.shape[1] // columns))

    def add(self, x: Tensor, more: Tensor) -> None:
        """Append ``x += more``."""
        self._append(_ADD, _AddRows(x=x.data_ptr(), more=more.data_ptr(), columns=x.shape[1]))

    def rotate(self, x: Tensor, dim: int, cos: Tensor, sin: Tensor) -> None:
        """Append the rotary embedding by halves of the heads ``[R, H d]`` of ``x``.

        ``cos`` and ``sin`` are buffers of the rows, ``[R, features that are rotated]``.
        """
        turned = cos.shape[1]
        if turned % 32 or turned > dim:
            raise UnsupportedStepError(f"a rotary embedding of {turned} of {dim} features")
        rotate = _RotateRows(
            x=x.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            heads=x.shape[1] // dim,
            dim=dim,
            turned=turned,
        )
        self._append(_ROTATE, rotate)

    def gate(self, gate: Tensor, up: Tensor, y: Tensor, activation: str) -> None:
        """Append ``y = activation(gate) * up``; ``activation`` is one of ``ACTIVATIONS``."""
        call = _GateRows(
            gate=gate.data_ptr(),
            up=up.data_ptr(),
            y=y.data_ptr(),
            columns=gate.shape[1],
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
        self, parts: tuple[Tensor, Tensor, Tensor, Tensor], heads: PagedHeads, scaling: float,
        window: int | None,
    ) -> None:  # fmt: skip
        """Append attention on the blocks of a layer, which first stores the new keys and values.

        Args:
            parts: query ``[R, H d]``, key and value ``[R, h d]``, output ``[R, H d]``.
            heads: of the layer.
            scaling: factor of the scores.
            window: tokens a query sees; ``None`` for all.
        """
        query, key, value, out = parts
        _, kv_heads, block_size, dim = heads.keys.shape
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
            group=query.shape[1] // dim // kv_heads,
            dim=dim,
            block_bits=block_size.bit_length() - 1,
            query_token=query.shape[1],
            query_head=dim,
            key_token=key.shape[1],
            key_head=dim,
            value_token=value.shape[1],
            value_head=dim,
            window=window or 0,
            scaling=scaling,
            type=TYPES[self.dtype],
            stored=STORED_TYPES[heads.keys.dtype],
        )
        call.block_stride, call.head_stride = heads.keys.stride()[:2]
        self._append(_STORE, call)
        self._append(_ATTEND, call)

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
        if weight.backend == "cpu_packed" and not is_bf16:
            return _PACKED_FLOAT, block, 0
        if weight.backend == "cpu_packed" and has_bf16_products():
            return _PACKED_BF16, block, few_rows_limit(weight.precision.bits)
        if weight.backend == "cpu_packed_int8" and is_bf16:
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
