"""When the time is up nothing is fitted any more: kept fits answer, else the roofline."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmpq.costmodel.costs import ClusterCosts, build_costs
from llmpq.costmodel.importers import public
from llmpq.costmodel.tables import latency
from llmpq.costmodel.tables.cache import Cache
from llmpq.costmodel.tables.latency import RegressionLatencyModel
from llmpq.costmodel.tables.lookup import fitted
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

MODEL = catalog.model("facebook/opt-125m")
CLUSTER = cluster_of_types({"A100-80G": 2, "V100-32G": 1})
TABLE = LatencyTable(
    samples=tuple(
        LatencySample(
            phase=phase, bits=16, batch=batch, tokens=tokens, seconds=1e-3 + 1e-6 * batch * tokens
        )
        for phase in Phase
        for batch in (1, 2, 3, 5, 8, 16)
        for tokens in (16, 64, 256)
    ),
    provenance=(("device", "A100-80G"),),
)


@pytest.fixture(autouse=True)
def database(monkeypatch: pytest.MonkeyPatch) -> None:
    """A public database that knows the A100 alone, and nothing remembered in this process."""
    monkeypatch.setattr(public, "is_installed", lambda: True)
    monkeypatch.setattr(public, "import_table", lambda *_: TABLE)
    forget()


def forget() -> None:
    """Be a new process."""
    public.public_table.cache_clear()
    fitted.cache_clear()


def costs(folder: Path, late: list[bool] | None) -> ClusterCosts:
    """Build with a clock that says ``late`` one answer after the other, the last one for good."""
    answers = iter(late or ())
    last = (late or [False])[-1]
    return build_costs(
        MODEL,
        CLUSTER,
        dtype="float16",
        kv_bits=16,
        cache_dir=folder,
        is_late=None if late is None else lambda: next(answers, last),
    )


def sources(found: ClusterCosts) -> list[str]:
    return [found.latency[group].source.split()[0] for group in range(2)]


def test_with_time_every_table_is_made_ready(tmp_path: Path) -> None:
    found = costs(tmp_path, [False])
    assert sources(found) == ["table", "roofline"]
    assert found.hurried == ()


def test_too_late_nothing_is_assembled_and_who_is_concerned_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public, "import_table", None)
    found = costs(tmp_path, [True])
    assert sources(found) == ["roofline", "roofline"]
    assert found.hurried == ("A100-80G",)


def test_too_late_between_two_fits_the_device_is_priced_by_the_roofline_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = []
    real = latency.choose_law
    monkeypatch.setattr(latency, "choose_law", lambda one: fits.append(1) or real(one))
    found = costs(tmp_path, [False, False, True])  # the table, one curve of two
    assert len(fits) == 1
    assert sources(found) == ["roofline", "roofline"]
    assert found.hurried == ("A100-80G",)


def test_what_an_earlier_run_kept_is_used_however_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = costs(tmp_path, [False])
    forget()
    monkeypatch.setattr(public, "import_table", None)
    monkeypatch.setattr(latency, "choose_law", None)
    late = costs(tmp_path, [True])
    assert late.hurried == ()
    shape = (Phase.DECODE, 16, 4, 100.0, 0)
    assert late.latency[0].layer_s(*shape) == first.latency[0].layer_s(*shape)


def test_without_a_cache_a_late_curve_is_not_ready() -> None:
    model = RegressionLatencyModel(TABLE)
    assert not model.prepare(lambda: True)
    assert model.prepare(lambda: False)
    assert model.prepare(lambda: True)  # it is at hand by now


def test_a_damaged_kept_fit_is_none(tmp_path: Path) -> None:
    cache = Cache(folder=tmp_path)
    assert RegressionLatencyModel(TABLE, cache=cache).prepare(lambda: False)
    for file in tmp_path.glob("*.fit"):
        file.write_bytes(b"cut")
    assert not RegressionLatencyModel(TABLE, cache=cache).prepare(lambda: True)
