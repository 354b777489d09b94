"""The coordinator with engines in this process: every request once, whatever is stopped when."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.schedules import CLUSTER, pair, schedule_of

from llmpq.dist.io.generation import TokenOutput
from llmpq.errors import CapacityError, StageError, StoppedError
from llmpq.multillm.dynamic import DynamicScheduler
from llmpq.multillm.graph import Application, AppModel, AppNode, Edge
from llmpq.multillm.running.coordinator import Coordinator
from llmpq.multillm.running.dataflow import Dataflow
from llmpq.multillm.running.journal import ANSWERS, AnswerJournal, identity_of, read_answers
from llmpq.multillm.running.prepare import RunModel
from llmpq.multillm.running.timeline import Timeline
from llmpq.multillm.workload import Item

CONTEXT = 200
LETTERS = b"abcdefghijklmnopqrstuvwxyz "


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode()


def tokens_of(folder: Path, prompt: Sequence[int], limit: int) -> list[int]:
    """The whole answer of a model, which depends on its folder and the prompt alone."""
    digest = hashlib.sha256(bytes(prompt) + str(folder).encode()).digest()
    length = min(limit, 1 + digest[0] % 12)
    return [LETTERS[byte % len(LETTERS)] for byte in digest[1 : 1 + length]]


class Engine:
    """Makes the tokens of ``tokens_of``, one a turn of the loop."""

    def __init__(self, folder: Path, log: list, fails_after: int | None) -> None:
        self.folder, self.log, self.left = folder, log, fails_after
        self.is_closed = False
        self.under_way = 0

    async def generate(self, request, token_ids=()):
        assert not self.is_closed
        limit = request.sampling.max_tokens
        whole = tokens_of(self.folder, request.prompt_token_ids, limit)
        assert list(token_ids) == whole[: len(token_ids)]
        assert len(token_ids) < len(whole)
        self.under_way += 1
        try:
            for place in range(len(token_ids), len(whole)):
                await asyncio.sleep(0)
                if self.left is not None:
                    self.left -= 1
                    if self.left < 0:
                        raise StageError("stage 0 was ended by SIGKILL")
                last = place + 1 == len(whole)
                reason = ("length" if len(whole) == limit else "stop") if last else None
                yield TokenOutput(token_ids=(whole[place],), finish_reason=reason)
        finally:
            self.under_way -= 1

    async def close(self) -> None:
        assert not self.is_closed
        assert self.under_way == 0  # its requests were taken back before
        await asyncio.sleep(0)
        self.is_closed = True
        self.log.append(("close", self.folder.name))


def app_of() -> Application:
    """A router, an ensemble and a chain, of four models."""
    return Application(
        name="all",
        models=tuple(AppModel(name=name, model="m") for name in "ABCD"),
        nodes=(
            AppNode(name="a", model="A", requests="r", templates=("Route {prompt}",)),
            AppNode(name="b", model="B", templates=("{prompt} {a}",), max_new_tokens=6),
            AppNode(name="c", model="C", requests="d", templates=("{c}{prompt}",)),
            AppNode(name="d", model="D", templates=("{b}{c}{a}!", "{b}{c}{a}?"), max_new_tokens=5),
        ),
        edges=(
            Edge(source="a", target="b", when="e"),
            Edge(source="c", target="c"),
            Edge(source="a", target="d"),
            Edge(source="b", target="d"),
            Edge(source="c", target="d"),
        ),
    )


def items_of(count: int = 12) -> dict[str, list[Item]]:
    return {
        "a": [Item(id=n, where=f"r:{n}", prompts=(f"q{n}",)) for n in range(count)],
        "c": [
            Item(id=f"d{n}", where=f"d:{n}", prompts=tuple(f"x{n}{k}" for k in range(1 + n % 4)))
            for n in range(count // 2)
        ],
    }


PLANS = {
    "all at once": [[pair("a T0"), pair("b T1"), pair("c T2"), pair("d T3")]],
    "one after the other": [[pair("a V0 V1")], [pair("b V0")], [pair("c T0 T1 V0")],
                            [pair("d V0 V1")]],
    "preempted": [[pair("c T0"), pair("a T1")], [pair("b T1")], [pair("c T0 T1 T2"), pair("b T3")],
                  [pair("d V0")]],
    "in the wrong order": [[pair("a T0"), pair("c T1"), pair("b T2")], [pair("d T1"), pair("c T0")],
                           [pair("d T0 T1")]],
}  # fmt: skip


PLAN = SimpleNamespace(workload=SimpleNamespace(batch=2))
"""What the coordinator reads of a plan."""


def run(folder: Path, stages, *, resume=False, app=None, items=None, **options) -> Coordinator:
    """Run to the end, or to what ``options`` break: fails_after, load_error, stop_after."""
    app, items = app or app_of(), items or items_of()
    log = options.get("log", [])

    async def start(plan, model_dir, devices):
        await asyncio.sleep(0)
        if model_dir.name == options.get("load_error"):
            raise CapacityError("found 1 GiB, expected 2")
        log.append(("start", model_dir.name, devices))
        return Engine(model_dir, log, options.get("fails_after"))

    async def main() -> Coordinator:
        with AnswerJournal(folder, identity_of(app, items, "greedy"), resume=resume) as journal:
            found = Coordinator(
                app=app,
                flow=Dataflow(app, items),
                scheduler=lambda done: DynamicScheduler(app, schedule, CLUSTER, done),
                models={
                    one.name: RunModel(
                        name=one.name, folder=Path(one.name), tokenizer=Bytes(), context=CONTEXT
                    )
                    for one in app.models
                },
                plans=dict.fromkeys([1, 2], PLAN),
                start_engine=start,
                journal=journal,
                timeline=Timeline(),
            )
            task = asyncio.create_task(found.run())
            for _ in range(options.get("stop_after", 0)):
                await asyncio.sleep(0)
            if "stop_after" in options:
                found.stop("SIGTERM")
            await task
            return found

    schedule = schedule_of(app, *stages)
    return asyncio.run(main())


def answers(folder: Path) -> dict:
    """All answers of a run, each once."""
    found = read_answers(folder / ANSWERS)
    assert len({one.key for one in found}) == len(found)
    return {one.key: (one.token_ids, one.text, one.finish_reason) for one in found}


def expected(app, items) -> dict:
    """Every model asked alone, as soon as its prompts are known."""
    flow, found = Dataflow(app, items), {}
    model_of = {one.name: one.model for one in app.nodes}
    waiting = flow.begin()
    while waiting:
        ready = waiting.pop()
        prompt = ready.prompt.encode()
        room = CONTEXT - len(prompt)
        limit = min(ready.max_new_tokens or room, room)
        tokens = tokens_of(Path(model_of[ready.key.node]), prompt, limit)
        reason = "length" if len(tokens) == limit else "stop"
        text = bytes(tokens).decode()
        found[ready.key] = (tuple(tokens), text, reason)
        waiting += flow.answer(ready.key, text)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_answers_are_those_of_models_asked_alone(tmp_path, name):
    log: list = []
    found = run(tmp_path, PLANS[name], log=log)
    assert answers(tmp_path) == expected(app_of(), items_of())
    assert found.done == {
        node: sum(key.node == node for key in answers(tmp_path)) for node in "abcd"
    }
    starts = [entry for entry in log if entry[0] == "start"]
    assert len(starts) == sum(entry[0] == "close" for entry in log)  # all have ended
    records = found.timeline.replicas
    assert sum(one.requests.total() for one in records) == len(answers(tmp_path))
    assert found.timeline.idle_s(6) >= 0


def test_a_model_that_goes_on_is_not_started_again(tmp_path):
    log: list = []
    stages = [[pair("a T0"), pair("c T1")], [pair("b T0"), pair("c T1")], [pair("d T0")]]
    run(tmp_path, stages, log=log)
    assert [entry[1] for entry in log if entry[0] == "start"].count("C") == 1


@pytest.mark.parametrize("name", PLANS)
def test_a_run_ended_at_any_moment_is_resumed_with_every_request_once(tmp_path, name):
    chance, ends = random.Random(name), 0
    for kill in range(8):
        try:
            run(tmp_path, PLANS[name], resume=kill > 0, stop_after=chance.randrange(1, 25))
        except StoppedError:
            ends += 1
        path = tmp_path / ANSWERS
        data = path.read_bytes()
        if chance.random() < 0.5:  # the machine failed while a line was written
            path.write_bytes(data[: len(data) - chance.randrange(20)])
    assert ends > 0
    run(tmp_path, PLANS[name], resume=True)
    assert answers(tmp_path) == expected(app_of(), items_of())


@pytest.mark.parametrize("name", PLANS)
def test_a_replica_that_fails_ends_the_run_and_can_be_resumed(tmp_path, name):
    with pytest.raises(StageError, match=r"model '[ABCD]' on node.*: stage 0 was ended by SIGKILL"):
        run(tmp_path, PLANS[name], fails_after=9)
    run(tmp_path, PLANS[name], resume=True)
    assert answers(tmp_path) == expected(app_of(), items_of())


def test_a_model_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(CapacityError, match="model 'C' on node0/T4-16G#2: found 1 GiB"):
        run(tmp_path, PLANS["all at once"], load_error="C")


def test_a_prompt_without_room_for_an_answer_is_reported(tmp_path):
    items = items_of(4)
    long = Item(id="long", where="r:9", prompts=("y" * CONTEXT,))
    found = run(tmp_path, PLANS["all at once"], items={**items, "a": [*items["a"], long]})
    (message,) = found.flow.errors.values()
    assert message == (
        f"r:9: node 'a': found a prompt of {CONTEXT + 6} tokens, expected 1 to {CONTEXT - 1}: the "
        f"context of model 'A' under its plans is {CONTEXT}"
    )
    assert answers(tmp_path) == expected(app_of(), items)


def test_a_schedule_whose_order_cannot_be_kept_is_repaired(tmp_path):
    """b waits for a, which was stopped and has its next turn only after b."""
    app = Application(
        name="ab",
        models=tuple(AppModel(name=name, model="m") for name in "ABE"),
        nodes=(
            AppNode(name="a", model="A", requests="r"),
            AppNode(name="e", model="E", requests="s"),
            AppNode(name="b", model="B", templates=("{a}",)),
        ),
        edges=(Edge(source="a", target="b"),),
    )
    items = {
        "a": [Item(id=n, where="r", prompts=(f"long {n}",)) for n in range(30)],
        "e": [Item(id="x", where="s", prompts=("quick",), max_new_tokens=1)],
    }
    stages = [[pair("a V0"), pair("e T0")], [pair("b V0")], [pair("a V0")]]
    run(tmp_path, stages, app=app, items=items)
    assert answers(tmp_path) == expected(app, items)
