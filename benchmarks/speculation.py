"""Time a token with and without drafts, on texts that repeat themselves more or less.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/speculation.py --folder DIR --output FILE

A random Llama of 125 M parameters runs in this process, with the engine of ``llmpq-serve``. Every
step computes what it always computes; only the token that is chosen is replaced by that of a given
text, so that acceptance is that of the text. Runs with and without drafts alternate; with one
thread it is the processor time that counts, which other programs disturb little.

Texts, of which the first half is the prompt and the second the answer, in tokens of the shipped
tokenizer:

* ``edit``: a module of this project, and the same module with another name for one thing;
* ``prose``: two pages of the shipped text;
* ``random``: tokens none of which comes twice;
* ``hostile``: random tokens of an alphabet of three: a match at every token, mostly a wrong one.

With ``--draft_bits`` drafts come from the shipped model (10 M parameters, trained) in place of
prompt lookup. Texts then are ``prose``, of which it finds the tokens that it finds in any text;
``answer``, where a page is followed by its own answer at 16 bits, so that a draft at fewer bits is
self-speculation; and ``random``.

``--model DIR`` is another model of 32,000 tokens, such as that of ``recurrent_layers.py``: where
layers have a recurrent state, a wrong draft token makes the next step repeat the accepted ones.
With ``--mtp`` drafts come from a layer for multi-token prediction, which is added to a copy of that
model. It has random numbers and computes all that a trained one does; its draft tokens are replaced
by those of the text with a given chance, once those before are right.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from workbench import ROOT, SMALL_LLAMA, add_isa_option, keep_document, make_model, restrict

from llmpq.batching.engine_step import DraftLimits, DraftWork, EngineLimits
from llmpq.batching.queue_order import queue_order
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.engine import engine as engine_module
from llmpq.dist.engine.compiled_steps import step_runner_of
from llmpq.dist.engine.drafters import Drafter, DraftModel
from llmpq.dist.engine.engine import SampledToken, SamplingState, ScoredRows
from llmpq.dist.engine.executor import PipelineExecutor, StageRunner
from llmpq.dist.engine.mtp import MtpDrafter
from llmpq.dist.engine.online_run import OnlineRun
from llmpq.dist.io.control_channel import AddedRequest, ModelLimits, added_to_json
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.kv.cache import KVCache
from llmpq.models import Master, kv_shapes
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master
from llmpq.quant.loading.mtp import load_mtp
from llmpq.spec.huggingface.families import load_model_dir

LENGTH = 192
"""Tokens of a prompt, and of an answer."""
TEXTS = ("edit", "prose", "random", "hostile")
DRAFTED_TEXTS = ("answer", "prose", "random")
DEMO = ROOT / "models" / "demo"
DEMO_VOCABULARY = 4096
DRAFT_COST = 0.2
"""Steps of the large model that a token of the small one is first expected to take."""
DTYPE = torch.bfloat16
CPU = torch.device("cpu")
BLOCKS = 16 * (2 * LENGTH // 16 + 4)
SEQUENCES = 16
STATES = 2 * SEQUENCES
"""Each sequence has another state after its draft tokens."""


def main() -> int:
    """Measure, print a table, and write JSON when asked."""
    options = _parser().parse_args()
    restrict(options.cpu_isa)
    torch.set_num_threads(options.threads)
    model = options.model or options.folder / "llama-125m"
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.model is None:
        make_model(model)
    if options.mtp:
        model = add_mtp(model, options.folder / f"{model.name}-mtp")
    options.num_states = STATES if load_model_dir(model).has_states else 0
    rows: list[list[str]] = []
    load = os.getloadavg()[0]
    with torch.inference_mode():
        master = load_master(model, dtype=DTYPE, device=CPU)
        for bits in options.bits:
            runner = _runner(model, bits)
            steps = PipelineExecutor(master=master, runner=runner, communicator=None)
            for batch in options.batches:
                for share in options.mtp:
                    drafts = _planted(model, bits, (master, runner), share)
                    rows += _measure(options, steps, (bits, None), batch, drafts)
                if not options.draft_bits and not options.mtp:
                    rows += _measure(options, steps, (bits, None), batch, None)
                for draft_bits in options.draft_bits:
                    drafts = Drafts(_draft_model(draft_bits), steps, DRAFTED_TEXTS)
                    rows += _measure(options, steps, (bits, draft_bits), batch, drafts)
    if options.output is not None:
        keep_document(options.output, _record(options, rows, load), options.cpu_isa)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the random model")
    parser.add_argument("--bits", type=int, nargs="+", default=[16, 8, 4])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--num_speculative_tokens", type=int, default=5)
    parser.add_argument(
        "--draft_bits", type=int, nargs="*", default=[], help="of the shipped model as draft model"
    )
    parser.add_argument("--model", type=Path, help="directory (default: the random model)")
    parser.add_argument(
        "--mtp", type=float, nargs="*", default=[], metavar="CHANCE",
        help="of the draft tokens of a layer for multi-token prediction, to be right",
    )  # fmt: skip
    add_isa_option(parser)
    parser.add_argument("--output", type=Path)
    return parser


def _runner(model: Path, bits: int) -> StageRunner:
    layers = int(json.loads((model / "config.json").read_text())["num_hidden_layers"])
    stage = load_stage(model, 0, layers, [bits] * layers, dtype=DTYPE, device="cpu")
    cache = KVCache(
        kv_shapes(stage.config, 0, layers), 0, num_blocks=BLOCKS, dtype=DTYPE,
        states=stage.new_states(STATES),
    )  # fmt: skip
    steps = step_runner_of(stage, cache)
    return StageRunner(
        layers=stage, cache=cache, device=CPU, is_last=True, steps=steps, dtype=DTYPE
    )


def _draft_model(bits: int) -> DraftModel:
    """Load the shipped model as a draft model."""
    master = load_master(DEMO, dtype=DTYPE, device=CPU, head_bits=None if bits == 16 else 8)
    steps = PipelineExecutor(master=master, runner=_runner(DEMO, bits), communicator=None)
    return DraftModel(steps, block_size=16, token_budget=16 * LENGTH)


def add_mtp(model: Path, output: Path) -> Path:
    """Copy a model and add a random layer for multi-token prediction, as Qwen3.5 has it."""
    if not output.exists():
        tensors, chance = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
        config = json.loads((model / "config.json").read_text())
        size, last = config["hidden_size"], config["num_hidden_layers"] - 1
        prefix = f"model.layers.{last}."
        for name in [name for name in tensors if name.startswith(prefix)]:
            like, place = tensors[name], f"mtp.layers.0.{name.removeprefix(prefix)}"
            tensors[place] = 0.02 * torch.randn(like.shape, generator=chance).to(like.dtype)
        for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            tensors[f"mtp.{norm}.weight"] = torch.zeros(size, dtype=DTYPE)
        tensors["mtp.fc.weight"] = (0.02 * torch.randn(size, 2 * size, generator=chance)).to(DTYPE)
        partial = output.with_suffix(".partial")
        shutil.copytree(model, partial, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file(tensors, partial / "model.safetensors", {"format": "pt"})
        partial.rename(output)
    return output


class Planted(MtpDrafter):
    """A layer whose draft tokens are those of the text as often as it is given.

    ``share`` and ``chance`` are set once it is made.
    """

    share = 0.0
    chance = random.Random(0)

    def propose(
        self, works: Sequence[DraftWork], tokens: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Propose as always, and return tokens of the texts."""
        found = super().propose(works, tokens)
        for draft, ids in zip(found, tokens, strict=True):
            text = next(one for one in Forced.texts if one[: len(ids)] == list(ids))
            right = text[len(ids) : len(ids) + len(draft)]
            for place, token in enumerate(right):
                if self.chance.random() >= self.share:
                    draft[place] = (token + 1) % DEMO_VOCABULARY
                    break
                draft[place] = token
        return found


def _planted(model: Path, bits: int, parts: tuple[Master, StageRunner], share: float) -> Drafts:
    """Load the layer for multi-token prediction of a model."""
    (layer, ends), (master, runner) = load_mtp(model, bits, dtype=DTYPE, device=CPU), parts
    shapes = kv_shapes(layer.config, layer.first_layer, layer.end_layer)
    cache = KVCache(shapes, layer.first_layer, num_blocks=BLOCKS, dtype=DTYPE)
    own = StageRunner(
        layers=layer, cache=cache, device=CPU, is_last=False,
        steps=step_runner_of(layer, cache), dtype=DTYPE,
    )  # fmt: skip
    drafter = Planted(master=master, ends=ends, runner=own, block_size=16)
    drafter.share, drafter.chance = share, random.Random(1)
    steps = PipelineExecutor(
        master=master, runner=replace(runner, returns_all=True), communicator=None,
        returns_all=True,
    )  # fmt: skip
    return Drafts(drafter, steps, (f"{100 * share:.0f} %",))


class Drafts(NamedTuple):
    """Where drafts come from, the model whose steps verify them, and the texts to draft for."""

    model: Drafter
    steps: PipelineExecutor
    texts: Sequence[str]


def _measure(
    options: argparse.Namespace,
    steps: PipelineExecutor,
    all_bits: tuple[int, int | None],
    batch: int,
    drafts: Drafts | None,
) -> list[list[str]]:
    """Return a row a text, and print it; the bits are those of the model and of the draft model."""
    rows = []
    bits, draft_bits = all_bits
    config = SpeculativeConfig(num_speculative_tokens=options.num_speculative_tokens)
    for name in TEXTS if drafts is None else drafts.texts:
        texts = [text_of(name, number) for number in range(batch)]
        times: dict[bool, list[float]] = {False: [], True: []}
        accepted = (0, 0)
        for number in range(options.rounds + 1):
            for has_drafts in (number % 2 == 0, number % 2 == 1):
                seconds, found = _run(
                    drafts.steps if has_drafts and drafts is not None else steps,
                    texts,
                    config if has_drafts else None,
                    None if drafts is None else drafts.model,
                    options.num_states,
                )
                if number:  # the first round warms up
                    times[has_drafts].append(1e3 * seconds / (LENGTH - 1))
                accepted = found if has_drafts else accepted
        plain, drafted = (statistics.median(times[has_drafts]) for has_drafts in (False, True))
        gains = [one / other for one, other in zip(times[False], times[True], strict=True)]
        verified, right = accepted
        rows.append([
            str(bits), *([] if draft_bits is None else [str(draft_bits)]), str(batch), name,
            f"{plain:.2f}", f"{drafted:.2f}",
            f"{statistics.median(gains):.2f}", f"{min(gains):.2f}-{max(gains):.2f}",
            f"{100 * right / max(1, verified):.0f} %", f"{100 * right / batch / LENGTH:.0f} %",
        ])  # fmt: skip
        sys.stdout.write(" ".join(f"{cell:>10}" for cell in rows[-1]) + "\n")
        sys.stdout.flush()
    return rows


def text_of(name: str, number: int) -> list[int]:
    """Return the tokens of a prompt and its answer."""
    chance = random.Random(number)
    if name == "random" or name.endswith("%"):
        return chance.sample(range(3, DEMO_VOCABULARY), 2 * LENGTH)
    if name == "hostile":
        return [chance.randrange(3, 6) for _ in range(2 * LENGTH)]
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    if name in ("prose", "answer"):
        text = (DEMO / "heldout.txt").read_text(encoding="utf-8")
        start = len(text) // 20 * number
        page = list(tokenizer.encode(text[start : start + 20 * LENGTH]).ids[: 2 * LENGTH])
        if name == "prose":
            return page
        work = DraftWork(0, 0, LENGTH, LENGTH, tuple(range(BLOCKS)))
        (answer,) = _draft_model(16).propose([work], [page[:LENGTH]])
        return page[:LENGTH] + answer
    modules = sorted((ROOT / "llmpq" / "batching").glob("*.py"))
    text = modules[number % len(modules)].read_text(encoding="utf-8")
    changed = text.replace("self", "this").replace("tokens", "pieces")
    first, second = (list(tokenizer.encode(one).ids[:LENGTH]) for one in (text, changed))
    return (first + second + [3] * 2 * LENGTH)[: 2 * LENGTH]


class Forced(ScoredRows):
    """Chooses the tokens of given texts; a request's seed is the number of its text."""

    texts: Sequence[Sequence[int]] = ()

    def sample(self, row: int, state: SamplingState) -> SampledToken:
        """Choose as always, and return the text's token."""
        super().sample(row, state)
        text = self.texts[state.params.seed or 0]
        return SampledToken(text[LENGTH + len(state.token_ids)])


class Channel:
    """Adds all requests at once, and closes when all are answered."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        self.left = len(texts)
        self.first_s = self.last_s = 0.0
        self.stats: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []
        for number, text in enumerate(texts):
            sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, seed=number)
            request = GenerationRequest(
                id=str(number), prompt_token_ids=tuple(text[:LENGTH]), sampling=sampling
            )
            self.messages.append({"kind": "add"} | added_to_json(AddedRequest(request=request)))

    def send(self, kind: str, **fields: Any) -> None:
        """Take the engine's messages."""
        assert kind != "refused", fields
        if kind == "tokens":
            self.last_s = self.clock()
            self.first_s = self.first_s or self.last_s
            self.left -= sum(item[4] is not None for item in fields["outputs"])

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the next request."""
        if self.messages:
            return self.messages.pop(0)
        if not self.left:
            raise EOFError
        return None


def _run(
    steps: PipelineExecutor,
    texts: Sequence[Sequence[int]],
    config: SpeculativeConfig | None,
    model: Drafter | None,
    num_states: int,
) -> tuple[float, tuple[int, int]]:
    """Return the seconds after the first tokens; draft tokens, and those accepted."""
    has_model = config is not None and model is not None
    limits = DraftLimits(
        num_blocks=BLOCKS, cost=DRAFT_COST, reads_states=isinstance(model, MtpDrafter)
    )
    channel = Channel(texts)
    Forced.texts = texts
    engine_module.ScoredRows = Forced  # type: ignore[misc]
    engine = OnlineRun(
        channel=channel,
        executor=steps,
        limits=EngineLimits(
            token_budget=16 * LENGTH,
            max_sequences=SEQUENCES,
            num_blocks=BLOCKS,
            block_size=16,
            prefix_caching=False,
            num_speculative_tokens=0 if config is None else config.num_speculative_tokens,
            draft=limits if has_model else None,
            num_state_slots=num_states,
        ),
        order=queue_order("fcfs"),
        model=ModelLimits(max_model_len=2 * LENGTH, vocab_size=SMALL_LLAMA["vocab"]),
        speculative=config,
        draft_model=model if has_model else None,
    )
    engine.run()
    scheduler = engine.scheduler
    assert scheduler.free_blocks == BLOCKS
    found = scheduler.drafts.num_draft_tokens, scheduler.drafts.num_accepted_tokens
    return channel.last_s - channel.first_s, found


def _record(options: argparse.Namespace, rows: list[list[str]], load: float) -> dict[str, Any]:
    with_model = bool(options.draft_bits)
    topic = "recurrent-drafts" if options.model else "speculation"
    if options.mtp:
        topic = "mtp"
    return {
        "topic": "draft-model" if with_model else topic,
        "command": "python benchmarks/speculation.py --folder DIR --output FILE "
        f"--bits {' '.join(map(str, options.bits))} "
        f"--batches {' '.join(map(str, options.batches))} --rounds {options.rounds} "
        f"--threads {options.threads}"
        + "".join(f" {bits}" for bits in (["--draft_bits", *options.draft_bits] * with_model))
        + (f" --model DIR/{options.model.name}" if options.model else "")
        + "".join(f" {share}" for share in (["--mtp", *options.mtp] if options.mtp else []))
        + f" --num_speculative_tokens {options.num_speculative_tokens}"
        + f" --cpu_isa {options.cpu_isa}",
        "date": time.strftime("%Y-%m-%d"),
        "load": round(load, 1),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "tables": [
            {
                "title": f"Drafts of up to {options.num_speculative_tokens} tokens",
                "keys": 3 + with_model,
                "beside": ["ms a token", "with drafts", "faster"],
                "ranges": {"of": "faster", "by": "chance" if options.mtp else "text"},
                "columns": [
                    "bits", *(["draft bits"] * with_model), "sequences",
                    "chance" if options.mtp else "text", "ms a token",
                    "with drafts", "faster", "rounds", "draft tokens accepted", "of the answer",
                ],
                "rows": rows,
            }
        ],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
