"""Seconds of a layer whose routed experts are, in part, in the memory of its device's host.

The host's cores compute its experts beside what the device computes: a step reads every expert that
some row chose once. This is law, not measurement: the figures come from profiles of both devices.

Symbols: E experts, k of them for a row, r rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llmpq.spec.model import LayerSpec, LinearSpec


def routed_experts(layer: LayerSpec) -> tuple[LinearSpec, ...]:
    """Return the operators of the routed experts of a layer."""
    return tuple(op for op in layer.linears if op.count > 1)


def without_experts(layer: LayerSpec) -> LayerSpec:
    """Return a layer without its routed experts."""
    return replace(layer, linears=tuple(op for op in layer.linears if op.count == 1))


def distinct_experts(rows: float, chosen: int, experts: int) -> float:
    """Return the expected number of experts that some of ``rows`` rows chose.

    With even, independent routing an expert is missed by all rows with probability
    ``(1 - k/E)^r``, so ``E (1 - (1 - k/E)^r)`` are read: an upper estimate.
    """
    missed: float = (1.0 - chosen / experts) ** rows
    return experts * (1.0 - missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostExperts:
    """Experts of a layer in the host's memory, and what reads and computes them.

    Attributes:
        experts: E, of the layer.
        chosen: k, of them for a row.
        on_host: how many of them are in the host's memory.
        expert_bytes: of one expert.
        gather_bytes_per_s: at which the host's cores read and multiply experts of few rows.
        row_s: seconds of the host's cores for a row of one expert.
        hop_s: of the rows of a step, one way.
    """

    experts: int
    chosen: int
    on_host: int
    expert_bytes: float
    gather_bytes_per_s: float
    row_s: float
    hop_s: float

    def host_s(self, rows: float) -> float:
        """Return the seconds in which the host's cores compute all of its experts of a step.

        They read each touched expert once, and compute every row of it.
        """
        share = self.on_host / self.experts
        touched = share * distinct_experts(rows, self.chosen, self.experts)
        read_s = touched * self.expert_bytes / self.gather_bytes_per_s
        return max(read_s, rows * self.chosen * share * self.row_s)

    def layer_s(self, rows: float, dense_s: float, beside_s: float) -> float:
        """Return the seconds of the layer in a step.

        Args:
            rows: of the step.
            dense_s: of the device, for all before and behind the experts.
            beside_s: of the device, for resident experts.
        """
        if not self.on_host:
            return dense_s + beside_s
        return dense_s + max(beside_s, self.hop_s + self.host_s(rows) + self.hop_s)
