"""Mixers of layers with a recurrent state, between their projections (Triton).

transformers launches dozens of kernels for each layer and step, and takes the tokens of a prompt
one after the other in Python where its optional packages are missing. Here a mixer is at most three
launches for all rows of a step, prompts included (``triton_recurrence``).

Shapes: as in ``llmpq.kernels.cpu.mixers``, whose parameters these are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.cpu.mixers import DeltaInputs, GatedDelta, Mamba2, ShortConvolution
from llmpq.kernels.gpu.triton_int import current_device_of, launch_failure

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BLOCK_CHANNELS = 64
"""Channels of a program of the convolution."""
STATE_NUMBERS = 4096
"""Most numbers of a state in the registers of a program."""
MAX_FEATURES = 256
"""Most features of a key, or of a state of Mamba 2."""
MAX_NORMED = 1 << 14
"""Most features that are normed together: they are in the registers of a program."""


def kernels() -> Any:
    """Return the module of kernels; importing it imports triton."""
    from llmpq.kernels.gpu import triton_recurrence

    return triton_recurrence


def _power(count: int) -> int:
    """Return the next power of two: the sizes of Triton's blocks."""
    return 1 << (count - 1).bit_length()


class TritonConvolution(ShortConvolution):
    """A causal convolution of each channel by itself; see :class:`ShortConvolution`."""

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel computes it, for hidden states of a dtype."""
        return dtype in DTYPES and launch_failure(self._weight.device, dtype) is None

    def __call__(self, joined: Tensor, rows: Tensor, states: Tensor) -> Tensor:
        """Return ``[N, C]``, as :meth:`ShortConvolution.__call__`."""
        joined = joined.contiguous()
        out = torch.empty(len(joined), self.channels, dtype=joined.dtype, device=joined.device)
        factor, gate, values = joined.chunk(3, dim=-1)
        self.launch(values, rows.to(joined.device), states, out, factor, gate)
        return out

    def launch(
        self,
        values: Tensor,
        rows: Tensor,
        states: Tensor,
        out: Tensor,
        factor: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> None:
        """Write ``out`` ``[N, C]``; arguments as those of :meth:`ShortConvolution.call`."""
        assert values.stride(1) == 1
        grid = (len(rows), -(-self.channels // BLOCK_CHANNELS))
        with current_device_of(values):
            kernels().convolve_kernel[grid](
                values, factor, gate, self._weight, self._bias, states, rows, out,
                values.stride(0), self.channels, KERNEL=self._weight.shape[0],
                IS_ACTIVATED=self._is_activated, BLOCK_C=BLOCK_CHANNELS,
            )  # fmt: skip


class TritonGatedDelta(GatedDelta):
    """Gated DeltaNet without its projections; see :class:`GatedDelta`."""

    _convolution: TritonConvolution

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel computes this layer, for hidden states of a dtype."""
        return self._convolution.fits(dtype) and self._key_dim <= MAX_FEATURES

    def __call__(
        self, found: DeltaInputs, rows: Tensor, conv_states: Tensor, states: Tensor
    ) -> Tensor:
        """Return ``[N, h e]``, as :meth:`GatedDelta.__call__`."""
        mixed, device = found.mixed.contiguous(), found.mixed.device
        heads, value_dim = len(self._rate), len(self._norm)
        rows, (count, channels) = rows.to(device), mixed.shape
        convolved = torch.empty(count, channels, device=device)
        self._convolution.launch(mixed, rows, conv_states, convolved)
        raw = torch.empty(count, heads * value_dim, device=device)
        block_d = _power(self._key_dim)
        block_e = min(_power(value_dim), max(16, STATE_NUMBERS // block_d))
        out = torch.empty(count, heads * value_dim, dtype=mixed.dtype, device=device)
        share, grid = heads // self._key_heads, (len(rows), heads, -(-value_dim // block_e))
        with current_device_of(mixed):
            kernels().delta_kernel[grid](
                convolved, found.beta.contiguous(), found.decay.contiguous(), self._rate,
                self._bias, states, rows, raw, channels, heads, share, self._key_dim, value_dim,
                self._key_dim**-0.5, BLOCK_D=block_d, BLOCK_E=block_e,
            )  # fmt: skip
            kernels().delta_gate_kernel[(count * heads,)](
                raw, found.gate.contiguous(), self._norm, out, value_dim, self._epsilon,
                BLOCK_E=_power(value_dim),
            )  # fmt: skip
        return out


class TritonMamba2(Mamba2):
    """Mamba 2 without its projections; see :class:`Mamba2`."""

    _convolution: TritonConvolution

    def fits(self, dtype: torch.dtype) -> bool:
        """Return whether the kernel computes this layer, for hidden states of a dtype."""
        fits = self._state_dim <= MAX_FEATURES and self._normed <= MAX_NORMED
        return fits and self._convolution.fits(dtype)

    def __call__(self, joined: Tensor, rows: Tensor, conv_states: Tensor, states: Tensor) -> Tensor:
        """Return ``[N, h p]``, as :meth:`Mamba2.__call__`."""
        joined, device = joined.contiguous(), joined.device
        rows, count, heads = rows.to(device), len(joined), len(self._rate)
        width, channels = len(self._norm), self._convolution.channels
        gate, mixed, dt = torch.split(joined, [width, channels, heads], dim=-1)
        convolved = torch.empty(count, channels, device=device)
        self._convolution.launch(mixed, rows, conv_states, convolved)
        raw = torch.empty(count, width, device=device)
        head_dim, stride = width // heads, joined.stride(0)
        block_n = _power(self._state_dim)
        block_p = min(_power(head_dim), max(16, STATE_NUMBERS // block_n))
        out = torch.empty(count, width, dtype=joined.dtype, device=device)
        share, grid = heads // self._groups, (len(rows), heads, -(-head_dim // block_p))
        with current_device_of(joined):
            kernels().mamba_kernel[grid](
                convolved, dt, self._rate, self._bias, self._skip, states, rows, raw,
                channels, stride, heads, share, head_dim, self._state_dim, *self._limits,
                BLOCK_P=block_p, BLOCK_N=block_n,
            )  # fmt: skip
            kernels().mamba_norm_kernel[(count, width // self._normed)](
                raw, gate, self._norm, out, stride, width, self._normed, self._epsilon,
                BLOCK=_power(self._normed),
            )  # fmt: skip
        return out
