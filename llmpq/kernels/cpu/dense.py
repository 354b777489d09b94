"""16-bit weights on a CPU: ordered once into panels that compiled kernels read as one stream.

torch reorders a 16-bit weight at every call, half of the time of one row, and multiplies bf16 at a
fraction of its speed in float32 on processors without products of bf16 pairs. So a weight is kept
in panels (``csrc/kernels.h``), whose order depends on what multiplies them:

* products of bf16 pairs (``csrc/dense_bf16.c``) with AVX512-BF16 and AMX;
* elsewhere, and always for float16, products in float32 of numbers widened in registers
  (``csrc/panel_float.c``): 16 bits stored, 32 bits computed.

On processors where bf16 pairs take longer than float32 for many rows, these are widened, too.

Shape legend: N output features, K input features, P rows of a panel.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.kernel_choice import MANY_ROWS, break_even_rows, fastest, kept_limit
from llmpq.kernels.cpu.native import (
    Weight,
    dense_product,
    float_product,
    has_bf16_products,
    instruction_set,
    library,
    panel_handle,
    to_panels,
)
from llmpq.spec.precision import default_precision
from llmpq.spec.runtime_constants import PANEL_COLUMNS, PANEL_ROWS

DENSE_BACKEND = "cpu_dense"
"""Name of this backend, next to the names in ``registry.BACKENDS``."""

DTYPES = (torch.bfloat16, torch.float16)
_ROWS_IN_FLOAT, _ROWS_IN_PAIRS, _ROWS_WITH_AMX = 16, PANEL_ROWS, 32
"""P for products in float32 and of bf16 pairs, these without and with AMX."""
_AT_ONCE, _AT_ONCE_WITH_AMX = 6, 16
"""Rows that the compiled kernel multiplies in one pass over a weight."""
_THREAD_BYTES = 1 << 20
"""Bytes over all passes that justify one more thread: waking it takes as long as reading them."""
_TRIED_SHAPE = (1024, 1024)  # [N, K]: 2 MiB, more than most cores keep, as decoding loads weights


def can_prepack(weight: Tensor) -> bool:
    """Return whether a weight ``[N, K]`` can be kept in panels: 16 bits, on a CPU."""
    fits = weight.dtype in DTYPES and weight.shape[-1] % PANEL_COLUMNS == 0
    return weight.device.type == "cpu" and fits and library() is not None


def is_whole(weight: Tensor) -> bool:
    """Return whether a weight that ``can_prepack`` takes the same bytes in panels."""
    return len(weight) % (PANEL_ROWS if multiplies_pairs(weight.dtype) else _ROWS_IN_FLOAT) == 0


def goes_in_panels(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Return whether a weight ``[N, K]`` on a CPU is kept in panels of the same bytes."""
    weight = torch.empty(0, columns, dtype=dtype)
    multiple = PANEL_ROWS if multiplies_pairs(dtype) else _ROWS_IN_FLOAT
    return can_prepack(weight) and rows % multiple == 0


def prepack(weight: Tensor, *, reuse: bool = False) -> PreparedWeight:
    """Return ``[N, K]`` in panels; ``can_prepack`` must hold.

    Unless it ``is_whole``, rows are filled up with zeros to a multiple of ``PANEL_ROWS``. The first
    call for bf16 on a machine also measures ``few_dense_rows``.

    Args:
        weight: bf16 or float16.
        reuse: whether the memory of ``weight`` may become the panels'; its content is then lost.
    """
    in_pairs = multiplies_pairs(weight.dtype)
    if in_pairs:
        few_dense_rows()
    return _prepared(weight.detach().contiguous(), in_pairs=in_pairs, reuse=reuse)


def wrap_panels(panels: Tensor) -> PreparedWeight:
    """Return a weight that ``is_whole`` and is in panels already, without a copy."""
    handle = panel_handle(panels, len(panels), panel_rows_of(panels.dtype))
    return _in_panels(panels, handle, len(panels))


def panel_rows_of(dtype: torch.dtype) -> int:
    """Return P of weights of a dtype on this processor."""
    return _panel_rows(in_pairs=multiplies_pairs(dtype))


def prepacked_linear(x: Tensor, weight: PreparedWeight, bias: Tensor | None) -> Tensor:
    """Return ``x @ weight.T + bias`` for ``x`` ``[..., K]``: ``[..., N]`` in x's dtype."""
    at_once = _AT_ONCE_WITH_AMX if has_tiles() else _AT_ONCE
    passes = -(-x.numel() // (at_once * weight.in_features))
    worth = passes * weight.nbytes // _THREAD_BYTES
    threads = max(1, min(torch.get_num_threads(), worth))
    if x.dtype == weight.tensors[0].dtype and multiplies_pairs(x.dtype):
        most = few_dense_rows()
        if most is None or x.numel() <= most * weight.in_features:
            return dense_product(x, weight, bias, threads=threads)
    return float_product(x, weight, bias, threads=threads)


def multiplies_pairs(dtype: torch.dtype) -> bool:
    """Return whether weights of a dtype are multiplied as pairs of bf16 here."""
    return dtype == torch.bfloat16 and has_bf16_products()


@cache
def few_dense_rows() -> int | None:
    """Return up to how many rows products of bf16 pairs are faster than float32 ones here.

    ``None`` for any number: then the bits of a row's answer are the same in any number of rows.
    Both kinds add in float32 and round once, in different orders: one output in thousands may
    differ in its last bit. The stored measurement makes the runs of a machine agree.
    """
    return None if has_tiles() else kept_limit("16 bits", _measure) or None


def has_tiles() -> bool:
    """Return whether the compiled kernel multiplies on AMX's tiles."""
    return instruction_set() == "amx"


def _prepared(plain: Tensor, *, in_pairs: bool, reuse: bool = False) -> PreparedWeight:
    rows = _panel_rows(in_pairs=in_pairs)
    multiple = rows if len(plain) % rows == 0 and not in_pairs else PANEL_ROWS
    panels, handle = to_panels(plain, rows, multiple, reuse=reuse)
    return _in_panels(panels, handle, len(plain))


def _panel_rows(*, in_pairs: bool) -> int:
    return (_ROWS_WITH_AMX if has_tiles() else _ROWS_IN_PAIRS) if in_pairs else _ROWS_IN_FLOAT


def _in_panels(panels: Tensor, handle: Weight, rows: int) -> PreparedWeight:
    return PreparedWeight(
        backend=DENSE_BACKEND,
        out_features=rows,
        in_features=panels.shape[1],
        precision=default_precision(16),
        tensors=(panels,),
        handle=handle,
    )


def _measure() -> int:
    """Return the limit, 0 for none."""
    own = _prepared(torch.zeros(_TRIED_SHAPE, dtype=torch.bfloat16), in_pairs=True)

    def timed(count: int) -> tuple[float, float]:
        x = torch.ones(count, _TRIED_SHAPE[1], dtype=torch.bfloat16)
        pairs, wide = (partial(call, x, own, None) for call in (dense_product, float_product))
        return fastest(pairs), fastest(wide)

    pairs, wide = timed(MANY_ROWS)
    return 0 if pairs <= wide else break_even_rows(timed)
