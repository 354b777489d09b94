"""How often a token of the shipped model in bfloat16 depends on the batching policy.

    python benchmarks/policy_flips.py FOLDER

Greedy tokens under each policy against those of one request at a time. In float32 nothing differs,
which is a test.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from workbench import ROOT, command

from llmpq.dist import Prompt, generate_offline
from llmpq.spec.plan import MicroBatching, default_schedule, read_plan

FLIP_REQUESTS = 48


def main() -> int:
    """Run every policy and print its share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    flips(folder)
    return 0


def flips(folder: Path) -> None:
    """Count how often a token of the shipped model in bfloat16 depends on the policy."""
    group = {"type": "cpu", "count": 1, "threads": 1}
    cluster = {"schema": 1, "name": "box", "nodes": [{"name": "here", "devices": [group]}],
               "links": []}  # fmt: skip
    (folder / "one.json").write_text(json.dumps(cluster))
    command([
        "llmpq-algo", "--model", str(ROOT / "models" / "demo"), "--cluster",
        str(folder / "one.json"), "--global_bz", "8", "--s", "64", "--n", "64", "--theta", "0",
        "--bits", "16", "--output", str(folder / "demo.json"),
    ])  # fmt: skip
    plan = replace(read_plan(folder / "demo.json"), dtype="bfloat16", kv_bits=16)
    text = (ROOT / "models" / "demo" / "heldout.txt").read_text(encoding="utf-8")
    prompts = [
        Prompt(id=number, where="here", text=text[900 * number :][: 40 + 7 * (number % 9)],
               max_new_tokens=8 + 11 * number % 57, ignore_eos=True)
        for number in range(FLIP_REQUESTS)
    ]  # fmt: skip
    one = replace(plan, micro_batching=MicroBatching(prefill=1, decode=1))
    alone = generate_offline(one, prompts)
    for policy in ("hybrid", "static", "iteration", "rra", "multibin"):
        schedule = default_schedule(policy, 8)
        if policy == "multibin":
            schedule = replace(schedule, decode_batch=4, boundaries=(20.0, 40.0))
        found = generate_offline(
            replace(plan, schedule=schedule, micro_batching=MicroBatching(prefill=4, decode=8)),
            prompts,
        )
        print(policy, differences([one.token_ids for one in alone], [o.token_ids for o in found]))


def differences(alone: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> str:
    """Count first differences over the tokens up to them: what follows one is another text."""
    same = flipped = 0
    for left, right in zip(alone, found, strict=True):
        equal = next(
            (place for place, two in enumerate(zip(left, right, strict=True)) if two[0] != two[1]),
            len(left),
        )
        same += equal
        flipped += equal < len(left)
    share = flipped / (same + flipped)
    return f"{flipped} of {same + flipped} tokens flip ({share:.2%}), in {len(alone)} requests"


if __name__ == "__main__":
    sys.exit(main())
