"""Whatever is done to a file, its reader says what is wrong and never fails in another way.

``scripts/fault_matrix --only files`` does the same a hundred thousand times.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.errors import LlmpqError, SpecError
from llmpq.spec.cluster import load_cluster
from llmpq.spec.fields import Fields
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import read_plan
from llmpq.spec.workload import load_workload

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "plan": (sorted((ROOT / "strategies").glob("*llmpq.json"))[0], read_plan),
    "cluster": (ROOT / "inputs" / "clusters" / "paper-03.json", load_cluster),
    "workload": (ROOT / "inputs" / "workloads" / "s512-n100-b32.json", load_workload),
}
READ = FILES | {
    "model": (ROOT / "models" / "demo" / "config.json", lambda file: load_model_dir(file.parent)),
}
# A loaded machine is slow, and every example writes its own file.
CHECKS = (HealthCheck.function_scoped_fixture, HealthCheck.too_slow)
STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(2**4000), st.floats(), st.text(max_size=5),
    st.just([]), st.just({}), st.just([[]]), st.just({"a": 1}),
)  # fmt: skip


def _places(value: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, as the keys that lead there."""
    if not isinstance(value, dict | list):
        return [where]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = [place for key, inner in items for place in _places(inner, (*where, key))]
    return [where, *found] if where else found


@pytest.mark.parametrize("other", FILES)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_another_kind_is_named(kind, other):
    read = FILES[kind][1]
    path = FILES[other][0]
    if kind == other:
        read(path)
        return
    names = {"plan": "strategy"}
    message = (
        f"{path}: is a {names.get(other, other)} file, expected a {names.get(kind, kind)} file"
    )
    with pytest.raises(SpecError) as error:
        read(path)
    assert str(error.value).startswith(message)


def test_a_missing_field_is_named_in_a_sentence(tmp_path):
    file = tmp_path / "file.json"
    file.write_text('{"schema": 1}')
    with pytest.raises(SpecError, match=r"file.json: field 'model' is missing$"):
        read_plan(file)


@pytest.mark.parametrize("kind", READ)
@settings(max_examples=40, suppress_health_check=CHECKS)
@given(data=st.data())
def test_file_with_one_invalid_value_loads_or_raises_a_typed_error(tmp_path, kind, data):
    source, read = READ[kind]
    value = json.loads(source.read_text())
    *path, last = data.draw(st.sampled_from(_places(value)))
    inner = value
    for key in path:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[last] = data.draw(STRANGE)
    else:
        del inner[last]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(value))
    try:
        read(file)
    except LlmpqError as error:
        assert str(file) in str(error)  # noqa: PT017  that none is raised is as good


@pytest.mark.parametrize("kind", READ)
@settings(max_examples=40, suppress_health_check=CHECKS)
@given(data=st.data())
def test_file_with_damaged_bytes_loads_or_raises_a_typed_error(tmp_path, kind, data):
    source, read = READ[kind]
    text = bytearray(source.read_bytes())
    at = data.draw(st.integers(0, len(text) - 1))
    text[at : at + data.draw(st.integers(0, 30))] = data.draw(st.binary(max_size=30))
    file = tmp_path / "config.json"
    file.write_bytes(text)
    try:
        read(file)
    except LlmpqError as error:
        assert str(file) in str(error)  # noqa: PT017


@pytest.mark.parametrize("number", [2**4000, -(2**4000), float("nan"), float("inf"), True, "1"])
def test_numbers_are_finite(number):
    with pytest.raises(SpecError, match=r"field 'x'.*a finite number"):
        Fields({"x": number}, "file").number("x", minimum=-float("inf"))


@pytest.mark.parametrize("family", [["llama"], {"a": 1}, 5])
def test_a_family_is_a_name(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(SpecError, match=r"config.json: field 'model_type'"):
        load_model_dir(tmp_path)
