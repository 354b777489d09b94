"""Seconds of a layer whose routed experts are, in part, in the memory of its device's host.

While few rows decode, the host's cores compute its experts beside what the device computes: a step
reads every expert that some row chose once. For prompts, a share of these experts can be sent to
the device instead, which computes faster. Both are law, not measurement: the figures come from a
device's profile.

Symbols: E experts, k of them for a row, r rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmpq.errors import SpecError

MOST_TOKENS = 1 << 20
"""Longest prompt for which :meth:`HostExperts.threshold` looks."""


def distinct_experts(rows: int, chosen: int, experts: int) -> float:
    """Return the expected number of experts that some of ``rows`` rows chose.

    ``E (1 - (1 - k / E)^r)``, for rows that choose independently and evenly.

    Raises:
        SpecError: more are chosen than there are, or fewer than one.
    """
    if not 1 <= chosen <= experts:
        raise SpecError(f"experts: found {chosen} chosen of {experts}, expected 1 to {experts}")
    return experts * (1 - (1 - chosen / experts) ** rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostExperts:
    """Experts of a layer in the host's memory, and what reads and computes them.

    Attributes:
        experts: E, of the layer.
        chosen: k, of them for a row.
        on_host: how many of them are in the host's memory.
        expert_bytes: of one expert.
        gather_bytes_per_s: at which the host's cores read and multiply experts of few rows.
        host_row_s: seconds of the host's cores for a row of one expert, in prompts.
        device_row_s: those of the device.
        link_bytes_per_s: from the host's memory to the device.
        hop_s: of the rows of a step, one way.
    """

    experts: int
    chosen: int
    on_host: int
    expert_bytes: int
    gather_bytes_per_s: float
    host_row_s: float
    device_row_s: float
    link_bytes_per_s: float
    hop_s: float

    def touched(self, rows: int) -> float:
        """Return the expected number of the host's experts that some row chose."""
        share = self.on_host / self.experts
        return share * distinct_experts(rows, self.chosen, self.experts)

    def host_s(self, rows: int) -> float:
        """Return the seconds in which the host's cores compute all of its experts of a step.

        They read each touched expert once, and compute every row of it.
        """
        read_s = self.touched(rows) * self.expert_bytes / self.gather_bytes_per_s
        return max(read_s, self._work(rows) * self.host_row_s)

    def decode_s(self, rows: int, dense_s: float, beside_s: float) -> float:
        """Return the seconds of the layer in a decode step.

        Args:
            rows: of the step.
            dense_s: of the device, for all before and behind the experts.
            beside_s: of the device, for shared and resident experts.
        """
        if not self.on_host:
            return dense_s + beside_s
        return dense_s + max(beside_s, self.hop_s + self.host_s(rows) + self.hop_s)

    def streamed_s(self, tokens: int) -> float:
        """Return the seconds in which the device gets and computes all touched experts."""
        send_s = self.touched(tokens) * self.expert_bytes / self.link_bytes_per_s
        return send_s + self._work(tokens) * self.device_row_s

    def prompt_s(self, tokens: int, share: float) -> float:
        """Return the seconds of the host's experts in a prompt of so many tokens.

        Args:
            tokens: of the prompt, or of a part of it that is computed at a time.
            share: of the touched experts that are sent to the device, 0 to 1.
        """
        return max(share * self.streamed_s(tokens), (1 - share) * self.host_s(tokens))

    def best_share(self, tokens: int) -> float:
        """Return the share with the least seconds: host and device take equally long."""
        streamed_s, host_s = self.streamed_s(tokens), self.host_s(tokens)
        return host_s / (streamed_s + host_s) if streamed_s + host_s else 0.0

    def threshold(self) -> int | None:
        """Return the fewest tokens from which on the device alone is faster than the host alone.

        ``None`` if it is not, up to ``MOST_TOKENS``.
        """
        low, high = 0, 1
        while self.streamed_s(high) >= self.host_s(high):
            low, high = high, 2 * high
            if high > MOST_TOKENS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            if self.streamed_s(middle) >= self.host_s(middle):
                low = middle
            else:
                high = middle
        return high

    def _work(self, rows: int) -> float:
        """Return the rows of all experts of the host together."""
        return rows * self.chosen * self.on_host / self.experts
