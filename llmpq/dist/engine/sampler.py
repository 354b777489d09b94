"""Sampling the next token of each sequence, by its own ``SamplingParams``.

Scores are changed in vLLM's order: allowed tokens, bad words, minimum length, bias, penalties; a
random choice then applies temperature, min-p, top-k and top-p. The random number of a token depends
on the seed, the request and the position only, not on the other sequences of the step; so a request
can be resumed, recomputed, regrouped or repeated.

Shapes: R rows, V vocabulary, N prompt positions.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmpq.dist.io.prompts import Request
from llmpq.dist.io.results import FinishReason
from llmpq.dist.io.sampling_params import GREEDY, SamplingParams, TokenLogprobs
from llmpq.dist.io.structured_outputs import GrammarCompiler
from llmpq.kernels.base import exact_dtype

NAN_SCORES = (
    "the model's scores are not numbers (NaN): found an overflow in the layers, "
    "expected finite values; try --dtype bfloat16 or float32 when planning"
)
NO_TOKEN = "sampling_params: found no token that all of them allow, expected at least one"
_UNIFORM_BITS = 52
"""Bits of a random number: with one bit more, its product with the total could round up to it."""
ROWS_AT_ONCE = 64
"""Positions whose log probabilities are computed together; more would take memory alone."""


class TokenMatcher(Protocol):
    """The tokens that may come next in an answer of a given form."""

    @property
    def is_complete(self) -> bool:
        """Whether the form allows no further token but an end token."""
        ...

    def allowed(self, count: int) -> NDArray[np.bool_]:
        """Return which of ``count`` tokens may come next."""
        ...

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        ...


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of a sequence.

    Attributes:
        token_id: the token; -1 where there is an error.
        logprobs: its log probabilities, where they are asked for.
        error: why no token could be chosen.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


class SamplingState:
    """What the choice of a sequence's next token depends on, in addition to the scores.

    Args:
        params: how tokens are chosen.
        request: identifies the request in the random numbers.
        prompt_token_ids: of the request.
        stop_token_ids: tokens that end the answer, those of the model included.
        matcher: the form of the answer, ``None`` for a free one.
        token_ids: tokens of the answer so far.
    """

    def __init__(
        self,
        params: SamplingParams = GREEDY,
        *,
        request: str = "",
        prompt_token_ids: Sequence[int] = (),
        stop_token_ids: Collection[int] = (),
        matcher: TokenMatcher | None = None,
        token_ids: Iterable[int] = (),
    ) -> None:
        self.params = params
        self.is_plain = params.is_greedy and params.logprobs is None and not params.changes_scores
        self.token_ids: list[int] = []
        self._request = request
        self._stop_token_ids = list(stop_token_ids)
        self._matcher = matcher
        self._allowed: Tensor | None = None
        self._prompt = set(prompt_token_ids) if params.repetition_penalty != 1 else set()
        self._counts: Counter[int] = Counter()
        self._counts_tokens = params.presence_penalty != 0 or params.frequency_penalty != 0
        for token in token_ids:
            self.accept(token)

    @property
    def is_complete(self) -> bool:
        """Whether the form of the answer allows no further token."""
        return self._matcher is not None and self._matcher.is_complete

    @property
    def ends_with_stop_token(self) -> bool:
        """Whether the last token is a stop token."""
        return self.token_ids[-1] in self._stop_token_ids

    def finish_reason(self, max_tokens: int) -> FinishReason | None:
        """Return why the answer is complete, ``None`` while it is not."""
        if self.ends_with_stop_token or self.is_complete:
            return "stop"
        return "length" if len(self.token_ids) == max_tokens else None

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        self.token_ids.append(token)
        if self._prompt:
            self._prompt.add(token)
        if self._counts_tokens:
            self._counts[token] += 1
        if self._matcher is not None:
            self._matcher.accept(token)

    def change_scores(self, scores: Tensor) -> None:
        """Apply masks, bias and penalties to the scores ``[V]`` in place."""
        params = self.params
        if self._matcher is not None:
            allowed = torch.from_numpy(self._matcher.allowed(len(scores)))
            scores.masked_fill_(~allowed.to(scores.device), -math.inf)
        if params.allowed_token_ids is not None:
            if self._allowed is None:
                self._allowed = torch.zeros(len(scores), dtype=torch.bool)
                self._allowed[list(params.allowed_token_ids)] = True
            scores.masked_fill_(~self._allowed.to(scores.device), -math.inf)
        if params.bad_words_ids:
            scores[self._bad_tokens()] = -math.inf
        if len(self.token_ids) < params.min_tokens and self._stop_token_ids:
            scores[self._stop_token_ids] = -math.inf
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias, strict=True)
            scores[list(tokens)] += torch.tensor(values, device=scores.device)
        self._penalize(scores)

    def uniform(self) -> float:
        """Return the random number in [0, 1) of the next token."""
        text = f"{self.params.seed or 0}/{len(self.token_ids)}/{self._request}".encode()
        number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
        return (number >> (64 - _UNIFORM_BITS)) / (1 << _UNIFORM_BITS)

    def _bad_tokens(self) -> list[int]:
        """Return the tokens that would complete a forbidden sequence."""
        found = []
        for *start, last in self.params.bad_words_ids:
            if not start or self.token_ids[-len(start) :] == start:
                found.append(last)
        return found

    def _penalize(self, scores: Tensor) -> None:
        params = self.params
        if params.repetition_penalty != 1 and self._prompt:
            tokens = torch.tensor(sorted(self._prompt), device=scores.device)
            found = scores[tokens]
            penalty = params.repetition_penalty
            scores[tokens] = torch.where(found > 0, found / penalty, found * penalty)
        if self._counts:
            tokens = torch.tensor(list(self._counts), device=scores.device)
            counts = torch.tensor(list(self._counts.values()), device=scores.device)
            scores[tokens] -= params.frequency_penalty * counts + params.presence_penalty


def sampling_state_of(
    request: Request, grammars: GrammarCompiler | None, token_ids: Sequence[int] = ()
) -> SamplingState:
    """Return the state of a request that has these tokens.

    Raises:
        SpecError: the form of its answer is not valid.
    """
    form = request.sampling_params.structured_outputs
    assert form is None or grammars is not None
    return SamplingState(
        request.sampling_params,
        request=str(request.id),
        prompt_token_ids=request.prompt_token_ids,
        stop_token_ids=request.stop_token_ids,
        matcher=None if form is None or grammars is None else grammars.compile(form),
        token_ids=token_ids,
    )


class ScoredRows:
    """The scores of several positions, from which tokens are chosen one after the other.

    Args:
        logits: ``[R, V]`` float32, finite (or minus infinity for a forbidden token).
    """

    def __init__(self, logits: Tensor) -> None:
        best = logits.argmax(dim=-1)  # [R]; a NaN, if there is one
        self._logits = logits
        self._is_nan: list[bool] = logits.gather(-1, best[:, None]).isnan()[:, 0].tolist()
        self._best: list[int] = best.tolist()

    def sample(self, row: int, state: SamplingState) -> SampledToken:
        """Return the token of a row; the state does not change."""
        if self._is_nan[row]:
            return SampledToken(-1, error=NAN_SCORES)
        if state.is_plain:
            return SampledToken(self._best[row])
        return _choose(self._logits[row], state)


def _choose(logits: Tensor, state: SamplingState) -> SampledToken:
    """Choose a token by the scores ``[V]``."""
    params, scores = state.params, logits
    if params.changes_scores:
        scores = logits.clone()
        state.change_scores(scores)
    best = int(scores.argmax())
    if scores[best] == -math.inf:
        return SampledToken(-1, error=NO_TOKEN)
    token = best if params.is_greedy else _draw(_truncated(scores, params), state.uniform())
    if params.logprobs is None:
        return SampledToken(token)
    return SampledToken(token, logprobs=_logprobs(logits[None], [token], params.logprobs)[0])


def _truncated(scores: Tensor, params: SamplingParams) -> Tensor:
    """Divide by the temperature and mask what min-p, top-k and top-p leave out.

    The best token always stays.
    """
    scores = scores.float() / params.temperature
    if params.min_p > 0:
        scores = scores.masked_fill(scores < scores.max() + math.log(params.min_p), -math.inf)
    if 0 < params.top_k < len(scores):
        least = scores.topk(params.top_k).values[-1]
        scores = scores.masked_fill(scores < least, -math.inf)
    if params.top_p < 1:
        kept = (scores > -math.inf).nonzero()[:, 0]
        ordered, order = scores[kept].sort(descending=True, stable=True)
        shares = torch.softmax(ordered, dim=-1)
        before = shares.cumsum(dim=-1) - shares
        scores[kept[order[before >= params.top_p]]] = -math.inf
    return scores


def _draw(scores: Tensor, uniform: float) -> int:
    """Return the token at a place in [0, 1) of the cumulative distribution."""
    if exact_dtype(scores.device) is not torch.float64:
        scores = scores.cpu()  # float32 sums would change which token a number draws
    total = torch.softmax(scores, dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [V]
    return int(torch.searchsorted(total, uniform * total[-1], right=True))


def prompt_logprobs(
    logits: Tensor, rows: Sequence[int], next_token_ids: Sequence[int], count: int
) -> list[TokenLogprobs]:
    """Return the log probabilities of prompt tokens.

    Args:
        logits: ``[R, V]``.
        rows: those of consecutive prompt positions [N].
        next_token_ids: the prompt token that follows each position [N].
        count: how many of the best tokens to report; -1 is all.
    """
    found: list[TokenLogprobs] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        found += _logprobs(logits[list(rows[part])], next_token_ids[part], count)
    return found


def _logprobs(logits: Tensor, token_ids: Sequence[int], count: int) -> list[TokenLogprobs]:
    values = torch.log_softmax(logits.float(), dim=-1)  # [N, V]
    chosen = values.gather(-1, torch.tensor(token_ids, device=values.device)[:, None])[:, 0]
    width = values.shape[-1]
    best = values.topk(width if count == -1 else min(count, width), dim=-1)
    return [
        TokenLogprobs(token, logprob, tuple(zip(tops, logprobs, strict=True)))
        for token, logprob, tops, logprobs in zip(
            token_ids, chosen.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
