"""OpenAI's own client against a server on a loopback port."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.served import demo_tokenizer, make_service, serving

PROMPT = "Open the file and"
MESSAGES = [{"role": "user", "content": "Say hello"}]


def encode(text: str) -> list[int]:
    return demo_tokenizer().encode(text)


def expected_text(prompt: list[int], count: int) -> str:
    """Return the text of the engine's own greedy answer."""
    request = type("R", (), {})()
    request.prompt_token_ids = tuple(prompt)
    request.sampling = type("S", (), {"temperature": 0, "seed": 0})()
    engine = FakeEngine()
    return demo_tokenizer().decode([engine.token(request, place) for place in range(count)])


def test_models_are_listed_with_their_length(client, served):
    models = list(client.models.list())
    assert [model.id for model in models] == ["demo", "other-name"]
    assert models[0].max_model_len == served.engine.max_model_len
    assert client.models.retrieve("demo").root.endswith("models/demo")


def test_completion_is_the_text_of_the_engines_tokens(client):
    answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=9, temperature=0)
    assert answer.choices[0].text == expected_text(encode(PROMPT), 9)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(encode(PROMPT))
    assert answer.usage.completion_tokens == 9
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")


def test_all_forms_of_a_prompt_give_the_same_answer(client):
    forms = [PROMPT, [PROMPT], encode(PROMPT), [encode(PROMPT)]]
    texts = {
        client.completions.create(model="demo", prompt=form, temperature=0).choices[0].text
        for form in forms
    }
    assert texts == {expected_text(encode(PROMPT), 16)}


def test_several_prompts_are_answered_in_their_order(client):
    prompts = ["one", "two", "three"]
    answer = client.completions.create(model="demo", prompt=prompts, max_tokens=4, temperature=0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.text for choice in answer.choices] == [
        expected_text(encode(prompt), 4) for prompt in prompts
    ]


def test_n_answers_differ_and_repeat_with_a_seed(client):
    def ask(seed: int | None) -> list[str]:
        answer = client.completions.create(
            model="demo", prompt=PROMPT, n=3, seed=seed, temperature=1, max_tokens=5
        )
        assert answer.usage.completion_tokens == 15
        assert answer.usage.prompt_tokens == len(encode(PROMPT))
        return [choice.text for choice in answer.choices]

    assert ask(7) == ask(7)
    assert len(set(ask(7))) == 3
    assert ask(None) != ask(None)


def test_stream_is_the_whole_answer_in_pieces(client):
    whole = client.completions.create(model="demo", prompt=PROMPT, max_tokens=30, temperature=0)
    chunks = list(
        client.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *texts, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in texts][-1] == "length"
    assert usage.choices == []
    assert usage.usage == whole.usage
    assert all(chunk.usage is None for chunk in texts)


def test_stream_has_usage_only_if_asked(client):
    chunks = list(client.completions.create(model="demo", prompt=PROMPT, stream=True))
    assert all(chunk.choices for chunk in chunks)
    options = {"continuous_usage_stats": True}
    chunks = list(
        client.completions.create(
            model="demo", prompt=PROMPT, stream=True, stream_options=options, max_tokens=4
        )
    )
    assert [chunk.usage.completion_tokens for chunk in chunks][-1] == 4


def test_chat_renders_the_template_and_answers(client, served):
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_completion_tokens=6, temperature=0
    )
    prompt = demo_tokenizer().encode("<user>Say hello\n<assistant>", add_special_tokens=False)
    assert list(served.engine.requests.values())[-1].prompt_token_ids == tuple(prompt)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == expected_text(prompt, 6)
    assert answer.object == "chat.completion"


def test_chat_streams_role_content_and_reason_for_each_answer(client):
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=5, n=2, stream=True, seed=3
        )
    )
    whole = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=5, n=2, seed=3
    )
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert (
            "".join(choice.delta.content or "" for choice in mine)
            == whole.choices[index].message.content
        )
        assert mine[-1].finish_reason == "length"


def test_text_parts_and_tools_reach_the_template(client, served):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": parts}],
        tools=[tool],
        max_tokens=1,
    )
    prompt = list(served.engine.requests.values())[-1].prompt_token_ids
    assert demo_tokenizer().decode(prompt) == (
        '<user>one\ntwo\n[{"type": "function", "function": {"name": "f", "parameters": '
        '{"type": "object"}}}]\n<assistant>'
    )


def test_completion_logprobs_have_tokens_offsets_and_best_tokens(client):
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=4, logprobs=3, temperature=0
    )
    found = answer.choices[0].logprobs
    text = answer.choices[0].text
    assert "".join(found.tokens) == text
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert text[offset:].startswith(token)
    assert found.token_logprobs == [-0.5] * 4
    assert all(1 <= len(tops) <= 4 for tops in found.top_logprobs)
    assert all(
        tops[token] == -0.5 for token, tops in zip(found.tokens, found.top_logprobs, strict=True)
    )


def test_echo_has_the_prompts_logprobs_first(client):
    for tokens in (0, 2):
        answer = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=tokens, echo=True, logprobs=1, temperature=0
        )
        choice = answer.choices[0]
        prompt = encode(PROMPT)
        assert choice.text == PROMPT + (expected_text(prompt, tokens) if tokens else "")
        assert len(choice.logprobs.tokens) == len(prompt) + tokens
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.top_logprobs[0] is None
        assert all(value == -0.5 for value in choice.logprobs.token_logprobs[1:])
        assert answer.usage.completion_tokens == tokens


def test_logprobs_of_a_prompt_are_computed_once_for_all_its_answers(client, served):
    served.engine.requests.clear()
    prompts = [PROMPT, "Another prompt"]
    answer = client.completions.create(
        model="demo", prompt=prompts, n=3, max_tokens=2, echo=True, logprobs=1, seed=5
    )
    for choice in answer.choices:
        tokens = len(encode(prompts[choice.index // 3]))
        assert choice.logprobs.token_logprobs[:2] == [None, -0.5]
        assert len(choice.logprobs.tokens) == tokens + 2
    asked = [one.sampling.prompt_logprobs for one in served.engine.requests.values()]
    assert sorted(asked, key=str) == [1, 1, None, None, None, None]


def test_answers_end_where_the_first_to_a_prompt_fails():
    engine = FakeEngine()
    engine.fails_after = 0
    with (
        serving(make_service(engine)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.InternalServerError),
    ):
        client.completions.create(
            model="demo", prompt=PROMPT, n=2, max_tokens=2, echo=True, logprobs=1
        )


def test_echo_streams_the_prompt_once(client):
    chunks = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=3, echo=True, stream=True, temperature=0
    )
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == PROMPT + expected_text(encode(PROMPT), 3)


def test_chat_logprobs_have_bytes_and_best_tokens(client):
    for stream in (False, True):
        answer = client.chat.completions.create(
            model="demo",
            messages=MESSAGES,
            max_tokens=3,
            logprobs=True,
            top_logprobs=2,
            temperature=0,
            stream=stream,
        )
        choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
        content = [item for c in choices if c.logprobs for item in c.logprobs.content]
        assert len(content) == 3
        for item in content:
            assert bytes(item.bytes).decode() == item.token
            assert [top.logprob for top in item.top_logprobs] == [-0.5, -1.5]
            assert item.top_logprobs[0].token == item.token


@pytest.mark.parametrize("at_once", [1, 3])
def test_stop_string_ends_answer_and_frees_the_engine(served, client, at_once):
    words = demo_tokenizer().encode(" one two STOP three four five", add_special_tokens=False)
    served.engine.script, served.engine.at_once = words * 3, at_once
    try:
        for stream in (False, True):
            answer = client.completions.create(
                model="demo", prompt="x", max_tokens=40, stop=["STOP"], stream=stream
            )
            parts = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
            assert "".join(part.text for part in parts) == " one two "
            assert parts[-1].finish_reason == "stop"
            assert parts[-1].stop_reason == "STOP"
        kept = client.completions.create(
            model="demo",
            prompt="x",
            max_tokens=40,
            stop="STOP",
            extra_body={"include_stop_str_in_output": True},
        )
        assert kept.choices[0].text == " one two STOP"
    finally:
        served.engine.script, served.engine.at_once = None, 1
    assert not served.engine.active
    assert served.service.admission.num_choices == 0


@pytest.mark.parametrize("at_once", [1, 3])
def test_stop_token_is_not_part_of_the_text(served, client, at_once):
    words = demo_tokenizer().encode(" one two three", add_special_tokens=False)
    served.engine.script, served.engine.at_once = words, at_once
    try:
        answer = client.completions.create(
            model="demo",
            prompt="x",
            max_tokens=40,
            extra_body={"stop_token_ids": [words[1]], "return_token_ids": True},
        )
        assert answer.choices[0].token_ids == words[:2]
        assert answer.choices[0].text == demo_tokenizer().decode(words[:1])
        assert answer.choices[0].stop_reason == words[1]
        free = client.completions.create(model="demo", prompt="x", max_tokens=40)
        assert free.choices[0].text == " one two three"
        assert free.choices[0].finish_reason == "stop"
        assert free.choices[0].stop_reason is None
    finally:
        served.engine.script, served.engine.at_once = None, 1


@pytest.mark.parametrize("at_once", [1, 3])
def test_last_token_of_a_complete_form_is_part_of_the_text(served, client, at_once):
    words = demo_tokenizer().encode(" one two three", add_special_tokens=False)
    served.engine.script, served.engine.at_once = words, at_once
    try:
        answer = client.completions.create(
            model="demo",
            prompt="x",
            max_tokens=40,
            extra_body={"structured_outputs": {"choice": [" one two three"]}},
        )
    finally:
        served.engine.script, served.engine.at_once = None, 1
    assert answer.choices[0].text == " one two three"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason is None


def test_fields_of_vllm_reach_the_engine(served, client):
    client.completions.create(
        model="demo",
        prompt="x",
        max_tokens=3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 200},
        extra_body={
            "top_k": 7,
            "min_p": 0.25,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "allowed_token_ids": [5, 9],
            "bad_words": ["file"],
            "priority": -3,
            "cache_salt": "tenant",
            "structured_outputs": {"regex": "a+"},
        },
    )
    request = list(served.engine.requests.values())[-1]
    sampling = request.sampling
    assert (request.priority, request.cache_salt) == (-3, "tenant")
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (7, 0.25, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.logit_bias == ((5, 100.0),)
    assert (sampling.min_tokens, sampling.ignore_eos) == (2, True)
    assert (sampling.stop_token_ids, sampling.allowed_token_ids) == ((9,), (5, 9))
    words = {demo_tokenizer().decode(word) for word in sampling.bad_words_ids}
    assert words == {"file", " file"}
    assert sampling.structured_outputs.regex == "a+"


def test_response_format_reaches_the_engine_as_a_schema(served, client):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        max_tokens=2,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    )
    form = list(served.engine.requests.values())[-1].sampling.structured_outputs
    assert form.json == '{"type": "object", "properties": {"a": {"type": "integer"}}}'


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        ({"model": "nothing", "prompt": "x"}, openai.NotFoundError, "does not exist"),
        ({"prompt": []}, openai.BadRequestError, "prompt: "),
        ({"prompt": "x", "max_tokens": 5000}, openai.BadRequestError, "maximum context length"),
        ({"prompt": [5000]}, openai.BadRequestError, "out of vocabulary"),
        ({"prompt": "x", "temperature": -1}, openai.BadRequestError, "temperature"),
        ({"prompt": "x", "max_tokens": 0}, openai.BadRequestError, "at least 1"),
        ({"prompt": "x", "suffix": "y"}, openai.BadRequestError, "suffix"),
        ({"prompt": "x", "n": 0}, openai.BadRequestError, "n: "),
        (
            {"prompt": ["x"] * 33, "n": 128},
            openai.BadRequestError,
            "found 4224 answers",
        ),
        ({"prompt": "x", "logprobs": 21}, openai.BadRequestError, "logprobs"),
        ({"prompt": "x", "stop": [""]}, openai.BadRequestError, "stop"),
        (
            {"prompt": "x", "stream_options": {"include_usage": True}},
            openai.BadRequestError,
            "stream_options",
        ),
        (
            {"prompt": "x", "stream": True, "extra_body": {"structured_outputs": {"regex": "(("}}},
            openai.BadRequestError,
            "not valid",
        ),
        ({"prompt": "x", "logit_bias": {"a": 1}}, openai.BadRequestError, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"9999": 1}}, openai.BadRequestError, "9999"),
    ],
)
def test_errors_have_the_clients_types(client, call, error, message):
    with pytest.raises(error, match=message) as raised:
        client.completions.create(**{"model": "demo"} | call)
    body = raised.value.body
    assert body["code"] == raised.value.status_code
    assert set(body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/rerank"), ("GET", "/v1/audio/voices"), ("POST", "/chat")]
)
def test_an_endpoint_that_is_not_there_is_named_with_where_to_look(served, method, path):
    answer = httpx.request(method, served.url + path, json={}, timeout=PATIENCE_S)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 404
    assert error["message"] == (
        f"There is no endpoint {method} {path}; GET /openapi.json lists them."
    )
    assert "/v1/chat/completions" in httpx.get(f"{served.url}/openapi.json").json()["paths"]


def test_missing_chat_template_is_a_clear_error():
    service = make_service(FakeEngine(), tokenizer=demo_tokenizer(None))
    with (
        serving(service) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="no chat template"),
    ):
        client.chat.completions.create(model="demo", messages=MESSAGES)


def test_model_without_tokenizer_takes_and_gives_tokens():
    service = make_service(FakeEngine(), has_tokenizer=False)
    with (
        serving(service) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="no tokenizer"):
            client.completions.create(model="demo", prompt="x")
        answer = client.completions.create(
            model="demo", prompt=[5, 6], max_tokens=3, extra_body={"return_token_ids": True}
        )
        assert answer.choices[0].text == ""
        assert len(answer.choices[0].token_ids) == 3
        assert answer.choices[0].prompt_token_ids == [5, 6]


def test_failed_engine_ends_streams_with_an_error_that_names_no_host():
    service = make_service(FakeEngine())
    service.engine.fails_after = 2
    with (
        serving(service) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
    ):
        chunks = client.completions.create(model="demo", prompt="x", stream=True)
        with pytest.raises(openai.APIError, match="The engine failed") as raised:
            list(chunks)
        assert "secret" not in str(raised.value)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="demo", prompt="x")
        assert service.admission.num_choices == 0


def test_client_that_leaves_a_stream_aborts_its_request():
    service = make_service(FakeEngine(step_s=0.01, max_model_len=100_000))
    with (
        serving(service) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = client.completions.create(
            model="demo", prompt="x", stream=True, max_tokens=50_000, n=2
        )
        next(iter(stream))
        assert len(service.engine.active) == 2
        stream.close()
        wait_until(lambda: not service.engine.active)
        assert len(service.engine.aborted) == 2
        assert service.admission.num_choices == service.admission.queued_tokens == 0


def test_client_that_leaves_a_whole_answer_aborts_its_request():
    service = make_service(FakeEngine(step_s=0.01, max_model_len=100_000))
    with (
        serving(service) as served,
        openai.OpenAI(
            base_url=f"{served.url}/v1", api_key="x", max_retries=0, timeout=3.0
        ) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        failing = pool.submit(
            client.completions.create, model="demo", prompt="x", max_tokens=50_000
        )
        wait_until(lambda: service.engine.active)
        with pytest.raises(openai.APITimeoutError):
            failing.result()
        wait_until(lambda: not service.engine.active)
        assert len(service.engine.aborted) == 1


def wait_until(condition, timeout_s: float = PATIENCE_S) -> None:
    """Wait for another thread; the time is a limit, not a measurement."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s
        threading.Event().wait(0.005)
