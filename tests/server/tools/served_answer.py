"""A server whose model has the chat template of a known one and gives one answer to everything."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

from helpers.fake_engine import FakeEngine
from helpers.served import DEMO, Served, make_service, serving
from model_templates import MODELS, SPECIAL_TOKENS

from llmpq.server.text.tokenizer import ServerTokenizer

VOCAB = 4096


def tokenizer_of(name: str) -> ServerTokenizer:
    """Return the demo's tokenizer with the special tokens and the template of a model."""
    content = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    sample = content["added_tokens"][0]
    content["added_tokens"] += [
        {**sample, "id": VOCAB + place, "content": text}
        for place, text in enumerate(MODELS[name].special)
    ]
    template = {"chat_template": MODELS[name].source, "special_tokens": SPECIAL_TOKENS}
    return ServerTokenizer({"tokenizer": content, **template})


@contextlib.contextmanager
def serving_answer(name: str, answer: str, *, at_once: int = 1) -> Iterator[Served]:
    """Serve the model; ``at_once`` is the number of tokens of a step."""
    tokenizer = tokenizer_of(name)
    script = tokenizer.encode(answer, add_special_tokens=False)
    engine = FakeEngine(script=script, vocab_size=VOCAB + len(MODELS[name].special))
    engine.at_once = at_once
    with serving(make_service(engine, tokenizer=tokenizer)) as server:
        yield server
    tokenizer.close()
