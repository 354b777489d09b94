"""16-bit weights on a CPU: bf16 reordered once into oneDNN's layout.

A plain ``F.linear`` reorders the weight at every call, half of the time of one row, and for few
rows oneDNN reads it at half of the memory bandwidth. So a compiled kernel (``csrc/dense_bf16.c``)
reads oneDNN's layout in place, after a check of every number that the layout is the expected one.
On processors where products of bf16 pairs take longer than float32 ones, another compiled kernel
(``csrc/panel_float.c``) widens the same layout for many rows. Where neither can read it, products
are oneDNN's. Weights that oneDNN would pad are not prepacked.

Shape legend: N output features, K input features.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.native import Weight, has_bf16_products, instruction_set, library
from llmpq.kernels.cpu.switch import MANY_ROWS, crossing, fastest, kept_limit
from llmpq.kernels.cpu.tiles import dense_product, float_product, panels_of
from llmpq.spec.precision import default_precision
from llmpq.spec.runtime_constants import PRODUCT_ROWS

DENSE_BACKEND = "cpu_bf16"
"""Name of this backend, next to the names in ``registry.BACKENDS``."""

_MULTIPLE = 64  # oneDNN pads blocks of outputs to it, and then a weight weighs more than 2 N K
_AT_ONCE, _AT_ONCE_WITH_AMX = 6, 16
"""Rows that the compiled kernel multiplies in one pass over a weight."""
_THREAD_BYTES = 1 << 20
"""Bytes over all passes that justify one more thread: waking it takes as long as reading them."""
_TRIED_SHAPE = (1024, 1024)  # [N, K]: 2 MiB, more than most cores keep, as decoding loads weights


def can_prepack(device_type: str, dtype: torch.dtype, out_features: int, in_features: int) -> bool:
    """Return whether a weight ``[N, K]`` is faster prepacked and has the same size."""
    whole = out_features % _MULTIPLE == 0 and in_features % _MULTIPLE == 0
    return device_type == "cpu" and dtype == torch.bfloat16 and whole and has_bf16_products()


def prepack(weight: Tensor) -> PreparedWeight:
    """Return bf16 ``[N, K]`` in oneDNN's order; ``can_prepack`` must hold.

    Its ``handle`` is set if the compiled kernel can read it; the first call on a machine then also
    measures ``few_dense_rows``.
    """
    plain = weight.detach().contiguous()
    layout: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain, None)
    handle = _readable(layout, plain)
    if handle is not None:
        few_dense_rows()
    return _prepared(layout, plain, handle)


def prepacked_linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` for bf16 ``x`` ``[..., K]``: bf16 ``[..., N]``."""
    if weight.handle is None or x.dtype != torch.bfloat16:
        return _onednn_product(x, weight, bias)
    most = few_dense_rows()
    if most is None or x.numel() <= most * weight.in_features:
        at_once = _AT_ONCE_WITH_AMX if has_tiles() else _AT_ONCE
        passes = -(-x.numel() // (at_once * weight.in_features))
        worth = passes * weight.nbytes // _THREAD_BYTES
        return dense_product(x, weight, bias, threads=max(1, min(torch.get_num_threads(), worth)))
    return float_product(x, weight, bias)


def product_rows(count: int) -> list[int]:
    """Return the numbers of rows whose products together cover ``count`` rows.

    All are in ``PRODUCT_ROWS``, so that few products are compiled. The last one may exceed the
    remaining rows by up to 15.
    """
    found, left = [], count
    while left > 0:
        size = next((rows for rows in PRODUCT_ROWS if 0 <= rows - left < PRODUCT_ROWS[0]), None)
        size = size or max(rows for rows in PRODUCT_ROWS if rows < left)
        found.append(size)
        left -= size
    return found


def _onednn_product(x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
    """Multiply ``x`` ``[..., K]`` in parts of ``PRODUCT_ROWS`` rows."""
    rows = x.reshape(-1, weight.in_features)
    count = len(rows)
    parts = product_rows(count)
    if parts == [count]:
        return _compiled_product(x, weight, bias)
    y = x.new_empty(count, weight.out_features)
    first = 0
    for size in parts:
        part = rows[first : first + size]
        if len(part) < size:
            part = torch.nn.functional.pad(part, (0, 0, 0, size - len(part)))
        y[first : first + size] = _compiled_product(part, weight, bias)[: count - first]
        first += size
    return y.view(*x.shape[:-1], weight.out_features)


def _compiled_product(x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.tensors[0], bias, "none", [], "")
    return y


@cache
def few_dense_rows() -> int | None:
    """Return up to how many rows products of bf16 pairs are faster than float32 ones here.

    ``None`` for any number: then the bits of a row's answer are the same in any number of rows.
    They take 0.9 to 1.3 of oneDNN's time with AMX, 0.8 to 1.0 of it elsewhere, and keep nothing for
    a number of rows. Both kinds add in float32 and round once, in different orders: one output in
    thousands may differ in its last bit. The stored measurement makes the runs of a machine agree.
    """
    return None if has_tiles() else kept_limit("16 bits", _measure) or None


def has_tiles() -> bool:
    """Return whether the compiled kernel multiplies on AMX's tiles."""
    return instruction_set() == "amx"


def _prepared(layout: Tensor, plain: Tensor, handle: Weight | None) -> PreparedWeight:
    return PreparedWeight(
        backend=DENSE_BACKEND,
        out_features=plain.shape[0],
        in_features=plain.shape[1],
        precision=default_precision(16),
        tensors=(layout,),
        handle=handle,
    )


def _readable(layout: Tensor, plain: Tensor) -> Weight | None:
    """Return the handle of ``layout`` if the compiled kernel can read it, else ``None``."""
    address_of = getattr(torch.ops.mkldnn, "data_ptr", None)  # not a public operator
    if address_of is None or library() is None:
        return None
    if torch.ops.mkldnn._nbytes(layout) != plain.nbytes:
        return None
    return panels_of(int(address_of(layout)), plain)


def _tried_weight() -> PreparedWeight:
    plain = torch.zeros(_TRIED_SHAPE, dtype=torch.bfloat16)
    layout: Tensor = torch.ops.mkldnn._reorder_linear_weight(plain, None)
    return _prepared(layout, plain, _readable(layout, plain))


def _measure() -> int:
    """Return the limit, 0 for none."""
    own = _tried_weight()

    def timed(count: int) -> tuple[float, float]:
        x = torch.ones(count, _TRIED_SHAPE[1], dtype=torch.bfloat16)
        pairs, wide = (partial(call, x, own, None) for call in (dense_product, float_product))
        return fastest(pairs), fastest(wide)

    pairs, wide = timed(MANY_ROWS)
    return 0 if pairs <= wide else crossing(timed)
