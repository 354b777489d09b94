"""Protocols of the cost models, in seconds and bytes.

A model covers one type of device and one ``ModelSpec``; ``ClusterCosts`` holds one for every device
of a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llmpq.spec.cluster import Device
from llmpq.spec.precision import Phase


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
