"""Cases that schemathesis makes from OpenAI's specification and from the server's own.

``openai_operations.json`` is cut from OpenAI's specification (MIT License); it says from which
version. In all 2,000 cases no answer is an error of the server, and answers to accepted requests
have the form that the specification states. The cases are the same in every run: the gate has a
quarter of each operation's, the slow lane all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from helpers.clocks import PATIENCE_S
from helpers.fake_engine import FakeEngine
from helpers.served import Served, make_service, serving
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from llmpq.server.app import build_app

OPERATIONS = Path(__file__).with_name("openai_operations.json")
CASES = {
    ("openai", "POST /v1/completions"): 300,
    ("openai", "POST /v1/chat/completions"): 200,
    ("openai", "GET /v1/models/{model}"): 200,
    ("own", "POST /v1/completions"): 150,
    ("own", "POST /v1/chat/completions"): 100,
    ("own", "POST /v1/messages"): 200,
    ("own", "POST /v1/messages/count_tokens"): 150,
    ("own", "POST /v1/responses"): 250,
    ("own", "POST /v1/embeddings"): 100,
    ("own", "POST /tokenize"): 175,
    ("own", "POST /detokenize"): 175,
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = FakeEngine(max_model_len=256, script=[300, 400, 500, 301, 401])
    with serving(make_service(engine)) as server:
        yield server


def adapted(value: Any) -> Any:
    """Return a specification whose requests name the model that is served, where they name one.

    The first token of an echoed prompt has null for its log-probability, which OpenAI's
    specification leaves out.
    """
    if isinstance(value, list):
        return [adapted(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {name: adapted(item) for name, item in value.items()}
    properties = found.get("properties", {})
    for name in ("token_logprobs", "top_logprobs"):
        if "items" in properties.get(name, {}) and "token_logprobs" in properties:
            items = properties[name]["items"]
            properties[name]["items"] = {"anyOf": [items, {"type": "null"}]}
    if "model" in properties and "object" not in properties:
        properties["model"] = {"type": "string", "enum": ["demo"]}
    return found


@cache
def operations(source: str) -> dict[str, Any]:
    if source == "openai":
        raw = json.loads(OPERATIONS.read_text(encoding="utf-8"))
    else:
        raw = asyncio.run(own_specification())
    schema = schemathesis.openapi.from_dict(adapted(raw))
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


async def own_specification() -> dict[str, Any]:
    app = build_app(make_service(FakeEngine()))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        return (await client.get("/openapi.json")).json()


def test_number_of_cases():
    assert sum(CASES.values()) == 2000


@pytest.mark.parametrize("share", [0.25, pytest.param(1.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("source", "label"), list(CASES), ids=lambda text: text.split("/")[-1])
def test_no_case_is_an_error_of_the_server(served, source, label, share):
    count = round(share * CASES[source, label])
    operation = operations(source)[label]
    seen: list[int] = []
    with requests.Session() as session:

        @settings(
            max_examples=count,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def run(case):
            answer = case.call(base_url=served.url, session=session, timeout=PATIENCE_S)
            seen.append(answer.status_code)
            is_json = answer.headers.get("content-type", [""])[0].startswith("application/json")
            checks = [not_a_server_error]
            if answer.status_code == 200 and is_json:
                checks.append(response_schema_conformance)
            case.validate_response(answer, checks=checks)

        run()
    assert len(seen) >= 0.9 * count
    assert 200 in seen or "{model}" in label
    assert served.service.admission.num_choices == 0
