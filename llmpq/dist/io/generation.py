"""What passes between the HTTP process and the engine: requests, new tokens, counters.

Values only. Needs no torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from llmpq.batching.blocks import Tier
from llmpq.dist.io.sampling_params import SamplingParams, StructuredOutputsParams, TokenLogprobs
from llmpq.options.run import Pooling

GenerationEnd = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request of the engine: one prompt, one answer.

    Attributes:
        id: unique among the requests that are not finished.
        prompt_token_ids: at least one token.
        sampling: how tokens are chosen, and when the answer ends.
        priority: lower values are served first, under the queue order ``priority``.
        cache_salt: prompts share cached prefixes only with prompts of the same salt.
        group: equal for the answers to one request of a client, which take turns with those of
            other requests; ``None`` for a lone answer.
        pooling: how the embedding of the prompt is made, which is the answer then, without tokens;
            ``None`` for an answer of tokens. ``mean`` computes the whole prompt: no part of it is
            taken from the prefix cache.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    group: str | None = None
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """What one or more steps add to an answer.

    Attributes:
        token_ids: the new tokens.
        logprobs: of the new tokens, ``None`` unless asked for.
        prompt_logprobs: of the prompt's tokens, ``None`` for the first; in the first output only,
            and only when asked for. An engine sends them before its first token, a part a step.
        finish_reason: set in the last output.
        stop_reason: the stop token that ended the answer, ``None`` for the model's own end token.
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache.
        is_form_complete: whether the reason ``stop`` means that the answer's form allows no further
            token; the last token is then a part of the text, and not a stop token.
        embedding: of the prompt, of length 1: float32 numbers, little-endian; ``None`` unless asked
            for.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: GenerationEnd | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    is_form_complete: bool = False
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStats:
    """Counters of a running engine.

    Attributes:
        running: requests that have blocks.
        waiting: requests in the queue.
        queued_tokens: prompt tokens that have not been computed yet.
        started_tokens: tokens of the prompts that have blocks and no token of their answer.
        kv_cache_usage: share of the KV blocks in use, 0 to 1.
        num_preemptions: since the start, as all that follow.
        prefix_cache_queries: prompt tokens looked up in the prefix cache.
        prefix_cache_hits: prompt tokens found there, and so not computed.
        prefix_tier_hits: these by where they were found: ``blocks``, ``host`` memory, ``disk``.
        kv_offload_bytes: bytes of blocks kept now in ``host`` memory and on ``disk``, all stages.
        kv_offload_saves, kv_offload_loads: blocks copied there, and loaded from there.
        kv_offload_unread: blocks whose files could not be read.
        num_blocks: KV blocks in all.
        block_size: tokens of a block.
        token_budget: tokens of all sequences in one step.
        num_drafts: speculative decoding: drafts that were verified, since the start.
        num_draft_tokens: their tokens.
        num_accepted_tokens: those of them that became tokens of an answer.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    started_tokens: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prefix_tier_hits: Mapping[Tier, int] = field(default_factory=dict)
    kv_offload_bytes: Mapping[Tier, int] = field(default_factory=dict)
    kv_offload_saves: Mapping[Tier, int] = field(default_factory=dict)
    kv_offload_loads: Mapping[Tier, int] = field(default_factory=dict)
    kv_offload_unread: int = 0
    num_blocks: int = 0
    block_size: int = 0
    token_budget: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class EngineClient(Protocol):
    """The engine as the HTTP process sees it."""

    @property
    def stats(self) -> ServingStats:
        """The latest counters."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the engine answers now; false while it restarts."""
        ...

    @property
    def error(self) -> BaseException | None:
        """Why the engine has ended for good, ``None`` while it has not."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens are below this number."""
        ...

    async def check_form(self, form: StructuredOutputsParams) -> None:
        """Check that a form of answers can be compiled; ``SpecError`` if not."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        """Answer a request; leaving the iterator aborts it."""
        ...

    async def abort(self, id: str) -> None:
        """End a request; its iterator ends with the reason ``abort``."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Finish running requests and admit no new ones."""
        ...

    async def close(self) -> None:
        """End the engine and all its processes."""
        ...
