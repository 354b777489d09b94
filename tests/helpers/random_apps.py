"""Small random applications with made-up engines, for tests of the planner."""

from __future__ import annotations

import numpy as np

from llmpq.multillm.candidates import Candidate
from llmpq.multillm.engine.law import EngineModel
from llmpq.multillm.estimate import Simulator
from llmpq.multillm.graph import Application, AppModel, AppNode, Edge
from llmpq.multillm.planner.search import AppProblem
from llmpq.multillm.workload import Item, ModelLengths, build_workload
from llmpq.spec.workload import empirical


def law(chance, degree, speed):
    rows = np.arange(33)
    gain = degree ** chance.uniform(0.3, 0.9)
    fixed, each = 0.02 * speed / gain, 0.0015 * speed / gain
    return EngineModel(
        mixed=False,
        max_sequences=32,
        token_budget=512,
        num_blocks=120 * degree,
        block_size=16,
        watermark_blocks=1,
        prefill=np.stack([fixed + 0 * rows, 2e-4 * speed / gain + 0 * rows], axis=1),
        decode=np.stack([fixed + each * rows, 1e-6 * speed + 0 * rows, 0 * rows], axis=1),
        packed=np.zeros(0),
        attention=0.0,
        flops_token=speed,
        flops_key=1e-3,
    )


def candidates(chance, devices):
    speed, load = chance.uniform(0.3, 3.0), chance.uniform(0.3, 4.0)
    degrees = [degree for degree in (1, 2, 4) if degree <= devices]
    least = degrees[0] if chance.random() < 0.8 else degrees[-1]
    found = []
    for degree in degrees:
        if degree < least:
            continue
        own = law(chance, degree, speed)
        found += [
            Candidate(
                name=f"dp{replicas} tp{degree}", replicas=replicas, counts=(degree,), law=own,
                load_s=load * (1 + 0.2 * degree), tensor_parallel=degree,
            )
            for replicas in range(1, devices // degree + 1)
        ]  # fmt: skip
    return tuple(found)


def application(chance, models):
    """Models by turns alone, after the one before them, and chains."""
    nodes, edges = [], []
    for number in range(models):
        kind = chance.choice(["alone", "after", "chain"]) if number else "alone"
        name, model = f"n{number}", f"m{number}"
        if kind == "after":
            before = f"n{number - 1}"
            edges.append(Edge(source=before, target=name))
            nodes.append(AppNode(name=name, model=model, templates=(f"Judge {{{before}}}",),
                              max_new_tokens=40))  # fmt: skip
        elif kind == "chain":
            edges.append(Edge(source=name, target=name))
            nodes.append(AppNode(name=name, model=model, requests="chunks", max_new_tokens=40,
                              templates=(f"{{{name}}} {{prompt}}",)))  # fmt: skip
        else:
            nodes.append(AppNode(name=name, model=model, requests="items", max_new_tokens=60))
    return Application(
        name="random",
        models=tuple(AppModel(name=f"m{number}", model="any") for number in range(models)),
        nodes=tuple(nodes),
        edges=tuple(edges),
    )


def problem(seed, models=3, devices=4, requests=30, **options):
    """Return a random application on equal devices."""
    chance = np.random.default_rng(seed)
    app = application(chance, models)
    plain = [
        Item(id=f"i{n}", where=f"items:{n}", prompt_tokens=(int(chance.integers(4, 60)),))
        for n in range(requests)
    ]
    chunks = [
        Item(id=f"c{n}", where=f"chunks:{n}",
             prompt_tokens=tuple(chance.integers(4, 60, chance.integers(1, 6)).tolist()))
        for n in range(requests // 3)
    ]  # fmt: skip
    items = {
        node.name: chunks if node.requests == "chunks" else plain
        for node in app.nodes
        if node.requests
    }
    lengths = {
        model.name: ModelLengths(law=empirical(chance.integers(1, 80, 200).tolist()), context=600)
        for model in app.models
    }
    workload = build_workload(app, items, lengths, seed=seed)
    return AppProblem(
        simulator=Simulator(workload),
        candidates=tuple(candidates(chance, devices) for _ in range(models)),
        counts=(devices,),
        **options,
    )
