"""Train the small Llama-shaped model that is shipped in `models/demo`.

The planner, the quantizers and the pipeline runtime need a model whose perplexity means something,
on machines that reach no model hub. This script makes one from freely licensed manuals in Debian
packages, on one CPU core, in about an hour. It runs in three steps that share a work folder:

    python scripts/train_demo_model.py gather --work DIR    # packages -> text, tokenizer, tokens
    python scripts/train_demo_model.py train --work DIR --minutes 70    # tokens -> checkpoints
    python scripts/train_demo_model.py export --work DIR    # last checkpoint -> models/demo

A `train` that was stopped goes on from its last checkpoint when it is called again.
`gather` needs a Debian machine (`apt-get download`, `dpkg-deb`), with the package lists up to date.
Only packages whose text is in the public domain or under a permissive licence are used, because
extracts of it (held-out and calibration text) are shipped beside the weights. Every random choice
derives from `--seed`. With `--tokens` the training is a function of the seed and the data; with
`--minutes` the schedule follows the clock, and the tokens seen are recorded. Nothing is pickled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, not as a module

from scripts.demo_model.exporting import export
from scripts.demo_model.gathering import gather
from scripts.demo_model.recipe import Recipe
from scripts.demo_model.training import train


def main(argv: Sequence[str] | None = None) -> int:
    """Run one step."""
    args = build_parser().parse_args(argv)
    args.run_step(args)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Describe the three steps and their options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    gathering = steps.add_parser("gather", help=gather.__doc__)
    gathering.add_argument("--vocab-size", type=int, default=4096)
    gathering.add_argument("--held-out-bytes", type=int, default=300_000)
    training = steps.add_parser("train", help=train.__doc__)
    budget = training.add_mutually_exclusive_group(required=True)
    budget.add_argument("--tokens", type=int, help="stop after this many (repeatable)")
    budget.add_argument("--minutes", type=float, help="stop after this long (follows the clock)")
    training.add_argument("--optimizer", choices=["adamw", "muon"], default="muon")
    training.add_argument("--learning-rate", type=float, default=4e-3)
    training.add_argument("--accumulate", type=int, default=4, help="2048-token parts an update")
    training.add_argument("--warmup-steps", type=int, default=20)
    training.add_argument("--decay-fraction", type=float, default=0.45)
    training.add_argument("--threads", type=int, default=1)
    training.add_argument("--checkpoint-minutes", type=float, default=5.0)
    training.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    training.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    exporting = steps.add_parser("export", help=export.__doc__)
    exporting.add_argument("--out", type=Path, default=Path("models/demo"))
    for step in (training, exporting):
        step.add_argument("--run", default="run", help="folder of the run inside --work")
    for step in (gathering, training):
        step.add_argument("--seed", type=int, default=1)
    for step in (gathering, training, exporting):
        step.add_argument("--work", type=Path, required=True, help="scratch folder, not committed")
    exporting.set_defaults(run_step=_export)
    gathering.set_defaults(run_step=_gather)
    training.set_defaults(run_step=_train)
    return parser


def _gather(args: argparse.Namespace) -> None:
    gather(
        args.work,
        seed=args.seed,
        vocab_size=args.vocab_size,
        held_out_bytes=args.held_out_bytes,
    )


def _train(args: argparse.Namespace) -> None:
    train(
        args.work,
        args.run,
        recipe_of(args),
        threads=args.threads,
        checkpoint_s=60 * args.checkpoint_minutes,
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
    )


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the recipe that the options of `train` describe."""
    return Recipe(
        seed=args.seed,
        tokens=args.tokens,
        minutes=args.minutes,
        optimizer=args.optimizer,
        learning_rate=args.learning_rate,
        accumulate=args.accumulate,
        warmup_steps=args.warmup_steps,
        decay_fraction=args.decay_fraction,
        compiled=args.compile,
        bf16=args.bf16,
    )


def _export(args: argparse.Namespace) -> None:
    export(args.work, args.run, args.out)


if __name__ == "__main__":
    raise SystemExit(main())
