"""Operators of a decoder layer between its products, one kernel each (Triton).

The kernels are in ``triton_rows``, imported when first needed. A call depends on its shapes only,
so a CUDA graph can contain it. Products pass their parts on: the kernel that reads them adds them
up, so a product split among programs needs no kernel of its own to do so.

Shapes: N tokens, C columns, H heads, h KV heads, d features of a key, e of a value, P parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.base import ProductParts
from llmpq.kernels.cpu.paged_attention import PagedHeads
from llmpq.kernels.cpu.step import ACTIVATIONS, RowNorm, UnsupportedStepError
from llmpq.kernels.gpu.triton_int import current_device_of

_MOST_COLUMNS = 1 << 14
"""Most numbers of a norm: a program holds them in its registers."""
_MOST_FEATURES = 512
_GATED = 1024
_NO_NORM = RowNorm(weight=None, bias=None, epsilon=0.0, centers=False, rounds=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """How queries and keys are normed and rotated.

    Attributes:
        query_norm: of each head of a query; ``None`` for none.
        key_norm: likewise.
        is_late: whether they are normed after the rotation.
        cos: ``[N, features]`` of all that are rotated, or of half of them, each with the one half
            of them away; ``None`` for no rotation.
        sin: likewise.
        turned: features that are rotated.
    """

    query_norm: RowNorm | None
    key_norm: RowNorm | None
    is_late: bool
    cos: Tensor | None
    sin: Tensor | None
    turned: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewTokens:
    """Where the keys and values of the tokens of a step are stored.

    Attributes:
        heads: blocks of the layer.
        block: of each token, int64 ``[N]``.
        offset: of each token in its block, int64 ``[N]``.
    """

    heads: PagedHeads
    block: Tensor
    offset: Tensor


def check_norm(norm: RowNorm, columns: int, *, of_heads: bool) -> None:
    """Raise an error for a norm that the kernels do not have.

    Args:
        norm: of rows, or of each head.
        columns: numbers of a row or head.
        of_heads: whether it is of heads.

    Raises:
        UnsupportedStepError: says which.
    """
    shapes = {v.shape for v in (norm.weight, norm.bias) if v is not None}
    most = _MOST_FEATURES if of_heads else _MOST_COLUMNS
    is_simple = norm.weight is not None and not (norm.centers or norm.bias is not None)
    if columns > most or not shapes <= {(columns,)} or (of_heads and not is_simple):
        raise UnsupportedStepError(f"a norm of {columns} numbers")


def add_norm(
    hidden: Tensor,
    made: ProductParts | None,
    *,
    inner: RowNorm | None = None,
    factor: float = 1.0,
    norm: RowNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``hidden + factor * inner(made)``, and the norm of that.

    Args:
        hidden: ``[N, C]``, contiguous.
        made: ``[P, N, C]``; ``None`` to norm ``hidden`` itself.
        inner: norm of what was made; ``None`` for none.
        factor: of what is added.
        norm: of the sum; ``None`` returns the sum twice.
    """
    if made is None and norm is None:
        return hidden, hidden
    columns = hidden.shape[1]
    total = hidden if made is None else torch.empty_like(hidden)
    out = None if norm is None else torch.empty_like(hidden)
    parts, part, row = (0, 0, 0) if made is None else (len(made.values), *made.values.stride()[:2])
    block = _power(columns)
    first, last = inner or _NO_NORM, norm or _NO_NORM
    with current_device_of(hidden):
        kernels().add_norm_kernel[(len(hidden),)](
            hidden, *_pointers(made), first.weight, first.bias, last.weight, last.bias,
            total, out, parts, part, row, factor, first.epsilon, last.epsilon,
            C=columns, IS_SCALED=factor != 1, HAS_INNER=inner is not None,
            INNER_CENTERS=first.centers, INNER_ROUNDS=first.rounds,
            CENTERS=last.centers, ROUNDS=last.rounds, BLOCK=block,
            num_warps=min(16, max(4, block // 512)),
        )  # fmt: skip
    return total, total if out is None else out


def gate(
    gate: ProductParts, up: ProductParts | None, activation: str, dtype: torch.dtype
) -> Tensor:
    """Return ``activation(gate) * up``: ``[N, C]``.

    Args:
        gate: ``[P, N, C]``.
        up: likewise; ``None`` for ones.
        activation: one of ``ACTIVATIONS``.
        dtype: of the result.
    """
    _, rows, columns = gate.values.shape
    out = torch.empty((rows, columns), dtype=dtype, device=gate.values.device)
    strides = (0, 0, 0) if up is None else (len(up.values), *up.values.stride()[:2])
    with current_device_of(out):
        kernels().gate_kernel[(rows, -(-columns // _GATED))](
            *_pointers(gate), *_pointers(up), out,
            columns, len(gate.values), *gate.values.stride()[:2], *strides,
            ACTIVATION=ACTIVATIONS.index(activation), BLOCK=_GATED,
        )  # fmt: skip
    return out


def rotate_store(
    parts: tuple[ProductParts, ProductParts, ProductParts],
    rotation: Rotation,
    tokens: NewTokens | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate queries and keys, and store keys and values in their blocks.

    Args:
        parts: queries ``[P, N, H, d]``, keys ``[P, N, h, d]`` and values ``[P, N, h, e]``.
        rotation: of queries and keys.
        tokens: where they are stored; ``None`` for nowhere.
        dtype: of the results.

    Returns:
        Queries ``[1, H, N, d]``, keys ``[1, h, N, d]`` and values ``[1, h, N, e]``.
    """
    query, key, value = parts
    _, count, heads, dim = query.values.shape
    kv_heads, value_dim = key.values.shape[2], value.values.shape[3]
    device = query.values.device
    made = [
        torch.empty((count, number, size), dtype=dtype, device=device)
        for number, size in ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    ]
    first, second = rotation.query_norm or _NO_NORM, rotation.key_norm or _NO_NORM
    blocks = None if tokens is None else tokens.heads
    with current_device_of(made[0]):
        kernels().rotate_store_kernel[(count, heads + 2 * kv_heads)](
            *(part.values for part in parts), *(part.bias for part in parts),
            first.weight, second.weight, rotation.cos, rotation.sin, *made,
            *_places(tokens),
            *(size for part in parts for size in (len(part.values), *part.values.stride()[:3])),
            *_strides(blocks), first.epsilon, second.epsilon,
            HEADS=heads, KEY_HEADS=kv_heads, HEAD_DIM=dim, VALUE_DIM=value_dim,
            TURNED=rotation.turned, TABLE=1 if rotation.cos is None else rotation.cos.shape[-1],
            QUERY_ROUNDS=first.rounds, KEY_ROUNDS=second.rounds, IS_LATE=rotation.is_late,
            BLOCK_D=_power(dim), BLOCK_E=_power(value_dim),
            num_warps=max(1, _power(max(dim, value_dim)) // 128),
        )  # fmt: skip
    rotated, keys, values = (part.transpose(0, 1)[None] for part in made)
    return rotated, keys, values


def kernels() -> Any:
    """Return the module of kernels; importing it imports triton."""
    from llmpq.kernels.gpu import triton_rows

    return triton_rows


def _pointers(parts: ProductParts | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if parts is None else (parts.values, parts.bias)


def _places(tokens: NewTokens | None) -> tuple[Tensor | None, ...]:
    if tokens is None:
        return (None,) * 6
    heads = tokens.heads
    return (
        tokens.block, tokens.offset, heads.keys, heads.values, heads.key_scales, heads.value_scales
    )  # fmt: skip


def _strides(heads: PagedHeads | None) -> tuple[int, ...]:
    """Return those of blocks and heads of keys, of values and of scales."""
    if heads is None:
        return (0,) * 6
    scales = (0, 0) if heads.key_scales is None else heads.key_scales.stride()[:2]
    return (*heads.keys.stride()[:2], *heads.values.stride()[:2], *scales)


def _power(count: int) -> int:
    """Return the next power of two: the sizes of Triton's blocks."""
    return 1 << (count - 1).bit_length()
