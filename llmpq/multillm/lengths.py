"""Answer lengths: sampled from a model's empirical distribution, capped by limit and context.

SamuLLM, Sec. 4.1: ``l_out = min(X, y, l_max - l_in)`` with ``X`` from the lengths of the model's
answers to many requests, ``y`` the limit and ``l_max`` the model's context.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from llmpq.errors import SpecError
from llmpq.spec.lengths import LengthDistribution

Lengths = NDArray[np.int64]


def sample_answers(
    law: LengthDistribution | None,
    prompt_tokens: ArrayLike,
    *,
    limit: ArrayLike | None,
    context: int | None,
    chance: np.random.Generator,
) -> Lengths:
    """Draw the answer length of every prompt.

    Args:
        law: distribution of the model's answers; ``None``: every answer reaches its limit.
        prompt_tokens: length of every prompt [n].
        limit: most new tokens, of all prompts or of each; ``None``: the context's.
        context: longest sequence of the model, ``None`` when unlimited.
        chance: source of randomness.

    Returns:
        Lengths [n], at least 1.

    Raises:
        SpecError: a prompt leaves no room for an answer, or nothing bounds an answer.
    """
    prompts = np.asarray(prompt_tokens, np.int64)
    if law is None and limit is None and context is None:
        raise SpecError("lengths: found no distribution, limit or context, expected one of them")
    room = np.full(prompts.shape, np.iinfo(np.int64).max)
    if context is not None:
        if prompts.size and prompts.max() >= context:
            raise SpecError(
                f"lengths: found a prompt of {prompts.max()} tokens, expected fewer than the "
                f"model's context of {context}"
            )
        room = context - prompts
    if limit is not None:
        room = np.minimum(room, np.asarray(limit, np.int64))
    if law is None:
        return room
    shares = np.cumsum(law.probabilities)
    places = np.searchsorted(shares, chance.random(prompts.shape) * shares[-1], side="right")
    drawn = np.asarray(law.lengths, np.int64)[np.minimum(places, len(law.lengths) - 1)]
    answers: Lengths = np.minimum(drawn, room)
    return answers
