"""OnlineAnswer: the tokens of an unfinished request, and how its next ones are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmpq.batching.prompt_lookup import PromptLookup
from llmpq.dist.engine.sampler import SampledToken, SamplingState, ScoredRows
from llmpq.dist.io.engine_messages import AddedRequest
from llmpq.dist.io.generation import GenerationEnd
from llmpq.dist.io.sampling_params import TokenLogprobs
from llmpq.logging import get_logger

_log = get_logger(__name__)


@dataclass(slots=True, kw_only=True, eq=False)
class OnlineAnswer:
    """An unfinished request with its tokens, and the draft of its next ones.

    Attributes:
        tokens: prompt and answer.
        prompt_logprobs: found so far, ``None`` when they are not asked for.
        lookup: finds drafts, ``None`` without prompt lookup.
        draft: the tokens proposed last.
    """

    added: AddedRequest
    tokens: list[int]
    state: SamplingState
    max_tokens: int
    prompt_logprobs: list[TokenLogprobs] | None
    num_cached_tokens: int | None = None
    lookup: PromptLookup | None = None
    draft: list[int] = field(default_factory=list)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.added.request.prompt_token_ids)

    def sample(
        self, scored: ScoredRows, rows: Sequence[int]
    ) -> tuple[list[SampledToken], GenerationEnd | None]:
        """Choose tokens while the draft has them, and one more.

        Args:
            scored: the scores of the step.
            rows: of the newest token and of the draft tokens.

        Returns:
            The tokens, the last one of which may be an error; and why the answer ends, if it does.
        """
        tokens: list[SampledToken] = []
        reason: GenerationEnd | None = None
        for row, proposed in zip(rows, [*self.draft[: len(rows) - 1], None], strict=True):
            token = scored.sample(row, self.state)
            tokens.append(token)
            if token.error is not None:
                _log.warning("request %s: %s", self.added.request.id, token.error)
                return tokens, "error"
            self.state.accept(token.token_id)
            self.tokens.append(token.token_id)
            reason = self.state.finish_reason(self.max_tokens)
            if reason is not None or token.token_id != proposed:
                break
        return tokens, reason
