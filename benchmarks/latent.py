"""Decode steps of latent attention by context: latent vectors read as they are, or expanded.

    python benchmarks/latent.py --folder DIR --cpu_isa avx2 --results benchmarks/results

A random model with four layers in the shapes of GLM 4.7 Flash (20 heads, latent vectors of 512 and
64 features) and 8 of its 64 experts, of which 4 are visited; layers at 4 bits, one sequence, all
threads. The cache holds random numbers. "Expanded" is what transformers' layers do: keys and values
of all tokens so far are made in every step. Both in turn, in one process; medians of steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from workbench import add_isa_option, keep_run, restrict, run_of, text_of

from llmpq.batching.blocks import blocks_of, slot_blocks
from llmpq.dist.engine.executor import StageRunner
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.transport.frames import Row
from llmpq.models import kv_shapes, load_config
from llmpq.models.stage import DecoderStage
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules import latent

LAYERS, BITS, STEPS = 4, 4, 5
CONTEXTS = (128, 1024, 4096)
WAYS = ("as they are", "expanded")
COLUMNS = ("context", *(f"{way}, ms a layer" for way in WAYS), "expanded / as they are")
NOTE = (
    "One decode step of one sequence, ms a layer: medians. Four layers in the shapes of GLM 4.7 "
    "Flash at 4 bits, with 8 experts, of which 4 are visited."
)


def main() -> int:
    """Time steps and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where the model is made")
    add_isa_option(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, help="folder of result files")
    options = parser.parse_args()
    restrict(options.cpu_isa)
    samples = [*_samples(make_model(options.folder), options.rounds)]
    table = {
        "title": "Latent attention", "columns": COLUMNS, "keys": 1, "rows": rows(samples),
        "note": NOTE,
    }  # fmt: skip
    print(text_of(table))
    if options.results is not None:
        words = f"python benchmarks/latent.py --folder DIR --cpu_isa {options.cpu_isa}"
        head = run_of(options.cpu_isa, f"{words} --rounds {options.rounds}")
        run = {**head, "samples": samples, "tables": [table]}
        keep_run(options.results / "latent.json", "latent", run)
    return 0


def make_model(folder: Path) -> Path:
    """Write the random model, once; return its folder."""
    target = folder / "glm-4.7-flash-layers"
    if target.exists():
        return target
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "glm4_moe_lite", hidden_size=2048, num_hidden_layers=LAYERS, num_attention_heads=20,
        num_key_value_heads=20, intermediate_size=10240, moe_intermediate_size=1536,
        n_shared_experts=1, n_routed_experts=8, num_experts_per_tok=4, n_group=1, topk_group=1,
        q_lora_rank=768, kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64,
        v_head_dim=256, vocab_size=4096, max_position_embeddings=2 * max(CONTEXTS),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if not parameter.any():  # a router that chooses among equals
            parameter.data.normal_(std=0.1)
    model.save_pretrained(target)
    return target


def _samples(model: Path, rounds: int) -> list[dict[str, float | str]]:
    """Return the median milliseconds of steps, by way, context and round."""
    bits, found = [BITS] * LAYERS, list[dict[str, float | str]]()
    stages = {}
    for way in WAYS:
        is_read = latent.can_absorb if way == WAYS[0] else (lambda *_: False)
        with mock.patch.object(latent, "can_absorb", is_read):
            stages[way] = load_stage(model, 0, LAYERS, bits, dtype=torch.bfloat16, device="cpu")
    for number in range(rounds):
        for context in CONTEXTS:
            for way, stage in stages.items():
                ms = 1e3 * step_s(stage, model, context)
                found.append({"way": way, "context": context, "round": number, "step_ms": ms})
                print(found[-1], file=sys.stderr, flush=True)
    return found


@torch.inference_mode()
def step_s(stage: DecoderStage, model: Path, context: int) -> float:
    """Return the median seconds of decode steps after ``context`` tokens."""
    config = load_config(model)
    shapes = kv_shapes(config, 0, LAYERS)
    cache = KVCache(shapes, 0, dtype=torch.bfloat16, num_blocks=blocks_of(context + STEPS + 1))
    for layer in range(LAYERS):
        cache.heads_of(layer).keys.normal_()
    runner = StageRunner(layers=stage, cache=cache, device=torch.device("cpu"), is_last=False)
    seconds = []
    for place in range(context, context + STEPS + 1):
        row = Row(blocks=slot_blocks(0, context + STEPS + 1, place + 1), first=place,
                  length=place + 1, slot=0)  # fmt: skip
        hidden = torch.randn(1, 1, config.hidden_size).to(torch.bfloat16)
        start = time.perf_counter()
        runner.run(hidden, [row])
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def rows(samples: list[dict[str, float | str]]) -> list[list[float]]:
    """Return context, milliseconds a layer of both ways, and their ratio."""
    made = []
    for context in CONTEXTS:
        both = [
            statistics.median(
                float(one["step_ms"]) for one in samples
                if (one["way"], one["context"]) == (way, context)
            ) / LAYERS
            for way in WAYS
        ]  # fmt: skip
        made.append([context, *(float(f"{one:.4g}") for one in (*both, both[1] / both[0]))])
    return made


if __name__ == "__main__":
    sys.exit(main())
