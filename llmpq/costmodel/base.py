"""Protocols of the cost models, in seconds and bytes.

A model covers one type of device and one ``ModelSpec``; ``ClusterCosts`` holds one for every device
of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llmpq.spec.cluster import Device
from llmpq.spec.precision import Phase
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS

PhaseSeconds = Callable[[int, float], float]
"""Returns the seconds of a micro-batch from its sequences and their tokens."""
PARTS = 4
"""Prompts of the second shape that separates attention from the rest."""


def prompt_s(prefill_s: PhaseSeconds, tokens: float, batch: int = 1) -> tuple[float, float]:
    """Return the seconds of prompts: without their attention, and ``A(s)`` of their attention.

    Attention of ``v`` prompts of ``s`` tokens grows with ``v s^2`` and everything else with
    ``v s``, so two shapes of equally many tokens separate them:
    ``4/3 (P(v, s) - P(4 v, s/4))``.

    Args:
        prefill_s: seconds of a prefill micro-batch, computed in one pass.
        tokens: length of a prompt.
        batch: prompts.
    """
    whole_s = prefill_s(batch, tokens)
    attention_s = (whole_s - prefill_s(PARTS * batch, tokens / PARTS)) * PARTS / (PARTS - 1)
    attention_s = min(max(0.0, attention_s), whole_s)
    return whole_s - attention_s, attention_s


def chunked_s(prefill_s: PhaseSeconds, batch: int, tokens: float) -> float:
    """Return the seconds of prompts that are computed ``PROMPT_CHUNK_TOKENS`` at a time.

    The attention of the chunks adds up to that of the whole prompt; all else is repeated.
    """
    if tokens <= PROMPT_CHUNK_TOKENS:
        return prefill_s(batch, tokens)
    whole, left = divmod(tokens, PROMPT_CHUNK_TOKENS)
    total_s = prompt_s(prefill_s, tokens, batch)[1]
    total_s += whole * prompt_s(prefill_s, PROMPT_CHUNK_TOKENS, batch)[0]
    return total_s + (prompt_s(prefill_s, left, batch)[0] if left else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The seconds of one layer and their relative standard deviation.

    ``is_extrapolated`` tells that the shape is outside what was measured.
    """

    seconds: float
    is_extrapolated: bool
    relative_deviation: float


class LatencyModel(Protocol):
    """Seconds of compute on one device."""

    @property
    def source(self) -> str:
        """Where the seconds come from, for messages: ``roofline`` or ``table <file>``."""
        ...

    def layer_s(self, phase: Phase, bits: int, batch: int, tokens: float, kind: int) -> float:
        """Return the seconds of ONE decoder layer of the model's ``layer_types[kind]``.

        ``tokens`` is the prompt length ``s`` in prefill, the context length ``s + t`` in decode.

        Raises:
            ProfileMissError: a measured table holds nothing for this phase and bitwidth.
        """
        ...

    def layer_estimate(
        self, phase: Phase, bits: int, batch: int, tokens: float, kind: int
    ) -> Estimate:
        """Return the seconds of ``layer_s`` with their uncertainty; raises as it does."""
        ...

    def master_s(self, phase: Phase, batch: int, tokens: float, head_bits: int = 16) -> float:
        """Return the seconds of the master's own work on one micro-batch.

        Embedding of every token, then final norm, head and sampling of one position a sequence.
        ``head_bits`` are those of the head's matrix.
        """
        ...


class CommModel(Protocol):
    """Seconds of communication between two devices of a cluster."""

    def send_s(self, source: Device, target: Device, size_bytes: int) -> float:
        """Return the seconds until ``size_bytes`` from ``source`` have arrived at ``target``."""
        ...

    def end_s(self, source: Device, target: Device) -> float | None:
        """Return the processor time of an empty message at either end, ``None`` if unknown."""
        ...
