"""Recognize norms and activations by the values that they return."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.kernels.cpu.step import RowNorm, UnsupportedStepError
from llmpq.quant.modules.norms import FusedNorm

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}
_LARGE = (12.0, 50.0, 1000.0)
"""Where activations with a bound differ from those without."""
_EPSILONS = ("variance_epsilon", "eps", "norm_eps")
_USUAL_EPSILON = 1e-5
_SIZES = (1.0, 0.003, 30.0)
"""Sizes of the rows that norms are tried on: small ones show epsilon."""
_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 0.00125}
"""Largest difference of a norm's output, relative to its size."""


def activation_like(module: nn.Module) -> str:
    """Return the name of the activation that computes what ``module`` does.

    Raises:
        UnsupportedStepError: there is none.
    """
    x = torch.cat((torch.linspace(-8, 8, 257), torch.tensor(_LARGE), -torch.tensor(_LARGE)))
    expected = module(x.clone())
    for name, function in _ACTIVATIONS.items():
        if torch.allclose(expected, function(x), rtol=1e-6, atol=1e-6):
            return name
    raise UnsupportedStepError(f"the activation {type(module).__name__}")


def norm_like(module: nn.Module, columns: int, dtype: torch.dtype) -> RowNorm:
    """Return the norm that computes what ``module`` does.

    Args:
        module: of rows ``[..., C]``, or of heads ``[..., H, C]`` if its weight has two dimensions.
        columns: C.
        dtype: of the rows.

    Raises:
        UnsupportedStepError: there is none.
    """
    weight = getattr(module, "weight", None)
    bias = getattr(module, "bias", None)
    factor = None if weight is None else weight.detach().float()
    offset = None if bias is None else bias.detach().float()
    if factor is not None and factor.shape[-1] != columns:
        raise UnsupportedStepError(f"a norm of {factor.shape[-1]} of {columns} numbers")
    epsilon = next(
        (float(getattr(module, name)) for name in _EPSILONS if hasattr(module, name)),
        _USUAL_EPSILON,
    )
    if isinstance(module, FusedNorm):
        return _norm(factor, None, epsilon, centers=False, rounds=True)
    if type(module) is nn.LayerNorm:
        return _norm(factor, offset, epsilon, centers=True, rounds=False)
    heads = 1 if factor is None or factor.dim() == 1 else len(factor)
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(_SIZES)[:, None, None]
    rows = (torch.randn(len(_SIZES), heads, columns, generator=generator) + 0.5) * sizes
    rows = rows.to(dtype)
    expected = module(rows[None])[0].float()
    factors = [None] if factor is None else [factor, 1 + factor, (1 + factor).to(dtype).float()]
    best, least = None, _LIMITS[dtype]
    for centers, rounds, own in itertools.product((False, True), (False, True), factors):
        norm = _norm(own, offset, epsilon, centers=centers, rounds=rounds)
        difference = (_normed(rows, norm) - expected).norm() / expected.norm()
        if difference < least:
            best, least = norm, float(difference)
    if best is None:
        raise UnsupportedStepError(f"the norm {type(module).__name__}")
    return best


def _norm(
    weight: Tensor | None, bias: Tensor | None, epsilon: float, *, centers: bool, rounds: bool
) -> RowNorm:
    return RowNorm(weight=weight, bias=bias, epsilon=epsilon, centers=centers, rounds=rounds)


def _normed(rows: Tensor, norm: RowNorm) -> Tensor:
    """Return what ``norm`` makes of rows ``[..., C]``, as float32 numbers of their dtype."""
    x = rows.float()
    if norm.centers:
        x = x - x.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.rounds:
        x = x.to(rows.dtype).float()
    if norm.weight is not None:
        x = x * norm.weight
    if norm.bias is not None:
        x = x + norm.bias
    return x.to(rows.dtype).float()
