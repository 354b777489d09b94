"""Expected batch sizes of a steady schedule, in closed form, from the law of answer lengths.

A phase is ``N_D`` decode iterations (RRA; WAA has ``N_D = 1``). An answer of ``S`` tokens needs
``D = S - 1`` iterations, because prefill makes its first token, and so ``ceil(D / N_D)`` phases.

**Where we depart from ExeGPT (Sec. 6).** The paper takes the law of a decoding batch's members to
be that of arriving requests, ``B_E = B_D E[1 / ceil(S / N_D)]``. In the steady state long answers
stay longer and are met more often: members follow the arrival law weighted by the phases they
stay, and Little's law gives ``B_E = B_D / E[ceil(D / N_D)]``. At ``N_D = 1`` this is the paper's
own formula for WAA, ``B_D = B_E E[S]``, which its formula for RRA is not. Both are here; schedules
are made with ours, which a Monte Carlo of the process confirms (tests).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from llmpq.errors import SpecError
from llmpq.spec.lengths import LengthDistribution


@dataclass(frozen=True, kw_only=True)
class SteadyBatch:
    """Who is in a decoding batch, phase after phase.

    Attributes:
        prompt_tokens: law of prompt lengths, independent of the answers'.
        new_tokens: law of answer lengths ``S``, the first token counted.
        decode_iterations: iterations of a phase ``N_D``.
    """

    prompt_tokens: LengthDistribution
    new_tokens: LengthDistribution
    decode_iterations: int

    def __post_init__(self) -> None:
        if self.decode_iterations < 1:
            raise SpecError(
                f"schedule: found {self.decode_iterations} decode iterations, expected 1 or more"
            )

    @cached_property
    def phases(self) -> float:
        """Mean number of phases a request takes part in ``E[ceil(D / N_D)] = B_D / B_E``."""
        return math.fsum(share * self.phases_of(tokens) for tokens, share in self._law)

    def phases_of(self, new_tokens: int) -> int:
        """Return the phases that an answer of so many tokens takes part in."""
        return -(-(new_tokens - 1) // self.decode_iterations)

    @cached_property
    def ending(self) -> tuple[float, ...]:
        """Probability that a member of the batch ends at iteration ``U`` of a phase, U = 1..N_D.

        ``P_D(U)`` in the steady state; the sum is the share of the batch that ends in a phase.
        """
        shares = [0.0] * self.decode_iterations
        for tokens, share in self._law:
            if tokens > 1:
                shares[(tokens - 2) % self.decode_iterations] += share
        return tuple(share / self.phases for share in shares) if self.phases else tuple(shares)

    @cached_property
    def alive(self) -> tuple[float, ...]:
        """Share of the batch that still decodes at iteration ``U``, U = 1..N_D; the first is 1."""
        left, shares = 1.0, []
        for share in self.ending:
            shares.append(left)
            left -= share
        return tuple(shares)

    @cached_property
    def mean_context_tokens(self) -> float:
        """Mean context of a sequence that is being decoded, over all iterations.

        An answer of S tokens is decoded at contexts ``s + 1, .., s + S - 1``.
        """
        steps = math.fsum(share * (tokens - 1) for tokens, share in self._law)
        made = math.fsum(share * (tokens - 1) * tokens / 2 for tokens, share in self._law)
        return self.prompt_tokens.mean + (made / steps if steps else 0.0)

    def encode_batch(self, decode_batch: float) -> float:
        """Return ``B_E`` that keeps a decoding batch at ``B_D``; without decoding, all of it."""
        return decode_batch / self.phases if self.phases else decode_batch

    def decode_batch(self, encode_batch: float) -> float:
        """Return the ``B_D`` that encoding ``B_E`` requests a phase leads to."""
        return encode_batch * self.phases

    @property
    def _law(self) -> list[tuple[int, float]]:
        return list(zip(self.new_tokens.lengths, self.new_tokens.probabilities, strict=True))


def paper_ending(new_tokens: LengthDistribution, decode_iterations: int) -> tuple[float, ...]:
    """Return ``P_D(U)`` as ExeGPT's Sec. 6 states it, U = 1..N_D.

    ``P_D(U | S)`` is 1 at ``U = S`` for ``S <= N_D``, else ``1 / ceil(S / N_D)`` at
    ``U = 1 + (S - 1) mod N_D``; all S iterations are decoding.
    """
    shares = [0.0] * decode_iterations
    for tokens, share in zip(new_tokens.lengths, new_tokens.probabilities, strict=True):
        shares[(tokens - 1) % decode_iterations] += share / -(-tokens // decode_iterations)
    return tuple(shares)


def paper_encode_batch(
    new_tokens: LengthDistribution, decode_iterations: int, decode_batch: float
) -> float:
    """Return ``B_E = B_D sum_U P_D(U)`` as ExeGPT's Sec. 6 states it."""
    return decode_batch * math.fsum(paper_ending(new_tokens, decode_iterations))


@lru_cache(maxsize=4096)
def expected_longest(lengths: LengthDistribution, count: int) -> float:
    """Return the mean of the longest of ``count`` independent lengths.

    Prompts of a micro-batch are padded to the longest, so this is what prefill computes.
    """
    if count < 1:
        raise SpecError(f"schedule: found {count} requests, expected at least one")
    below, before, mean = 0.0, 0.0, 0.0
    for length, share in zip(lengths.lengths, lengths.probabilities, strict=True):
        below = min(1.0, below + share)
        at_most = below**count
        mean += length * (at_most - before)
        before = at_most
    return mean
