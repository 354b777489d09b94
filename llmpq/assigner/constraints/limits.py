"""Limits: manual decisions as constraints of an assignment problem, in groups, layers and widths.

Every device that a limit names is a group of its own, so its group determines its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """Constraints of a problem in addition to memory and quality.

    Array legend: ``L`` layers, ``B`` bitwidths, ``T`` groups.

    Attributes:
        layer_widths: ``[L, B]`` whether a layer may have a width.
        group_widths: ``[T, B]`` whether layers on a group may have a width.
        ranges: group, first and end layer: its one device holds exactly these layers.
        used: groups whose one device holds at least one layer.
    """

    layer_widths: BoolArray
    group_widths: BoolArray
    ranges: tuple[tuple[int, int, int], ...] = ()
    used: tuple[int, ...] = ()

    @property
    def layers_equal(self) -> bool:
        """Whether all layers have the same choice of widths."""
        return bool((self.layer_widths == self.layer_widths[0]).all())


def obeys(
    limits: Limits | None,
    order: Sequence[int],
    positions: Sequence[int],
    widths: Sequence[int],
) -> bool:
    """Return whether positions and width indices of all layers keep the limits, if any."""
    if limits is None:
        return True
    groups = [order[position] for position in positions]
    allowed = all(
        limits.layer_widths[layer, width] and limits.group_widths[group, width]
        for layer, (group, width) in enumerate(zip(groups, widths, strict=True))
    )
    ranges = all(
        [layer for layer, found in enumerate(groups) if found == group] == list(range(first, end))
        for group, first, end in limits.ranges
    )
    return allowed and ranges and set(limits.used) <= set(groups)
