"""SamuLLM's evaluation (Sec. 5) by the estimate, on eight A100-80G from the authors' tables.

    python -m reproduce.samullm --data FOLDER [--small] [--keep FILE] [--json]

FOLDER holds ``iterations/<model>_tp<degree>.csv.gz``, ``model_load_seconds.json`` and
``output_length_pdf_norobots.json``, as made from github.com/puddingfjz/vllm (Apache-2.0). Every
application is planned with one sample of answer lengths and played with another. With ``--keep`` a
later start goes on where this one was stopped.

Measured: iterations and load times (the authors' tables). From the text: models, numbers of
requests, limits, lengths of prompts and documents by range and mean. Not public, and taken
instead: output lengths of Llama-2-7b-chat (chatglm3-6b and Mixtral have their own), tables of
models of equal architecture, and per-layer costs for models without any.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from llmpq.assigner.fleet.partition import DevicePools
from llmpq.errors import LlmpqError
from llmpq.multillm.candidates import resolve_models
from llmpq.multillm.engine.law import IterationModel
from llmpq.multillm.graph import load_application
from llmpq.multillm.planner import Method, PlanOptions, application, plan_application
from llmpq.multillm.planner.application import (
    PlannedApplication,
    candidate_finder,
    replay,
    workload_of,
)
from llmpq.multillm.workload import load_items
from llmpq.spec.cluster import load_cluster
from llmpq.spec.fields import dump_json, write_text
from reproduce.output import Record, emit, say, table
from reproduce.samullm_search import search

# --- Applications ---


Json = dict[str, Any]

LLAMA_13B = "meta-llama/Llama-2-13b-hf"
CHATGLM = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 4096,
    "num_hidden_layers": 28, "num_attention_heads": 32, "num_key_value_heads": 2,
    "intermediate_size": 13696, "vocab_size": 65024, "max_position_embeddings": 8192,
    "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip
STABLELM = {
    "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_size": 6144,
    "num_hidden_layers": 16, "num_attention_heads": 48, "intermediate_size": 24576,
    "vocab_size": 50432, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "torch_dtype": "float16",
}  # fmt: skip
CONFIGS = {"chatglm3-6b": CHATGLM, "stablelm-7b": STABLELM}
"""Sizes of models that the catalogue lacks, as configurations of families with equal layers."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the figures of a model come from.

    Attributes:
        name: of the model in the applications.
        model: its sizes: name of the catalogue, or of ``CONFIGS``.
        table: model of its tables of iterations; ``None``: priced from its layers.
        loads: key of its load times.
        lengths: model of its output lengths.
        context: longest sequence.
    """

    name: str
    model: str
    table: str | None
    loads: str
    lengths: str = "Llama-2-7b-chat-hf"
    context: int = 4096


ENSEMBLE_MODELS = (
    Source("vicuna-13b", LLAMA_13B, "vicuna-13b-v1.5", "lmsys/vicuna-13b-v1.5"),
    Source("oasst-12b", "EleutherAI/pythia-12b", "oasst-sft-4-pythia-12b-epoch-3.5",
           "OpenAssistant/oasst-sft-4-pythia-12b-epoch-3.5", context=2048),
    Source("alpaca-13b", LLAMA_13B, "alpaca-13b", "chavinlo/alpaca-13b", context=2048),
    Source("baize-13b", LLAMA_13B, "baize-v2-13b", "project-baize/baize-v2-13b"),
    Source("koala-13b", LLAMA_13B, "alpaca-13b", "TheBloke/koala-13B-HF", context=2048),
    Source("dolly-12b", "EleutherAI/pythia-12b", "dolly-v2-12b", "databricks/dolly-v2-12b",
           context=2048),
    Source("mpt-7b", "mosaicml/mpt-7b", "mpt-7b-chat", "mosaicml/mpt-7b-chat", context=2048),
    Source("chatglm3-6b", "chatglm3-6b", "chatglm3-6b", "THUDM/chatglm3-6b", "chatglm3-6b"),
    Source("stablelm-7b", "stablelm-7b", None, "stabilityai/stablelm-tuned-alpha-7b"),
)  # fmt: skip
LLAMA_70B = Source("llama-70b", "meta-llama/Llama-2-70b-hf", None, "meta-llama/Llama-2-70b-chat-hf")
ROUTED = {
    LLAMA_70B: 408,
    Source("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1", "Mixtral-8x7B-v0.1",
           "mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B-v0.1"): 1267,
    Source("wizardlm-13b", LLAMA_13B, "Llama-2-13b-hf", "WizardLMTeam/WizardLM-13B-V1.2"): 2068,
    Source("codellama-34b", "codellama/CodeLlama-34b-hf", None,
           "meta-llama/CodeLlama-34b-Instruct-hf"): 456,
    Source("mistral-7b", "mistralai/Mistral-7B-v0.1", None,
           "mistralai/Mistral-7B-Instruct-v0.2"): 2657,
}  # fmt: skip
"""Table 1: models and their requests."""

CLUSTER: Json = {
    "schema": 1,
    "name": "8 A100-80G",
    "nodes": [{"name": "node0", "devices": [{"type": "A100-80G", "count": 8}]}],
}
CHUNK = 2048
INSTRUCTIONS = 150
"""Tokens of the judge's instructions."""


class Cases:
    """Writes application files into a folder.

    Args:
        data: folder of the authors' tables.
        folder: to write to.
    """

    def __init__(self, data: Path, folder: Path) -> None:
        self._data, self._folder = data, folder
        for name, config in CONFIGS.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        for name in ("Llama-2-7b-chat-hf", "chatglm3-6b", "Mixtral-8x7B-v0.1"):
            self._write_lengths(name, self._pdfs[name])
        self._write_lengths("routerbench", _routed_outputs())
        self.cluster = self._write("cluster.json", CLUSTER)

    def ensemble(self, requests: int, limit: int) -> Path:
        """Return nine models that answer every request."""
        self._requests("mix", _mix_prompts(requests))
        return self._app(
            f"ensemble-{requests}-{limit}",
            [self._model(source) for source in ENSEMBLE_MODELS],
            self._answers("mix", limit),
            [],
        )

    def routing(self, *, is_known: bool) -> Path:
        """Return five models that answer their own requests; ``is_known``: lengths as published."""
        lengths = "routerbench" if is_known else None
        nodes = []
        for number, (source, requests) in enumerate(ROUTED.items()):
            name = f"routed-{source.name}"
            self._requests(name, _routed_prompts(requests, number), name)
            nodes.append(_node(source.name, requests=f"{name}.jsonl", max_new_tokens=4096))
        models = [self._model(source, lengths) for source in ROUTED]
        return self._app(f"routing-{'known' if is_known else 'sampled'}", models, nodes, [])

    def chain(self, documents: int, evaluations: int, limit: int = 900) -> Path:
        """Return summaries chunk by chunk, each judged several times."""
        models, nodes, edges = self._chain(documents, evaluations, limit)
        return self._app(f"chain-{documents}-{evaluations}-{limit}", models, nodes, edges)

    def mixed(self, documents: int, requests: int, limit: int, evaluations: int = 4) -> Path:
        """Return both: a chain of limit 900 and an ensemble."""
        models, nodes, edges = self._chain(documents, evaluations, 900)
        self._requests("mix", _mix_prompts(requests))
        models += [self._model(source) for source in ENSEMBLE_MODELS]
        nodes += self._answers("mix", limit)
        return self._app(f"mixed-{documents}-{requests}-{limit}", models, nodes, edges)

    def _chain(self, documents: int, evaluations: int, limit: int) -> tuple[list[Json], ...]:
        self._requests("documents", [[CHUNK] * chunks for chunks in _chunks(documents)])
        vicuna = Source("summariser", *_figures(ENSEMBLE_MODELS[0]))
        judge = Source("judge", *_figures(LLAMA_70B))
        words = "word " * INSTRUCTIONS
        nodes = [
            _node(
                "summary", "summariser", requests="documents.jsonl", max_new_tokens=limit,
                templates=["{prompt} {summary}"],
            ),
            _node(
                "verdict", "judge", max_new_tokens=limit,
                templates=[f"{words[: 4 * INSTRUCTIONS]}{{summary}}"] * evaluations,
            ),
        ]  # fmt: skip
        edges = [{"from": "summary", "to": "summary"}, {"from": "summary", "to": "verdict"}]
        return [self._model(vicuna), self._model(judge)], nodes, edges

    def _answers(self, requests: str, limit: int) -> list[Json]:
        return [
            _node(f"answer-{source.name}", source.name, requests=f"{requests}.jsonl",
                  max_new_tokens=limit)
            for source in ENSEMBLE_MODELS
        ]  # fmt: skip

    def _model(self, source: Source, lengths: str | None = None) -> Json:
        tables = []
        for degree in (1, 2, 4):
            table: Json = {"tensor_parallel": degree}
            path = self._data / "iterations" / f"{source.table}_tp{degree}.csv.gz"
            if source.table is not None and path.is_file():
                table["iterations"] = str(path.resolve())
            elif source.table is not None:
                continue
            seconds = self._loads.get(f"{source.loads}|tp{degree}")
            if seconds:
                table["load_s"] = seconds[-1]
            tables.append(table)
        return {
            "name": source.name,
            "model": source.model,
            "max_model_len": source.context,
            "lengths": f"{lengths or source.lengths}.json",
            "tables": tables,
        }

    @cached_property
    def _pdfs(self) -> Mapping[str, Sequence[float]]:
        found: Mapping[str, Sequence[float]] = json.loads(
            (self._data / "output_length_pdf_norobots.json").read_text()
        )
        return found

    @cached_property
    def _loads(self) -> Mapping[str, Sequence[float]]:
        found: Mapping[str, Sequence[float]] = json.loads(
            (self._data / "model_load_seconds.json").read_text()
        )
        return found

    def _write_lengths(self, name: str, shares: Sequence[float]) -> None:
        pairs = [(length, share) for length, share in enumerate(shares) if length and share > 0]
        total = sum(share for _, share in pairs)
        record = {
            "schema": 1,
            "lengths": [length for length, _ in pairs],
            "probabilities": [share / total for _, share in pairs],
        }
        self._write(f"{name}.json", record)

    def _requests(
        self, name: str, prompts: Sequence[int | Sequence[int]], prefix: str = ""
    ) -> None:
        lines = [
            json.dumps({"id": f"{prefix or name}-{number}", "prompt_tokens": prompt})
            for number, prompt in enumerate(prompts)
        ]
        (self._folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    def _app(self, name: str, models: list[Json], nodes: list[Json], edges: list[Json]) -> Path:
        record = {"schema": 1, "name": name, "models": models, "nodes": nodes, "edges": edges}
        return self._write(f"app-{name}.json", record)

    def _write(self, name: str, record: Json) -> Path:
        path = self._folder / name
        path.write_text(json.dumps(record))
        return path


def _node(name: str, model: str | None = None, **fields: object) -> Json:
    return {"name": name, "model": model or name, **fields}


def _figures(source: Source) -> tuple[str, str | None, str, str, int]:
    return source.model, source.table, source.loads, source.lengths, source.context


def _mix_prompts(count: int) -> list[int]:
    """Prompts of MixInstruct: 5 to 127 tokens, 21 in the mean."""
    chance = np.random.default_rng(1)
    found: list[int] = (5 + chance.exponential(16.3, count).clip(max=122)).astype(int).tolist()
    return found


def _routed_prompts(count: int, seed: int) -> list[int]:
    """Prompts of RouterBench: 9 to 577 tokens, 310 in the mean."""
    chance = np.random.default_rng(2 + seed)
    found: list[int] = chance.triangular(9, 344, 577, count).astype(int).tolist()
    return found


def _routed_outputs() -> list[float]:
    """Answers of RouterBench: 3 to 1,585 tokens, 199 in the mean (a lognormal law, cut)."""
    at = np.arange(1, 1586)
    shares = np.where(at < 3, 0.0, np.exp(-((np.log(at) - 4.95) ** 2) / (2 * 0.85**2)) / at)
    return [0.0, *(shares / shares.sum()).tolist()]


def _chunks(documents: int) -> list[int]:
    """Chunks of documents: 3 in the median; the longest has 60 of 100, 201 of 300 and more."""
    chance = np.random.default_rng(3)
    drawn = np.exp(chance.normal(np.log(3.0), 1.1, documents)).round().clip(1, 60).astype(int)
    drawn[0] = 60 if documents <= 100 else 201
    found: list[int] = drawn.tolist()
    return found


# --- The evaluation ---


PLANNED, PLAYED = 0, 1
"""Seeds of the lengths that are planned with, and played."""
METHODS: tuple[Method, ...] = ("greedy", "samullm", "max", "min")
NAMES = {"greedy": "ours", "samullm": "Algorithm 1", "max": "Max", "min": "Min"}


Published = tuple[str, str]
"""Gains of Algorithm 1, end to end, over Max and over Min."""
ENSEMBLE, ROUTING = ("1.1-2.4", "1.0-1.6"), ("1.4-1.8", "1.0-1.1")
CHAIN, MIXED = ("1.0-1.3", "1.0-1.4"), ("1.2-1.4", "1.2-1.4")
RIVALS: tuple[Method, ...] = ("max", "min")


@dataclass(frozen=True, slots=True)
class Case:
    """An application with what the paper publishes about it.

    Attributes:
        name: for the tables.
        make: writes the application that is planned.
        published: gains.
        truth: writes the application whose lengths are played; the same by default.
    """

    name: str
    make: Callable[[Cases], Path]
    published: Published
    truth: Callable[[Cases], Path] | None = None


def _ensemble(requests: int, limit: int) -> Case:
    return Case(
        f"ensemble, {requests:,} requests, limit {limit}",
        lambda cases: cases.ensemble(requests, limit),
        ENSEMBLE,
    )


def _chain(documents: int, evaluations: int) -> Case:
    return Case(
        f"chain, {documents} documents, {evaluations} evaluations",
        lambda cases: cases.chain(documents, evaluations),
        CHAIN,
    )


MIXED_DOCUMENTS, MIXED_REQUESTS, EVALUATIONS = (100, 300, 500), 5000, 4


def _mixed(documents: int, limit: int) -> Case:
    return Case(
        f"mixed, {documents} documents, {MIXED_REQUESTS:,} requests of limit {limit}",
        lambda cases: cases.mixed(documents, MIXED_REQUESTS, limit, EVALUATIONS),
        MIXED,
    )


def _known(cases: Cases) -> Path:
    return cases.routing(is_known=True)


SAMPLED = Case(
    "routing, lengths sampled", lambda cases: cases.routing(is_known=False), ROUTING, _known
)
KNOWN = Case("routing, distribution known", _known, ROUTING)
SMALL = (
    *(_ensemble(requests, 256) for requests in (1000, 10000)),
    SAMPLED,
    KNOWN,
    *(_chain(documents, 4) for documents in (100, 500)),
    _mixed(300, 256),
)
CASES = (
    *(_ensemble(requests, limit) for limit in (256, 512) for requests in (1000, 5000, 10000)),
    SAMPLED,
    KNOWN,
    *(_chain(*sizes) for sizes in ((100, 1), (100, 2), (100, 4), (300, 4), (500, 4))),
    *(_mixed(documents, 256) for documents in MIXED_DOCUMENTS),
)
ABLATIONS = tuple(_mixed(500, limit) for limit in (256, 512))
SEQUENCES = (1, 20)
"""Complete sequences of stages of the search in the authors' code (``max_group_seq_num``)."""
LOGGED = {
    "chain, 100 documents, 1 evaluations": (1.02, 1.05),
    "chain, 100 documents, 2 evaluations": (1.03, 1.10),
    "chain, 100 documents, 4 evaluations": (1.18, 1.20),
    "chain, 300 documents, 4 evaluations": (1.19, 1.02),
}
"""Max over the authors' search, by their estimate and in their runs with Vicuna-13B on eight GPUs:
``benchmarks/Exp_Analysis_extract_results_from_logs_outputs.json`` of their repository."""
VARIANTS: dict[str, PlanOptions] = {
    "as planned": PlanOptions(pipelines=False),
    "no preemption": PlanOptions(pipelines=False, preemption=False),
    "lengths known": PlanOptions(pipelines=False, seed=PLAYED),
}
AS_PLANNED = next(iter(VARIANTS))
ABLATED: tuple[Method, ...] = ("greedy", "samullm", "min")


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, play and print the tables."""
    parser = argparse.ArgumentParser(prog="reproduce.samullm", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="some cases, without ablations")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds to improve a plan")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keeps the figures, case by case")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")
    options = parser.parse_args(argv)
    try:
        record = collect(options.data, options.limit, options.keep, is_small=options.small)
    except LlmpqError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return error.exit_status
    emit(report(record), record, as_json=options.json)
    return 0


def collect(data: Path, limit_s: float, keep: Path | None, *, is_small: bool = False) -> Record:
    """Return the figures of all cases and ablations."""
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(Cases(data, Path(folder)), limit_s, keep)
        record: Record = {"cases": [bench.compare(case) for case in (SMALL if is_small else CASES)]}
        if not is_small:
            record["ablations"] = {case.name: bench.ablations(case) for case in ABLATIONS}
        record["searches"] = {case["name"]: case_searches(bench, case) for case in record["cases"]}
    return record


def case_searches(bench: _Bench, case: Record) -> Record:
    """Return what the search of the authors' code finds, after a few sequences and after more."""
    return {str(sequences): bench.searched(case["name"], sequences) for sequences in SEQUENCES}


class _Bench:
    """Plans and plays cases; ``keep`` names the file of the figures so far."""

    def __init__(self, cases: Cases, limit_s: float, keep: Path | None) -> None:
        self._cases, self._limit_s, self._keep = cases, limit_s, keep
        self._fitted: dict[str, IterationModel] = {}
        self._cluster = load_cluster(cases.cluster)
        has_kept = keep is not None and keep.exists()
        self._known: Record = json.loads(keep.read_text()) if keep and has_kept else {}

    def compare(self, case: Case) -> Record:
        """Return the figures of all methods."""
        found: Record = {"name": case.name, "published": case.published}
        return found | {method: self._figures(case, method, AS_PLANNED) for method in METHODS}

    def ablations(self, case: Case) -> Record:
        """Return the figures without preemption, and with known lengths."""
        return {
            method: {name: self._figures(case, method, name) for name in VARIANTS}
            for method in ABLATED
        }

    def searched(self, name: str, sequences: int) -> Record:
        """Return the figures of the search of the authors' code."""
        key = f"{name}, code, {sequences} sequences"
        if key not in self._known:
            say(key)
            case = next(one for one in CASES if one.name == name)
            path = case.make(self._cases)
            planned = self._plan(path, replace(VARIANTS[AS_PLANNED], method="max"))
            found = search(planned.problem, sequences)
            workload = planned.problem.simulator.workload
            stages = tuple(application._stages(workload, DevicePools.of(self._cluster), found))
            made = replace(planned, schedule=replace(planned.schedule, stages=stages))
            truth = path if case.truth is None else case.truth(self._cases)
            self._known[key] = {
                "predicted_s": found.makespan_s, "played_s": self._play(made, truth),
            }  # fmt: skip
            if self._keep is not None:
                write_text(self._keep, dump_json(self._known))
        known: Record = self._known[key]
        return known

    def _figures(self, case: Case, method: Method, variant: str) -> Record:
        key = f"{case.name}, {method}, {variant}, {self._limit_s:g} s"
        if key not in self._known:
            say(key)
            self._known[key] = self._played(case, replace(VARIANTS[variant], method=method))
            if self._keep is not None:
                write_text(self._keep, dump_json(self._known))
        found: Record = self._known[key]
        return found

    def _played(self, case: Case, options: PlanOptions) -> Record:
        path = case.make(self._cases)
        planned = self._plan(path, options)
        played = self._play(planned, path if case.truth is None else case.truth(self._cases))
        schedule = planned.schedule
        return {
            "predicted_s": schedule.makespan_s,
            "played_s": played,
            "search_s": schedule.search_s,
            "bound_s": schedule.bound_s,
            "idle_s": schedule.idle_s,
            "stages": len(schedule.stages),
        }

    def _plan(self, path: Path, options: PlanOptions) -> PlannedApplication:
        app = load_application(path)
        chosen = replace(options, limit_s=self._limit_s)
        return plan_application(app, load_items(app), self._cluster, chosen, fitted=self._fitted)

    def _play(self, planned: PlannedApplication, path: Path) -> float:
        app = load_application(path)
        models = resolve_models(app)
        workload = workload_of(app, load_items(app), models, PLAYED)
        finder = candidate_finder(models, self._cluster, workload, planned.problem.candidates)
        return replay(workload, planned.schedule, self._cluster, finder).makespan_s


def report(record: Record) -> str:
    """Return the tables as Markdown."""
    parts = [_gains(record["cases"]), _searches(record["cases"])]
    if "ablations" in record:
        parts.append(_apart(record["cases"]))
    if "searches" in record:
        parts.append(_beside(record["cases"], record["searches"]))
    if "ablations" in record:
        parts.append(_ablations(record["ablations"]))
    return "\n\n".join(parts)


def _gains(cases: Sequence[Record]) -> str:
    rows = []
    for case in cases:
        seconds = {method: case[method]["played_s"] for method in METHODS}
        rows.append(
            [
                case["name"],
                *(f"{seconds[method]:.0f}" for method in METHODS),
                f"{seconds['samullm'] / seconds['greedy']:.2f}",
                *(f"{seconds[rival] / seconds['greedy']:.2f}" for rival in RIVALS),
                *(
                    cell
                    for rival, published in zip(RIVALS, case["published"], strict=True)
                    for cell in (f"{seconds[rival] / seconds['samullm']:.2f}", published)
                ),
            ]
        )
    head = (
        "application", *(f"{NAMES[method]}, s" for method in METHODS), "Algorithm 1 over ours",
        "Max over ours", "Min over ours", "Max over Algorithm 1", "published",
        "Min over Algorithm 1", "published ",
    )  # fmt: skip
    return f"### Seconds as played, and gains\n\n{table(head, rows)}"


def predicted_gains(case: Record) -> dict[str, float]:
    """Return the gains of Algorithm 1 over the rivals by the estimate, as they are shown."""
    own = case["samullm"]["predicted_s"]
    return {rival: float(round(case[rival]["predicted_s"] / own, 2)) for rival in RIVALS}


def _beside(cases: Sequence[Record], searches: Record) -> str:
    rows = []
    for case in cases:
        of_code = [searches[case["name"]][str(number)]["predicted_s"] for number in SEQUENCES]
        seconds = {method: case[method]["predicted_s"] for method in METHODS}
        logged = LOGGED.get(case["name"])
        rows.append([
            case["name"], f"{seconds['greedy']:.0f}", f"{seconds['samullm']:.0f}",
            *(f"{one:.0f}" for one in of_code),
            *(f"{seconds[rival]:.0f}" for rival in RIVALS),
            *(f"{one:.2f}" for one in predicted_gains(case).values()),
            *(f"{seconds[rival] / min(of_code):.2f}" for rival in RIVALS),
            "-" if logged is None else f"{logged[0]:.2f}, {logged[1]:.2f}",
        ])  # fmt: skip
    head = (
        "application", "ours, s", "Algorithm 1, s", "code, 1 sequence, s", "20 sequences, s",
        "Max, s", "Min, s", "Max over Algorithm 1", "Min over it", "Max over code", "Min over code",
        "Max over theirs: estimate, run",
    )  # fmt: skip
    return f"### As planned, beside the search of the authors' code\n\n{table(head, rows)}"


def gain(case: Record, rival: Method) -> float:
    """Return the gain of Algorithm 1 over a rival, as it is shown."""
    return float(round(case[rival]["played_s"] / case["samullm"]["played_s"], 2))


def published(case: Record, rival: Method) -> tuple[float, float]:
    """Return the range of the published gains of Algorithm 1 over a rival."""
    low, high = case["published"][RIVALS.index(rival)].split("-")
    return float(low), float(high)


def _apart(cases: Sequence[Record]) -> str:
    """Return how much longer the parts of a mixed application take one after the other."""
    seconds = {case["name"]: case for case in cases}
    rows = []
    for documents in MIXED_DOCUMENTS:
        parts = _ensemble(MIXED_REQUESTS, 256).name, _chain(documents, EVALUATIONS).name
        whole = seconds[_mixed(documents, 256).name]
        sums = {
            method: sum(seconds[part][method]["played_s"] for part in parts) for method in METHODS
        }
        shares = (f"{sums[method] / whole[method]['played_s']:.2f}" for method in METHODS)
        rows.append([f"{documents} documents", *shares])
    head = ("mixed", *(NAMES[method] for method in METHODS))
    return f"### Parts one after the other, over mixed\n\n{table(head, rows)}"


def _searches(cases: Sequence[Record]) -> str:
    rows = []
    for case in cases:
        ours = case["greedy"]
        rows.append(
            [
                case["name"],
                *(f"{case[method]['search_s']:.1f}" for method in METHODS),
                f"{ours['predicted_s']:.0f}",
                f"{ours['bound_s']:.0f}",
                f"{1.0 - ours['bound_s'] / ours['predicted_s']:.0%}",
                f"{ours['played_s'] / ours['predicted_s'] - 1.0:+.1%}",
            ]
        )
    head = (
        "application", *(f"search of {NAMES[method]}, s" for method in METHODS),
        "ours predicted, s", "lower bound, s", "gap", "played over predicted",
    )  # fmt: skip
    return f"### Searches, bounds and estimates\n\n{table(head, rows)}"


def _ablations(cases: Record) -> str:
    rows = []
    for case, found in cases.items():
        ours = found["greedy"][AS_PLANNED]["played_s"]
        for method, variants in found.items():
            base = variants[AS_PLANNED]["played_s"]
            for name, figures in variants.items():
                rows.append(
                    [
                        case,
                        NAMES[method],
                        name,
                        f"{figures['played_s']:.0f}",
                        f"{figures['played_s'] / base:.2f}",
                        f"{figures['played_s'] / ours:.2f}",
                        f"{figures['played_s'] / figures['predicted_s'] - 1.0:+.1%}",
                    ]
                )
    head = (
        "application", "method", "variant", "played, s", "over as planned", "over ours",
        "played over predicted",
    )  # fmt: skip
    return f"### Ablations\n\n{table(head, rows)}"


if __name__ == "__main__":
    sys.exit(main())
