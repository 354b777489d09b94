"""The operators of ``llmpq.kernels.gpu.rows`` in operators of torch.

They stand in for Triton's kernels where a test is about the layers that call them: the interpreter
takes milliseconds for a program. ``tests/kernels/rows_interpreted.py`` compares the kernels with
float64.
"""

from __future__ import annotations

from typing import Any

import torch
from helpers.decode_attention import Launches
from torch import Tensor
from torch.nn import functional as F

from llmpq.dist.kv.cache import quantize_tokens
from llmpq.kernels.base import ProductParts
from llmpq.kernels.cpu.step import RowNorm
from llmpq.kernels.gpu import rows
from llmpq.kernels.gpu.rows import NewTokens, Rotation

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}


def use(monkeypatch: Any) -> None:
    """Let these stand in for the kernels and for the code that launches them."""
    for function in (add_norm, gate, rotate_store):
        monkeypatch.setattr(rows, function.__name__, function)


def use_without_kernels(monkeypatch: Any, launches: Launches) -> None:
    """Let the code that launches the kernels run, and launch nothing but note the names."""
    monkeypatch.setattr(rows, "kernels", lambda: launches)


def add_norm(
    hidden: Tensor,
    made: ProductParts | None,
    *,
    inner: RowNorm | None = None,
    factor: float = 1.0,
    norm: RowNorm | None = None,
) -> tuple[Tensor, Tensor]:
    """Add and norm rows; see ``rows.add_norm``."""
    total = hidden
    if made is not None:
        total = hidden + _normed(_summed(made, hidden.dtype), inner) * factor
    return total, _normed(total, norm)


def gate(
    gate: ProductParts, up: ProductParts | None, activation: str, dtype: torch.dtype
) -> Tensor:
    """Return ``activation(gate) * up``; see ``rows.gate``."""
    activated = _ACTIVATIONS[activation](_summed(gate, dtype))
    return activated if up is None else activated * _summed(up, dtype)


def rotate_store(
    parts: tuple[ProductParts, ProductParts, ProductParts],
    rotation: Rotation,
    tokens: NewTokens | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys and store keys and values; see ``rows.rotate_store``."""
    query, key, value = (_summed(part, dtype) for part in parts)  # [N, H, d]
    query = _turned(query, rotation.query_norm, rotation)
    key = _turned(key, rotation.key_norm, rotation)
    if tokens is not None:
        heads = tokens.heads
        for new, stored, scales in (
            (key, heads.keys, heads.key_scales),
            (value, heads.values, heads.value_scales),
        ):
            codes = new
            if scales is not None:
                codes, own = quantize_tokens(new)
                scales[tokens.block, :, tokens.offset] = own
            stored[tokens.block, :, tokens.offset] = codes
    query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
    return query, key, value


def _summed(parts: ProductParts, dtype: torch.dtype) -> Tensor:
    total = parts.values.float().sum(0)
    return (total if parts.bias is None else total + parts.bias.float()).to(dtype)


def _normed(x: Tensor, norm: RowNorm | None) -> Tensor:
    if norm is None:
        return x
    dtype, x = x.dtype, x.float()
    if norm.centers:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon)
    x = x.to(dtype).float() if norm.rounds else x
    x = x if norm.weight is None else x * norm.weight
    return (x if norm.bias is None else x + norm.bias).to(dtype)


def _turned(x: Tensor, norm: RowNorm | None, rotation: Rotation) -> Tensor:
    x = x if rotation.is_late else _normed(x, norm)
    if rotation.cos is not None and rotation.sin is not None:
        own, rest = x[..., : rotation.turned], x[..., rotation.turned :]
        first, second = own.chunk(2, dim=-1)
        cos, sin = (
            table.repeat(1, rotation.turned // table.shape[1])[:, None]
            for table in (rotation.cos, rotation.sin)
        )
        turned = own * cos + torch.cat((-second, first), dim=-1) * sin
        x = torch.cat((turned.to(x.dtype), rest), dim=-1)
    return _normed(x, norm) if rotation.is_late else x
