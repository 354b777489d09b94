"""Load on a server of OpenAI's API: requests at given times, whose answers are read as streams.

Needs the standard library and numpy only, so that clients take little of the cores that they share
with the server. The same requests can be answered by any other coroutine of type :data:`Send`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

ANSWER_TIMEOUT_S = 600.0
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A request.

    Attributes:
        number: of the request; decides its tokens.
        prompt_tokens, new_tokens: lengths.
        arrival_s: when to send it, after the start; 0 in closed loops.
    """

    number: int
    prompt_tokens: int
    new_tokens: int
    arrival_s: float = 0.0

    def token_ids(self, vocabulary: int) -> tuple[int, ...]:
        """Return the prompt; different requests have no prefix in common."""
        first = self.number * 7919
        return tuple(
            3 + (first + at * at * 31) % (vocabulary - 3) for at in range(self.prompt_tokens)
        )


@dataclass(slots=True, kw_only=True)
class Sample:
    """What became of a request; times in seconds after the start of the load.

    Attributes:
        number: of the request.
        due_s: when it should be sent; waiting times count from here.
        sent_s, first_s, end_s: when it was sent, had its first token and its last.
        new_tokens: that the server counted, or that were asked for where it does not count.
        reason: ``finish_reason``, or ``error: ...``.
    """

    number: int
    prompt_tokens: int
    due_s: float
    sent_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    new_tokens: int = 0
    reason: str = ""


Send = Callable[[Query, Sample, Callable[[], float]], Awaitable[None]]
"""Answers a request and fills in its sample; the last argument is the clock."""


class HttpError(Exception):
    """An answer whose status is not 200."""


async def events(port: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the server-sent events of an answer, without ``[DONE]``.

    Raises:
        HttpError: another status.
        EOFError: the stream ended without ``[DONE]``.
    """
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
            + data
        )
        status = (await reader.readline()).split()
        is_chunked = False
        while (line := await reader.readline()).strip():
            is_chunked |= line.lower().startswith(b"transfer-encoding:") and b"chunked" in line
        if status[1:2] != [b"200"]:
            text = (await reader.read(2000)).decode(errors="replace")
            raise HttpError(f"{b' '.join(status[1:]).decode(errors='replace')} {text}")
        kept = b""
        async for part in _parts(reader, is_chunked):
            kept += part
            *lines, kept = kept.split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                event = line[5:].strip()
                if event == b"[DONE]":
                    return
                yield json.loads(event)
    finally:
        writer.close()
    raise EOFError("the stream ended without [DONE]")


async def request(port: int, path: str, body: Any, limit_s: float) -> int:
    """Send a body and read the answer; return its status.

    Args:
        port: on 127.0.0.1.
        path: of the request.
        body: bytes, or what becomes JSON; ``None`` asks for the path.
        limit_s: after which the client hangs up.

    Returns:
        The status; 0 where the client hung up, -1 where the server did.
    """
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(limit_s):
            writer.write(
                f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                "Content-Type: application/json\r\n"
                f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
                + data
            )
            words = (await reader.readline()).split()
            await reader.read()
            return int(words[1]) if len(words) > 1 else -1
    except TimeoutError:
        return 0
    except OSError:  # an answer before the body was read
        return -1
    finally:
        writer.close()


async def _parts(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    """Yield the body as it arrives."""
    while is_chunked:
        size = int((await reader.readline()).split(b";")[0] or b"0", 16)
        if not size:
            return
        yield (await reader.readexactly(size + 2))[:-2]
    while part := await reader.read(1 << 16):
        yield part


def sender(
    port: int, body_of: Callable[[Query], dict[str, Any]], path: str = "/v1/completions"
) -> Send:
    """Return what sends requests to a server, whose streams need not end with ``[DONE]``."""

    async def send(query: Query, sample: Sample, clock: Callable[[], float]) -> None:
        try:
            async for event in events(port, path, body_of(query)):
                now_s = clock()
                if "error" in event:
                    raise HttpError(str(event["error"]))
                usage = event.get("usage") or {}
                sample.new_tokens = usage.get("completion_tokens") or sample.new_tokens
                for choice in event.get("choices") or ():
                    if choice.get("text") or choice.get("token_ids"):
                        sample.first_s = sample.first_s or now_s
                        sample.end_s = now_s
                    sample.reason = choice.get("finish_reason") or sample.reason
        except EOFError:
            if not sample.reason:
                raise

    return send


async def drive(
    queries: Sequence[Query], send: Send, concurrency: int | None = None
) -> list[Sample]:
    """Send all requests and return their samples.

    Args:
        queries: in order.
        send: answers one of them.
        concurrency: requests under way at a time, the next one at once when one ends; ``None``
            sends each at its arrival time.
    """
    start_s = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - start_s

    async def one(query: Query, due_s: float) -> Sample:
        sample = Sample(number=query.number, prompt_tokens=query.prompt_tokens, due_s=due_s)
        sample.sent_s = clock()
        try:
            await asyncio.wait_for(send(query, sample, clock), ANSWER_TIMEOUT_S)
        except (OSError, EOFError, ValueError, HttpError, TimeoutError) as error:
            sample.reason = f"error: {type(error).__name__}: {error}"[:300]
        sample.new_tokens = sample.new_tokens or query.new_tokens
        return sample

    async def at_its_time(query: Query) -> Sample:
        await asyncio.sleep(max(0.0, query.arrival_s - clock()))
        return await one(query, query.arrival_s)

    if concurrency is None:
        return list(await asyncio.gather(*map(at_its_time, queries)))
    left = iter(queries)
    samples: list[Sample] = []

    async def worker() -> None:
        for query in left:
            samples.append(await one(query, clock()))

    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return samples


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return throughput, percentiles of latencies in seconds, and what went wrong."""
    good = [sample for sample in samples if sample.reason in ("length", "stop")]
    bad = [sample.reason for sample in samples if sample.reason not in ("length", "stop")]
    found: dict[str, Any] = {"requests": len(samples), "failed": len(bad), "errors": bad[:3]}
    if not good:
        return found
    seconds = max(sample.end_s for sample in good) - min(sample.sent_s for sample in good)
    tokens = sum(sample.new_tokens for sample in good)
    ttft = [sample.first_s - sample.due_s for sample in good]
    found |= {
        "seconds": round(seconds, 4),
        "output_tokens_per_s": round(tokens / seconds, 3),
        "requests_per_s": round(len(good) / seconds, 4),
        "ttft_s": _figures(ttft),
        "normalized_ttft_s": _figures(
            [value / sample.prompt_tokens for value, sample in zip(ttft, good, strict=True)]
        ),
        "total_generation_time_s": _figures([sample.end_s - sample.due_s for sample in good]),
        "time_per_output_token_s": _figures(
            [
                (sample.end_s - sample.first_s) / (sample.new_tokens - 1)
                for sample in good
                if sample.new_tokens > 1
            ]
        ),
        "late_s": _figures([sample.sent_s - sample.due_s for sample in good]),
    }
    return found


def rows(samples: Sequence[Sample]) -> list[list[Any]]:
    """Return samples in a short form; see ``SAMPLE_COLUMNS``."""
    return [
        [round(value, 4) if isinstance(value, float) else value for value in asdict(one).values()]
        for one in samples
    ]


SAMPLE_COLUMNS = tuple(Sample.__dataclass_fields__)


def _figures(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    found = {"mean": float(np.mean(values))}
    found |= {f"p{at}": float(np.percentile(values, at)) for at in PERCENTILES}
    return {name: round(value, 6) for name, value in found.items()}
