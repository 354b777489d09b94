"""A worker and the host that uses it, in this process: whom it serves and what it refuses."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
from helpers.clocks import PATIENCE_S
from helpers.processes import wait_for
from helpers.small_host import small_host

from llmpq.cli.front.host_plan import FoundModel
from llmpq.cli.workers import command, hosts, lender, socket_hosts
from llmpq.cli.workers.command import Worker
from llmpq.cli.workers.socket_hosts import WorkerHosts
from llmpq.dist.launch.signals import StopRequest
from llmpq.dist.transport.endpoint import Endpoint, read_token
from llmpq.errors import SpecError, StageError
from llmpq.options.run import WorkerOptions, WorkersOptions
from llmpq.spec.catalog import resolve_model
from llmpq.spec.model_files.config import model_digest

DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"


def key(folder: Path, secret: str = "a secret of the hosts") -> Path:
    file = folder / f"key-{len(list(folder.iterdir()))}"
    file.touch(mode=0o600)
    file.write_text(secret)
    return file


class Started:
    """A worker on a free port, in a thread: its ranks would end with it."""

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self._stop = StopRequest()
        self._listening = Endpoint(address=("127.0.0.1", 0)).listening()

    def __enter__(self) -> Started:
        listener = self._listening.__enter__()
        self.address = ("127.0.0.1", listener.getsockname()[1])
        worker = Worker(self.options, read_token(self.options.key_file))
        self._thread = threading.Thread(target=worker.serve, args=(listener, self._stop))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.request("the test")
        self._thread.join()
        self._listening.__exit__(*error)

    def connected(self, file: Path | None = None) -> WorkerHosts:
        options = WorkersOptions(workers=(self.address,), key_file=file or self.options.key_file)
        return WorkerHosts(options, 600, "llmpq test")


@pytest.fixture
def worker(tmp_path, monkeypatch):
    monkeypatch.setattr(lender, "host_cluster", lambda: small_host(300))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Started(WorkerOptions(key_file=key(tmp_path))) as started:
        yield started


def asked(found: WorkerHosts, kind: str, **fields: object):
    return found._hosts[0].ask(kind, **fields)


def test_its_devices_and_its_link_join_those_of_this_host(worker, capsys):
    with worker.connected() as found:
        cluster = found.joined(small_host(200))
    assert [device.label for device in cluster.devices] == ["here/cpu#0", "127.0.0.1/cpu#0"]
    assert [device.memory_bytes for device in cluster.devices] == [200 << 20, 300 << 20]
    (link,) = cluster.links
    assert link.between == ("here", "127.0.0.1")
    shown = capsys.readouterr().err
    assert "llmpq test: worker 127.0.0.1 has joined: cpu (1 thread, 300 MiB); link " in shown


def test_one_worker_serves_one_host_after_the_other(worker, monkeypatch, capsys):
    monkeypatch.setattr(socket_hosts, "BUSY_S", 0.0)
    first = worker.connected()
    with pytest.raises(StageError, match=r"in use by 127\.0\.0\.1, expected an idle worker"):
        worker.connected()
    monkeypatch.setattr(socket_hosts, "BUSY_S", PATIENCE_S)
    first.close()
    worker.connected().close()
    assert "127.0.0.1 has left" in capsys.readouterr().err


def test_another_key_is_one_line_at_both_ends(worker, tmp_path, capsys):
    with pytest.raises(SpecError, match="found another key there, expected that of") as error:
        worker.connected(key(tmp_path, "another secret of hosts"))
    assert "\n" not in str(error.value)
    shown = capsys.readouterr().err
    assert shown == (
        "llmpq-worker: refused 127.0.0.1: found another key, expected that of "
        f"{worker.options.key_file}\n"
    )
    worker.connected().close()


def test_another_version_is_refused_and_both_are_named(worker, monkeypatch, capsys):
    monkeypatch.setattr(socket_hosts, "__version__", "0.0.1")
    own = command.__version__
    with pytest.raises(SpecError, match=f"found llmpq {own}, expected 0.0.1"):
        worker.connected()
    wait_for(
        lambda: capsys.readouterr().err,
        lambda text: f"refused 127.0.0.1: found llmpq 0.0.1, expected {own}" in text,
    )


def test_no_worker_is_one_error_that_names_the_address(tmp_path, monkeypatch):
    monkeypatch.setattr(socket_hosts, "HANDSHAKE_S", 0.1)
    with Endpoint(address=("127.0.0.1", 0)).listening() as listener:
        address = ("127.0.0.1", listener.getsockname()[1])
    options = WorkersOptions(workers=(address,), key_file=key(tmp_path))
    with pytest.raises(StageError, match=rf"worker 127.0.0.1:{address[1]}: .* refused"):
        WorkerHosts(options, 600, "llmpq test")


def model_at(folder: Path) -> FoundModel:
    return FoundModel(spec=resolve_model(DEMO)[0], path=folder, hub=None)


def test_a_model_is_compared_before_anything_is_loaded(worker, tmp_path):
    copy, other = tmp_path / "copy", tmp_path / "other"
    for folder in (copy, other):
        shutil.copytree(DEMO, folder)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert model_digest(copy) == model_digest(DEMO) != model_digest(other)
    with worker.connected() as found:
        assert asked(found, "model", **hosts._model_fields(model_at(copy))).has("path")
        wrong = {"path": str(other), "digest": model_digest(DEMO)}
        with pytest.raises(SpecError, match=rf"worker 127.0.0.1: {other}: found another model"):
            asked(found, "model", **wrong)
        gone = {"path": str(tmp_path / "gone"), "digest": "x"}
        with pytest.raises(SpecError, match=r"worker 127.0.0.1: .*gone: no such folder"):
            asked(found, "model", **gone)


def test_a_model_of_the_hub_is_found_in_the_workers_cache(worker, tmp_path, monkeypatch):
    snapshot = tmp_path / "snapshots" / "abc"
    shutil.copytree(DEMO, snapshot)
    places = {("a/b", "abc"): snapshot}
    monkeypatch.setattr(lender, "snapshot_of", lambda *name: places.get(name))
    fields = {"path": str(tmp_path / "gone"), "commit": "abc", "file": "."}
    with worker.connected() as found:
        digest = model_digest(DEMO)
        asked(found, "model", repo="a/b", digest=digest, **fields)
        with pytest.raises(SpecError, match="c/d: found no files of commit abc"):
            asked(found, "model", repo="c/d", digest=digest, **fields)


def test_the_folder_that_a_worker_was_given_is_the_one_that_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(lender, "host_cluster", lambda: small_host(300))
    own = tmp_path / "own"
    shutil.copytree(DEMO, own)
    options = WorkerOptions(key_file=key(tmp_path), model=own)
    with Started(options) as started, started.connected() as found:
        fields = {"path": str(tmp_path / "gone"), "digest": model_digest(DEMO)}
        assert asked(found, "model", **fields).text("path") == str(own)


@pytest.mark.parametrize(
    "words",
    [
        ["--output", "x"],
        ["--strat_file_name", "x"],
        ["--token_budget", "x"],
        ["--store", "x"],
        ["--kv_offloading_folder", "x"],
        ["--kv_offloading_folder=x"],
        ["x"],
    ],
)
def test_only_options_of_the_engine_come_from_another_host(words):
    with pytest.raises(SpecError, match="expected options of the engine"):
        lender._checked_words(words)
    good = ["--token_budget", "5", "--step_timeout", "60", "--no_prefix_caching"]
    assert lender._checked_words(good) == good


def test_what_is_not_asked_for_in_order_is_an_error(worker):
    with worker.connected() as found:
        with pytest.raises(SpecError, match="start: found no model"):
            asked(found, "start")
        with pytest.raises(SpecError, match="expected one of devices, link"):
            asked(found, "format the disk")
        assert asked(found, "stop").has("kind")
