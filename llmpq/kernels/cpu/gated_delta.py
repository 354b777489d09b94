"""Gated DeltaNet between its projections (compiled, CPU): ``csrc/delta.c``.

transformers computes it with some thirty operators of torch for each layer and step, and copies the
states of all rows. Here four loops read and change the states of the rows in their slots.

Shapes: N tokens, C channels of the convolution (queries, keys, values), K its width, S slots, g key
heads of d features, h value heads of e features.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.kernels.cpu.native import TYPES, library

MULTIPLE = 16
"""Of the features of a head."""
MAX_WIDTH = 8
"""Longest convolution, ``MAX_KERNEL`` in ``csrc/delta.c``."""
MAX_KEY_DIM = 256
"""Most features of a key head, as there."""


class _Call(Structure):
    """One call (``csrc/delta.c``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("mixed", "gate", "beta", "decay", "weight", "rate")),
        *((name, c_void_p) for name in ("bias", "norm", "conv_states", "states", "convolved")),
        *((name, c_void_p) for name in ("factors", "raw", "out", "rows")),
        *((name, c_int64) for name in ("count", "tokens", "key_heads", "heads", "key_dim")),
        *((name, c_int64) for name in ("value_dim", "kernel")),
        ("epsilon", c_float),
        *((name, c_int32) for name in ("type", "threads")),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRow:
    """Tokens of a sequence that follow one another in a step.

    Attributes:
        first: place of the first one in the step.
        tokens: how many there are.
        slot: of the states of the sequence.
        is_new: whether it begins, so that its states count as zeros.
    """

    first: int
    tokens: int
    slot: int
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaInputs:
    """What the projections of a layer make of the tokens of a step, of one dtype.

    Attributes:
        mixed: queries, keys and values, ``[N, C]``.
        gate: ``[N, h e]``.
        beta, decay: ``[N, h]``.
    """

    mixed: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor


class GatedDelta:
    """The parameters of a layer that are no projections, in float32.

    Args:
        conv: weights of the convolution, ``[C, 1, K]``.
        log_rate: ``A_log``, ``[h]``.
        dt_bias: ``[h]``.
        norm: weights of the gated norm, ``[e]``.
        epsilon: of the norm.
        key_heads: g.
        key_dim: d.
    """

    def __init__(
        self,
        conv: Tensor,
        log_rate: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        epsilon: float,
        *,
        key_heads: int,
        key_dim: int,
    ) -> None:
        self._weight = conv.detach().float()[:, 0].t().contiguous()
        self._rate = -log_rate.detach().float().exp()
        self._bias = dt_bias.detach().float().contiguous()
        self._norm = norm.detach().float().contiguous()
        self._epsilon = epsilon
        self._key_heads, self._key_dim = key_heads, key_dim

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel computes this layer, for hidden states of a dtype."""
        width, channels = self._weight.shape
        heads, value_dim = len(self._rate), len(self._norm)
        return (
            dtype in TYPES
            and self._weight.device.type == "cpu"
            and value_dim % MULTIPLE == 0
            and self._key_dim % MULTIPLE == 0
            and self._key_dim <= MAX_KEY_DIM
            and channels == 2 * self._key_heads * self._key_dim + heads * value_dim
            and heads % self._key_heads == 0
            and width <= MAX_WIDTH
            and library() is not None
        )

    def __call__(
        self, found: DeltaInputs, rows: Sequence[DeltaRow], conv_states: Tensor, states: Tensor
    ) -> Tensor:
        """Return ``[N, h e]``, what the last projection gets; the states of the rows change.

        Args:
            found: of the tokens.
            rows: no two of one slot; together all tokens.
            conv_states: float32 ``[S, C, K]``.
            states: float32 ``[S, h, d, e]``.
        """
        kernels = library()
        assert kernels is not None  # fits
        (count, channels), dtype = found.mixed.shape, found.mixed.dtype
        heads, value_dim = len(self._rate), len(self._norm)
        parts = [one.contiguous() for one in (found.mixed, found.gate, found.beta, found.decay)]
        table = torch.tensor([[one.first, one.tokens, one.slot, one.is_new] for one in rows])
        convolved = torch.empty(count, channels)
        factors = torch.empty(count, heads, 3)
        raw = torch.empty(count, heads * value_dim)
        out = torch.empty(count, heads * value_dim, dtype=dtype)
        tensors = (
            *parts, self._weight, self._rate, self._bias, self._norm, conv_states, states,
            convolved, factors, raw, out, table,
        )  # fmt: skip
        assert all(one.is_contiguous() for one in tensors)
        call = _Call(
            *(one.data_ptr() for one in tensors),
            len(rows),
            count,
            self._key_heads,
            heads,
            self._key_dim,
            value_dim,
            self._weight.shape[0],
            self._epsilon,
            TYPES[dtype],
            torch.get_num_threads(),
        )
        kernels.kernels_delta(byref(call))
        return out
