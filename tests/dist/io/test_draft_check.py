"""A draft model has the vocabulary of the model that answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.ranks import make_plan

from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.async_engine import AsyncEngine
from llmpq.dist.io.job import Job, checked_speculation, read_job, write_job
from llmpq.errors import SpecError
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import draft_limits
from llmpq.spec.plan import PlannedDraft

PLAN = make_plan((0, 3))
DRAFTS = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=3, bits=4)


@pytest.fixture
def folders(tiny_model, tmp_path, monkeypatch) -> tuple[Path, Path]:
    """The model's folder, and that of a draft model in the working folder."""
    own = tmp_path / "model"
    shutil.copytree(tiny_model("llama", seed=1), own)
    shutil.copytree(tiny_model("opt", seed=1), tmp_path / "draft")
    monkeypatch.chdir(tmp_path)
    return own, tmp_path / "draft"


def write_tokens(folder: Path, vocab: object, added: tuple[tuple[int, str], ...] = ()) -> None:
    tokens = [{"id": number, "content": text} for number, text in added]
    fields = {"model": {"vocab": vocab}, "added_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(fields))


def test_the_path_becomes_absolute(folders):
    model_dir, draft_dir = folders
    assert checked_speculation(PLAN, DRAFTS, model_dir) == replace(DRAFTS, model=str(draft_dir))
    lookup = SpeculativeConfig(num_speculative_tokens=3)
    assert checked_speculation(PLAN, lookup, model_dir) == lookup
    assert checked_speculation(PLAN, None, model_dir) is None


def test_a_plans_draft_model_is_taken_where_none_is_asked_for(folders):
    model_dir, draft_dir = folders
    planned = PlannedDraft(
        model="draft", bits=4, num_speculative_tokens=3, device=0, acceptance_rate=0.7, cost=0.25,
        speedup=1.4, memory_bytes=1,
    )  # fmt: skip
    plan = replace(PLAN, draft=planned)
    found = checked_speculation(plan, None, model_dir)
    assert found == replace(DRAFTS, model=str(draft_dir))
    limits = draft_limits(plan, found, 9)
    assert limits is not None
    assert limits.cost == 0.25
    lookup = SpeculativeConfig(num_speculative_tokens=3)
    assert checked_speculation(plan, lookup, model_dir) == lookup


def test_a_vocabulary_of_another_size_is_refused(folders):
    model_dir, draft_dir = folders
    file = draft_dir / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 99}))
    message = f"{file}: field 'vocab_size': found 99, expected the 100 of"
    with pytest.raises(SpecError, match=message):
        checked_speculation(PLAN, DRAFTS, model_dir)
    given = {"method": "draft_model", "model": str(draft_dir), "num_speculative_tokens": 3}
    with pytest.raises(SpecError, match=message):
        asyncio.run(AsyncEngine.start(make_plan((0, 3)), model_dir, speculative_config=given))


@pytest.mark.parametrize(
    ("own", "other", "found"),
    [
        ({"a": 0, "b": 1}, {"b": 1, "a": 0}, None),
        ({"a": 0, "b": 1}, [["a", -1.0], ["b", -2.0]], None),
        ({"a": 0, "b": 1}, {"a": 0, "c": 1}, "found token 1 'b', expected 'c'"),
        ({"a": 0}, {"a": 0, "c": 1}, "found token 1 None, expected 'c'"),
        ({"a": 0, "b": 1}, [["a", -1.0]], "found token 1 'b', expected None"),
    ],
)
def test_tokens_are_compared_where_both_are_known(folders, own, other, found):
    model_dir, draft_dir = folders
    write_tokens(draft_dir, own)
    assert checked_speculation(PLAN, DRAFTS, model_dir) is not None  # nothing to compare with
    write_tokens(model_dir, other)
    if found is None:
        assert checked_speculation(PLAN, DRAFTS, model_dir) is not None
    else:
        with pytest.raises(SpecError, match=f"field 'model.vocab': {found}"):
            checked_speculation(PLAN, DRAFTS, model_dir)


def test_added_tokens_count(folders):
    model_dir, draft_dir = folders
    write_tokens(draft_dir, {"a": 0}, ((1, "<s>"),))
    write_tokens(model_dir, {"a": 0, "<s>": 1})
    assert checked_speculation(PLAN, DRAFTS, model_dir) is not None
    write_tokens(model_dir, {"a": 0}, ((1, "</s>"),))
    with pytest.raises(SpecError, match="found token 1 '<s>', expected '</s>'"):
        checked_speculation(PLAN, DRAFTS, model_dir)


def test_a_file_that_is_no_tokenizer_is_named(folders):
    model_dir, draft_dir = folders
    write_tokens(model_dir, {"a": 0})
    (draft_dir / "tokenizer.json").write_text("[]")
    with pytest.raises(SpecError, match="field 'model': found nothing"):
        checked_speculation(PLAN, DRAFTS, model_dir)


def test_a_draft_model_is_part_of_a_job(tmp_path):
    job = Job(
        strategy=tmp_path, model_dir=tmp_path, prompts=tmp_path, output=tmp_path,
        engine=EngineOptions(speculative_config=DRAFTS),
    )  # fmt: skip
    write_job(tmp_path / "job.json", job)
    assert read_job(tmp_path / "job.json") == job
