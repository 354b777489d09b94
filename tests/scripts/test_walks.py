"""Nothing makes a reader's way longer without its record saying so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "walks.json"


@pytest.fixture(scope="module")
def walks():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tools"))
        patch.setattr(sys, "argv", ["walks"])
        import walks  # noqa: PLC0415

        yield walks


def recorded() -> dict[str, dict[str, int]]:
    (table,) = json.loads(RECORD.read_text(encoding="utf-8"))["tables"]
    return {row["walk"]: row for row in table["rows"]}


ON_THE_WAY = {
    "token_offline": ("llmpq.dist.engine.engine.Engine", "llmpq.dist.kv.cache.KVCache"),
    "token_online": ("llmpq.dist.engine.engine.Engine", "llmpq.dist.kv.cache.KVCache"),
    "plan": ("llmpq.spec.plan.Plan",),
    "weight": ("llmpq.quant.modules.layer.QuantLinear",),
    "request": ("llmpq.server.service.Service",),
}


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_a_walk_meets_what_is_known_and_no_more_files_than_recorded(walks, name):
    walk = walks.walked(name)
    assert set(ON_THE_WAY[name]) <= set(walk.classes)
    assert set(recorded()) == set(walks.WALKS) == set(ON_THE_WAY)
    assert len(walk.files) <= recorded()[name]["files"]
    # The way to a kernel differs by a class between processors.
    assert len(walk.classes) <= recorded()[name]["classes"] + 1
