import json
import stat

import numpy as np
import pytest

from llmpq.cli.fit_cache import fit_cache
from llmpq.costmodel.costs import build_costs
from llmpq.costmodel.importers import public
from llmpq.costmodel.tables import cache as module
from llmpq.costmodel.tables import latency
from llmpq.costmodel.tables.cache import Cache, digest
from llmpq.costmodel.tables.latency import RegressionLatencyModel
from llmpq.spec import catalog
from llmpq.spec.cluster import cluster_of_types
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

DECODE = Phase.DECODE
TABLE = LatencyTable(
    samples=tuple(
        LatencySample(
            phase=DECODE,
            bits=16,
            batch=batch,
            tokens=tokens,
            seconds=1e-3 + 1e-6 * batch * tokens**0.9 + 1e-5 * (batch % 3),
        )
        for batch in (1, 2, 3, 5, 8, 16)
        for tokens in (16, 64, 256)
    )
)
SHAPES = [(2, 64), (4, 100), (1, 7), (40, 3000)]


def answers(model):
    return [model.estimate(DECODE, 16, *shape) for shape in SHAPES]


def test_a_kept_fit_answers_as_the_first_did_and_is_not_fitted_again(tmp_path, monkeypatch):
    cache = Cache(folder=tmp_path / "fits")
    first = answers(RegressionLatencyModel(TABLE, cache=cache))
    assert first == answers(RegressionLatencyModel(TABLE))
    monkeypatch.setattr(latency, "choose_law", None)  # a second fit would call it
    assert answers(RegressionLatencyModel(TABLE, cache=cache)) == first


def test_files_are_readable_by_their_owner_alone_and_hold_no_objects(tmp_path):
    cache = Cache(folder=tmp_path / "fits")
    answers(RegressionLatencyModel(TABLE, cache=cache))
    (file,) = cache.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    header, _, body = file.read_bytes().partition(b"\n")
    kinds = [kind for kind, _ in json.loads(header).values()]
    assert set(kinds) == {"<f8"}
    assert len(body) % 8 == 0


@pytest.mark.parametrize("content", [b"", b"nothing", b"[]\n", b'{"rows": ["<f8", [9]]}\ncut'])
def test_a_damaged_file_is_fitted_again_and_replaced(tmp_path, content):
    cache = Cache(folder=tmp_path)
    first = answers(RegressionLatencyModel(TABLE, cache=cache))
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert answers(RegressionLatencyModel(TABLE, cache=cache)) == first
    assert file.read_bytes() != content


def test_a_folder_that_cannot_be_written_to_stops_nobody(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = Cache(folder=tmp_path / "file" / "fits")
    assert answers(RegressionLatencyModel(TABLE, cache=cache))


def test_other_code_asks_for_other_files(monkeypatch):
    before = digest(b"one", b"two")
    assert before != digest(b"onet", b"wo")
    monkeypatch.setattr(module, "_code", lambda: b"other")
    assert digest(b"one", b"two") != before


def test_the_oldest_files_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILES", 3)
    cache = Cache(folder=tmp_path)
    for index in range(5):
        cache.write(f"key{index}", {"one": np.array([float(index)])})
    assert len(list(tmp_path.iterdir())) == 3
    assert cache.read("key4") is not None


def test_fits_lie_in_the_users_cache_directory(tmp_path):
    assert fit_cache({"XDG_CACHE_HOME": "/c", "HOME": "/h"}).as_posix() == "/c/llmpq/fits"
    assert fit_cache({"HOME": "/h"}).as_posix() == "/h/.cache/llmpq/fits"
    assert fit_cache({}) is None


def test_a_roofline_plan_asks_no_table(monkeypatch):
    monkeypatch.setattr("llmpq.costmodel.costs.public_table", None)
    cluster = cluster_of_types({"A100-80G": 1})
    model = catalog.model("facebook/opt-125m")
    costs = build_costs(model, cluster, dtype="float16", kv_bits=16, latency="roofline")
    assert costs.latency_source(cluster.devices[0]) == "roofline"


def test_a_public_table_is_assembled_once_and_comes_back_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(public, "is_installed", lambda: True)
    table = LatencyTable(samples=TABLE.samples, provenance=(("device", "A100-80G"), ("a", "b: c")))
    asked = []
    monkeypatch.setattr(public, "import_table", lambda *args: asked.append(args) or table)
    model, cache = catalog.model("facebook/opt-125m"), Cache(folder=tmp_path)
    for _ in range(2):
        public.public_table.cache_clear()
        assert public.public_table(model, "A100-80G", "float16", cache) == table
    assert len(asked) == 1
    public.public_table.cache_clear()
