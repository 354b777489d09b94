"""Links: seconds of a send as latency plus size over bandwidth (alpha-beta)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmpq.costmodel.tables.nnls import fit_relative
from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, Device, LinkSpec
from llmpq.spec.devices.figures import DeviceSpec
from llmpq.spec.tables import CommSample, LinkEnds

MAX_BYTES_PER_S = 1e15


@dataclass(frozen=True, slots=True, kw_only=True)
class AlphaBetaCommModel:
    """Seconds of a send from the cluster's links.

    Attributes:
        cluster: names the links; a node's own devices use the sender's figures otherwise.
        specs: figures of every group of the cluster, by ``Device.group``.
        measured: links that replace the cluster's.
        ends: processor time of messages at the ends of measured links, by the two nodes.
    """

    cluster: Cluster
    specs: tuple[DeviceSpec, ...]
    measured: tuple[LinkSpec, ...] = ()
    ends: tuple[tuple[tuple[str, str], LinkEnds], ...] = ()

    def send_s(self, source: Device, target: Device, size_bytes: int) -> float:
        """Return ``latency + size / bandwidth``, and 0 for a device and itself."""
        if source == target:
            return 0.0
        link = self._link(source, target)
        return link.latency_s + size_bytes / link.bytes_per_s

    def end_s(self, source: Device, target: Device) -> float | None:
        """Return the processor time of an empty message at either end, ``None`` if not measured.

        It is the mean of both ends: every rank of a ring sends as often as it receives.
        """
        nodes = {source.node, target.node}
        for between, ends in self.ends:
            if set(between) == nodes:
                return (ends.send_s + ends.receive_s) / 2.0
        return None

    def _link(self, source: Device, target: Device) -> LinkSpec:
        ends = {source.node, target.node}
        for link in self.measured:
            if set(link.between) == ends:
                return link
        return self.cluster.link(source, target, self.specs[source.group])


def fit_links(samples: Sequence[CommSample]) -> tuple[LinkSpec, ...]:
    """Fit latency and bandwidth of every pair of nodes, both directions together.

    Minimizes the relative error, so that small messages determine the latency and large ones the
    bandwidth; neither is negative. Raises ``SpecError`` for a pair measured at one size only.
    """
    pairs = dict.fromkeys(tuple(sorted((one.source, one.target))) for one in samples)
    links = []
    for first, second in pairs:
        own = [one for one in samples if {one.source, one.target} == {first, second}]
        if len({one.size_bytes for one in own}) < 2:
            raise SpecError(
                f"link table: found one message size between '{first}' and '{second}', "
                "expected at least two"
            )
        features = np.array([[1.0, float(one.size_bytes)] for one in own])
        alpha, beta = fit_relative(features, np.array([one.seconds for one in own]))
        rate = 1.0 / max(beta, 1.0 / MAX_BYTES_PER_S)
        links.append(LinkSpec(between=(first, second), bytes_per_s=rate, latency_s=float(alpha)))
    return tuple(links)
