"""Requests of an application: how many, how long, and what each waits for."""

from __future__ import annotations

import numpy as np
import pytest

from llmpq.errors import SpecError
from llmpq.multillm.graph import Application, AppModel, AppNode, Edge
from llmpq.multillm.workload import Item, ModelLengths, build_workload
from llmpq.spec.workload import constant, empirical


def models(*names):
    return tuple(AppModel(name=name, model="any") for name in names)


def items(count, *tokens, **options):
    return [
        Item(id=f"i{number}", where=f"r.jsonl, line {number + 1}", prompt_tokens=tokens, **options)
        for number in range(count)
    ]


def answers_of(length, context=1000):
    return ModelLengths(law=constant(length), context=context)


def node_of(work, name):
    place = [node.name for node in work.app.nodes].index(name)
    return np.flatnonzero(work.node == place)


def waits(work, request):
    return work.parents[work.first[request] : work.first[request + 1]].tolist()


def test_a_chain_feeds_each_answer_to_the_next_chunk_and_its_last_one_to_the_judge():
    app = Application(
        name="chain",
        models=models("writer", "judge"),
        nodes=(
            AppNode(name="summary", model="writer", requests="r", templates=("{summary}{prompt}",)),
            AppNode(name="verdict", model="judge", templates=("12345678{summary}", "{summary}")),
        ),
        edges=(Edge(source="summary", target="summary"), Edge(source="summary", target="verdict")),
    )
    work = build_workload(
        app,
        {"summary": items(2, 10, 20, 30)},
        {"writer": answers_of(7), "judge": answers_of(3)},
    )
    chunks, verdicts = node_of(work, "summary"), node_of(work, "verdict")
    assert len(chunks) == 6
    assert len(verdicts) == 4
    assert sorted(work.prompt[chunks].tolist()) == [10, 10, 27, 27, 37, 37]
    firsts = chunks[work.before[chunks] < 0]
    assert (work.prompt[firsts] == 10).all()
    last = [one for one in chunks if one not in work.before]
    assert (work.prompt[last] == 37).all()
    assert {waits(work, one)[0] for one in verdicts} == set(last)
    assert sorted(work.prompt[verdicts].tolist()) == [7, 7, 9, 9]
    assert (work.answer[verdicts] == 3).all()


def test_joins_wait_for_all_producers_or_make_a_request_of_each():
    def app(join, template):
        return Application(
            name="judged",
            models=models("a", "b", "c"),
            nodes=(
                AppNode(name="left", model="a", requests="r"),
                AppNode(name="right", model="b", requests="r"),
                AppNode(name="best", model="c", join=join, templates=(template,)),
            ),
            edges=(Edge(source="left", target="best"), Edge(source="right", target="best")),
        )

    lengths = {"a": answers_of(5), "b": answers_of(9), "c": answers_of(1)}
    sources = {"left": items(3, 10), "right": items(3, 10)}
    work = build_workload(app("all", "{left} {right} {prompt}"), sources, lengths)
    best = node_of(work, "best")
    assert work.prompt[best].tolist() == [25, 25, 25]  # two spaces count a token
    assert all(len(waits(work, one)) == 2 for one in best)
    work = build_workload(app("each", "{answer}"), sources, lengths)
    best = node_of(work, "best")
    assert sorted(work.prompt[best].tolist()) == [5, 5, 5, 9, 9, 9]
    assert all(len(waits(work, one)) == 1 for one in best)


def test_routed_answers_take_one_edge_each_in_the_expected_shares():
    app = Application(
        name="router",
        models=models("router", "a", "b"),
        nodes=(
            AppNode(name="route", model="router", requests="r", max_new_tokens=1),
            AppNode(name="easy", model="a"),
            AppNode(name="hard", model="b"),
        ),
        edges=(
            Edge(source="route", target="easy", when="easy", share=0.7),
            Edge(source="route", target="hard", when="hard", share=0.3),
        ),
    )
    lengths = {"router": answers_of(2), "a": answers_of(4), "b": answers_of(4)}
    work = build_workload(app, {"route": items(2000, 10)}, lengths)
    easy, hard = node_of(work, "easy"), node_of(work, "hard")
    assert len(easy) + len(hard) == 2000
    assert not set(work.item[easy]) & set(work.item[hard])
    assert len(easy) == pytest.approx(1400, abs=80)
    assert (work.prompt[easy] == 10).all()


def test_answers_keep_to_the_limits_of_node_request_and_context():
    app = Application(
        name="one",
        models=models("m"),
        nodes=(AppNode(name="n", model="m", requests="r", max_new_tokens=50),),
    )
    three = [
        *items(1, 10),
        Item(id="short", where="r", prompt_tokens=(10,), max_new_tokens=20),
        Item(id="long", where="r", prompt_tokens=(95,)),
    ]
    work = build_workload(app, {"n": three}, {"m": answers_of(80, context=100)})
    assert work.answer.tolist() == [50, 20, 5]


def test_an_overflowing_prompt_is_one_error_with_item_and_node():
    app = Application(
        name="two",
        models=models("a", "b"),
        nodes=(
            AppNode(name="first", model="a", requests="r"),
            AppNode(name="second", model="b", templates=("{prompt} {first}",)),
        ),
        edges=(Edge(source="first", target="second"),),
    )
    lengths = {"a": answers_of(40), "b": answers_of(5, context=60)}
    with pytest.raises(SpecError, match=r"r\.jsonl, line 1: node 'second': found a prompt of 71"):
        build_workload(app, {"first": items(2, 30)}, lengths)


def test_the_same_seed_draws_the_same_lengths():
    app = Application(
        name="one", models=models("m"), nodes=(AppNode(name="n", model="m", requests="r"),)
    )
    lengths = {"m": ModelLengths(law=empirical(range(1, 200)), context=1000)}
    one, two, other = (
        build_workload(app, {"n": items(50, 10)}, lengths, seed=seed).answer for seed in (3, 3, 4)
    )
    assert (one == two).all()
    assert not (one == other).all()
