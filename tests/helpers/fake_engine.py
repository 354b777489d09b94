"""An engine in this process whose tokens follow from prompt, seed and position alone."""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
from collections.abc import AsyncGenerator
from dataclasses import replace

from llmpq.dist.io.generation import GenerationRequest, ServingStats, TokenOutput
from llmpq.dist.io.sampling_params import StructuredOutputsParams, TokenLogprobs
from llmpq.dist.io.structured_outputs import grammar_of
from llmpq.errors import StageError


def number(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


def embedding_of(token_ids: tuple[int, ...], pooling: str) -> list[float]:
    """Return eight numbers of length 1 that follow from a prompt."""
    found = [number(token_ids, pooling, place) / 2**48 - 0.5 for place in range(8)]
    length = math.hypot(*found)
    return [value / length for value in found]


def merged(outputs: list[TokenOutput]) -> TokenOutput:
    """Return several outputs of an answer as one."""
    logprobs = tuple(item for output in outputs for item in output.logprobs or ())
    return replace(
        outputs[-1],
        token_ids=tuple(token for output in outputs for token in output.token_ids),
        logprobs=logprobs or None,
        prompt_logprobs=outputs[0].prompt_logprobs,
    )


FAKE_TIERS = {"host": 1000, "disk": 2000}


class FakeEngine:
    """Has the interface of ``EngineClient``.

    Args:
        vocab_size: tokens are below this number.
        max_model_len: most tokens of prompt and answer.
        eos: the model's own end token.
        step_s: seconds between tokens.
        script: tokens of every answer, instead of those that follow from the prompt; answers with a
            form are complete after them.

    Attributes:
        requests: all requests so far, by id.
        active: ids of requests that have not ended.
        aborted: ids of requests that were left before their end.
        made: number of tokens so far.
        fails_after: tokens of an answer after which the engine fails; ``None`` for never.
        at_once: tokens of an output, as with speculative decoding.
    """

    def __init__(
        self,
        vocab_size: int = 4096,
        max_model_len: int = 1024,
        eos: int = 1,
        step_s: float = 0.0,
        script: list[int] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos = eos
        self.step_s = step_s
        self.script = script
        self.fails_after: int | None = None
        self.at_once = 1
        self.is_alive = True
        self.error: BaseException | None = None
        self.requests: dict[str, GenerationRequest] = {}
        self.active: set[str] = set()
        self.aborted: set[str] = set()
        self.made = 0
        self.started_tokens = 0
        self.is_closed = False
        self.starts = asyncio.Event()  # cleared, requests wait before their first token
        self.starts.set()

    @property
    def stats(self) -> ServingStats:
        return ServingStats(
            running=len(self.active),
            started_tokens=self.started_tokens,
            num_blocks=64,
            block_size=16,
            token_budget=256,
            prefix_tier_hits={"blocks": 300, "host": 20, "disk": 1},
            kv_offload_bytes=FAKE_TIERS,
            kv_offload_saves=FAKE_TIERS,
            kv_offload_loads=FAKE_TIERS,
            kv_offload_unread=3,
        )

    def token(self, request: GenerationRequest, place: int) -> int:
        if self.script is not None:
            return self.script[place] if place < len(self.script) else self.eos
        seed = request.sampling.seed if request.sampling.temperature > 0 else 0
        token = number(request.prompt_token_ids, seed, place) % self.vocab_size
        return 300 + token % 100 if token == self.eos else token

    def logprobs(self, token: int, count: int | None) -> TokenLogprobs | None:
        """Return values that fall with the rank; the token is the best one."""
        if count is None:
            return None
        others = [(token + step) % self.vocab_size for step in range(count)]
        top = tuple((other, -0.5 - rank) for rank, other in enumerate(others))
        return TokenLogprobs(token, -0.5, top)

    async def check_form(self, form: StructuredOutputsParams) -> None:
        grammar_of(form)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        assert request.id not in self.active
        self.requests[request.id] = request
        self.active.add(request.id)
        has_ended = False
        try:
            pending: list[TokenOutput] = []
            async for output in self._outputs(request):
                pending.append(output)
                has_ended = output.finish_reason is not None
                if has_ended or len(pending) == self.at_once:
                    yield merged(pending)
                    pending = []
        finally:
            self.active.remove(request.id)
            if not has_ended:
                self.aborted.add(request.id)

    async def _outputs(self, request: GenerationRequest) -> AsyncGenerator[TokenOutput, None]:
        sampling = request.sampling
        limit = sampling.max_tokens or self.max_model_len
        await self.starts.wait()
        if request.pooling is not None:
            values = embedding_of(request.prompt_token_ids, request.pooling)
            yield TokenOutput(
                token_ids=(), finish_reason="length", embedding=struct.pack("<8f", *values)
            )
            return
        prompt = None
        if sampling.prompt_logprobs is not None:
            found = [self.logprobs(t, sampling.prompt_logprobs) for t in request.prompt_token_ids]
            prompt = (None, *found[1:])
        for place in range(limit):
            await asyncio.sleep(self.step_s)
            if self.fails_after is not None and place >= self.fails_after:
                self.error = StageError("stage 1 on host secret-host died: /secret/path")
                self.is_alive = False
                raise self.error
            token = self.token(request, place)
            self.made += 1
            reason = None
            is_form_complete = (
                sampling.structured_outputs is not None
                and self.script is not None
                and place + 1 == len(self.script)
            )
            stops = token in sampling.stop_token_ids
            stops |= token == self.eos and not sampling.ignore_eos
            if is_form_complete or (stops and place + 1 > sampling.min_tokens):
                reason = "stop"
            elif place + 1 == limit:
                reason = "length"
            logprobs = self.logprobs(token, sampling.logprobs)
            yield TokenOutput(
                token_ids=(token,),
                logprobs=None if logprobs is None else (logprobs,),
                prompt_logprobs=prompt if place == 0 else None,
                finish_reason=reason,
                stop_reason=token if token in sampling.stop_token_ids else None,
                is_form_complete=is_form_complete,
                num_cached_tokens=math.floor(len(request.prompt_token_ids) / 16) * 16,
            )
            if reason is not None:
                return

    async def abort(self, id: str) -> None:
        self.active.discard(id)

    async def drain(self, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s):
            while self.active:
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.is_closed = True
