"""Try every plan of small random problems, and compare the best one with the planner's.

    OMP_NUM_THREADS=1 python benchmarks/brute_force.py --problems 200 --json FILE

Seconds and bytes of one layer, one message and one process are those of the cost model. All that
the planner makes of them (``docs/how/equations.md``) is computed here once more, without its code:
every sequence of single devices, none of which count as equal; every cut of the layers; every
choice of bits; every micro-batch size. The planner runs as a user runs it: ``llmpq-algo`` on files.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llmpq.costmodel import ClusterCosts, build_costs
from llmpq.spec import catalog
from llmpq.spec.cluster import Device, load_cluster
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import Phase
from llmpq.spec.workload import Workload, load_workload

TYPES = ("T4-16G", "V100-32G", "P100-12G", "A100-40G")
DEVICES = (1, 2, 3, 3, 3, 4, 4, 4)
"""Numbers of devices that problems are drawn from."""
AGREED = 1e-9
"""Relative difference below which two objectives are equal."""
INFEASIBLE = 3
"""Exit status of ``llmpq-algo`` where there is no plan."""

Array = np.ndarray[Any, Any]
Record = dict[str, Any]
Planner = Callable[[Sequence[str]], tuple[int, str]]
"""Runs ``llmpq-algo`` with these options; returns its exit status and what it prints."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all problems; return 1 where the planner and brute force differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first problem")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args(argv)
    samples = []
    for seed in range(options.first, options.first + options.problems):
        with tempfile.TemporaryDirectory() as folder:
            samples.append(compared(seed, Path(folder), planner_process))
        sys.stdout.write(json.dumps(samples[-1]) + "\n")
        sys.stdout.flush()
    wrong = [sample["seed"] for sample in samples if sample["difference"]]
    sys.stdout.write(f"{len(samples)} problems, {len(wrong)} differ: {wrong}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(document(samples, options), indent=1) + "\n")
    return 1 if wrong else 0


def planner_process(words: Sequence[str]) -> tuple[int, str]:
    """Run ``llmpq-algo`` as a process of its own."""
    program = "import sys; from llmpq.cli.commands.algo import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout or done.stderr


def compared(seed: int, folder: Path, planner: Planner) -> Record:
    """Return what brute force and the planner find for one problem, and where they differ."""
    words = write_problem(seed, folder)
    problem = Problem.read(folder)
    every, adjacent = solve(problem)
    sample: Record = {
        "seed": seed,
        "devices": [device.label for device in problem.costs.cluster.devices],
        "layers": problem.costs.model.num_layers,
        "plans": problem.tried,
        "best_s": finite(every),
        "best_adjacent_s": finite(adjacent),
        "difference": [],
    }
    for orders, best_s in (("auto", every), ("types", adjacent)):
        output = folder / f"plan-{orders}.json"
        asked = [*words, "--orders", orders, "--output", str(output)]
        status, printed = planner(asked)
        found, differences = answer(problem, status, printed, best_s)
        if orders == "auto" and status == 0 and found["orders"] != "all":
            differences.append("the proof is not over all orders")
        sample[f"planner_{orders}"] = found
        sample["difference"] += [f"{orders}: {text}" for text in differences]
    return sample


def answer(problem: Problem, status: int, printed: str, best_s: float) -> tuple[Record, list[str]]:
    """Return the planner's answer, and what is wrong with it."""
    if status == INFEASIBLE:
        return {"status": "infeasible"}, [] if math.isinf(best_s) else ["a plan exists"]
    if status:
        return {"status": "error"}, [printed[-300:]]
    plan = json.loads(printed)
    found = {
        "status": plan["status"],
        "objective_s": plan["objective_s"],
        "bound_s": plan["bound_s"],
        "orders": plan["order_set"],
        "number": plan["orders"],
    }
    wrong = []
    if plan["status"] != "optimal":
        wrong.append("not proven")
    if not math.isclose(plan["objective_s"], best_s, rel_tol=AGREED):
        wrong.append(f"costs {plan['objective_s']!r} s, the best plan {best_s!r} s")
    if plan["bound_s"] > best_s * (1 + AGREED):
        wrong.append(f"claims a bound of {plan['bound_s']!r} s")
    own_s = value_of(problem, plan)
    if not math.isclose(own_s, plan["objective_s"], rel_tol=AGREED):
        wrong.append(f"its plan costs {own_s!r} s")
    return found, wrong


def finite(seconds: float) -> float | None:
    """Return seconds, ``None`` where there is no plan."""
    return None if math.isinf(seconds) else seconds


def write_problem(seed: int, folder: Path) -> list[str]:
    """Draw a problem, write its files, and return the options of ``llmpq-algo``."""
    rng = np.random.default_rng([11, seed])
    layers, batch = int(rng.integers(2, 5)), int(rng.integers(1, 5))
    bits = ((16, 8, 4), (16, 4, 3), (16, 8), (8, 4), (4, 3))[int(rng.integers(5))]
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config(layers, has_kinds=rng.random() < 0.3)))
    (folder / "cluster.json").write_text(json.dumps(cluster(rng, layers)))
    work = {
        "schema": 1,
        "batch": batch,
        "prompt_tokens": int(rng.integers(8, 200)),
        "new_tokens": int(rng.integers(1, 40)),
    }
    (folder / "workload.json").write_text(json.dumps(work))
    words = [
        *("--model", str(model), "--cluster", str(folder / "cluster.json")),
        *("--workload", str(folder / "workload.json"), "--bits", *map(str, bits)),
        *("--json", "--no_explain", "--formula", str(rng.choice(["steady", "steady", "paper"]))),
    ]
    if rng.random() < 0.7:
        weight = rng.uniform(0.2, 3.0, layers)
        omega = {
            str(width): (weight * rng.uniform(0.9, 1.1, layers) / (2**width - 1) ** 2).tolist()
            for width in (3, 4, 8)
        }
        table = {"schema": 1, "model": str(model), "method": "random", "omega": omega}
        (folder / "omega.json").write_text(json.dumps(table))
        words += ["--omega_file", str(folder / "omega.json")]
    if rng.random() < 0.3:
        words += ["--quality_budget", str(float(rng.choice([0.01, 0.3, 1.0])))]
    else:
        words += ["--theta", str(float(rng.choice([0.0, 0.01, 0.1, 1.0])))]
    (folder / "words.json").write_text(json.dumps(words))
    return words


def config(layers: int, *, has_kinds: bool) -> Record:
    """Return a small model; with kinds, every other layer has a window of 32 tokens."""
    own = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    if has_kinds:
        own = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    return {
        **own,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 2000,
        "max_position_embeddings": 2048,
        "sliding_window": 32 if has_kinds else None,
        "torch_dtype": "float16",
    }


def cluster(rng: np.random.Generator, layers: int) -> Record:
    """Draw a cluster: equal and other nodes, with equal, slow and fast links of all kinds."""
    left = int(rng.choice(DEVICES))
    nodes: list[Record] = []
    mega = rng.uniform(8, 45) * layers / left

    def group() -> Record:
        name = str(rng.choice(TYPES))
        own = catalog.device(name).runtime_bytes + int((rng.uniform(0.5, 1.5) * mega + 25) * 1e6)
        return {"type": name, "count": int(rng.integers(1, left + 1)), "memory_bytes": own}

    while left > 0:
        like: list[Record] = nodes[-1]["devices"] if nodes and rng.random() < 0.5 else [group()]
        groups = [dict(one) for one in like]
        if rng.random() < 0.2:
            groups.append(group() | {"count": 1})
        while sum(one["count"] for one in groups) > left:
            groups[-1]["count"] -= 1
            groups = [one for one in groups if one["count"]]
        left -= sum(one["count"] for one in groups)
        nodes.append({"name": f"node{len(nodes)}", "devices": groups})
    names = [node["name"] for node in nodes]
    rates = [1e7, 1e8, 1e9, 1e10]
    usual = {"bytes_per_s": float(rng.choice(rates)), "latency_s": 1e-4}
    links = [
        {"between": [one, other], **usual}
        | ({"bytes_per_s": float(rng.choice(rates))} if rng.random() < 0.3 else {})
        for one, other in itertools.combinations_with_replacement(names, 2)
        if one != other or rng.random() < 0.4
    ]
    return {"schema": 1, "name": "random", "nodes": nodes, "links": links}


@dataclass(kw_only=True)
class Problem:
    """A problem as arrays by single device; ``D`` devices, ``L`` layers, ``B`` bitwidths.

    Attributes:
        omega: ``[L, B]`` degradation, 1 for all layers at 4 bits.
        theta_s: price of one unit of it.
        budget: the most of it.
        tried: plans that were evaluated.
    """

    costs: ClusterCosts
    work: Workload
    bits: tuple[int, ...]
    omega: Array
    theta_s: float
    budget: float
    is_paper: bool
    tried: int = field(default=0)

    @classmethod
    def read(cls, folder: Path) -> Problem:
        """Read a problem's files."""
        words = json.loads((folder / "words.json").read_text())

        def option(name: str, default: str) -> str:
            return words[words.index(name) + 1] if name in words else default

        model, _ = catalog.resolve_model(str(folder / "model"))
        known = load_cluster(folder / "cluster.json")
        first = words.index("--bits") + 1
        bits = [int(word) for word in itertools.takewhile(str.isdecimal, words[first:])]
        ordered = tuple(sorted(bits, reverse=True))
        return cls(
            costs=build_costs(model, known, dtype="float16", kv_bits=16),
            work=load_workload(folder / "workload.json"),
            bits=ordered,
            omega=degradation(folder / "omega.json", model.num_layers, ordered),
            theta_s=float(option("--theta", "0")),
            budget=float(option("--quality_budget", "inf")),
            is_paper=option("--formula", "steady") == "paper",
        )


def degradation(path: Path, layers: int, bits: Sequence[int]) -> Array:
    """Return ``[L, B]``: of a table, or the square of the step between two codes."""
    if not path.exists():
        step = [0.0 if width == 16 else ((2**4 - 1) / (2**width - 1)) ** 2 for width in bits]
        return np.tile(np.array(step) / layers, (layers, 1))
    table = json.loads(path.read_text())["omega"]
    unit = sum(table["4"])
    columns = [np.zeros(layers) if b == 16 else np.array(table[str(b)]) / unit for b in bits]
    return np.stack(columns, axis=1)


def solve(problem: Problem) -> tuple[float, float]:
    """Return the least objective over all plans, and over those with groups kept together."""
    best, best_adjacent = math.inf, math.inf
    groups = [device.group for device in problem.costs.cluster.devices]
    sizes = range(1, problem.work.batch + 1)
    for eta, xi in itertools.product(sizes, sizes):
        tables = Tables(problem, MicroBatching(prefill=eta, decode=xi))
        for chain in chains(len(groups)):
            used = [groups[device] for device in chain]
            is_adjacent = len(list(itertools.groupby(used))) == len(set(used))
            for ends in cuts(len(chain), problem.costs.model.num_layers):
                value = tables.least(chain, ends)
                best = min(best, value)
                if is_adjacent:
                    best_adjacent = min(best_adjacent, value)
    return best, best_adjacent


def chains(devices: int) -> Iterator[tuple[int, ...]]:
    """Yield every sequence of different devices; the first has embeddings and head."""
    for length in range(1, devices + 1):
        yield from itertools.permutations(range(devices), length)


def cuts(stages: int, layers: int) -> Iterator[tuple[int, ...]]:
    """Yield the end layers of all stages; only the first stage may be empty."""
    for inner in itertools.combinations(range(layers), stages - 1):
        yield (*inner, layers)


class Tables:
    """Times and bytes of all choices of bits, for one pair of micro-batch sizes.

    ``C`` choices. Sums over layers ``[0, i)`` are kept, by device, so a stage is a difference.
    """

    def __init__(self, problem: Problem, pair: MicroBatching) -> None:
        costs = problem.costs
        self.problem = problem
        self.pair = pair
        layers = costs.model.num_layers
        self.choices = np.array(list(itertools.product(range(len(problem.bits)), repeat=layers)))
        self.quality = problem.omega[np.arange(layers), self.choices].sum(axis=1)  # [C]
        self.devices = costs.cluster.devices
        self.prefill, self.decode, self.bytes = (
            [self._sums(partial(of_layer, device)) for device in self.devices]
            for of_layer in (self._prefill_s, self._decode_s, self._bytes)
        )
        self.room = [self._room(number, is_master=False) for number in range(len(self.devices))]
        self.first_room = [
            self._room(number, is_master=True) for number in range(len(self.devices))
        ]

    def _prefill_s(self, device: Device, kind: int, bits: int) -> float:
        costs, tokens = self.problem.costs, self.problem.work.prompt_tokens
        return costs.layer_s(device, Phase.PREFILL, bits, self.pair.prefill, tokens, kind)

    def _decode_s(self, device: Device, kind: int, bits: int) -> float:
        costs, work = self.problem.costs, self.problem.work
        context = work.prompt_tokens + work.new_tokens / 2
        return costs.layer_s(device, Phase.DECODE, bits, self.pair.decode, context, kind)

    def _bytes(self, device: Device, kind: int, bits: int) -> int:
        costs, work = self.problem.costs, self.problem.work
        reach = work.prompt_tokens + work.new_tokens
        kept = costs.layer_kv_bytes(kind, work.batch, reach, device)
        return costs.layer_weight_bytes(device, kind, bits) + kept

    def _sums(self, of_layer: Callable[[int, int], float]) -> Array:
        """Return ``[C, L + 1]`` sums over the first layers."""
        kinds, bits = self.problem.costs.model.layer_kinds, self.problem.bits
        table = np.array([[of_layer(kind, width) for width in bits] for kind in kinds])  # [L, B]
        single = table[np.arange(len(kinds)), self.choices]  # [C, L]
        zero = np.zeros((len(self.choices), 1), dtype=single.dtype)
        return np.concatenate([zero, np.cumsum(single, axis=1)], axis=1)

    def _room(self, number: int, *, is_master: bool) -> int:
        """Return the bytes left for layers; buffers are those of whatever stage it may be."""
        costs, work, device = self.problem.costs, self.problem.work, self.devices[number]
        roles = (False, True) if is_master else (False,)
        buffers = max(costs.temporary_bytes(device, work, self.pair, role) for role in roles)
        left = costs.capacity_bytes(device) - costs.runtime_bytes(device) - buffers
        return left - costs.master_bytes(device) if is_master else left

    def least(self, chain: Sequence[int], ends: Sequence[int]) -> float:
        """Return the least objective of a sequence of devices and a cut over all choices."""
        values = self.values(chain, ends)
        self.problem.tried += len(values)
        return float(values.min())

    def values(self, chain: Sequence[int], ends: Sequence[int]) -> Array:
        """Return ``[C]`` objectives, infinite where memory or the budget is exceeded."""
        problem = self.problem
        fits = self.quality <= problem.budget * (1 + 1e-9) + 1e-15
        prefill, decode = [], []
        for place, (device, end) in enumerate(zip(chain, ends, strict=True)):
            start = ends[place - 1] if place else 0
            own = self.bytes[device]
            room = (self.first_room if place == 0 else self.room)[device]
            fits = fits & (own[:, end] - own[:, start] <= room)
            times = [table[device] for table in (self.prefill, self.decode)]
            seconds = [table[:, end] - table[:, start] for table in times]
            if place == 0:
                seconds = [one + more for one, more in zip(seconds, self._master(device),
                                                           strict=True)]  # fmt: skip
            prefill.append(seconds[0])
            decode.append(seconds[1])
        latency = self._latency(chain, np.array(prefill), np.array(decode))
        return np.where(fits, latency + problem.theta_s * self.quality, math.inf)

    def _master(self, device: int) -> tuple[float, float]:
        costs, pair, here = self.problem.costs, self.pair, self.devices[device]
        tokens = self.problem.work.prompt_tokens
        return (
            costs.master_s(here, Phase.PREFILL, pair.prefill, tokens),
            costs.master_s(here, Phase.DECODE, pair.decode, 1),
        )

    def _latency(self, chain: Sequence[int], prefill: Array, decode: Array) -> Array:
        """Return ``[C]`` seconds of the whole batch, of stage times ``[N, C]``."""
        work, pair = self.problem.work, self.pair
        mu_pre, mu_dec = math.ceil(work.batch / pair.prefill), math.ceil(work.batch / pair.decode)
        sends, echoes = self._sends(chain)
        slowest_pre = np.maximum(prefill.max(axis=0), max(sends))
        slowest_dec = np.maximum(decode.max(axis=0), max(echoes))
        rounds = work.new_tokens - 1
        first = (mu_pre - 1) * slowest_pre + prefill.sum(axis=0)
        if self.problem.is_paper:
            return first + rounds * (mu_dec - 1) * slowest_dec + decode.sum(axis=0)
        once = decode.sum(axis=0) + sum(echoes)
        return first + sum(sends) + rounds * np.maximum(mu_dec * slowest_dec, once)

    def _sends(self, chain: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the seconds of every message of a micro-batch, the last one to the master."""
        if len(chain) == 1:
            return [0.0], [0.0]
        send_s, tokens = self.problem.costs.send_s, self.problem.work.prompt_tokens
        found: tuple[list[float], list[float]] = [], []
        for place, device in enumerate(chain):
            is_last = place == len(chain) - 1
            here, there = self.devices[device], self.devices[chain[0 if is_last else place + 1]]
            sent = 1 if is_last else tokens
            found[0].append(send_s(here, there, Phase.PREFILL, self.pair.prefill, sent))
            found[1].append(send_s(here, there, Phase.DECODE, self.pair.decode, 1))
        return found


def value_of(problem: Problem, plan: Record) -> float:
    """Return the objective of a plan of the planner, infinite where it does not fit."""
    labels = [device.label for device in problem.costs.cluster.devices]
    pair = MicroBatching(prefill=plan["prefill_micro_batch"], decode=plan["decode_micro_batch"])
    tables = Tables(problem, pair)
    chain = [labels.index(stage["device"]) for stage in plan["stages"]]
    ends = [stage["end_layer"] for stage in plan["stages"]]
    bits = [width for stage in plan["stages"] for width in stage["bits"]]
    wanted = [problem.bits.index(width) for width in bits]
    at = int(np.flatnonzero((tables.choices == wanted).all(axis=1))[0])
    return float(tables.values(chain, ends)[at])


def document(samples: Sequence[Record], options: argparse.Namespace) -> Record:
    """Return the result file: what was compared, a table, and every sample."""
    planned = [one for one in samples if one["best_s"] is not None]
    gains = [one["best_adjacent_s"] / one["best_s"] - 1 for one in planned
             if one["best_adjacent_s"] is not None]  # fmt: skip
    rows = [
        ["problems", len(samples)],
        ["plans tried", sum(one["plans"] for one in samples)],
        ["problems without a plan", len(samples) - len(planned)],
        ["problems where the planner differs", sum(bool(one["difference"]) for one in samples)],
        ["better where equal devices need not be adjacent", sum(gain > AGREED for gain in gains)],
        ["by at most, in percent", round(100 * max(gains, default=0.0), 1)],
    ]  # fmt: skip
    return {
        "topic": "planner-claims",
        "command": f"python benchmarks/brute_force.py --problems {options.problems}",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "machine": "any: nothing is timed",
        "versions": {"numpy": np.__version__},
        "tables": [{"title": "", "columns": ["", "found"], "rows": rows}],
        "samples": list(samples),
    }


if __name__ == "__main__":
    sys.exit(main())
