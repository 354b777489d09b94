"""What drafts gain and lose on real texts, where a step takes what its rows take."""

from __future__ import annotations

import random

import pytest
from helpers.docs_pages import ROOT
from tokenizers import Tokenizer

from llmpq.batching.block_scheduler import BlockScheduler
from llmpq.batching.engine_step import EngineLimits, EngineRequest
from llmpq.batching.queue_order import queue_order
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.engine.drafters import PromptLookup

LENGTH = 192
CONFIG = SpeculativeConfig(num_speculative_tokens=5)


def text_of(name: str, number: int) -> list[int]:
    """Return the tokens of a prompt and of an answer of the same length."""
    chance = random.Random(number)
    if name == "random":
        return chance.sample(range(3, 5000), 2 * LENGTH)
    if name == "matches, mostly wrong":
        return [chance.randrange(3, 6) for _ in range(2 * LENGTH)]
    text = (ROOT / "models" / "demo" / "heldout.txt").read_text(encoding="utf-8")
    text = text[len(text) // 20 * number :][: 20 * LENGTH]
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / "demo" / "tokenizer.json"))
    if name == "prose":
        return list(tokenizer.encode(text).ids[: 2 * LENGTH])
    edited = text.replace(" the ", " this ")
    return [token for one in (text, edited) for token in tokenizer.encode(one).ids[:LENGTH]]


def seconds_of(text: list[int], row_cost: float, drafts: bool, first: float = 0.25) -> float:
    """Return the seconds of the answer, in steps of one row; ``first`` is the forecast cost."""
    lookup, known, draft = PromptLookup(CONFIG), text[:LENGTH], []

    def propose(_: int, most: int) -> int:
        draft.extend(lookup.propose(known, most))
        return len(draft)

    limits = EngineLimits(
        token_budget=4 * LENGTH,
        max_sequences=1,
        num_blocks=LENGTH,
        block_size=16,
        num_speculative_tokens=CONFIG.num_speculative_tokens if drafts else 0,
        row_cost=first,
    )
    scheduler = BlockScheduler(limits, queue_order("fcfs"), propose if drafts else None)
    scheduler.add(
        EngineRequest(
            request=0,
            token_ids=tuple(known),
            prompt_tokens=LENGTH,
            max_tokens=LENGTH,
            arrival_s=0.0,
        )
    )
    now_s = first_s = 0.0
    while not scheduler.is_idle:
        step = scheduler.schedule(now_s)
        assert step is not None
        now_s += 1 + row_cost * (step.chunks[0].count - 1)
        right = 0
        while right < len(draft) and draft[right] == text[len(known) + right]:
            right += 1
        *accepted, last = text[len(known) : len(known) + right + 1]
        known += [*accepted, last]
        draft.clear()
        ended = {0} if len(known) == 2 * LENGTH else ()
        scheduler.complete(step.number, {0: last}, ended, {0: accepted}, now_s=now_s)
        first_s = first_s or now_s
    return now_s - first_s


@pytest.mark.parametrize("row_cost", [0.0, 0.05, 0.15, 0.4, 0.7])
@pytest.mark.parametrize("name", ["edited", "prose", "random", "matches, mostly wrong"])
def test_no_text_is_slower_with_drafts_and_an_edited_one_is_faster(name, row_cost):
    """The engine starts from the wrong cost and measures the right one."""
    gains = []
    for number in range(3):
        text = text_of(name, number)
        times = [seconds_of(text, row_cost, drafts) for drafts in (False, True)]
        assert times[0] == pytest.approx(LENGTH - 1)
        gains.append(times[0] / times[1])
    assert min(gains) > 0.97
    if name == "edited" and row_cost < 0.2:
        assert min(gains) > 1.5


def test_a_forecast_that_drafts_save_nothing_is_believed_from_the_start():
    text = text_of("edited", 0)
    assert seconds_of(text, 1.0, drafts=True, first=1.0) == pytest.approx(LENGTH - 1)
    assert seconds_of(text, 1.0, drafts=True) < 1.05 * (LENGTH - 1)
