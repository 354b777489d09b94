"""The JSON codec of dataclasses: names, optional fields, arrays, objects and errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest

from llmpq.errors import SpecError
from llmpq.spec.fields import Fields, Rule, from_json, to_json
from llmpq.spec.plan import plan_text, read_plan

ROOT = Path(__file__).resolve().parents[2]


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True, kw_only=True)
class Leaf:
    size: Annotated[int, Rule(minimum=1, maximum=9)]


@dataclass(frozen=True, kw_only=True)
class Tree:
    SCHEMA: ClassVar[int] = 2

    name: Annotated[str, Rule(key="title")]
    kind: Literal["oak", "fir"]
    leaves: Annotated[tuple[Leaf, ...], Rule(minimum=1)]
    ends: tuple[str, str]
    rates: tuple[tuple[str, float], ...] = ()
    height_m: float | None = None
    owner: Annotated[str | None, Rule(null=True)] = None
    colour: Colour | None = None
    bits: Annotated[tuple[int, ...], Rule(optional=True)] = ()
    is_old: bool | None = None
    soil: Annotated[str | None, Rule(choices=("clay", "sand"))] = None


FULL = {
    "schema": 2,
    "title": "t",
    "kind": "oak",
    "leaves": [{"size": 1}, {"size": 9}],
    "ends": ["a", "b"],
    "rates": {"x": 1.5},
    "height_m": 2.0,
    "owner": None,
    "colour": "red",
    "bits": [3, 4],
    "is_old": True,
}


def read(value: dict) -> Tree:
    return from_json(Tree, Fields(value, "file"))


def test_an_object_round_trips_in_its_order():
    tree = read(FULL)
    assert tree.leaves == (Leaf(size=1), Leaf(size=9))
    assert (tree.rates, tree.colour, tree.bits) == ((("x", 1.5),), Colour.RED, (3, 4))
    assert json.dumps(to_json(tree)) == json.dumps(FULL)


def test_absent_fields_mean_the_defaults():
    absent = ("height_m", "owner", "colour", "bits", "is_old")
    tree = read({key: value for key, value in FULL.items() if key not in absent})
    assert (tree.height_m, tree.owner, tree.colour, tree.bits) == (None, None, None, ())
    assert {"height_m", "colour"}.isdisjoint(to_json(tree))
    assert to_json(tree)["owner"] is None


@pytest.mark.parametrize("field", ["height_m", "owner"])
def test_null_number_or_text_is_read_as_absent(field):
    assert getattr(read(FULL | {field: None}), field) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, "file: field 'schema': found 1, expected a whole number in"),
        ({"title": ""}, "field 'title': found '', expected a non-empty string"),
        ({"kind": "elm"}, "field 'kind': found 'elm', expected one of fir, oak"),
        ({"leaves": []}, "field 'leaves': .*at least 1"),
        ({"leaves": [{"size": 10}]}, r"field 'leaves\[0\].size': found 10, .*\[1, 9\]"),
        ({"leaves": [{"size": 1, "x": 1}]}, r"field 'leaves\[0\].x': .*no such field"),
        ({"ends": ["a", "b", "c"]}, "field 'ends': found '3 entries', expected an array of 2"),
        ({"rates": {"x": "fast"}}, "field 'rates.x': found 'fast', expected a finite number"),
        ({"colour": None}, "field 'colour': found None, expected no such field"),
        ({"bits": None}, "field 'bits'"),
        ({"soil": None}, "field 'soil': found None, expected no such field"),
        ({"soil": "mud"}, "field 'soil': found 'mud', expected one of clay, sand"),
        ({"is_old": 1}, "field 'is_old': found 1, expected true or false"),
        ({"surprise": 1}, "field 'surprise': found 1, expected no such field"),
    ],
)
def test_mistakes_name_file_and_field(change, message):
    with pytest.raises(SpecError, match=message):
        read(FULL | change)


@pytest.mark.parametrize("file", sorted((ROOT / "strategies").glob("*.json")), ids=lambda f: f.name)
def test_strategy_files_are_written_back_byte_for_byte(file):
    assert plan_text(read_plan(file)) == file.read_text("utf-8")
