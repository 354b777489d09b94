"""A pipeline as processes: loads once, and answers every call as transformers would."""

from __future__ import annotations

import doctest
import os
import shutil
import signal
import threading
from pathlib import Path
from types import FrameType

import pytest
from helpers.ranks import make_plan
from helpers.tiny_models import generate_alone, load_reference, write_tokenizer
from transformers import AutoTokenizer

from llmpq import Pipeline, SamplingParams, api
from llmpq.dist import Prompt, generate_offline
from llmpq.dist.metrics.progress import Event
from llmpq.errors import SpecError, StageError

pytestmark = pytest.mark.dist

PLAN = make_plan((0, 1, 3), prefill=2, decode=3, batch=4, prompt_tokens=16, new_tokens=8)
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9, 10, 11, 50, 51], [61], [33, 34, 35, 36]]
WORDS = [f"w{number}" for number in range(100)]
TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}w7{% endif %}{{ extra }}"
)
CHAT = [
    {"role": "user", "content": "w1 w2"},
    {"role": "assistant", "content": "w3"},
    {"role": "user", "content": "w4 w5"},
]


@pytest.fixture(scope="module")
def model_dir(tiny_model, tmp_path_factory):
    """A tiny model that knows the words w0 to w99, and a chat template."""
    folder = tmp_path_factory.mktemp("words") / "model"
    shutil.copytree(tiny_model("llama", seed=1), folder)
    write_tokenizer(folder, WORDS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Interrupter:
    """Sends Ctrl-C to this process once, at the next new token after it is armed.

    The main thread then waits for answers. A signal at a fixed time may arrive while a callback of
    the garbage collector runs, which drops its exception.
    """

    def __init__(self) -> None:
        self.is_armed = threading.Event()

    def report(self, event: Event) -> None:
        if event.kind == "tokens" and event.done and self.is_armed.is_set():
            self.is_armed.clear()
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def interrupter() -> Interrupter:
    return Interrupter()


@pytest.fixture(scope="module")
def pipeline(model_dir, interrupter):
    drafts = {"num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with Pipeline(PLAN, model=model_dir, speculative_config=drafts, progress=interrupter) as found:
        yield found


@pytest.fixture(scope="module")
def expected(model_dir):
    """What transformers generates for each prompt alone, without end tokens."""
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    return [tuple(generate_alone(model, prompt, 8)[0][len(prompt) :]) for prompt in PROMPTS]


def test_examples_of_the_docstrings_run(model_dir):
    names = vars(api) | {"strategy": PLAN, "model_dir": model_dir}
    found = doctest.testmod(api, globs=names, optionflags=doctest.ELLIPSIS)
    assert found.attempted > 5
    assert not found.failed


def test_many_calls_equal_transformers_and_generate_offline(pipeline, model_dir, expected):
    params = SamplingParams(ignore_eos=True)
    for _ in range(2):
        outputs = pipeline.generate(PROMPTS, params)
        assert [output.token_ids for output in outputs] == expected
        assert {output.finish_reason for output in outputs} == {"length"}
        assert [output.prompt for output in outputs] == [tuple(prompt) for prompt in PROMPTS]
    text = pipeline.generate("w1 w2 w3 w4 w5", params)[0]
    assert text.token_ids == expected[0]
    assert text.text == " ".join(WORDS[token] for token in expected[0])
    batch = [
        Prompt(id=number, where="", token_ids=tuple(prompt), ignore_eos=True)
        for number, prompt in enumerate(PROMPTS)
    ]
    offline = generate_offline(PLAN, batch, model_dir=model_dir)
    assert [result.token_ids for result in offline] == expected


def test_sampling_parameters_hold_for_one_call(pipeline, expected):
    stop = expected[0][3]
    end = expected[0].index(stop) + 1
    stopped = pipeline.generate(PROMPTS[:1], SamplingParams(stop_token_ids=(stop,)))[0]
    assert stopped.token_ids == expected[0][:end]
    assert stopped.finish_reason == "stop"
    assert len(pipeline.generate(PROMPTS, SamplingParams(max_tokens=2))[4].token_ids) == 2
    warm = SamplingParams(temperature=2.0, seed=3, ignore_eos=True)
    first, second = (pipeline.generate(PROMPTS, warm) for _ in range(2))
    assert first == second
    assert [output.token_ids for output in first] != expected
    assert first != pipeline.generate(PROMPTS, SamplingParams(temperature=2.0, seed=4))


def test_each_prompt_has_its_own_sampling_parameters(pipeline, expected):
    warm = SamplingParams(temperature=2.0, seed=3, ignore_eos=True)
    greedy = SamplingParams(ignore_eos=True)
    params = [warm if number % 2 else greedy for number in range(len(PROMPTS))]
    mixed = [output.token_ids for output in pipeline.generate(PROMPTS, params)]
    alone = [output.token_ids for output in pipeline.generate(PROMPTS, warm)]
    assert mixed == [(alone if number % 2 else expected)[number] for number in range(len(PROMPTS))]
    with pytest.raises(SpecError, match="one for each"):
        pipeline.generate(PROMPTS, params[1:])


def test_a_stream_yields_every_token_and_the_text_of_generate(pipeline):
    params = SamplingParams(ignore_eos=True)
    whole = pipeline.generate(PROMPTS, params)
    chunks = list(pipeline.stream(PROMPTS, params))
    for output in whole:
        own = [chunk for chunk in chunks if chunk.id == output.id]
        assert tuple(token for chunk in own for token in chunk.token_ids) == output.token_ids
        assert "".join(chunk.text for chunk in own) == output.text
        assert [chunk.finish_reason for chunk in own] == [None] * 8 + ["length"]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], [10**6]], "prompt 1: .*found token 1000000"),
        ([[1] * 121], "prompt 0: found 121 prompt tokens and 8 new ones, .* 128 positions"),
        ("", "prompt 0: field 'prompt'"),
        ([[]], "prompt 0: field 'prompt_token_ids'"),
        ("w1 \udc80", "prompt 0: field 'prompt'"),
        (None, "prompts: found None, expected a text or a list of token ids"),
        ([1, 2], r"prompts\[0\]: found 1, expected a text or a list of token ids"),
    ],
)
def test_a_bad_prompt_refuses_its_call_alone(pipeline, expected, prompts, message):
    with pytest.raises(SpecError, match=message):
        pipeline.generate(prompts)
    answer = pipeline.generate(PROMPTS[:1], SamplingParams(ignore_eos=True))[0]
    assert answer.token_ids == expected[0]


def test_a_conversation_is_answered_like_its_rendered_prompt(pipeline, model_dir):
    params = SamplingParams(ignore_eos=True)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    answer = pipeline.chat(CHAT, params)
    assert answer == pipeline.generate([tokens], params)[0]
    assert answer.prompt == (1, 2, 3, 4, 5, 7)
    chunks = list(pipeline.stream_chat(CHAT, params))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(answer.token_ids)
    text = pipeline.chat("w1", params, chat_template_kwargs={"extra": " w9"})
    assert text.prompt == (1, 7, 9)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages: found None, expected a text or a list"),
        ([], "messages: found none, expected at least one"),
        ([{"content": "w1"}], r"messages\[0\]: found {'content': 'w1'}, expected a mapping"),
        (["w1"], r"messages\[0\]: found 'w1', expected a mapping with a role"),
        ({"role": "user", "content": "w1"}, r"messages\[0\]: found 'role', expected a mapping"),
        ([{"role": "user", "content": 1}], "expected content to be a text or a list"),
        ("w1 " * 120, "prompt 0: found 121 prompt tokens and 8 new ones, .* 128 positions"),
    ],
)
def test_a_bad_conversation_is_named(pipeline, messages, message):
    with pytest.raises(SpecError, match=message):
        pipeline.chat(messages)


def test_a_stream_left_early_is_cancelled(pipeline, expected):
    params = SamplingParams(ignore_eos=True)
    for chunk in pipeline.stream(PROMPTS * 20, params):
        assert chunk.token_ids
        break
    kept = pipeline.stream(PROMPTS * 20, params)
    next(kept)
    assert pipeline.generate(PROMPTS[:1], params)[0].token_ids == expected[0]
    with pytest.raises(StageError, match="ended by a later one"):
        next(kept)


def test_calls_of_several_threads_wait_for_each_other(pipeline, expected):
    found: dict[int, tuple[int, ...]] = {}

    def call(number: int) -> None:
        params = SamplingParams(ignore_eos=True)
        found[number] = pipeline.generate(PROMPTS[number : number + 1], params)[0].token_ids

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(PROMPTS))] == expected


def test_an_interrupted_call_is_cancelled_and_the_pipeline_stays(pipeline, interrupter, expected):
    params = SamplingParams(ignore_eos=True)

    def interrupt(_: int, frame: FrameType | None) -> None:
        if frame is not None and Path(frame.f_code.co_filename).name == "_weakrefset.py":
            interrupter.is_armed.set()  # Python drops exceptions there: once more
            return
        raise KeyboardInterrupt

    # A shell that starts the tests in the background makes them ignore the signal.
    before = signal.signal(signal.SIGINT, interrupt)
    interrupter.is_armed.set()
    try:
        with pytest.raises(KeyboardInterrupt):
            pipeline.generate(PROMPTS * 2000, params)
    finally:
        interrupter.is_armed.clear()
        signal.signal(signal.SIGINT, before)
    assert pipeline.generate(PROMPTS[:1], params)[0].token_ids == expected[0]
