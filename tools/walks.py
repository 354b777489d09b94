"""Count what a reader meets on the way of one token, plan, weight and request.

    python tools/walks.py                                 # a table
    python tools/walks.py --files token_offline           # the files of one walk, in order
    python tools/walks.py --results benchmarks/results    # and walks.json

A walk is what runs once everything is built and warm: functions of ``llmpq``, the files they are
in, and the classes whose methods run. Threads count, other processes do not. The walks:

* ``token_offline``, ``token_online``: from one decode step of one request to the next, one stage;
* ``plan``: ``llmpq-algo`` for OPT-30B on two kinds of devices, from the flags to the file;
* ``weight``: one layer from safetensors to 4 bits as its kernel reads them;
* ``request``: a streamed completion, from HTTP to the last event; the engine makes tokens up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FrameType
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import httpx
import torch
from helpers.fake_engine import FakeEngine
from helpers.online_runs import request as online_request
from helpers.ranks import make_plan, run_threads, serve_script
from helpers.scripted_channel import Script
from helpers.served import make_service
from helpers.tiny_models import save_tiny_model
from torch import Tensor

from llmpq.cli.commands.algo import main as algo
from llmpq.dist.engine import batch_run, online_run
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.models import Master
from llmpq.options.engine import EngineOptions
from llmpq.quant.loading.loader import load_stage
from llmpq.server.app import build_app

PACKAGE = str(ROOT / "llmpq") + os.sep
CREATED = "<string>"
"""File name of methods that ``dataclasses`` makes."""
STEPS = 6
"""Tokens of an answer: the walk is that of one in the middle."""
PROMPT = (5, 6, 7, 8)
RARELY_S = 3600.0
"""Time between reports of progress and counters, so that none falls into a step by chance."""


class Walk:
    """What has run while it was open.

    Attributes:
        functions: code of functions, without comprehensions and lambdas, in the order of calls.
        classes: full names of classes whose methods ran.
    """

    def __init__(self) -> None:
        self.functions: dict[CodeType, None] = {}
        self.classes: dict[str, None] = {}
        self.is_open = False

    @property
    def files(self) -> list[str]:
        """Files of the functions, from the root of the package, in the order of calls."""
        return list(dict.fromkeys(code.co_filename[len(PACKAGE) :] for code in self.functions))

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """Take note of a call; a profile function."""
        if not self.is_open or event != "call":
            return
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGE)
        if is_ours and not code.co_name.startswith("<"):
            self.functions[code] = None
        if (is_ours or code.co_filename == CREATED) and code.co_argcount:
            own = frame.f_locals.get(code.co_varnames[0])
            kind = own if isinstance(own, type) else type(own)
            if code.co_varnames[0] in ("self", "cls") and kind.__module__.startswith("llmpq."):
                self.classes[f"{kind.__module__}.{kind.__qualname__}"] = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Take note of what this thread and new ones call."""
        threading.setprofile(self.see)
        sys.setprofile(self.see)
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]  # as its documentation says


@contextlib.contextmanager
def between_steps(walk: Walk) -> Iterator[None]:
    """Open a walk at a middle call of ``Master.embed``, which begins each step, until the next.

    Only decode steps of the request count: warming up and its prompt have earlier positions.
    """
    embed, calls = Master.embed, 0

    def counted(self: Master, token_ids: Tensor, positions: Tensor) -> Tensor:
        nonlocal calls
        calls += int(positions.min()) >= len(PROMPT)
        # The call itself belongs to both ends: it is counted at the second.
        walk.is_open = calls == STEPS // 2
        return embed(self, token_ids, positions)

    Master.embed = counted  # type: ignore[method-assign]
    try:
        with (
            mock.patch.object(batch_run, "REPORT_S", RARELY_S),
            mock.patch.object(online_run, "STATS_PERIOD_S", RARELY_S),
            walk.opened(),
        ):
            walk.is_open = False
            yield
    finally:
        Master.embed = embed  # type: ignore[method-assign]
    if calls <= STEPS // 2:
        raise RuntimeError(f"found {calls} steps, expected more than {STEPS // 2}")


def tiny_llama(folder: Path) -> Path:
    """Save a small random Llama."""
    return save_tiny_model("llama", folder, seed=1)


def token_offline(walk: Walk, folder: Path) -> None:
    """One decode step of ``llmpq-dist``."""
    requests = [Request(id=0, prompt_token_ids=PROMPT, max_new_tokens=STEPS)]
    with between_steps(walk):
        run_threads(make_plan((0, 3), batch=1), tiny_llama(folder), requests)


def token_online(walk: Walk, folder: Path) -> None:
    """One decode step of ``llmpq-serve``."""
    script = Script()
    script.add(
        1, online_request(0, list(PROMPT), SamplingParams(ignore_eos=True, max_tokens=STEPS))
    )
    with between_steps(walk):
        serve_script(make_plan((0, 3)), tiny_llama(folder), script, EngineOptions())


def plan(walk: Walk, folder: Path) -> None:
    """From the flags of ``llmpq-algo`` to a strategy file."""
    words = (
        "--model facebook/opt-30b --device_names T4-16G V100-32G --device_numbers 2 1 "
        f"--global_bz 8 --s 512 --n 32 --output {folder}/"
    )
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        algo(f"{words}first.json".split())  # so that caches are full
        with walk.opened():
            status = algo(f"{words}second.json".split())
    if status != 0:
        raise RuntimeError(f"llmpq-algo {words}: found {said.getvalue()}, expected a plan")


def weight(walk: Walk, folder: Path) -> None:
    """A layer read, quantized and prepared for its kernel."""
    model, settings = tiny_llama(folder), {"dtype": torch.bfloat16, "device": "cpu"}
    load_stage(model, 0, 1, [4], **settings)
    with walk.opened():
        load_stage(model, 1, 2, [4], **settings)


def request(walk: Walk, _: Path) -> None:
    """A streamed completion."""
    body = {"model": "demo", "prompt": "One", "max_tokens": 4, "stream": True}

    async def ask() -> None:
        transport = httpx.ASGITransport(app=build_app(make_service(FakeEngine())))
        async with httpx.AsyncClient(transport=transport, base_url="http://walk") as client:
            for number in range(2):
                with walk.opened() if number else contextlib.nullcontext():
                    answer = await client.post("/v1/completions", json=body)
                if answer.status_code != 200 or "[DONE]" not in answer.text:
                    raise RuntimeError(f"found {answer.text}, expected a stream of events")

    asyncio.run(ask())


WALKS: dict[str, Callable[[Walk, Path], None]] = {
    one.__name__: one for one in (token_offline, token_online, plan, weight, request)
}
COLUMNS = ("walk", "functions", "files", "classes")


def walked(name: str) -> Walk:
    """Return what runs on the way."""
    walk = Walk()
    with tempfile.TemporaryDirectory() as folder:
        WALKS[name](walk, Path(folder))
    return walk


def main(argv: Sequence[str] | None = None) -> int:
    """Count, print and write."""
    parser = argparse.ArgumentParser(
        prog="tools/walks.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=list(WALKS), metavar="WALK")
    parser.add_argument("--files", choices=list(WALKS), metavar="WALK", help="print its files")
    parser.add_argument("--classes", choices=list(WALKS), metavar="WALK", help="its classes")
    parser.add_argument("--results", type=Path, metavar="DIR", help="where walks.json is written")
    options = parser.parse_args(argv)
    if options.files or options.classes:
        found = walked(options.files or options.classes)
        print("\n".join(found.files if options.files else sorted(found.classes)))
        return 0
    rows = []
    for name in options.only or WALKS:
        walk = walked(name)
        counts = (len(walk.functions), len(walk.files), len(walk.classes))
        rows.append(dict(zip(COLUMNS, (name, *counts), strict=True)))
        print("{:14} {:4} functions {:3} files {:3} classes".format(name, *counts), flush=True)
    if options.results is not None:
        report = {
            "topic": "walks",
            "command": "python tools/walks.py",
            "date": datetime.now(UTC).date().isoformat(),
            "machine": "counts, the same on each",
            "versions": {"python": sys.version.split()[0], "torch": version("torch")},
            "tables": [{"title": "Walks", "columns": list(COLUMNS), "rows": rows}],
        }
        file = options.results / "walks.json"
        file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
