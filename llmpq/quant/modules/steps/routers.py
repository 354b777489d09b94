"""Recognize routers by the experts and weights that they return.

Shapes: R rows, C hidden size, E experts, k experts of a row.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.kernels.cpu.step import UnsupportedStepError
from llmpq.kernels.cpu.step_experts import RowRouter, Score

_ROWS = 64
"""Random rows on which routers are tried."""
_ALIKE = 0.9
"""Least share of rows with the same weights: two logits may be equal after rounding."""
_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.0025}
"""Largest difference of logits and of the weights of a row, relative to them (norms)."""
_TRIED: tuple[tuple[Score, bool], ...] = (
    ("softmax", True),
    ("softmax", False),
    ("sigmoid", True),
    ("sigmoid", False),
    ("sparse mixer", False),
)
"""Scores, and whether the weights of a row are divided by their sum."""
_FACTOR = "routed_scaling_factor"
_JITTER = "router_jitter_noise"


def router_like(
    module: nn.Module, hidden_size: int, dtype: torch.dtype, correction: Tensor | None
) -> RowRouter:
    """Return the router that chooses what ``module`` does.

    Args:
        module: see :func:`routed`.
        hidden_size: C.
        dtype: of the rows.
        correction: float32 ``[E]`` of its scores, if any.

    Raises:
        UnsupportedStepError: there is none.
    """
    unknown = UnsupportedStepError(f"the router {type(module).__name__}")
    matrices = [p.detach() for p in module.parameters() if p.shape[1:] == (hidden_size,)]
    if len(matrices) != 1:
        raise unknown
    weight, generator = matrices[0], torch.Generator().manual_seed(0)
    bias = next((p.detach() for name, p in module.named_parameters() if name == "bias"), None)
    rows = torch.randn(_ROWS, hidden_size, generator=generator).to(dtype)
    logits, weights, chosen = routed(module, rows, correction)
    plain = RowRouter(
        weight=weight,
        bias=bias,
        correction=correction,
        count=weights.shape[1],
        score="softmax",
        factor=float(getattr(module, _FACTOR, 1.0)),
        jitter=float(getattr(module, _JITTER, 0.0)),
        rounds_logits=torch.equal(logits.float(), logits.to(dtype).float()),
        rounds_weights=weights.dtype == dtype,
    )
    logits = logits.float()
    own = functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    if (logits - own).norm() > _LIMITS[dtype] * own.norm():
        raise unknown
    expected = _spread(logits, weights, chosen)
    for score, normalizes in _TRIED:
        router = replace(plain, score=score, normalizes=normalizes)
        difference = (_spread(logits, *router.choose(logits)) - expected).norm(dim=1)
        if (difference <= _LIMITS[dtype] * expected.norm(dim=1)).float().mean() >= _ALIKE:
            return router
    raise unknown


def routed(
    module: nn.Module, rows: Tensor, correction: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits ``[R, E]``, weights and experts ``[R, k]`` of ``rows`` ``[R, C]``.

    Args:
        module: returns them in any order; gets the correction as another argument if it takes one.
        rows: of the layer.
        correction: ``[E]`` of its scores.

    Raises:
        UnsupportedStepError: it returns something else.
    """
    takes_correction = len(inspect.signature(module.forward).parameters) > 1
    found = module(rows, correction) if takes_correction else module(rows)
    if isinstance(found, tuple) and len(found) == 3:
        numbers = sorted((t for t in found if t.is_floating_point()), key=lambda t: t.shape[-1])
        chosen = [t for t in found if not t.is_floating_point()]
        if len(chosen) == 1 and numbers[0].shape == chosen[0].shape != numbers[1].shape:
            return numbers[1], numbers[0], chosen[0]
    raise UnsupportedStepError(f"the router {type(module).__name__}")


def _spread(logits: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Return the weights of all experts, ``[R, E]``."""
    return torch.zeros_like(logits).scatter(1, chosen, weights.float())
