"""AsyncEngine with ranks as processes: tokens equal generate, also when a rank is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from helpers.byte_tokenizer import text_of, write_byte_tokenizer
from helpers.clocks import PATIENCE_S
from helpers.ranks import make_plan
from helpers.tiny_models import generate_alone, load_reference

from llmpq import AsyncEngine, GenerationRequest, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.dist
torch.set_num_threads(1)
PROMPTS = [[3 + number, 4, 5, 6] for number in range(6)]
FREE = SamplingParams(ignore_eos=True, max_tokens=24)


@pytest.fixture(scope="module")
def model_dir(tiny_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for path in tiny_model("llama", seed=1, vocab_size=300).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return write_byte_tokenizer(folder)


@pytest.fixture(scope="module")
def expected(model_dir) -> list[list[int]]:
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    return [generate_alone(model, prompt, 24)[0][len(prompt) :] for prompt in PROMPTS]


def workers() -> list[int]:
    """Processes of ranks that this process started, in the order of their start."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            status = (path / "stat").read_text().rpartition(") ")[2].split()
            command = (path / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if int(status[1]) == os.getpid() and b"llmpq.dist.launch.worker" in command:
            found.append(int(path.name))
    return sorted(found)


async def tokens_of(
    engine: AsyncEngine, number: int, after: asyncio.Event | None = None, made: Sequence[int] = ()
):
    item = GenerationRequest(id=str(number), prompt_token_ids=tuple(PROMPTS[number]), sampling=FREE)
    found: list[int] = []
    async with aclosing(engine.generate(item, made)) as outputs:
        async for output in outputs:
            found += output.token_ids
            if after is not None and len(found) > 4:
                after.set()
    return found


@pytest.mark.parametrize(
    ("rank", "transport"),
    [
        pytest.param(0, "auto", marks=pytest.mark.slow),
        (1, "auto"),
        pytest.param(1, "torch", marks=pytest.mark.slow),
    ],
)
def test_streams_go_on_when_a_rank_is_killed(model_dir, expected, rank, transport):
    async def main() -> None:
        plan = make_plan((0, 1, 3), batch=4, prompt_tokens=16, new_tokens=24)
        engine = await AsyncEngine.start(plan, model_dir, token_budget=9, transport=transport)
        try:
            assert engine.max_model_len == 40
            found = await asyncio.gather(*(tokens_of(engine, n) for n in range(6)))
            assert found == expected
            # An answer that another engine began goes on after its tokens.
            assert await tokens_of(engine, 0, made=expected[0][:9]) == expected[0][9:]
            begun = asyncio.Event()
            tasks = [asyncio.create_task(tokens_of(engine, n, begun)) for n in range(6)]
            await begun.wait()
            os.kill(workers()[rank], signal.SIGKILL)
            assert await asyncio.gather(*tasks) == expected
            assert engine.is_alive
        finally:
            await engine.close()
        assert not workers()

    asyncio.run(main())


def test_answers_of_a_form_and_with_drafts_come_from_the_ranks(model_dir):
    pytest.importorskip("llguidance")

    async def main() -> None:
        plan = make_plan((0, 3), batch=4, prompt_tokens=16, new_tokens=24)
        drafts = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
        engine = await AsyncEngine.start(plan, model_dir, speculative_config=drafts)
        try:
            same = SamplingParams(ignore_eos=True, max_tokens=20, logit_bias={5: 100.0})
            item = GenerationRequest(id="b", prompt_token_ids=(3, 4), sampling=same)
            async with aclosing(engine.generate(item)) as outputs:
                found = [output async for output in outputs]
            assert [token for output in found for token in output.token_ids] == [5] * 20
            # The counters of the last steps come after the last token.
            async with asyncio.timeout(PATIENCE_S):
                while engine.stats.num_accepted_tokens <= 10:
                    await asyncio.sleep(0.02)
            assert engine.stats.num_draft_tokens >= engine.stats.num_accepted_tokens
            params = SamplingParams(
                structured_outputs=StructuredOutputsParams(choice=("yes", "no")), max_tokens=5
            )
            item = GenerationRequest(id="a", prompt_token_ids=(3, 4), sampling=params)
            async with aclosing(engine.generate(item)) as outputs:
                found = [output async for output in outputs]
            tokens = [token for output in found for token in output.token_ids]
            assert text_of(tokens) in ("yes", "no")
            assert found[-1].finish_reason == "stop"
        finally:
            await engine.close()

    asyncio.run(main())
