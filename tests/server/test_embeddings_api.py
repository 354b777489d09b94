"""``/v1/embeddings``, asked by OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from pathlib import Path

import httpx
import openai
import pytest
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine, embedding_of
from helpers.gguf_headers import gguf_bytes, key
from helpers.served import demo_tokenizer, make_service, serving

from llmpq.errors import SpecError
from llmpq.server.apis.embeddings import embedding_settings
from llmpq.server.batch import run_batch
from llmpq.server.service import EmbeddingSettings

TEXT = "Open the file and"


def encode(text: str) -> list[int]:
    return demo_tokenizer().encode(text)


def expected(token_ids: list[int], pooling: str = "last") -> list[float]:
    return pytest.approx(embedding_of(tuple(token_ids), pooling), abs=1e-6)


@pytest.mark.parametrize("encoding", ["float", "base64", openai.omit])
def test_all_forms_of_an_input_have_the_same_embedding(client, served, encoding):
    tokens = encode(TEXT)
    for form in (TEXT, [TEXT], tokens, [tokens]):
        answer = client.embeddings.create(model="demo", input=form, encoding_format=encoding)
        (item,) = answer.data
        found = item.embedding
        if encoding == "base64":  # the client decodes what it asked for by itself only
            found = struct.unpack("<8f", base64.b64decode(found))
        assert list(found) == expected(tokens)
        assert (answer.object, item.object, item.index) == ("list", "embedding", 0)
        assert answer.model == "demo"
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(tokens)
    assert served.service.admission.num_choices == 0


def test_embeddings_come_in_the_order_of_the_inputs(client):
    texts = ["one", "two and three", "four"]
    answer = client.embeddings.create(model="demo", input=texts)
    assert [item.index for item in answer.data] == [0, 1, 2]
    for item, text in zip(answer.data, texts, strict=True):
        assert item.embedding == expected(encode(text))
    assert answer.usage.prompt_tokens == sum(len(encode(text)) for text in texts)


def test_an_input_is_cut_as_it_says(client):
    tokens = list(range(300, 320))
    for options, kept in (
        ({"truncate_prompt_tokens": 5}, tokens[-5:]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "right"}, tokens[:5]),
        ({"truncate_prompt_tokens": -1}, tokens),
    ):
        answer = client.embeddings.create(model="demo", input=tokens, extra_body=options)
        assert answer.data[0].embedding == expected(kept)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "input: Field required"),
        ({"input": "", "add_special_tokens": False}, "The prompt is empty"),
        ({"input": []}, "none of them empty"),
        ({"input": [[]]}, "a list of tokens that is not empty"),
        ({"input": ["a", 3]}, "expected a list of texts"),
        ({"input": [4096]}, "out of vocabulary"),
        ({"input": [300] * 1024}, "longest input of this model has 1023 tokens"),
        ({"input": ["a"] * 2049}, "expected at most 2048"),
        ({"input": "a", "dimensions": 4}, "was not trained for embeddings that are cut"),
        ({"input": "a", "dimensions": 0}, "greater than or equal to 1"),
        ({"input": "a", "encoding_format": "hex"}, "'float' or 'base64'"),
        ({"input": "a", "stream": True}, "not available when stream"),
        ({"input": "\ud800"}, "lone surrogate"),
    ],
)
def test_what_cannot_be_answered_says_why(served, fields, text):
    answer = httpx.post(
        f"{served.url}/v1/embeddings",
        content=json.dumps(fields),
        headers={"Content-Type": "application/json"},
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_an_embedding_is_cut_where_the_model_was_trained_for_it():
    settings = EmbeddingSettings(pooling="mean", dimensions=(2, 4))
    with serving(make_service(FakeEngine(), embeddings=settings)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with client:
            answer = client.embeddings.create(model="demo", input=[5, 6], dimensions=4)
            whole = embedding_of((5, 6), "mean")[:4]
            length = sum(value * value for value in whole) ** 0.5
            wanted = [value / length for value in whole]
            assert answer.data[0].embedding == pytest.approx(wanted, abs=1e-6)
            with pytest.raises(openai.BadRequestError, match=r"expected one of \[2, 4\]"):
                client.embeddings.create(model="demo", input=[5, 6], dimensions=3)


def test_a_batch_may_ask_for_embeddings(tmp_path):
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": [7, 8]}}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line) + "\n")
    summary = asyncio.run(run_batch(make_service(FakeEngine()), source, output, resume=False))
    assert (summary.requests, summary.errors, summary.prompt_tokens) == (1, 0, 2)
    body = json.loads(output.read_text())["response"]["body"]
    assert body["data"][0]["embedding"] == expected([7, 8])


def folder_with(folder: Path, pooling: object = None, config: object = None) -> Path:
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("stated", "found"),
    [
        (None, "last"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
    ],
)
def test_pooling_is_what_sentence_transformers_states(tmp_path, stated, found):
    folder = folder_with(tmp_path, stated)
    assert embedding_settings(folder).pooling == found
    assert embedding_settings(folder, "mean").pooling == "mean"


@pytest.mark.parametrize(
    "stated", [{"pooling_mode_cls_token": True}, {"pooling_mode_lasttoken": False}, []]
)
def test_another_pooling_needs_the_option(tmp_path, stated):
    folder = folder_with(tmp_path, stated)
    with pytest.raises(SpecError, match="--pooling"):
        embedding_settings(folder)
    assert embedding_settings(folder, "last").pooling == "last"


def test_dimensions_are_those_of_the_config(tmp_path):
    for number, (config, sizes) in enumerate(
        [
            ({"hidden_size": 8}, []),
            ({"hidden_size": 3, "is_matryoshka": True}, [1, 2, 3]),
            ({"hidden_size": 8, "matryoshka_dimensions": [8, 4]}, [4, 8]),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        folder = folder_with(tmp_path / str(number), config=config)
        assert list(embedding_settings(folder).dimensions) == sizes


@pytest.mark.parametrize(("stated", "found"), [(None, "last"), (1, "mean"), (3, "last")])
def test_pooling_that_a_gguf_file_states(tmp_path, stated, found):
    extra = () if stated is None else (key("llama.pooling_type", 4, "I", stated),)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(extra=extra))
    assert embedding_settings(tmp_path / "m.gguf").pooling == found
    assert embedding_settings(tmp_path / "m.gguf", "mean").pooling == "mean"


def test_pooling_of_a_ranking_model_is_an_error(tmp_path):
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(extra=(key("llama.pooling_type", 4, "I", 4),)))
    with pytest.raises(SpecError, match=r"'llama.pooling_type': found 4, expected one of 0, 1, 3"):
        embedding_settings(tmp_path)
