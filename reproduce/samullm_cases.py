"""The applications of SamuLLM's evaluation, written as application files.

Measured: iterations and load times (the authors' tables). From the text: models, numbers of
requests, limits, lengths of prompts and documents by range and mean. Not public, and taken
instead: output lengths of Llama-2-7b-chat (chatglm3-6b and Mixtral have their own), tables of
models of equal architecture, and per-layer costs for models without any.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

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


ENSEMBLE = (
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
            [self._model(source) for source in ENSEMBLE],
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
        models += [self._model(source) for source in ENSEMBLE]
        nodes += self._answers("mix", limit)
        return self._app(f"mixed-{documents}-{requests}-{limit}", models, nodes, edges)

    def _chain(self, documents: int, evaluations: int, limit: int) -> tuple[list[Json], ...]:
        self._requests("documents", [[CHUNK] * chunks for chunks in _chunks(documents)])
        vicuna = Source("summariser", *_figures(ENSEMBLE[0]))
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
            for source in ENSEMBLE
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
