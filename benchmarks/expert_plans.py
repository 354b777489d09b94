"""Plans of large models with experts on small GPUs beside much memory, and what simple rules reach.

    python benchmarks/expert_plans.py

One sequence. A plan is the fastest one whose degradation is at most that of all layers at 4 bits,
with experts at 3, 4 or 8 bits on the device or its host. Rules have 4 bits and are priced by the
same cost models:

* *cpu-moe*: all experts on the host, as llama.cpp's ``--cpu-moe`` and KTransformers without experts
  on the GPU;
* *fit*: the experts of the first layers of each GPU on the host, as few as fit, as llama.cpp's
  ``--fit`` or the best ``--n-cpu-moe``;
* *share*: the same share of the experts of each layer on the GPU, as KTransformers.

Several GPUs have equal numbers of layers. Where nothing fits within 4 bits' degradation, the plan
has none to keep. Figures of devices are the catalogue's: nothing was measured.

A second table has speeds that people report, beside the prices of just these placements. ``--json``
prints an object for ``scripts.docs_site.evidence record``. Exit status 1: a rule is faster than a
plan, a plan took more than 10 s, or a price is out of a factor of 1.5 that is not explained.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from llmpq.assigner.forecast import evaluate_plan
from llmpq.assigner.planner import make_plan
from llmpq.assigner.request import PlanRequest, build_task, head_loss_at, omega_of
from llmpq.errors import InfeasibleError
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, DeviceGroup, DeviceHost, Node
from llmpq.spec.huggingface.families import model_from_config
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import MicroBatching, Plan, StageAssignment, StageEstimate
from llmpq.spec.precision import BITS, LayerExperts, StageExperts
from llmpq.spec.workload import Workload
from llmpq.units import GIB

RULE_BITS, HEAD_BITS = 4, 8
PLAN_BITS = (8, 4, 3)
PROMPT_TOKENS, NEW_TOKENS = 1024, 256
STEPS = 16
"""Shares tried by the rule of equal shares."""

MODEL_125B = {
    "model_type": "qwen3_moe", "hidden_size": 3072, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 1088, "num_experts": 256, "num_experts_per_tok": 8,
    "vocab_size": 151936, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
"""125 B parameters, 6 B of them active: the size of Qwen3.8-Flash-Next, in layers of Qwen3-MoE."""
_LAYERS_35B = {
    "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512, "num_experts": 256,
    "vocab_size": 248320,
}  # fmt: skip
_LAYERS_80B = {
    "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "moe_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
}  # fmt: skip
CONFIGS = {
    "125B-A6B": MODEL_125B,
    "35B-A3B": MODEL_125B | _LAYERS_35B,
    "80B-A3B": MODEL_125B | _LAYERS_80B,
}
"""Models of reports, as layers of Qwen3-MoE with the experts of Qwen3.8-Flash-Next, Qwen3.6-35B-A3B
and Qwen3-Next-80B, whose own layers mostly keep a state instead of keys and values."""
MODELS = ("125B-A6B", "openai/gpt-oss-120b", "Qwen/Qwen3-235B-A22B", "deepseek-ai/DeepSeek-V3")
RULES = ("cpu-moe", "fit", "share")
MOST_PLANNING_S = 10.0
FACTOR = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """Equal GPUs beside a processor and its memory, of which each GPU's experts have a part."""

    gpu: str
    count: int = 1
    cpu: str
    memory_gib: int

    @property
    def name(self) -> str:
        """Words for a table."""
        number = f"{self.count} x " if self.count > 1 else ""
        return f"{number}{self.gpu}, {self.cpu}, {self.memory_gib} GiB"

    @property
    def cluster(self) -> Cluster:
        """The node. Stages take turns, but a device's host is its own: threads and memory."""
        processor = catalog.device(self.cpu)
        assert processor.cores is not None, "whole processors are listed"
        host = DeviceHost(
            type=self.cpu,
            threads=processor.cores,
            memory_bytes=(self.memory_gib - 8) * GIB // self.count,
        )
        group = DeviceGroup(type=self.gpu, count=self.count, host=host)
        return Cluster(name="box", nodes=(Node(name="box", devices=(group,)),))


BOXES = (
    Box(gpu="RTX3060-12G", cpu="Ryzen-9-5950X", memory_gib=64),
    Box(gpu="RTX5060Ti-16G", cpu="Ryzen-9-7950X", memory_gib=96),
    Box(gpu="RTX3090", cpu="Ryzen-9-5950X", memory_gib=128),
    Box(gpu="RTX5090", cpu="Ryzen-9-9950X", memory_gib=256),
    Box(gpu="RTX3090", count=2, cpu="Core-i7-12700K", memory_gib=192),
    Box(gpu="RTX4090", count=4, cpu="Xeon-8480", memory_gib=512),
)


def model_of(name: str) -> ModelSpec:
    """Return a model of the table."""
    if name not in CONFIGS:
        return catalog.model(name)
    return model_from_config(CONFIGS[name], name=name, where=name)


def request_of(
    model: ModelSpec, box: Box, tokens: tuple[int, int] = (PROMPT_TOKENS, NEW_TOKENS)
) -> PlanRequest:
    """Return the request of our plan, for a prompt and an answer of so many tokens."""
    return PlanRequest(
        model=model,
        cluster=box.cluster,
        workload=Workload(batch=1, prompt_tokens=tokens[0], new_tokens=tokens[1]),
        dtype="bfloat16" if "openai" in model.name else "float16",
        kv_bits=16,
        head_bits=(HEAD_BITS,),
        bits=PLAN_BITS,
        theta_s=0.0,
        quality_budget=1.0 + head_loss_at(None, model, HEAD_BITS),
    )


def rules(request: PlanRequest, template: Plan) -> Iterator[tuple[str, Plan | None]]:
    """Yield the plan of every rule, ``None`` where nothing of it fits."""
    with_experts = [
        layer
        for layer, kind in enumerate(request.model.layer_kinds)
        if request.model.layer_types[kind].num_experts
    ]
    count = max(layer.num_experts for layer in request.model.layer_types)
    own = _Rules(request, template)
    yield "cpu-moe", own.fitting([dict.fromkeys(with_experts, 0)])
    yield "fit", own.fitting([dict.fromkeys(own.fewest(with_experts), 0)])
    yield (
        "share",
        own.fitting(
            [dict.fromkeys(with_experts, count * step // STEPS) for step in range(STEPS, -1, -1)]
        ),
    )


class _Rules:
    def __init__(self, request: PlanRequest, template: Plan) -> None:
        self.request, self.template = request, template
        self.task = build_task(request)
        self.omega = np.zeros((request.model.num_layers, len(BITS)))
        widths = [BITS.index(bits) for bits in self.task.request.bits]
        self.omega[:, widths] = omega_of(self.task.request)

    def fitting(self, choices: Sequence[dict[int, int]]) -> Plan | None:
        """Return the plan of the first choice that fits.

        A choice is how many experts are on the device, of layers where not all are.
        """
        for resident in choices:
            plan = self.plan_of(resident)
            estimate, excess = evaluate_plan(plan, self.task.costs, self.omega)
            if not excess:
                return replace(plan, estimate=estimate)
        return None

    @property
    def cuts(self) -> list[int]:
        """The first layer of each device, and the end."""
        layers, number = self.request.model.num_layers, len(self.request.cluster.devices)
        return [round(layers * index / number) for index in range(number + 1)]

    def fewest(self, layers: Sequence[int]) -> list[int]:
        """Return the first of ``layers`` on each device, as few as let it hold the others."""
        found: list[int] = []
        for rank, (first, end) in enumerate(pairwise(self.cuts)):
            own = [layer for layer in layers if first <= layer < end]
            fitting = (
                number
                for number in range(len(own) + 1)
                if self._free_bytes(rank, [*found, *own[:number]]) >= 0
            )
            found += own[: next(fitting, len(own))]
        return found

    def _free_bytes(self, rank: int, apart: Sequence[int]) -> int:
        estimate, _ = evaluate_plan(
            self.plan_of(dict.fromkeys(apart, 0)), self.task.costs, self.omega
        )
        return estimate.stages[rank].capacity_bytes - estimate.stages[rank].memory.total

    def plan_of(self, resident: dict[int, int], bits: int = RULE_BITS) -> Plan:
        """Return the plan of a choice, not evaluated."""
        devices, cuts = self.request.cluster.devices, self.cuts
        stages = []
        for rank, device in enumerate(devices):
            first, end = cuts[rank], cuts[rank + 1]
            apart = tuple(
                LayerExperts(layer=layer, resident=tuple(range(resident[layer])))
                for layer in range(first, end)
                if layer in resident
            )
            assert device.host is not None, "every box has a host"
            stages.append(
                StageAssignment(
                    rank=rank,
                    device=rank,
                    first_layer=first,
                    end_layer=end,
                    bits=(bits,) * (end - first),
                    experts=StageExperts(threads=device.host.threads, layers=apart)
                    if apart
                    else None,
                )
            )
        blank = self.template.estimate.stages[0]
        nothing: tuple[StageEstimate, ...] = (blank,) * len(stages)
        return replace(
            self.template,
            stages=tuple(stages),
            dropped_devices=(),
            micro_batching=MicroBatching(prefill=1, decode=1),
            estimate=replace(self.template.estimate, stages=nothing, forecast=None),
        )


def speeds(plan: Plan) -> tuple[float, float]:
    """Return tokens a second of the prompt, and of decode."""
    stages = plan.estimate.stages
    prompt_s = sum(one.prefill_s + one.send_prefill_s for one in stages)
    decode_s = sum(one.decode_s + one.send_decode_s for one in stages)
    return plan.workload.prompt_tokens / prompt_s, 1 / decode_s


def choice_text(plan: Plan) -> str:
    """Return the bits of a plan's layers, and how many have experts on the host."""
    widths = {bits: plan.bits.count(bits) for bits in sorted(set(plan.bits), reverse=True)}
    bits = ", ".join(f"{number} x {width}" for width, number in widths.items())
    apart = sum(stage.num_apart for stage in plan.stages)
    return f"{bits}; {apart} of {plan.model.num_layers}"


def row_of(name: str, box: Box) -> dict[str, Any]:
    """Return the figures of a model on a box."""
    model = model_of(name)
    request = request_of(model, box)
    started = time.perf_counter()
    try:
        plan = make_plan(request)
    except InfeasibleError:
        started = time.perf_counter()
        try:
            plan = make_plan(replace(request, quality_budget=None, theta_s=None))
        except InfeasibleError:
            return {"model": name, "box": box.name, "planning_s": time.perf_counter() - started}
    row: dict[str, Any] = {
        "model": name,
        "box": box.name,
        "planning_s": time.perf_counter() - started,
        "status": plan.search.status,
        "choice": choice_text(plan),
        "latency_s": plan.estimate.latency_s,
        "speeds": speeds(plan),
    }
    for rule, other in rules(request, plan):
        row[rule] = None if other is None else speeds(other)
        row[f"{rule}_latency_s"] = None if other is None else other.estimate.latency_s
    return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A speed that people report of one sequence.

    Attributes:
        model, box: theirs; where a report does not name the processor, a usual one.
        engine: which made it, and what it left on the host.
        bits: nearest of ours to theirs.
        apart: layers with all experts on the host; ``None`` for all.
        tokens: of the prompt and the answer, assumed where not told.
        found: tokens a second of prompt and decode, ``None`` for none.
        source: thread or document.
        reason: why a figure is out of ``FACTOR``.
    """

    model: str
    box: Box
    engine: str
    bits: int
    apart: int | None = None
    tokens: tuple[int, int] = (PROMPT_TOKENS, NEW_TOKENS)
    found: tuple[float | None, float | None]
    source: str
    reason: str = ""


_COPIES = "prompts: their engines copy experts to the GPU, here the host computes them"
_DDR4, _DDR5 = "Ryzen-9-5950X", "Ryzen-9-7950X"
REPORTS = (
    Report(
        model="125B-A6B", box=Box(gpu="RTX3090", cpu=_DDR4, memory_gib=128), bits=4, apart=43,
        engine="exllamav3 -mcl 43", found=(402, 17.3), source="exllamav3#326",
    ),
    Report(
        model="125B-A6B", box=Box(gpu="RTX4090", cpu=_DDR4, memory_gib=128), bits=4,
        engine="llama.cpp -cmoe", found=(364, 21.0), tokens=(8192, NEW_TOKENS), source="Crow#140",
    ),
    Report(
        model="125B-A6B", box=Box(gpu="RTX5090", cpu="Ryzen-9-9950X", memory_gib=128), bits=4,
        engine="llama.cpp --fit", apart=27, found=(343, 28.9), source="qvac#237", reason=_COPIES,
    ),
    Report(
        model="35B-A3B", box=Box(gpu="RTX3060-12G", cpu=_DDR4, memory_gib=64), bits=4,
        engine="llama.cpp -ncmoe 99", found=(431, 42.3), source="thecodacus#5", reason=_COPIES,
    ),
    Report(
        model="35B-A3B", box=Box(gpu="RTX3090", cpu=_DDR5, memory_gib=64), bits=8, apart=22,
        engine="ik_llama, 22 layers", found=(2234, 88.5), source="ik_llama.cpp#2262",
        reason="decode: the report names no memory",
    ),
    Report(
        model="80B-A3B", box=Box(gpu="RTX4090", count=4, cpu="Xeon-8480", memory_gib=512), bits=8,
        engine="KTransformers, share 0", found=(None, 53.0), source="KTransformers",
    ),
)  # fmt: skip


def report_row(one: Report) -> dict[str, Any]:
    """Return a reported speed beside the price of its placement."""
    request = replace(
        request_of(model_of(one.model), one.box, one.tokens), quality_budget=None, theta_s=0.0
    )
    own = _Rules(request, make_plan(request))
    layers = request.model.num_layers
    resident = dict.fromkeys(range(layers if one.apart is None else one.apart), 0)
    plan = own.plan_of(resident, one.bits)
    estimate, _ = evaluate_plan(plan, own.task.costs, own.omega)
    return {
        "model": one.model,
        "box": one.box.name,
        "engine": one.engine,
        "source": one.source,
        "found": one.found,
        "speeds": speeds(replace(plan, estimate=estimate)),
        "reason": one.reason,
    }


def report(record: dict[str, Any]) -> str:
    """Return the figures as two Markdown tables."""
    lines = [
        "**Plans and rules**",
        "",
        "| model | box | bits; layers with experts on the host | prompt | decode | "
        f"{' | '.join(RULES)} | planning |",
        "|" + " --- |" * (6 + len(RULES)),
    ]
    for row in record["rows"]:
        title = f"{row['model'].rpartition('/')[2]} | {row['box']}"
        if "speeds" not in row:
            lines.append(f"| {title} | does not fit |{' - |' * 5} {row['planning_s']:.1f} s |")
            continue
        others = ["-" if row[rule] is None else f"{row[rule][1]:.1f}" for rule in RULES]
        prompt, decode = row["speeds"]
        lines.append(
            f"| {title} | {row['choice']} | {prompt:.0f} | {decode:.1f} | "
            f"{' | '.join(others)} | {row['planning_s']:.1f} s |"
        )
    lines += [
        "",
        "**Reported speeds**",
        "",
        "| model | box | engine | prompt, reported | predicted | decode, reported | predicted |",
        "|" + " --- |" * 7,
    ]
    for row in record["reports"]:
        cells = [
            cell
            for found, price in zip(row["found"], row["speeds"], strict=True)
            for cell in (
                "-" if found is None else f"{found:g}",
                f"{price:.{0 if price > 100 else 1}f}",
            )
        ]
        lines.append(
            f"| {row['model']} | {row['box']} | {row['engine']} ({row['source']}) | "
            f"{' | '.join(cells)} |"
        )
    reasons = dict.fromkeys(row["reason"] for row in record["reports"] if row["reason"])
    lines += ["", f"Out of a factor of {FACTOR:g}: {'; '.join(reasons)}."] if reasons else []
    return "\n".join(lines)


def faults(record: dict[str, Any]) -> list[str]:
    """Return what a plan or a price lacks."""
    found = []
    for row in record["rows"]:
        name = f"{row['model']} on {row['box']}"
        if row["planning_s"] > MOST_PLANNING_S:
            found.append(f"{name}: planned in {row['planning_s']:.1f} s")
        for rule in RULES:
            other_s = row.get(f"{rule}_latency_s")
            if other_s is not None and row["latency_s"] > other_s * (1 + 1e-9):
                found.append(f"{name}: {row['latency_s']:.3f} s, {rule} {other_s:.3f} s")
    for row in record["reports"]:
        factors = [
            max(value / price, price / value)
            for value, price in zip(row["found"], row["speeds"], strict=True)
            if value is not None
        ]
        if max(factors) > FACTOR and not row["reason"]:
            found.append(f"{row['model']} by {row['engine']}: {max(factors):.2f} times")
    return found


def main() -> int:
    """Plan all models on all boxes, and price what people report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    record = {
        "rows": [row_of(name, box) for name in MODELS for box in BOXES],
        "reports": [report_row(one) for one in REPORTS],
    }
    print(json.dumps(record) if options.json else report(record))
    lacking = faults(record)
    for text in lacking:
        print(text, file=sys.stderr)
    return int(bool(lacking))


if __name__ == "__main__":
    sys.exit(main())
