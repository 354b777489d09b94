"""The model card. Its numbers come from the provenance record, its words from here."""

from __future__ import annotations

from typing import Any

from scripts.demo_model.recipe import Recipe

CARD = """# The demo model

A Llama-shaped language model with {parameters} parameters, trained from random weights on freely
licensed software manuals, so that planning, quantization and serving can be tried on a machine that
reaches no model hub. It writes the English of manuals, and knows nothing: use it to measure
engines, not to answer questions. Made by `scripts/train_demo_model.py`; every number here is in
`pretraining.json`. Do not edit this page: `export` writes it.

## Shape

12 decoder layers, hidden size 256, feed-forward size 768 (SwiGLU), 4 query heads sharing 2
key-value heads of size 64, rotary positions up to 1024, tied embeddings, 4096 byte-level BPE
tokens, bfloat16 weights. The inputs of all linear layers are multiples of 128, so groups of 64 or
128 divide them. Trained on windows of 512 tokens.

## Scores on `heldout.txt`

{held_tokens} tokens, in windows of 512 that do not overlap. No held-out document, and no paragraph
of one, is in the training text.

| Model | Perplexity |
| --- | ---: |
| this model, bfloat16 weights, float32 arithmetic | {rounded} |
| this model, bfloat16 weights and arithmetic | {bf16} |
| before rounding to bfloat16 (float32) | {fp32} |
| token frequencies of the training text | {unigram} |
| all tokens equally likely | {uniform} |

That is {bits} bits for each byte of text.

## Training

    {command}

The schedule of that run followed the clock. `--tokens {tokens}` instead of `--minutes` makes a run
of the same length that does not.

{steps} updates of {step_tokens} tokens, {seen} tokens in all ({passes} passes over the text),
{minutes} minutes on one CPU thread that other work shared, on {date}; {versions}.

The layers' matrices are trained with Muon and the rest with AdamW (`recipe` in `pretraining.json`).
AdamW alone, at its usual rate of 2e-3, was tried too: after 0.4M tokens its training loss was 6.5,
where Muon's at 4e-3 was 5.5. Rates warm up, stay, and fall to zero over the last part of the time.

| Tokens seen | Training loss (nats a token) |
| ---: | ---: |
{curve}

## Text

From Debian packages, code and tables left out (bytes of text used). `NOTICE` has the copyright
notices.

| Package | Version | Licence | Training | Held out |
| --- | --- | --- | ---: | ---: |
{sources}

`calibration.txt` is an extract of the training text, for quantizers that calibrate; `prompts.jsonl`
has prompts written for this model.
"""


def model_card(record: dict[str, Any]) -> str:
    """Write the model card, all its numbers taken from the provenance record."""
    scores, perplexity = record["held_out"], record["held_out"]["perplexity"]
    sources = "\n".join(
        f"| `{name}` | {s['version']} | {s['licence']} | {s['train_bytes']:,} "
        f"| {s['held_out_bytes']:,} |"
        for name, s in sorted(record["data"]["sources"].items())
    )
    curve = "\n".join(f"| {p['tokens']:,} | {p['loss']:.3f} |" for p in record["loss_curve"])
    return CARD.format(
        parameters=f"{record['parameters'] / 1e6:.1f}M",
        steps=record["steps"],
        tokens=record["tokens_seen"],
        step_tokens=Recipe(**record["recipe"]).step_tokens,
        seen=f"{record['tokens_seen'] / 1e6:.1f}M",
        passes=f"{record['tokens_seen'] / record['data']['train_tokens']:.1f}",
        minutes=f"{record['minutes']:.0f}",
        date=record["date"],
        command=record["command"],
        versions=", ".join(f"{k} {v}" for k, v in record["versions"].items()),
        held_tokens=f"{scores['tokens']:,}",
        rounded=f"{perplexity['rounded']:.2f}",
        fp32=f"{perplexity['fp32']:.2f}",
        bf16=f"{perplexity['bf16']:.2f}",
        unigram=f"{scores['unigram_perplexity']:.0f}",
        uniform=scores["uniform_perplexity"],
        bits=f"{scores['bits_per_byte']:.3f}",
        sources=sources,
        curve=curve,
    )
