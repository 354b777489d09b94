"""Two workers of one thread each: our pipeline against llama.cpp over RPC, with our forecast.

    python benchmarks/two_machines.py --folder DIR --prepare    # models: nothing is timed
    sudo python benchmarks/two_machines.py --folder DIR --rounds 3 --output FILE.json

DIR/rivals is the folder of benchmarks/rivals.py. A random model of 125 M parameters decodes 31
tokens after prompts of 32, in two places:

* ``loopback``: both workers on this machine; ours talk over unix sockets, llama.cpp's over TCP;
* ``link``: two network namespaces with a core each and a link of 1 Gbit/s and 1 ms between them
  (``tools/boxes/wire.py``, needs root).

Ours runs the plan of ``llmpq-algo`` for layers and links measured here by ``llmpq-profile``; its
forecast is compared with the run. The head has the bits of the layers, as llama.cpp's has. The
first round runs all settings of llama.cpp, later ones those that were best for a batch. Runs
are kept one by one in DIR; ours counts by the median, llama.cpp by its best run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rivals
from workbench import (
    PASSIVE,
    ROOT,
    SMALL_LLAMA,
    command,
    keep_document,
    make_model,
    origin,
    text_of,
    unset_threading,
    write_prompts,
)

from tools.boxes.wire import Host, Link, hosts

CASE = "single"
"""Name of the model, in pipeline.py's folder too."""
BITS = ("16", "8", "4")
PROMPT, STEPS = 32, 31
"""Tokens of a prompt; decode steps: the first new token comes from the prompt."""
LOOPBACK, LINK = "loopback", "link"
TITLES = {LOOPBACK: "One machine, loopback", LINK: "Two hosts, 1 Gbit/s and 1 ms"}
WIRE = Link(bytes_per_s=125e6, delay_s=1e-3)
OURS, LLAMA_CPP = "llmpq", "llama.cpp"
PORTS = (29650, 29651)
RUN_S = 120.0
PARTS = SMALL_LLAMA["layers"] + 1
"""What llama.cpp divides: the layers, and the head."""
EVEN, BALANCED = 7, 8
"""Parts of the first worker: by number, as llama.cpp does itself, or by bytes."""
Run = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine: the words before a command that runs on it, and its address."""

    before: tuple[str, ...]
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One machine with two workers, or two machines with a worker each."""

    name: str
    machines: tuple[Machine, ...]

    def of_worker(self, number: int) -> Machine:
        """Return the machine of a worker."""
        return self.machines[min(number, len(self.machines) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How llama.cpp runs.

    Attributes:
        workers: RPC workers; with one, the main process computes the first parts.
        first: parts of the first worker, of ``PARTS``.
        threads: of each worker, and of the main process.
        tokens: most of a micro-batch (``-ub``). A step of more sequences is pipelined.
    """

    workers: int
    first: int
    threads: int
    tokens: int

    @property
    def label(self) -> str:
        """The setting in llama.cpp's words."""
        shares = f"-ts {self.first},{PARTS - self.first}"
        split = shares if self.workers > 1 else f"main and one worker, -ngl {PARTS - self.first}"
        return f"{split}, -t {self.threads}, -ub {self.tokens}"

    def words(self, addresses: Sequence[str]) -> list[str]:
        """Return the options of the main process."""
        shares = ["-ngl", str(PARTS - self.first)]
        if self.workers > 1:
            shares = ["-ngl", str(PARTS), "-ts", f"{self.first},{PARTS - self.first}"]
        own = ["-t", str(self.threads), "-ub", str(self.tokens)]
        return ["--rpc", ",".join(addresses), *shares, *own]


def settings(place: str, batches: Sequence[int]) -> list[Setting]:
    """Return the settings of llama.cpp to try: splits, threads and micro-batches.

    A host of the link has one core, and so one thread. Two threads on two cores help a worker
    while the other waits, which it does not when steps are pipelined.
    """
    whole = max(512, *batches)
    parts = sorted({batch // share for batch in batches for share in (2, 4) if batch // share > 1})
    one = {"threads": 1, "first": BALANCED}
    made = [Setting(workers=2, tokens=tokens, **one) for tokens in (whole, *parts)]
    made += [
        Setting(workers=2, first=EVEN, threads=1, tokens=whole),
        Setting(workers=1, tokens=whole, **one),
    ]
    if place == LOOPBACK:
        made += [
            Setting(workers=workers, first=BALANCED, threads=2, tokens=whole) for workers in (1, 2)
        ]
    return made


def main() -> int:
    """Prepare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--prepare", action="store_true", help="make models and exit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--places", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--bits", nargs="+", choices=list(rivals.BITS), default=BITS)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to time layers")
    parser.add_argument("--output", type=Path, help="results of all runs in the folder")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    prepare(options.folder)
    if options.prepare:
        return 0
    with contextlib.ExitStack() as stack:
        places = [stack.enter_context(place_of(name)) for name in options.places]
        for place in places:
            price(options, place)
        for _ in range(options.rounds):
            for place in places:
                for bits in options.bits:
                    measure(options, place, bits)
    found = runs_of(options.folder)
    print("\n\n".join(text_of(table) for table in tables(found)))
    if options.output is not None:
        keep_document(options.output, document(found))
    return 0


def prepare(folder: Path) -> None:
    """Make the model, in our format and in llama.cpp's, and the secret of the hosts."""
    folder.mkdir(parents=True, exist_ok=True)
    make_model(folder / CASE)
    rivals.prepare(folder / "rivals", CASE, SMALL_LLAMA)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))


@contextlib.contextmanager
def place_of(name: str) -> Iterator[Place]:
    """Make a place; hosts and their link are removed again."""
    if name == LOOPBACK:
        yield Place(name=name, machines=(Machine(before=(), address="127.0.0.1"),))
        return
    with hosts({(0, 1): WIRE}, 2) as both:
        cores = sorted(os.sched_getaffinity(0))
        yield Place(
            name=name,
            machines=tuple(
                _of_host(host, core) for host, core in zip(both, cores[:2], strict=True)
            ),
        )


def _of_host(host: Host, core: int) -> Machine:
    """Return a host that has one core."""
    before = ("ip", "netns", "exec", host.name, "taskset", "-c", str(core))
    return Machine(before=before, address=host.address)


def price(options: argparse.Namespace, place: Place) -> None:
    """Time layers and link, and write the cluster with both."""
    layers, folder = options.folder / "layers.csv", options.folder / place.name
    folder.mkdir(exist_ok=True)
    if not layers.exists():
        command([
            "llmpq-profile", "layer", "--model", str(options.folder / CASE), "--core", "0",
            "--bits", *options.bits, "--max_batch", "16", "--max_prompt", "64", "--max_context",
            "128", "--budget", str(options.budget), "--output", str(layers),
        ])  # fmt: skip
    names = ["here"] if len(place.machines) == 1 else ["a", "b"]
    if not (folder / "links.csv").exists():
        between = ["--between", names[0], names[-1], "--output", str(folder / "links.csv")]
        on_machines(options.folder, place, ["llmpq-profile", "link", *between])
    group = {"type": "cpu", "count": 2 // len(names), "threads": 1, "profile": "../layers.csv"}
    nodes = [{"name": name, "devices": [group], "cores": 2 // len(names)} for name in names]
    cluster = {"schema": 1, "name": place.name, "nodes": nodes, "links": []}
    (folder / "cluster.json").write_text(json.dumps(cluster))


def on_machines(folder: Path, place: Place, words: Sequence[str]) -> str:
    """Run one of our commands on every machine of a place; return what the first prints.

    Raises:
        SystemExit: one of them failed; with the end of what it said.
    """
    program = str(Path(sys.executable).parent / words[0])
    together = ["--master_addr", place.machines[0].address, "--token_file", str(folder / "token")]
    together += ["--node_rank"]
    ends, logs = [], []
    for rank, one in enumerate(place.machines):
        own = [*together, str(rank)] if len(place.machines) > 1 else []
        logs.append(folder / f"rank-{rank}.log")
        with logs[-1].open("w") as log:
            ends.append(
                subprocess.Popen(
                    [*one.before, program, *words[1:], *own],
                    cwd=ROOT, env={**unset_threading(), **PASSIVE}, stdout=subprocess.PIPE,
                    stderr=log, text=True,
                )
            )  # fmt: skip
    try:
        outputs = [end.communicate(timeout=RUN_S)[0] for end in ends]
    finally:
        for end in ends:
            end.kill()
    for end, written in zip(ends, logs, strict=True):
        if end.returncode:
            raise SystemExit(f"{words[:2]}: {end.returncode}\n{written.read_text()[-2000:]}")
    return outputs[0]


def measure(options: argparse.Namespace, place: Place, bits: str) -> None:
    """Run ours at all batches, then llama.cpp, and keep what was found."""
    kept = options.folder / "runs.jsonl"
    where = {"place": place.name, "bits": bits}
    known = [run for run in runs_of(options.folder) if {**run, **where} == run]
    for batch in options.batches:
        found = ours(options.folder, place, bits, batch)
        _keep(kept, {**where, "batch": batch, "run": OURS, **found})
    tried = [run for run in known if run["run"] == LLAMA_CPP]
    for setting in best_settings(tried) or settings(place.name, options.batches):
        batches = [one for one in options.batches if _is_for(setting, one)]
        for batch, seconds in llama_cpp(options.folder, place, bits, setting, batches).items():
            line = {**where, "batch": batch, "run": LLAMA_CPP, "seconds": seconds}
            _keep(kept, {**line, "setting": asdict(setting)})


def _is_for(setting: Setting, batch: int) -> bool:
    """Say whether a batch is large enough for the micro-batches of a setting."""
    return setting.tokens >= 512 or batch in (2 * setting.tokens, 4 * setting.tokens)


def best_settings(runs: Sequence[Run]) -> list[Setting]:
    """Return the settings of the best run of each batch."""
    best: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: -run["seconds"]):
        best[run["batch"]] = run
    return list(dict.fromkeys(Setting(**run["setting"]) for run in best.values()))


def _keep(file: Path, run: Run) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(run) + "\n")


def runs_of(folder: Path) -> list[Run]:
    """Return the runs that were kept."""
    file = folder / "runs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ours(folder: Path, place: Place, bits: str, batch: int) -> dict[str, float]:
    """Run our pipeline; return measured and forecast seconds of all decode steps."""
    name = f"{bits}-{batch}"
    strategy, prompts = (folder / place.name / f"{name}.{end}" for end in ("json", "jsonl"))
    if not strategy.exists():
        plan(folder, place, bits, batch, strategy)
        write_prompts(prompts, [(PROMPT, STEPS + 1)] * batch)
    answers = folder / "answers.jsonl"
    answers.unlink(missing_ok=True)
    words = [
        "llmpq-dist", "--strat_file_name", str(strategy), "--prompts", str(prompts), "--output",
        str(answers), "--store", str(folder / "store"), "--json",
    ]  # fmt: skip
    if len(place.machines) > 1:
        words += ["--nnodes", str(len(place.machines))]
    decode = json.loads(on_machines(folder, place, words))["phases"]["decode"]
    return {"seconds": decode["measured"], "predicted": decode["predicted"]}


def plan(folder: Path, place: Place, bits: str, batch: int, strategy: Path) -> None:
    """Plan both workers, with one micro-batch of prompts: decode steps then run by themselves."""
    cluster, profile = folder / place.name / "cluster.json", folder / place.name
    devices = ["here/cpu#0", "here/cpu#1"] if len(place.machines) == 1 else ["a/cpu#0", "b/cpu#0"]
    words = [
        "llmpq-algo", "--model", str(folder / CASE), "--cluster", str(cluster), "--profile",
        str(profile), "--bits", bits, "--global_bz", str(batch), "--s", str(PROMPT), "--n",
        str(STEPS + 1), "--theta", "0", "--use", *devices, "--no_explain", "--output",
        str(strategy), "--json",
    ]  # fmt: skip
    if bits != "16":
        words += ["--fix_bits", f"head={bits}"]
    found = json.loads(command(words))
    if found["prefill_micro_batch"] != batch:
        command([*words, "--micro_batch", str(batch), str(found["decode_micro_batch"])])


def llama_cpp(
    folder: Path, place: Place, bits: str, setting: Setting, batches: Sequence[int]
) -> dict[int, float]:
    """Run llama.cpp; return the least seconds of all decode steps by batch, of two."""
    place_rivals = folder / "rivals"
    numbers = range(2 - setting.workers, 2)
    with contextlib.ExitStack() as stack:
        addresses = [
            stack.enter_context(
                worker(place_rivals, place.of_worker(number), PORTS[number], setting.threads)
            )
            for number in numbers
        ]
        found = rivals.batched_bench(
            place_rivals,
            rivals.gguf_of(place_rivals, CASE, bits),
            [batch for batch in batches for _ in range(2)],
            (PROMPT, STEPS),
            setting.words(addresses),
            place.machines[0].before,
        )
    return {batch: min(line["t_tg"] for line in found if line["pl"] == batch) for batch in batches}


@contextlib.contextmanager
def worker(folder: Path, where: Machine, port: int, threads: int) -> Iterator[str]:
    """Start one of llama.cpp's RPC workers; yield its address."""
    words = ["-H", where.address, "-p", str(port), "-t", str(threads)]
    process = subprocess.Popen(
        [*where.before, str(rivals.worker_of(folder)), *words], env=unset_threading(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait_for_listener(process, port)
        yield f"{where.address}:{port}"
    finally:
        process.terminate()
        process.wait()


def _wait_for_listener(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a process listens, whatever its network namespace."""
    listening = f":{port:04X} 00000000:0000 0A"
    end_s = time.monotonic() + RUN_S
    while time.monotonic() < end_s and process.poll() is None:
        if listening in Path(f"/proc/{process.pid}/net/tcp").read_text():
            return
        time.sleep(0.05)
    raise SystemExit(f"found no RPC worker on port {port}, status {process.poll()}")


COLUMNS = (
    "bits",
    "batch",
    "llmpq, tokens/s (range)",
    "llama.cpp, tokens/s",
    "llmpq / llama.cpp",
    "decode, s",
    "forecast, s",
    "forecast error",
    "best setting of llama.cpp",
)
NOTE = (
    "Random Llama, 125 M parameters, 31 decode steps after prompts of 32, two workers of one "
    "thread. Layers and head have the same bits. llmpq: median of the rounds; llama.cpp: best run "
    "of its best setting."
)


def tables(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a table a place."""
    places = [place for place in TITLES if any(run["place"] == place for run in runs)]
    return [
        {
            "title": TITLES[place],
            "columns": COLUMNS,
            "keys": 2,
            "beside": (COLUMNS[2], "llmpq / llama.cpp", "forecast error"),
            "ranges": {"of": "llmpq / llama.cpp", "by": "bits"},
            "rows": rows([run for run in runs if run["place"] == place]),
            "note": NOTE,
        }
        for place in places
    ]


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Return a row for each bitwidth and batch that both ran."""
    found = []
    for bits, batch in dict.fromkeys((run["bits"], run["batch"]) for run in runs):
        both = [run for run in runs if (run["bits"], run["batch"]) == (bits, batch)]
        own = [run for run in both if run["run"] == OURS]
        others = [run for run in both if run["run"] == LLAMA_CPP]
        if not own or not others:
            continue
        tokens, best = batch * STEPS, min(others, key=lambda run: run["seconds"])
        seconds = [run["seconds"] for run in own]
        middle, guess = statistics.median(seconds), own[-1]["predicted"]
        found.append([
            bits, str(batch),
            f"{tokens / middle:.0f} ({tokens / max(seconds):.0f}-{tokens / min(seconds):.0f})",
            f"{tokens / best['seconds']:.0f}", f"{best['seconds'] / middle:.2f}", f"{middle:.3f}",
            f"{guess:.3f}", f"{guess / middle - 1:+.1%}", Setting(**best["setting"]).label,
        ])  # fmt: skip
    return found


def document(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the results with their samples and where they come from."""
    rounds = max(
        Counter(
            (run["place"], run["bits"], run["batch"]) for run in runs if run["run"] == OURS
        ).values()
    )
    return {
        **origin(
            "two-machines",
            f"python benchmarks/two_machines.py --folder DIR --rounds {rounds}",
            **{"llama.cpp": rivals.PACKAGE},
        ),
        "samples": list(runs),
        "tables": tables(runs),
    }


if __name__ == "__main__":
    sys.exit(main())
