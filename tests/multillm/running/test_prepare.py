"""What is refused before a model is loaded: one clear error each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.ranks import cpu_cluster, make_plan
from helpers.schedules import schedule_on

from llmpq.errors import CapacityError, SpecError
from llmpq.multillm.graph import Application, AppModel, AppNode, Edge
from llmpq.multillm.running.prepare import RunModel, check_prompts, prepare_models
from llmpq.multillm.schedule import ModelReplica, ScheduledModel
from llmpq.multillm.workload import Item
from llmpq.spec.cluster import Cluster, DeviceGroup
from llmpq.spec.cluster import Node as Host


class Letters:
    """A tokenizer with a token for every letter."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids) -> str:
        return bytes(token_ids).decode()


CLUSTER = cpu_cluster(2)
LABELS = tuple(device.label for device in CLUSTER.devices)
PLAN = make_plan((0, 3), prompt_tokens=30, new_tokens=10)


def app_of(folder: str = "m", *, limit=8, template="Grade: {draft}", own=None) -> Application:
    return Application(
        name="graded",
        models=(AppModel(name="w", model=folder, max_model_len=own), AppModel(name="g", model="m")),
        nodes=(
            AppNode(name="draft", model="w", requests="r.jsonl", max_new_tokens=limit),
            AppNode(name="grade", model="g", templates=(template,), max_new_tokens=2),
        ),
        edges=(Edge(source="draft", target="grade"),),
    )


def entry(model: str, node: str, label: str, plan=PLAN) -> ScheduledModel:
    replica = ModelReplica(devices=(label,), plan=plan)
    return ScheduledModel(model=model, nodes=(node,), replicas=(replica,))


def schedule_of(app: Application, plan=PLAN, cluster=CLUSTER):
    first, second = LABELS
    entries = (entry("w", "draft", first, plan), entry("g", "grade", second))
    return schedule_on(app, cluster, entries)


def prepared(app, folders, *, plan=PLAN, cluster=CLUSTER, tokenizer=Letters):
    schedule = schedule_of(app, plan, cluster)
    return prepare_models(app, schedule, cluster, folders, lambda _: tokenizer and tokenizer())


@pytest.fixture
def folders(tiny_model) -> dict[str, Path]:
    folder = tiny_model("llama", seed=1)
    return {"w": folder, "g": folder}


def test_models_get_their_folders_and_the_least_context(folders):
    models, plans = prepared(app_of(own=33), folders)
    assert models["w"].folder == folders["w"].resolve()
    assert {name: one.context for name, one in models.items()} == {"w": 33, "g": 40}
    assert list(plans.values()) == [PLAN]


def test_a_folder_can_be_the_applications_or_the_plans(folders):
    by_app = app_of(str(folders["w"]))
    assert prepared(by_app, {"g": folders["g"]})[0]["w"].folder == folders["w"].resolve()
    plan = make_plan((0, 3), prompt_tokens=30, new_tokens=10, source=folders["w"])
    found = prepared(app_of(), {"g": folders["g"]}, plan=plan)[0]
    assert found["w"].folder == folders["w"].resolve()


def test_what_cannot_be_loaded_is_named_before(folders, tmp_path):
    app = app_of()
    with pytest.raises(SpecError, match=r"model 'w': found no folder.*expected --model w=DIR"):
        prepared(app, {})
    with pytest.raises(SpecError, match="found folder of 'x', expected a model of graded"):
        prepared(app, folders | {"x": tmp_path})
    with pytest.raises(SpecError, match="3 decoder layers, expected the 2"):
        prepared(app, folders, plan=make_plan((0, 2)))
    with pytest.raises(SpecError, match="found no tokenizer"):
        prepared(app, folders, tokenizer=None)


def test_a_plan_that_its_device_does_not_hold_is_refused(folders):
    group = DeviceGroup(type="cpu", count=2, threads=1, memory_bytes=4)
    small = Cluster(name="small", nodes=(Host(name="here", devices=(group,)),))
    with pytest.raises(CapacityError, match=r"model 'w' needs 5 B on here/cpu#0, which has 4 B"):
        prepared(app_of(), folders, cluster=small)


def item(number: int, text: str | None) -> Item:
    prompts, lengths = ((), (3,)) if text is None else ((text,), ())
    return Item(id=number, where=f"r.jsonl:{number}", prompts=prompts, prompt_tokens=lengths)


def check(app, *texts, refuses=True) -> None:
    models = {
        name: RunModel(name=name, folder=Path(), tokenizer=Letters(), context=40) for name in "wg"
    }
    items = {"draft": [item(number, text) for number, text in enumerate(texts, start=1)]}
    check_prompts(app, items, models, refuses_overflow=refuses)


def test_prompts_that_do_not_fit_are_refused_with_their_line():
    check(app_of(), "x" * 39)
    with pytest.raises(SpecError) as error:
        check(app_of(), "x", "x" * 40)
    assert str(error.value) == (
        "r.jsonl:2: node 'draft': found a prompt of 40 tokens, expected 1 to 39: the context of "
        "model 'w' under its plans is 40"
    )
    check(app_of(), "x" * 40, refuses=False)
    with pytest.raises(SpecError, match=r"r.jsonl:1: field 'prompt': found nothing"):
        check(app_of(), None, refuses=False)


def test_answers_that_may_be_too_long_for_the_next_prompt_are_refused():
    check(app_of(limit=32), "x")  # 7 letters and 32: 39 tokens
    for app in (
        app_of(limit=33),
        app_of(limit=None),
        app_of(limit=31, template="{draft}{prompt}" * 2),
    ):
        with pytest.raises(
            SpecError, match=r"node 'grade': prompts may have .* context of model 'g'"
        ):
            check(app, "x")
        check(app, "x", refuses=False)


def test_a_chain_reads_its_own_answer():
    app = app_of()
    chain = replace(
        app,
        nodes=(replace(app.nodes[0], templates=("{draft}{prompt}",)), app.nodes[1]),
        edges=(*app.edges, Edge(source="draft", target="draft")),
    )
    check(chain, "x" * 31)
    with pytest.raises(SpecError, match=r"node 'draft': prompts may have 40 tokens.*\(draft 8\)"):
        check(chain, "x" * 32)


def test_answers_count_together_only_where_one_item_reaches_both():
    app = app_of(limit=20)
    draft, grade = app.nodes
    app = replace(
        app,
        nodes=(replace(draft, name="note"), draft, replace(grade, templates=("{draft}{note}",))),
        edges=(*app.edges, Edge(source="note", target="grade")),
    )
    models = {
        name: RunModel(name=name, folder=Path(), tokenizer=Letters(), context=40) for name in "wg"
    }
    check_prompts(
        app, {"note": [item(1, "x")], "draft": [item(2, "x")]}, models, refuses_overflow=True
    )
    both = {"note": [item(1, "x")], "draft": [item(1, "x")]}
    with pytest.raises(SpecError, match=r"node 'grade': prompts may have 40 tokens"):
        check_prompts(app, both, models, refuses_overflow=True)
