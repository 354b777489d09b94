"""Agents on a server: growing contexts, calls of tools, requests cut off, ranks that are killed.

    python benchmarks/faults agents --seconds 1800 --agents 8 --kill_every_s 180

The demo in float32 on two ranks, with a template of calls. Conversations are first played alone;
then agents play them again and again at the same time, and every answer must be the same. Exit
status 1 when a check fails, as of ``server``; the share of prompt tokens found in the cache of
prefixes is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load import events
from processes import open_files
from server import Stress, metrics, play, report, settle
from servers import llmpq_serve, make_plan
from workbench import ROOT

sys.path.insert(0, str(ROOT / "tests" / "server" / "tools"))

from model_templates import MODELS

CONVERSATIONS, TURNS, NEW_TOKENS = 16, 5, 32
CUT_OFF = 0.2
"""Share of requests that an agent cuts off and sends again."""
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": text, "parameters": schema, "strict": True},
    }
    for name, text, schema in (
        (
            "read_file",
            "Return lines of a file.",
            {
                "type": "object",
                "properties": {
                    "file": {"enum": ["setup.py", "README.md", "notes.txt"]},
                    "line": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["file", "line"],
                "additionalProperties": False,
            },
        ),
        (
            "list_folder",
            "Return the names in a folder.",
            {"type": "object", "properties": {}, "additionalProperties": False},
        ),
    )
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a client reads of an answer: its text, its calls by name and arguments, its end."""

    text: str
    calls: tuple[tuple[str, str], ...]
    reason: str | None

    def message(self) -> dict[str, Any]:
        """Return the message that the next request sends back."""
        calls = [
            {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": text}}
            for at, (name, text) in enumerate(self.calls)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        return message | ({"tool_calls": calls} if calls else {})


class Agents(Stress):
    """Plays conversations; ``known`` holds the answers of each when it was played alone."""

    def __init__(self, port: int, seed: int) -> None:
        super().__init__(port, (), seed)
        self.known: dict[int, list[Answer]] = {}

    def acts(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return what an agent does."""
        return {"agent": self.converse}

    async def play_alone(self) -> None:
        """Play every conversation, one request at a time."""
        for number in range(CONVERSATIONS):
            self.known[number] = []
            for turn in range(TURNS):
                answer = await self.answer(self.request_of(number, turn))
                self.known[number].append(answer)

    async def converse(self) -> None:
        """Play a conversation beside others; compare every answer."""
        number = self.chance.randrange(CONVERSATIONS)
        for turn, expected in enumerate(self.known[number]):
            body = self.request_of(number, turn)
            if self.chance.random() < CUT_OFF:
                await self.cut_off(body, self.chance.randrange(1, NEW_TOKENS // 2))
            found = await self.answer(body)
            if found != expected:
                self.problem(
                    f"conversation {number}, turn {turn}: found {found}, expected {expected}"
                )
            self.counts["compared"] += 1
            self.counts["calls"] += len(found.calls)

    def request_of(self, number: int, turn: int) -> dict[str, Any]:
        """Return a turn's request: all that was said, and what comes next."""
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": "You answer questions about a small project."}
        ]
        for earlier, answer in enumerate(self.known[number][:turn]):
            messages += [*_asked(number, earlier, messages), answer.message()]
        messages += _asked(number, turn, messages)
        return {
            "messages": messages, "tools": TOOLS, "parallel_tool_calls": False,
            "tool_choice": "required" if (number + turn) % 2 else "none",
            "temperature": 0, "max_tokens": NEW_TOKENS, "stream": True,
        }  # fmt: skip

    async def answer(self, body: dict[str, Any]) -> Answer:
        """Read an answer to its end."""
        text, reason = "", None
        calls: dict[int, list[str]] = {}
        async for event in events(self.port, "/v1/chat/completions", body):
            if "error" in event:
                raise ValueError(f"a stream ended with {event['error']}")
            for choice in event["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    known = calls.setdefault(call["index"], ["", ""])
                    known[0] += call["function"].get("name") or ""
                    known[1] += call["function"].get("arguments") or ""
                reason = choice["finish_reason"] or reason
        if reason is None:
            raise ValueError("a stream ended without a reason")
        return Answer(text=text, calls=tuple((one, two) for one, two in calls.values()),
                      reason=reason)  # fmt: skip

    async def cut_off(self, body: dict[str, Any], count: int) -> None:
        """Hang up after some events."""
        stream = events(self.port, "/v1/chat/completions", body)
        async with contextlib.aclosing(stream):  # type: ignore[type-var]
            async for _ in stream:
                count -= 1
                if not count:
                    break
        self.counts["cut off"] += 1


def _asked(number: int, turn: int, before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of the calls of the message before, then what the user says."""
    calls = before[-1].get("tool_calls", ())
    lines = " ".join(f"line {number + at} of {turn}," for at in range(3))
    results = [{"role": "tool", "tool_call_id": one["id"], "content": lines} for one in calls]
    asked = f"Question {turn} of {number}: what is in the file?"
    return [*results, {"role": "user", "content": asked}]


def hit_rate(port: int) -> float:
    """Return the share of prompt tokens that were found in the cache of prefixes."""
    names = "prefix_cache_hits_total", "prefix_cache_queries_total"
    hits, queries = metrics(port, *names).values()
    return hits / queries if queries else 0.0


def main(argv: Sequence[str]) -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(
        prog="faults agents",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--kill_every_s", type=float, default=180.0, help="0 kills nothing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="agents-") as name:
        folder = Path(name)
        model = shutil.copytree(ROOT / "models" / "demo", folder / "model")
        template = MODELS["qwen_coder"].source
        (model / "chat_template.jinja").write_text(template, encoding="utf-8")
        plan = make_plan(model, folder / "plan.json", bits=16, batch=8, stages=2, dtype="float32",
                         prompt_tokens=700, new_tokens=300)  # fmt: skip
        with llmpq_serve(model, plan, folder / "log", "--max_restarts", "1000") as server:
            agents = Agents(server.port, options.seed)
            asyncio.run(agents.play_alone())
            descriptors = len(open_files(server.pid))
            asyncio.run(play(options, server, agents, ["agent"] * options.agents))
            asyncio.run(settle(server, agents, descriptors))
            agents.counts["% found in the cache"] = round(100 * hit_rate(server.port))
        return report(agents, folder / "log")
