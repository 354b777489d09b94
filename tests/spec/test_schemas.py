"""The JSON Schemas and the readers accept the same files."""

import copy
import json
from importlib import resources
from typing import Any

import pytest
from helpers.docs_pages import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster
from llmpq.spec.fields import Fields, from_json
from llmpq.spec.plan import Plan
from llmpq.spec.tables import read_sensitivity
from llmpq.spec.workload import Workload

SCHEMAS = {
    name: json.loads(
        (resources.files("llmpq.spec") / "schema" / f"{name}.v1.schema.json").read_text("utf-8")
    )
    for name in ("plan", "cluster", "workload", "sensitivity")
}
# The lengths fit into the context, whichever of them is replaced by its least or most.
WORKLOAD = {
    "schema": 1,
    "batch": 4,
    "prompt_tokens": 1,
    "new_tokens": 1,
    "context_tokens": 20_000_000,
}
CLUSTER = {
    "schema": 1,
    "name": "c",
    "nodes": [
        {
            "name": "a",
            "devices": [
                {"type": "cpu", "count": 1, "threads": 2, "cpu_isa": "avx2", "cpu_share": 0.5}
            ],
        },
        {"name": "b", "devices": [{"type": "L4", "count": 1, "memory_bytes": 5, "profile": "p"}]},
    ],
    "links": [{"between": ["a", "b"], "bytes_per_s": 1e9, "latency_s": 0.0}],
    "device_types": [
        {
            "type": "own",
            "kind": "cuda",
            "memory_bytes": 8,
            "memory_bytes_per_s": 100.0,
            "memory_bus_bits": 100,
            "memory_pin_bits_per_s": 8.0,
            "flops": {"float32": 1e9},
            "runtime_bytes": 1,
            "compute_efficiency": 0.5,
            "overlap_loss": 1.0,
            "attention_efficiency": 1.2,
            "attention_memory_efficiency": 0.7,
            "precision_costs": [
                {
                    "bits": 8,
                    "compute": 1.0,
                    "stream": 1.0,
                    "value_flops": 9.0,
                    "overhead": 1.0,
                    "dequantize": 0.0,
                    "overlap_loss": 0.4,
                    "saturation_tokens": None,
                }
            ],
            "bits": [16, 8],
            "compute_capability": [8, 6],
            "prefill_deviation": [0.3, 0.6],
            "source": {"flops": "paper"},
        },
        {"type": "other", "like": "own", "link_latency_s": 0.0, "saturation_tokens": 1.0},
        {"type": "third", "like": "cpu", "cores": 8, "link_bytes_per_s": 5.0},
    ],
}
SENSITIVITY = {
    "schema": 1,
    "model": "m",
    "method": "variance",
    "omega": {"3": [3.0, 4.0], "4": [1.0, 2.0]},
    "provenance": {"seed": 0},
}
STAGE_ESTIMATE = {
    "prefill_s": 1.0,
    "decode_s": 0.1,
    "send_prefill_s": 0.0,
    "send_decode_s": 0.0,
    "memory_bytes": {"weights": 1, "kv": 1, "temporary": 1, "master": 1, "runtime": 1},
    "capacity_bytes": 9,
}
STAGE_FORECAST = {
    "prefill_s": 0.1,
    "decode_s": 0.1,
    "prefill_busy_s": 0.4,
    "decode_busy_s": 0.6,
}
PLAN = {
    "schema": 1,
    "model": {"name": "m", "source": None, "num_layers": 3},
    "dtype": "float16",
    "kv_bits": 16,
    "head_bits": 8,
    "micro_batching": {"prefill": 1, "decode": 2},
    "stages": [
        {"rank": 0, "device": 1, "first_layer": 0, "end_layer": 2, "bits": [16, 4]},
        {"rank": 1, "device": 0, "first_layer": 2, "end_layer": 3, "bits": [3]},
    ],
    "dropped_devices": [],
    "draft": {
        "model": "small",
        "bits": 4,
        "num_speculative_tokens": 3,
        "device": 1,
        "acceptance_rate": 0.7,
        "cost": 0.2,
        "handover": 0.01,
        "speedup": 1.5,
        "memory_bytes": 9,
    },
    "estimate": {
        "latency_s": 1.0,
        "quality": 0.5,
        "objective_s": 2.0,
        "stages": [STAGE_ESTIMATE, STAGE_ESTIMATE],
        "forecast": {
            "latency_s": 1.0,
            "prefill_s": 0.5,
            "stages": [STAGE_FORECAST, STAGE_FORECAST],
            "row_cost": 0.2,
        },
    },
    "search": {
        "method": "llmpq",
        "solver": None,
        "formula": "steady",
        "theta_s": 1.0,
        "quality_budget": None,
        "status": "feasible",
        "bound_s": None,
        "gap": None,
        "planning_s": 0.1,
        "orders": 1,
        "order_set": "all",
        "pairs_searched": 1,
        "pairs_pruned": 0,
    },
    "workload": WORKLOAD,
    "cluster": CLUSTER,
    "provenance": {"command": "c", "version": "v", "inputs": {"model": "0"}},
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "plan": PLAN,
    "cluster": CLUSTER,
    "workload": WORKLOAD,
    "sensitivity": SENSITIVITY,
}
TYPES = {"object": dict, "array": list, "string": str, "null": type(None)}


def is_type(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        kinds = int if name == "integer" else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool)
    return isinstance(value, TYPES[name])


def same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


CHECKS = {
    "const": same,
    "enum": lambda value, wanted: any(same(value, one) for one in wanted),
    "type": lambda value, wanted: any(
        is_type(value, one) for one in (wanted if isinstance(wanted, list) else [wanted])
    ),
    "minimum": lambda value, wanted: not is_type(value, "number") or value >= wanted,
    "maximum": lambda value, wanted: not is_type(value, "number") or value <= wanted,
    "minLength": lambda value, wanted: not isinstance(value, str) or len(value) >= wanted,
    "minItems": lambda value, wanted: not isinstance(value, list) or len(value) >= wanted,
    "maxItems": lambda value, wanted: not isinstance(value, list) or len(value) <= wanted,
    "minProperties": lambda value, wanted: not isinstance(value, dict) or len(value) >= wanted,
    "required": lambda value, wanted: not isinstance(value, dict) or set(wanted) <= set(value),
    "items": lambda value, wanted: (
        not isinstance(value, list) or all(accepts(wanted, one) for one in value)
    ),
    "properties": lambda value, wanted: (
        not isinstance(value, dict)
        or all(accepts(wanted[key], value[key]) for key in wanted if key in value)
    ),
}


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Judge by the part of JSON Schema that our files use; any other keyword is a KeyError."""
    for keyword, wanted in schema.items():
        if keyword in ("$schema", "title", "description"):
            continue
        if keyword == "additionalProperties":
            others = (
                [value[key] for key in value if key not in schema.get("properties", {})]
                if isinstance(value, dict)
                else []
            )
            if others and (wanted is False or not all(accepts(wanted, one) for one in others)):
                return False
        elif not CHECKS[keyword](value, wanted):
            return False
    return True


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("schemas")


def reads(kind: str, value: Any, folder) -> bool:
    try:
        if kind == "sensitivity":
            path = folder / "s.json"
            path.write_text(json.dumps(value))
            read_sensitivity(path)
        else:
            kinds: dict[str, type] = {"plan": Plan, "cluster": Cluster, "workload": Workload}
            from_json(kinds[kind], Fields(value, "file"))
    except SpecError:
        return False
    return True


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_schema_and_reader_accept_a_valid_file(kind, folder):
    assert reads(kind, DOCUMENTS[kind], folder)
    assert accepts(SCHEMAS[kind], DOCUMENTS[kind])


@pytest.mark.parametrize("path", sorted((ROOT / "strategies").glob("*.json"))[::4])
def test_schema_accepts_the_strategies_that_the_planner_wrote(path):
    assert accepts(SCHEMAS["plan"], json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("experts", "is_good"),
    [
        ({"layers": [{"layer": 0, "resident": [0, 2]}]}, True),
        ({"layers": [{"layer": 0, "bits": 4}], "threads": 3}, True),
        ({"layers": [{"layer": 0, "bits": 5}]}, False),
        ({"layers": [{"layer": 0, "bits": 4, "place": "host"}]}, False),
        ({"layers": [{"bits": 4}]}, False),
        ({"layers": []}, False),
        ({"layers": [{"layer": 0, "bits": 4}], "threads": 0}, False),
    ],
)
def test_schema_and_reader_agree_on_experts(experts, is_good, folder):
    plan = copy.deepcopy(PLAN)
    plan["schema"], plan["stages"][0]["experts"] = 2, experts
    assert reads("plan", plan, folder) == accepts(SCHEMAS["plan"], plan) == is_good


def test_schema_and_reader_accept_split_stages(folder):
    (first, *_), bits = (
        PLAN["stages"],
        [width for stage in PLAN["stages"] for width in stage["bits"]],
    )
    whole = first | {"first_layer": 0, "end_layer": len(bits), "bits": bits}
    stages = [whole | {"phase": "decode"}, whole | {"rank": 1, "device": 0, "phase": "prefill"}]
    schedule = {"policy": "waa", "encode_batch": 1, "decode_batch": 1}
    document = PLAN | {"stages": stages, "schedule": schedule}
    assert reads("plan", document, folder)
    assert accepts(SCHEMAS["plan"], document)
    for junk in (None, "both", ""):
        wrong = document | {"stages": [whole | {"phase": junk}, stages[1]]}
        assert not accepts(SCHEMAS["plan"], wrong)
        assert not reads("plan", wrong, folder)


def paths_of(value: Any, path: tuple = ()) -> list[tuple]:
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(found for key, one in children for found in paths_of(one, (*path, key)))]


def changed(document: Any, path: tuple, change: Any) -> Any:
    result = copy.deepcopy(document)
    if not path:
        return change(result, None)
    place = result
    for key in path[:-1]:
        place = place[key]
    change(place, path[-1])
    return result


JUNK = [None, True, -1, 0, 1.5, "", "text", [], {}, [1], 10**7, 10**20, ["a", "b", "c"]]


@settings(max_examples=400, deadline=None)
@given(kind=st.sampled_from(sorted(DOCUMENTS)), data=st.data())
def test_reader_rejects_what_the_schema_rejects(kind, data, folder):
    document = DOCUMENTS[kind]
    path = data.draw(st.sampled_from([one for one in paths_of(document) if one]))
    action = data.draw(st.sampled_from(["drop", "replace", "add"]))

    def change(place, key):
        if action == "drop":
            del place[key]
        elif action == "replace":
            place[key] = data.draw(st.sampled_from(JUNK))
        elif isinstance(place[key], dict):
            place[key]["surprise"] = data.draw(st.sampled_from(JUNK))

    value = changed(document, path, change)
    if not accepts(SCHEMAS[kind], value):
        assert not reads(kind, value, folder)
    elif kind == "workload":
        # A schema cannot express unique names or covered layers, which this format does not have.
        assert reads(kind, value, folder)
