"""Tiny random checkpoints of every family, and a pipeline in one process to run them.

The models come from ``scripts/make_tiny_model.py``, so that tests and people make the same ones.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.dist.kv.cache import KVCache
from llmpq.models import Checkpoint, DecoderStage, Master, PackedBatch, build_layer, kv_shapes

_SCRIPT = Path(__file__).parents[2] / "scripts" / "make_tiny_model.py"


def make_tiny_model_script() -> ModuleType:
    """The script as a module."""
    name = "make_tiny_model"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # before running it: dataclasses look their module up
        spec.loader.exec_module(module)
    return sys.modules[name]


def save_tiny_model(
    family: str,
    output: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    shape: dict[str, int] | None = None,
    **overrides: object,
) -> Path:
    """Save a tiny model; ``shape`` are sizes of the script, ``overrides`` the family's fields."""
    script = make_tiny_model_script()
    config = script.make_config(family, script.Shape(**(shape or {})), overrides)
    model = script.make_model(config, seed=seed)
    return script.save_model(model, output, dtype=dtype, max_shard_size=max_shard_size)


def write_tokenizer(folder: Path, words: Sequence[str]) -> None:
    """Save a tokenizer that knows these words; a word's token is its place."""
    tokenizer = Tokenizer(
        models.WordLevel({word: token for token, word in enumerate(words)}, unk_token=words[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[1]})
    )


def load_reference(model_dir: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The whole model, loaded by transformers itself."""
    config = AutoConfig.from_pretrained(model_dir)
    # In older versions of transformers torch's own attention leaves the bound of scores out.
    chosen = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation=chosen)
    return model.eval()


def generate_alone(
    model: PreTrainedModel, prompt: Sequence[int], new_tokens: int
) -> tuple[list[int], Tensor]:
    """What transformers generates greedily for one prompt: all tokens, and logits ``[new, V]``."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    with torch.inference_mode():
        answer = model.generate(
            torch.tensor([list(prompt)]),
            # Before 5.23 cached keys were not turned again where the angles change.
            use_cache=rope.get("rope_type") != "longrope",
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=new_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return answer.sequences[0].tolist(), torch.cat(answer.logits)


def load_stage(model_dir: Path, first_layer: int, end_layer: int) -> DecoderStage:
    """A stage with the weights as stored."""
    checkpoint = Checkpoint(model_dir)
    layers = []
    for index in range(first_layer, end_layer):
        layer = build_layer(checkpoint.config, index)
        layer.load_state_dict(checkpoint.layer_state_dict(index), assign=True)
        layers.append(layer)
    return DecoderStage(checkpoint.config, layers, first_layer)


def load_master(model_dir: Path) -> Master:
    """The two ends with the weights as stored."""
    checkpoint = Checkpoint(model_dir)
    master = Master(checkpoint.config)
    master.load_state_dict(checkpoint.master_state_dict(), assign=True)
    return master


class Pipeline:
    """Master and stages in one process: embed, every stage in turn, logits."""

    def __init__(
        self,
        model_dir: Path,
        cuts: Sequence[int],
        *,
        num_slots: int = 5,
        max_tokens: int = 64,
        kv_bits: int | None = None,
    ) -> None:
        self.master = load_master(model_dir)
        self.max_tokens = max_tokens
        self.num_blocks = num_slots * blocks_of(max_tokens)
        self.stages = []
        self.caches = []
        for first, end in itertools.pairwise(cuts):
            stage = load_stage(model_dir, first, end)
            self.stages.append(stage)
            self.caches.append(
                KVCache(
                    kv_shapes(self.master.config, first, end),
                    first,
                    num_blocks=self.num_blocks,
                    dtype=Checkpoint(model_dir).dtype,
                    kv_bits=kv_bits,
                    # The first block of a sequence numbers its state.
                    states=stage.new_states(self.num_blocks),
                )
            )

    def step(self, rows: Sequence[tuple[int, int, list[int]]]) -> Tensor:
        """Run one micro-batch of (slot, tokens already cached, new tokens); logits ``[R, V]``."""
        return self.packed_step(
            [
                (slot_blocks(slot, self.max_tokens, start + len(tokens)), start, tokens)
                for slot, start, tokens in rows
            ]
        )

    def packed_step(
        self,
        rows: Sequence[tuple[Sequence[int], int, list[int]]],
        rope_lengths: Sequence[int] = (),
    ) -> Tensor:
        """Run one step of (blocks, tokens already cached, new tokens); logits ``[R, V]``."""
        tables, starts, tokens = zip(*rows, strict=True)
        counts = list(map(len, tokens))
        batch = PackedBatch(
            block_tables=tables,
            starts=starts,
            counts=counts,
            rope_lengths=rope_lengths,
            slots=[table[0] for table in tables],
        )
        flat = torch.tensor([list(itertools.chain(*tokens))])
        hidden = self.master.embed(flat, batch.positions)
        for stage, cache in zip(self.stages, self.caches, strict=True):
            hidden = stage(hidden, batch, cache)
        return self.master.logits(hidden[0, batch.last_tokens])


class Sequences:
    """Greedy generation of several sequences on a pipeline, in whatever order a test asks for."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.slots: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logits: dict[str, list[Tensor]] = {}

    def prefill(self, prompts: dict[str, tuple[int, list[int]]]) -> None:
        """Start sequences ``{name: (slot, prompt)}`` in one micro-batch."""
        scores = self.pipeline.step([(slot, 0, prompt) for slot, prompt in prompts.values()])
        for row, (name, (slot, prompt)) in enumerate(prompts.items()):
            self.slots[name] = slot
            self.tokens[name] = [*prompt, int(scores[row].argmax())]
            self.logits[name] = [scores[row]]

    def decode(self, names: Sequence[str], steps: int) -> None:
        """Generate ``steps`` tokens of each named sequence, all in one micro-batch."""
        for _ in range(steps):
            rows = [(self.slots[n], len(self.tokens[n]) - 1, self.tokens[n][-1:]) for n in names]
            scores = self.pipeline.step(rows)
            for row, name in enumerate(names):
                self.tokens[name].append(int(scores[row].argmax()))
                self.logits[name].append(scores[row])
