"""Seconds of a layer with routed experts in the memory of its device's host, and buffers there.

The host's cores compute its experts beside what the device computes: a step reads every expert that
some row chose once. This is law, not measurement: the figures come from profiles of both devices.

Symbols: E experts, k of them for a row, r rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmpq.spec.model import LayerSpec, LinearSpec
from llmpq.spec.runtime_constants import HOST_LINK_SLOTS, STEP_ROWS, STEP_SLOTS

CODE_BYTES = {16: 0.0, 8: 10.0, 4: 1.25, 3: 1.25}
"""Bytes at most that products at a bitwidth take for each number of a row: codes and outliers."""


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


def host_buffer_bytes(
    layers: Iterable[LayerSpec], bits: Iterable[int], value_bytes: int, sent_rows: int
) -> int:
    """Return the bytes of the buffers beside experts in the memory of a host.

    The threads have room for the rows of ``STEP_SLOTS`` choices (``llmpq.kernels.cpu.experts``):
    what goes into the experts, what is between their products, and what comes out. A device that is
    no CPU sends its rows through slots, each with the rows of a step, their choices and their sums.

    Args:
        layers: with routed experts on the host.
        bits: of these experts.
        value_bytes: of a number of a row.
        sent_rows: most rows of a step; 0 where the device reads the memory of its host.
    """
    shapes = set()
    slot_bytes = 0
    for layer in layers:
        *ups, down = routed_experts(layer)
        slots = down.active * min(STEP_ROWS, STEP_SLOTS // down.active)
        made = sum(op.out_features for op in ups)
        shapes.add((slots, ups[0].in_features, made, down.in_features, down.out_features))
        choices = down.active * 8
        slot_bytes = max(slot_bytes, 2 * ups[0].in_features * value_bytes + choices)
    coded = sum(CODE_BYTES[width] for width in set(bits))
    buffers = sum(
        slots * (sum(widths) * value_bytes + math.ceil((widths[0] + widths[2]) * coded))
        for (slots, *widths) in shapes
    )
    return buffers + HOST_LINK_SLOTS * sent_rows * slot_bytes


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
