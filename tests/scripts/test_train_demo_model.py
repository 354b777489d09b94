"""The demo model's training script, on inline text."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.demo_model.documents import choose_held_out, clean, is_prose, split_documents
from scripts.demo_model.network import block_causal_attention, demo_config, new_model
from scripts.demo_model.optimizer import learning_rate_scale
from scripts.demo_model.paragraphs import dictd_paragraphs, html_paragraphs, pod_paragraphs
from scripts.demo_model.recipe import Recipe
from scripts.demo_model.records import public_command
from scripts.demo_model.scoring import mean_loss, unigram_loss
from scripts.demo_model.tokenizer import encode_documents, train_tokenizer
from scripts.demo_model.training import batch_rows, fit

pytestmark = pytest.mark.nightly

SENTENCE = "The quick brown fox jumps over the lazy dog number {} on its way to the river bank."


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- Cleaning ---


def test_html_paragraphs_leaves_out_code_tables_and_navigation():
    page = """<html><head><title>T</title></head><body><nav><p>Menu</p></nav>
    <div class="sphinxsidebar"><div><p>Side</p></div></div><h1>Title&#182;</h1>
    <p>Some <code>text</code> &amp; more.</p><pre>x = 1</pre><table><tr><td>cell</td></tr></table>
    <ul><li>One.<li>Two.</ul><script>run()</script></body></html>"""
    assert html_paragraphs(page) == [
        ("Title", True),
        ("Some text & more.", False),
        ("One.", False),
        ("Two.", False),
    ]


def test_pod_paragraphs_strips_codes_and_verbatim_blocks():
    use = "Use C<< $x->y >> or L<this page|perlop>, 1 E<lt> 2.X<index>"
    page = f"=head1 NAME\n\n{use}\n\n  code\n\n=cut"
    assert pod_paragraphs(page) == [
        ("NAME", True),
        ("Use $x->y or this page, 1 < 2.", False),
    ]


def test_dictd_paragraphs_takes_headwords_as_headings():
    page = "abbrev\n /say/, n.\n\n    A {word} cut\n    short.\n"
    assert dictd_paragraphs(page) == [("abbrev", True), ("A word cut short.", False)]


@pytest.mark.parametrize(
    ("paragraph", "expected"),
    [
        (SENTENCE.format(1), True),
        ("Too short to be prose.", False),
        (
            "int (*f)(void *, char **); x->y[0] = {1, 2, 3}; /* a b c d e f g */ return (a) + (b);",
            False,
        ),
        ("a sentence that has words enough but does not end as sentences do", False),
    ],
)
def test_is_prose_tells_sentences_from_the_rest(paragraph, expected):
    assert is_prose(paragraph) is expected


def test_clean_drops_repeated_paragraphs_and_headings_without_text():
    first, second = SENTENCE.format(1), SENTENCE.format(2)
    seen = set()
    page = [("Empty", True), ("Kept", True), (first, False), (first, False), ("Last", True)]
    assert clean(page, seen) == f"Kept\n\n{first}"
    assert clean([(first, False), (second, False)], seen) == second


# --- Splitting ---


def pages(count):
    shared = SENTENCE.format("shared")
    return {
        f"package/page{n}": [(SENTENCE.format(f"{n} {k}"), False) for k in range(20)]
        + [(shared, False)]
        for n in range(count)
    }


def test_split_documents_shares_no_document_and_no_paragraph():
    train, held_out = split_documents(pages(40), seed=3, held_out_bytes=6_000)
    assert len(held_out) >= 3
    assert len(train) + len(held_out) == 40
    assert not {d.name for d in train} & {d.name for d in held_out}
    paragraphs = [{p for d in part for p in d.text.split("\n\n")} for part in (train, held_out)]
    assert not paragraphs[0] & paragraphs[1]


def test_split_documents_keeps_the_held_out_ones_when_a_page_is_added():
    before = choose_held_out(dict.fromkeys(pages(40), 1_500), 3, 6_000)
    after = choose_held_out(dict.fromkeys(pages(41), 1_500), 3, 6_000)
    assert len(before & after) >= len(before) - 1


# --- Schedule, batches, scores ---


def test_learning_rate_scale_warms_up_stays_and_decays():
    recipe = Recipe(tokens=1, warmup_steps=10, decay_fraction=0.4)
    points = [(0, 0.0), (4, 0.0), (20, 0.3), (50, 0.6), (80, 0.8), (100, 1.0)]
    found = [learning_rate_scale(step, fraction, recipe) for step, fraction in points]
    assert found == pytest.approx([0.1, 0.5, 1.0, 1.0, 0.5, 0.0])


def test_batch_rows_visits_every_window_of_a_pass_once():
    recipe = Recipe(tokens=1, sequence=8, rows=2, accumulate=1)
    tokens = np.arange(8 * 11 + 1, dtype=np.uint16)  # 10 whole windows at any offset
    starts = [int(row[0]) for step in range(5) for row in batch_rows(tokens, recipe, step)]
    assert len(set(starts)) == 10
    assert len({start % 8 for start in starts}) == 1


def test_batch_rows_refuses_too_little_text():
    recipe = Recipe(tokens=1, sequence=8)
    with pytest.raises(ValueError, match="at least, found 9"):
        batch_rows(np.arange(9, dtype=np.uint16), recipe, 0)


def test_block_causal_attention_equals_plain_attention():
    torch.manual_seed(0)
    module = torch.nn.Module()
    query, key, value = (torch.randn(2, heads, 200, 16) for heads in (4, 2, 2))
    found, _ = block_causal_attention(module, query, key, value, None, scaling=0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=0.25, enable_gqa=True
    )
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_unigram_loss_of_even_counts_is_uniform():
    tokens = np.arange(64, dtype=np.uint16)
    assert unigram_loss(tokens, [1, 2, 3], 64) == pytest.approx(math.log(64))


def test_public_command_hides_folders():
    argv = ["x.py", "train", "--work", "/some/where", "--tokens", "5"]
    expected = "python scripts/train_demo_model.py train --work DIR --tokens 5"
    assert public_command(argv) == expected


# --- A run in small ---

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def tiny_run(folder, optimizer, steps):
    texts = [SENTENCE.format(n) for n in range(40)]
    tokenizer = train_tokenizer(texts, 300)
    tokens = encode_documents(tokenizer, texts)
    recipe = Recipe(
        tokens=steps * 64,
        sequence=16,
        rows=2,
        accumulate=2,
        optimizer=optimizer,
        warmup_steps=1,
        decay_fraction=0.0,
        compiled=False,
    )
    model = new_model(demo_config(len(tokenizer), **TINY), seed=1)
    progress = fit(model, tokens, recipe, folder)
    return model, tokenizer, progress


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fit_resumes_where_it_stopped(tmp_path, optimizer):
    whole, _, _ = tiny_run(tmp_path / "whole", optimizer, 4)
    tiny_run(tmp_path / "parts", optimizer, 2)
    resumed, _, progress = tiny_run(tmp_path / "parts", optimizer, 4)
    assert progress.step == 4
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(resumed.get_parameter(name), weight, msg=name)


def test_fit_gives_a_model_directory_that_loads(tmp_path):
    model, tokenizer, progress = tiny_run(tmp_path / "run", "muon", 2)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")(SENTENCE)["input_ids"]
    assert ids[0] == loaded.config.bos_token_id
    assert math.isfinite(mean_loss(loaded.eval(), ids, window=16))
    assert [entry[0] for entry in progress.losses] == [1, 2]
