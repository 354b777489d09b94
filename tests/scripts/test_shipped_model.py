"""The demo model that its training script shipped."""

import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import train_demo_model
from scripts.demo_model.documents import is_prose
from scripts.demo_model.scoring import mean_loss

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = REPOSITORY / "models" / "demo"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shipped():
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval()
    record = json.loads((SHIPPED / "pretraining.json").read_text("utf-8"))
    return model, AutoTokenizer.from_pretrained(SHIPPED), record


def test_shipped_model_has_the_shape_that_planning_needs(shipped):
    config = shipped[0].config
    assert config.num_hidden_layers >= 12
    assert config.num_key_value_heads < config.num_attention_heads
    linears = [m for m in shipped[0].model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert all(m.in_features % 64 == 0 and m.out_features % 64 == 0 for m in linears)


def test_shipped_directory_stays_small():
    size = sum(path.stat().st_size for path in SHIPPED.rglob("*") if path.is_file())
    assert size <= 30e6


def test_shipped_texts_are_long_enough_and_apart(shipped):
    texts = [(SHIPPED / n).read_text("utf-8") for n in ("heldout.txt", "calibration.txt")]
    for text in texts:
        assert len(shipped[1](text)["input_ids"]) >= 50_000
    held_out, calibration = ({p for p in t.split("\n\n") if is_prose(p)} for t in texts)
    assert not held_out & calibration


def test_shipped_perplexity_is_the_recorded_one_and_far_below_unigram(shipped):
    model, tokenizer, record = shipped
    ids = tokenizer((SHIPPED / "heldout.txt").read_text("utf-8"))["input_ids"][:2048]
    perplexity = math.exp(mean_loss(model, ids))
    recorded = record["held_out"]
    assert perplexity == pytest.approx(recorded["perplexity_first_2048_tokens"], rel=0.01)
    assert perplexity < recorded["unigram_perplexity_first_2048_tokens"] / 8


def test_shipped_prompts_are_whole_and_of_different_lengths(shipped):
    lines = (SHIPPED / "prompts.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    assert len({p["id"] for p in prompts}) == len(prompts) >= 20
    lengths = {len(shipped[1](p["prompt"])["input_ids"]) for p in prompts}
    assert min(lengths) <= 4
    assert max(lengths) >= 100
    assert all(1 <= p["max_new_tokens"] <= 256 for p in prompts)


def test_shipped_record_and_card_name_no_folder_of_the_machine_and_every_source(shipped):
    card = (SHIPPED / "README.md").read_text("utf-8")
    notice = (SHIPPED / "NOTICE").read_text("utf-8")
    for package, facts in shipped[2]["data"]["sources"].items():
        assert facts["licence"] in card
        assert package in notice
    words = json.dumps(shipped[2]).replace('"', " ").split()
    assert not [word for word in words if word.startswith("/")]


def test_recorded_command_still_parses_into_the_recorded_recipe(shipped):
    command, recipe = shipped[2]["command"], shipped[2]["recipe"]
    python, path, *argv = shlex.split(command)
    assert python == "python"
    assert (REPOSITORY / path).is_file()
    options = train_demo_model.build_parser().parse_args(argv)
    assert asdict(train_demo_model.recipe_of(options)) == recipe
