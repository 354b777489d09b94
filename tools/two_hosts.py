"""Run one plan on two "hosts": network namespaces joined by a wire of 1 Gbit/s and 1 ms.

    sudo python tools/two_hosts.py [--rate_mbit 1000] [--delay_ms 1] [--transport auto|torch]

Each host runs the documented ``llmpq-dist doctor`` and ``llmpq-dist`` commands with its
``--node_rank``; nothing but the wire joins them (``tools/boxes/wire.py``). Prints one JSON
object; everything made is removed again, whatever happens.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers.ranks import make_plan
from helpers.tiny_models import save_tiny_model

from llmpq.spec.cluster import Cluster, DeviceGroup, LinkSpec, Node
from llmpq.spec.plan import write_plan
from tools.boxes.wire import Host, Link, hosts

PORT = 29500


def main() -> int:
    """Build the hosts, examine them, run the plan, print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate_mbit", type=float, default=1000.0)
    parser.add_argument("--delay_ms", type=float, default=1.0)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    link = Link(bytes_per_s=options.rate_mbit * 1e6 / 8, delay_s=options.delay_ms / 1e3)
    with tempfile.TemporaryDirectory() as name, hosts({(0, 1): link}, 2) as both:
        folder = Path(name)
        files = prepare(folder, options.layers)
        words = [*files, "--transport", options.transport]
        doctor = run_both(both, "doctor", words)
        words += ["--prompts", str(folder / "prompts.jsonl")]
        words += ["--output", str(folder / "results.jsonl"), "--trace", str(folder / "trace.json")]
        report = run_both(both, None, words)
        events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    stages = [
        {name: round(stage[name], 3) for name in ("busy_fraction", "wait_fraction")}
        for stage in report["stages"]
    ]
    links = [one["link"] for one in doctor["ranks"]]
    print(
        json.dumps(
            {
                "links": links,
                "findings": doctor["findings"],
                "requests": report["requests"],
                "generated_tokens": report["generated_tokens"],
                "elapsed_s": report["elapsed_s"],
                "tokens_per_s": report["throughput_tokens_per_s"],
                "stages": stages,
                "trace_spans": sum(event["ph"] == "X" for event in events),
            }
        )
    )
    return 0


def prepare(folder: Path, layers: int) -> list[str]:
    """Write a small random model, a plan over two nodes, prompts and a token."""
    model = save_tiny_model("llama", folder / "model", seed=1, num_hidden_layers=layers)
    group = DeviceGroup(type="cpu", count=1, threads=1)
    nodes = tuple(Node(name=name, devices=(group,)) for name in ("a", "b"))
    link = LinkSpec(between=("a", "b"), bytes_per_s=125e6, latency_s=1e-3)
    plan = make_plan(
        (0, layers // 2, layers),
        prefill=2,
        decode=2,
        batch=8,
        new_tokens=32,
        cluster=Cluster(name="two", nodes=nodes, links=(link,)),
    )
    write_plan(folder / "strategy.json", plan)
    lines = [
        {"id": n, "prompt_token_ids": [1 + n % 9] * 12, "max_new_tokens": 32, "ignore_eos": True}
        for n in range(16)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(16))
    files = ["--strat_file_name", str(folder / "strategy.json"), "--model", str(model)]
    return [*files, "--token_file", str(token)]


def run_both(both: list[Host], verb: str | None, words: list[str]) -> dict[str, Any]:
    """Run the command on both hosts; return what the master's printed."""
    command = [sys.executable, "-m", "llmpq.cli.commands.dist", *([verb] if verb else []), *words]
    command += ["--json", "--nnodes", "2", "--master_addr", both[0].address]
    command += ["--master_port", str(PORT)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ends = [
        subprocess.Popen(
            ["ip", "netns", "exec", host.name, *command, "--node_rank", str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(both)
    ]
    try:
        outputs = [end.communicate(timeout=200)[0] for end in ends]
    finally:
        for end in ends:
            end.kill()
    codes = [end.returncode for end in ends]
    if not outputs[0].strip() or any(code not in (0, 2) for code in codes):
        raise SystemExit(f"{verb or 'run'}: exit statuses {codes}: {outputs[0][:500]}")
    return json.loads(outputs[0])


if __name__ == "__main__":
    sys.exit(main())
