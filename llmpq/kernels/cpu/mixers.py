"""Mixers of layers with a recurrent state, between their projections (compiled, CPU).

transformers computes them with some thirty operators of torch for each layer and step, and copies
the states of all rows. Here a few loops read and change the states of the rows in their slots:
``csrc/convolution.c``, ``csrc/delta.c``, ``csrc/mamba.c``, ``csrc/scan.c``.

Shapes: N tokens, R rows, C channels of the convolution, K its width, S slots; g key heads of d
features and h value heads of e features (Gated DeltaNet); G groups, h heads of p features, states
of n features (Mamba 2; of each channel in Mamba 1).
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from llmpq.kernels.cpu.native import TYPES, library
from llmpq.kernels.cpu.step import Kind, StepProgram

MULTIPLE = 16
"""Of channels, and of the features of a state."""
MAX_WIDTH = 8
"""Longest convolution, ``MAX_KERNEL`` in ``csrc/mixer.h``."""
MAX_KEY_DIM = 256
"""Most features of a key head, as in ``csrc/delta.c``."""
HEAD_MULTIPLE = 4
"""Of the features of a head of Mamba 2, ``ROWS`` in ``csrc/mamba.c``."""


Found = TypeVar("Found", Tensor, "DeltaInputs")
"""What the projections of a mixer make of the tokens."""


class _Convolution(Structure):
    """``Convolution`` (``csrc/mixer.h``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("input", "factor", "gate", "weight", "bias", "states")),
        *((name, c_void_p) for name in ("out", "rows")),
        *((name, c_int64) for name in ("count", "channels", "kernel", "stride")),
        *((name, c_int32) for name in ("type", "out_type", "is_activated", "threads")),
    )


class _Delta(Structure):
    """``Delta`` (``csrc/delta.c``)."""

    _fields_ = (
        ("convolution", _Convolution),
        *((name, c_void_p) for name in ("gate", "beta", "decay", "rate", "bias", "norm")),
        *((name, c_void_p) for name in ("states", "factors", "raw", "out")),
        *((name, c_int64) for name in ("tokens", "key_heads", "heads", "key_dim", "value_dim")),
        ("epsilon", c_float),
        *((name, c_int32) for name in ("type", "threads")),
    )


class _Mamba(Structure):
    """``Mamba`` (``csrc/mamba.c``)."""

    _fields_ = (
        ("convolution", _Convolution),
        *((name, c_void_p) for name in ("gate", "dt", "rate", "bias", "skip", "norm")),
        *((name, c_void_p) for name in ("states", "factors", "raw", "out")),
        *((name, c_int64) for name in ("tokens", "groups", "heads", "head_dim", "state_dim")),
        ("normed", c_int64),
        *((name, c_float) for name in ("epsilon", "least", "most")),
        *((name, c_int32) for name in ("type", "threads")),
    )


class _Scan(Structure):
    """``Scan`` (``csrc/scan.c``)."""

    _fields_ = (
        *((name, c_void_p) for name in ("values", "gate", "steps", "in", "read", "rate", "skip")),
        *((name, c_void_p) for name in ("states", "out", "rows")),
        *((name, c_int64) for name in ("count", "channels", "state_dim", "stride")),
        *((name, c_int32) for name in ("type", "threads")),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scratch:
    """What a mixer writes.

    Attributes:
        convolved: float32 ``[N, C]``.
        factors: of each head, float32 ``[N, ...]``.
        raw: output before the norm, float32 ``[N, values]``.
        out: output, ``[N, values]``.
    """

    convolved: Tensor
    factors: Tensor
    raw: Tensor
    out: Tensor

    @classmethod
    def of(cls, program: StepProgram, channels: int, factors: int, values: int) -> _Scratch:
        """Return the buffers of a step."""
        return cls(
            convolved=program.buffer("convolved", channels, torch.float32),
            factors=program.buffer("factors", factors, torch.float32),
            raw=program.buffer("raw", values, torch.float32),
            out=program.buffer("mixed", values),
        )


class ShortConvolution:
    """A causal convolution of each channel by itself.

    Args:
        weight: ``[C, 1, K]``.
        bias: ``[C]``, if any.
        is_activated: by SiLU.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, is_activated: bool) -> None:
        self._weight = weight.detach().float()[:, 0].t().contiguous()
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._is_activated = is_activated

    @property
    def channels(self) -> int:
        """C."""
        return self._weight.shape[1]

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel computes it, for hidden states of a dtype."""
        width, channels = self._weight.shape
        return (
            dtype in TYPES
            and self._weight.device.type == "cpu"
            and channels % MULTIPLE == 0
            and width <= MAX_WIDTH
            and library() is not None
        )

    def __call__(self, joined: Tensor, rows: Tensor, states: Tensor) -> Tensor:
        """Return ``[N, C]``: the gated convolution of LFM2; the states of the rows change.

        Args:
            joined: factor, gate and input of the tokens side by side, ``[N, 3 C]``.
            rows: as :attr:`llmpq.models.PackedBatch.sequence_rows`.
            states: float32 ``[S, C, K]``.
        """
        kernels = library()
        assert kernels is not None  # fits
        joined = joined.contiguous()
        out = torch.empty(len(joined), self.channels, dtype=joined.dtype)
        factor, gate, values = joined.chunk(3, dim=-1)
        call = self.call(values, rows, states, out, factor, gate)
        kernels.kernels_convolution(byref(call))
        return out

    def append(self, program: StepProgram, joined: Tensor, states: Tensor) -> Tensor:
        """Append the gated convolution to a step; return the buffer of its output ``[R, C]``.

        Args:
            program: the step, whose rows have their states in slots.
            joined: buffer, as in :meth:`__call__`.
            states: as there; they live as long as the program.
        """
        out = program.buffer("mixed", self.channels)
        factor, gate, values = joined.chunk(3, dim=-1)
        program.append(Kind.CONVOLVE, self.call(values, None, states, out, factor, gate))
        program.hold(self, states)
        return out

    def call(
        self,
        values: Tensor,
        rows: Tensor | None,
        states: Tensor,
        out: Tensor,
        factor: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> _Convolution:
        """Return the call for tokens; all tensors must live until its end.

        Args:
            values: ``[N, C]``, numbers of a token side by side; factor and gate are parts of the
                same tensor.
            rows: as :meth:`__call__`; ``None`` for those of a step.
            states: as there.
            out: ``[N, C]``.
            factor: what multiplies the inputs, if anything.
            gate: what multiplies the outputs, if anything.
        """
        assert values.stride(1) == 1
        assert all(one is None or one.is_contiguous() for one in (rows, states, out))
        return _Convolution(
            values.data_ptr(),
            None if factor is None else factor.data_ptr(),
            None if gate is None else gate.data_ptr(),
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            states.data_ptr(),
            out.data_ptr(),
            None if rows is None else rows.data_ptr(),
            0 if rows is None else len(rows),
            self.channels,
            self._weight.shape[0],
            values.stride(0),
            TYPES[values.dtype],
            TYPES[out.dtype],
            self._is_activated,
            torch.get_num_threads(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaInputs:
    """What the projections of Gated DeltaNet make of the tokens of a step, of one dtype.

    Attributes:
        mixed: queries, keys and values, ``[N, C]``.
        gate: ``[N, h e]``.
        beta, decay: ``[N, h]``.
    """

    mixed: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor

    def __len__(self) -> int:
        return len(self.mixed)

    @property
    def dtype(self) -> torch.dtype:
        """That of all."""
        return self.mixed.dtype

    def contiguous(self) -> DeltaInputs:
        """Return the same without gaps."""
        parts = (self.mixed, self.gate, self.beta, self.decay)
        mixed, gate, beta, decay = (one.contiguous() for one in parts)
        return DeltaInputs(mixed=mixed, gate=gate, beta=beta, decay=decay)


class _Recurrence(Generic[Found]):
    """What Gated DeltaNet and Mamba 2 have in common: convolution, recurrence and gated norm.

    Args:
        convolution: of what the recurrence reads.
        log_rate: ``A_log``, ``[h]``.
        dt_bias: ``[h]``.
        norm: weights of the gated norm.
        epsilon: of the norm.
        values: features of the output.
    """

    _kernel: str
    _kinds: tuple[Kind, ...]
    _factors: int

    def __init__(
        self,
        convolution: ShortConvolution,
        log_rate: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        epsilon: float,
        values: int,
    ) -> None:
        self._convolution, self._values = convolution, values
        self._rate = -log_rate.detach().float().exp()
        self._bias = dt_bias.detach().float().contiguous()
        self._norm = norm.detach().float().contiguous()
        self._epsilon = epsilon

    def __call__(self, found: Found, rows: Tensor, conv_states: Tensor, states: Tensor) -> Tensor:
        """Return what the last projection gets, ``[N, values]``; the states of the rows change.

        Args:
            found: what the projections make of the tokens.
            rows: as :attr:`llmpq.models.PackedBatch.sequence_rows`.
            conv_states: float32 ``[S, C, K]``.
            states: float32 ``[S, h, ...]``.
        """
        kernels = library()
        assert kernels is not None  # fits
        found, count = found.contiguous(), len(found)
        scratch = _Scratch(
            convolved=torch.empty(count, self._convolution.channels),
            factors=torch.empty(count, len(self._rate) * self._factors),
            raw=torch.empty(count, self._values),
            out=torch.empty(count, self._values, dtype=found.dtype),
        )
        call = self._call(found, rows, conv_states, states, scratch)
        getattr(kernels, self._kernel)(byref(call))
        return scratch.out

    def append(
        self, program: StepProgram, found: Found, conv_states: Tensor, states: Tensor
    ) -> Tensor:
        """Append the layer to a step; return the buffer of its output ``[R, values]``.

        Args:
            program: the step, whose rows have their states in slots.
            found: buffers, as in :meth:`__call__`.
            conv_states: as there; they live as long as the program.
            states: likewise.
        """
        factors = len(self._rate) * self._factors
        scratch = _Scratch.of(program, self._convolution.channels, factors, self._values)
        call = self._call(found, None, conv_states, states, scratch)
        program.append(Kind.CONVOLVE, call.convolution)
        for kind in self._kinds:
            program.append(kind, call)
        program.hold(self, conv_states, states)
        return scratch.out

    def _call(
        self,
        found: Found,
        rows: Tensor | None,
        conv_states: Tensor,
        states: Tensor,
        scratch: _Scratch,
    ) -> _Delta | _Mamba:
        raise NotImplementedError


class GatedDelta(_Recurrence[DeltaInputs]):
    """The parameters of Gated DeltaNet that are no projections, in float32.

    Its states are ``[S, h, d, e]``, its output ``[N, h e]``.

    Args:
        convolution: of queries, keys and values.
        log_rate: ``A_log``, ``[h]``.
        dt_bias: ``[h]``.
        norm: weights of the gated norm, ``[e]``.
        epsilon: of the norm.
        key_heads: g.
        key_dim: d.
    """

    _kernel = "kernels_delta"
    _kinds = (Kind.DELTA_FACTORS, Kind.DELTA, Kind.DELTA_GATE)
    _factors = 3

    def __init__(
        self,
        convolution: ShortConvolution,
        log_rate: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        epsilon: float,
        *,
        key_heads: int,
        key_dim: int,
    ) -> None:
        super().__init__(convolution, log_rate, dt_bias, norm, epsilon, len(log_rate) * len(norm))
        self._key_heads, self._key_dim = key_heads, key_dim

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel computes this layer, for hidden states of a dtype."""
        heads, value_dim = len(self._rate), len(self._norm)
        channels = 2 * self._key_heads * self._key_dim + heads * value_dim
        return (
            self._convolution.fits(dtype)
            and value_dim % MULTIPLE == 0
            and self._key_dim % MULTIPLE == 0
            and self._key_dim <= MAX_KEY_DIM
            and channels == self._convolution.channels
            and heads % self._key_heads == 0
        )

    def _call(
        self,
        found: DeltaInputs,
        rows: Tensor | None,
        conv_states: Tensor,
        states: Tensor,
        scratch: _Scratch,
    ) -> _Delta:
        tensors = (
            found.gate, found.beta, found.decay, self._rate, self._bias, self._norm, states,
            scratch.factors, scratch.raw, scratch.out,
        )  # fmt: skip
        assert all(one.is_contiguous() for one in tensors)
        return _Delta(
            self._convolution.call(found.mixed, rows, conv_states, scratch.convolved),
            *(one.data_ptr() for one in tensors),
            len(found.mixed),
            self._key_heads,
            len(self._rate),
            self._key_dim,
            len(self._norm),
            self._epsilon,
            TYPES[found.mixed.dtype],
            torch.get_num_threads(),
        )


class Mamba2(_Recurrence[Tensor]):
    """The parameters of Mamba 2 that are no projections, in float32.

    It reads gate, convolved channels and time steps of the tokens side by side,
    ``[N, h p + C + h]``. Its states are ``[S, h, p, n]``, its output ``[N, h p]``.

    Args:
        convolution: of inputs, B and C.
        log_rate: ``A_log``, ``[h]``.
        dt_bias: ``[h]``.
        skip: ``D``, ``[h]``.
        norm: weights of the gated norm, ``[h p]``.
        epsilon: of the norm.
        normed: features that are normed together.
        groups: G.
        state_dim: n.
        limits: of the time step.
    """

    _kernel = "kernels_mamba"
    _kinds = (Kind.MAMBA_FACTORS, Kind.MAMBA, Kind.MAMBA_NORM)
    _factors = 2

    def __init__(
        self,
        convolution: ShortConvolution,
        log_rate: Tensor,
        dt_bias: Tensor,
        skip: Tensor,
        norm: Tensor,
        epsilon: float,
        *,
        normed: int,
        groups: int,
        state_dim: int,
        limits: tuple[float, float],
    ) -> None:
        super().__init__(convolution, log_rate, dt_bias, norm, epsilon, len(norm))
        self._skip = skip.detach().float().contiguous()
        self._limits = limits
        self._normed, self._groups, self._state_dim = normed, groups, state_dim

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel computes this layer, for hidden states of a dtype."""
        heads, width = len(self._rate), len(self._norm)
        return (
            self._convolution.fits(dtype)
            and self._state_dim % MULTIPLE == 0
            and width % (HEAD_MULTIPLE * heads) == 0
            and self._normed % MULTIPLE == 0
            and width % self._normed == 0
            and heads % self._groups == 0
            and self._convolution.channels == width + 2 * self._groups * self._state_dim
        )

    def _call(
        self,
        found: Tensor,
        rows: Tensor | None,
        conv_states: Tensor,
        states: Tensor,
        scratch: _Scratch,
    ) -> _Mamba:
        heads, width = len(self._rate), len(self._norm)
        channels = self._convolution.channels
        gate, mixed, dt = torch.split(found, [width, channels, heads], dim=-1)
        own = (
            self._rate, self._bias, self._skip, self._norm, states, scratch.factors, scratch.raw,
            scratch.out,
        )  # fmt: skip
        assert all(one.is_contiguous() for one in own)
        return _Mamba(
            self._convolution.call(mixed, rows, conv_states, scratch.convolved),
            *(one.data_ptr() for one in (gate, dt, *own)),
            len(found),
            self._groups,
            heads,
            width // heads,
            self._state_dim,
            self._normed,
            self._epsilon,
            *self._limits,
            TYPES[found.dtype],
            torch.get_num_threads(),
        )


class SelectiveScan:
    """The parameters of Mamba 1 behind its convolution, in float32.

    Args:
        convolution: of the inputs.
        log_rate: ``A_log``, ``[C, n]``.
        skip: ``D``, ``[C]``.
    """

    def __init__(self, convolution: ShortConvolution, log_rate: Tensor, skip: Tensor) -> None:
        self._convolution = convolution
        self._rate = -log_rate.detach().float().exp().contiguous()
        self._skip = skip.detach().float().contiguous()

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernels compute this layer, for hidden states of a dtype."""
        return self._convolution.fits(dtype) and self._rate.shape[1] % MULTIPLE == 0

    def convolve(self, joined: Tensor, rows: Tensor, conv_states: Tensor) -> Tensor:
        """Return the convolved inputs ``[N, C]``; the states of the rows change.

        Args:
            joined: inputs and gates of the tokens side by side, ``[N, 2 C]``.
            rows: as :attr:`llmpq.models.PackedBatch.sequence_rows`.
            conv_states: float32 ``[S, C, K]``.
        """
        kernels = library()
        assert kernels is not None  # fits
        values = joined[:, : self._convolution.channels]
        out = torch.empty(values.shape, dtype=joined.dtype)
        kernels.kernels_convolution(byref(self._convolution.call(values, rows, conv_states, out)))
        return out

    def __call__(
        self,
        joined: Tensor,
        convolved: Tensor,
        selected: tuple[Tensor, Tensor, Tensor],
        rows: Tensor,
        states: Tensor,
    ) -> Tensor:
        """Return ``[N, C]``, what the last projection gets; the states of the rows change.

        Args:
            joined: as in :meth:`convolve`.
            convolved: its result.
            selected: float32 time steps ``[N, C]``, B and C ``[N, n]``.
            rows: as there.
            states: float32 ``[S, C, n]``.
        """
        kernels = library()
        assert kernels is not None  # fits
        channels, state_dim = self._rate.shape
        steps, entered, read = (one.contiguous() for one in selected)
        out = torch.empty_like(convolved)
        assert convolved.is_contiguous()
        assert joined.stride(1) == 1
        assert rows.is_contiguous()
        assert states.is_contiguous()
        tensors = (
            convolved, joined[:, channels:], steps, entered, read, self._rate, self._skip, states,
            out, rows,
        )  # fmt: skip
        call = _Scan(
            *(one.data_ptr() for one in tensors),
            len(rows),
            channels,
            state_dim,
            joined.stride(0),
            TYPES[joined.dtype],
            torch.get_num_threads(),
        )
        kernels.kernels_scan(byref(call))
        return out
