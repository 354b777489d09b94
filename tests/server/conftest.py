"""A server of the fake engine, and OpenAI's client of it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from helpers.fake_engine import FakeEngine
from helpers.served import Served, make_service, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A server that answers with the fake engine, in this process."""
    with serving(make_service(FakeEngine())) as server:
        yield server


@pytest.fixture
def client(served) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the server, which asks once."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made
