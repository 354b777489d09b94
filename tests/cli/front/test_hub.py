"""Models of the hub, from a server on this host that speaks its protocol."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers.gguf_headers import gguf_bytes
from helpers.hub_server import HubRepository, HubServer, git_id, sha256
from helpers.processes import wait_for

from llmpq.cli.front import hub
from llmpq.cli.front.host_plan import find_model
from llmpq.cli.front.hub import hub_model, hub_name
from llmpq.cli.front.program import main
from llmpq.errors import SpecError
from llmpq.spec.fields import dump_json

pytest.importorskip("huggingface_hub")
DEMO = Path(__file__).resolve().parents[3] / "models" / "demo"
REPO = "own/tiny"
WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
TOKENIZER = b'{"version": "1.0"}'
CONFIG = (DEMO / "config.json").read_bytes()


def files(**more):
    return {
        "config.json": CONFIG,
        "tokenizer.json": TOKENIZER,
        "README.md": b"# Read me",
        "trainer_state.json": b"{}" * 5000,
        "code.py": b"import os",
        "model.safetensors": WEIGHTS,
        "pytorch_model.bin": b"pickled" * 1000,
        "onnx/model.onnx": b"other" * 1000,
        **more,
    }


def index(*names):
    return dump_json(
        {"weight_map": {f"t{place}": name for place, name in enumerate(names)}}
    ).encode()


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Return the folder of the hub's cache, empty, with downloads allowed."""
    for name, value in (
        ("HF_HUB_CACHE", str(tmp_path / "hub")),
        ("HF_TOKEN_PATH", str(tmp_path / "token")),
        ("HF_HUB_OFFLINE", False),
        ("ENDPOINT", "http://127.0.0.1:9"),  # no server
    ):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("huggingface_hub._tree_cache._IN_MEMORY_TREE_CACHE", {})
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub, "PAUSE_S", 0.0)
    monkeypatch.setattr("time.sleep", lambda _: None)  # huggingface_hub's pauses
    return tmp_path / "hub"


@pytest.fixture
def serve(cache, monkeypatch):
    """Return a function that serves files as a repository and returns it."""
    servers = []

    def serve(content, **more):
        repository = HubRepository(repo=REPO, files=content, **more)
        server = HubServer(repository).__enter__()
        servers.append(server)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        return repository

    yield serve
    for server in servers:
        server.__exit__()


def get(text=REPO):
    return hub_model(hub_name(text))


def blobs(cache):
    return sorted(one.name for one in cache.glob("models--*/blobs/*"))


def problem_of(text=REPO):
    with pytest.raises(SpecError) as caught:
        get(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_only_what_is_needed_is_downloaded_and_then_used_without_a_request(serve, cache):
    repository = serve(files())
    first = get()
    assert first.commit == repository.commit
    assert first.downloaded_bytes == len(CONFIG) + len(TOKENIZER) + len(WEIGHTS)
    links = sorted(first.path.iterdir())
    assert [one.name for one in links] == ["config.json", "model.safetensors", "tokenizer.json"]
    assert all(one.is_symlink() and one.resolve().parent.name == "blobs" for one in links)
    assert blobs(cache) == sorted([git_id(CONFIG), git_id(TOKENIZER), sha256(WEIGHTS)])
    assert (first.path / "model.safetensors").read_bytes() == WEIGHTS
    repository.requests.clear()
    again = get()
    assert (again.path, again.downloaded_bytes) == (first.path, 0)
    assert repository.requests == []


def test_the_configuration_is_checked_before_weights_are_downloaded(serve, cache):
    repository, folders = serve(files()), []

    def check(folder):
        folders.append((folder / "config.json").read_bytes())
        raise SpecError("too large")

    with pytest.raises(SpecError, match="too large"):
        hub_model(hub_name(REPO), check)
    assert folders == [CONFIG]
    assert repository.ranges("model.safetensors") == []
    assert get().downloaded_bytes == len(WEIGHTS)


def test_files_of_other_programs_in_the_cache_are_used(serve, cache):
    from huggingface_hub import hf_hub_download, snapshot_download  # noqa: PLC0415

    repository = serve(files())
    folder = snapshot_download(REPO, allow_patterns=["*.json", "*.safetensors"])
    repository.requests.clear()
    assert get().path == Path(folder)
    assert repository.requests == []
    shutil.rmtree(cache)
    hf_hub_download(REPO, "config.json")
    assert get().downloaded_bytes == len(TOKENIZER) + len(WEIGHTS)


def test_a_cut_connection_is_continued_where_it_ended(serve):
    repository = serve(files())
    repository.cuts["model.safetensors"] = [300_000, 0, 0, 500_000]
    assert (get().path / "model.safetensors").read_bytes() == WEIGHTS
    assert repository.ranges("model.safetensors") == [
        None, *["bytes=300000-"] * 3, "bytes=800000-",
    ]  # fmt: skip


def test_a_download_that_ended_is_continued_by_the_next_command(serve, cache):
    repository = serve(files())
    repository.cuts["model.safetensors"] = [300_000, *[0] * (hub.RETRIES + 1)]
    assert "the same command continues" in problem_of()
    assert f"{sha256(WEIGHTS)}.incomplete" in blobs(cache)
    assert not list(cache.glob("**/model.safetensors"))
    repository.requests.clear()
    found = get()
    assert found.downloaded_bytes == len(WEIGHTS) - 300_000
    assert repository.ranges("model.safetensors") == ["bytes=300000-"]
    assert not [name for name in blobs(cache) if name.endswith(".incomplete")]


def test_busy_answers_are_asked_again(serve):
    repository = serve(files(), statuses=[429, 503])
    assert (get().path / "model.safetensors").read_bytes() == WEIGHTS
    assert len(repository.ranges("model.safetensors")) == 3


def test_a_hub_that_stays_busy_is_one_error(serve):
    serve(files(), statuses=[503] * (hub.RETRIES + 1))
    assert "answered 503: it is busy" in problem_of()


def test_two_programs_do_not_download_the_same_model_at_once(serve, cache, capsys):
    from filelock import FileLock  # noqa: PLC0415

    repository = serve(files())
    lock = FileLock(cache / ".locks" / "models--own--tiny" / "llmpq.lock")
    Path(lock.lock_file).parent.mkdir(parents=True)
    found, said = [], []
    with lock:
        second = threading.Thread(target=lambda: found.append(get()))
        second.start()
        wait_for(lambda: said.append(capsys.readouterr().err) or "".join(said), bool)
        assert "waiting for another program" in "".join(said)
        assert repository.ranges("model.safetensors") == []
    second.join()
    assert found[0].downloaded_bytes > len(WEIGHTS)


def test_damaged_bytes_are_deleted_and_an_error(serve, cache):
    repository = serve(files(), damaged={"model.safetensors"})
    assert "digest" in problem_of()
    assert sha256(WEIGHTS) not in blobs(cache)
    assert f"{sha256(WEIGHTS)}.incomplete" not in blobs(cache)
    repository.damaged.clear()
    assert (get().path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_damaged_beginning_of_an_earlier_run_is_downloaded_anew(serve, cache):
    serve(files())
    folder = cache / "models--own--tiny" / "blobs"
    folder.mkdir(parents=True)
    (folder / f"{sha256(WEIGHTS)}.incomplete").write_bytes(bytes(1000))
    assert (get().path / "model.safetensors").read_bytes() == WEIGHTS


def test_a_full_disk_is_one_error_and_the_download_continues(serve, cache, monkeypatch):
    serve(files())
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "free in" in problem_of()
    assert not [name for name in blobs(cache) if name.startswith(sha256(WEIGHTS))]
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _: usage)
    real, written = Path.open, []

    class Full:
        """A file of a disk with room for 200,000 bytes."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, block):
            if sum(written) + len(block) > 200_000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written.append(self.file.write(block))

    with monkeypatch.context() as patch:
        patch.setattr(
            Path,
            "open",
            lambda path, mode="r", *more, **names: (
                Full(real(path, mode, *more, **names))
                if path.suffix == ".incomplete" and mode[0] in "wa"
                else real(path, mode, *more, **names)
            ),
        )
        problem = problem_of()
    assert "No space left" in problem
    assert "HF_HOME" in problem
    assert get().downloaded_bytes == len(WEIGHTS) - sum(written) > 0


def test_a_gated_model_names_the_page_and_the_token(serve, monkeypatch):
    repository = serve(files(), token="secret", gated=True)
    problem = problem_of()
    assert f"/{REPO}" in problem
    assert "HF_TOKEN" in problem
    monkeypatch.setenv("HF_TOKEN", "wrong")
    assert "the token" in problem_of()
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert get().downloaded_bytes > 0
    # The token of the hub is not for other hosts, which the large files are on.
    sent = {path: token for path, token in repository.tokens.items() if path.startswith("/lfs/")}
    assert set(sent.values()) == {None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("own/other", "no such model"),
        (f"{REPO}:v9", "neither a revision nor a GGUF file"),
    ],
)
def test_what_the_hub_has_not_is_one_error(text, message, serve):
    serve(files())
    assert message in problem_of(text)


def test_a_hub_that_cannot_be_reached_is_one_error(cache):
    assert "http://127.0.0.1:9" in problem_of()


def test_offline_uses_the_cache_and_names_what_forbids_the_rest(serve, cache, monkeypatch):
    repository = serve(files())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in problem_of()
    assert repository.requests == []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    found = get()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert get().path == found.path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"config.json": CONFIG, "pytorch_model.bin": b"p" * 5000}, "pickles can run code"),
        ({"README.md": b"none"}, "no weights"),
        ({"model.safetensors": WEIGHTS}, "no config.json"),
        ({"adapter_model.safetensors": WEIGHTS, "adapter_config.json": b"{}"}, "no weights"),
        (
            {"config.json": CONFIG, "model.safetensors.index.json": index("a.safetensors"),
             "b.safetensors": WEIGHTS},
            "names a.safetensors",
        ),
    ],
)  # fmt: skip
def test_a_repository_without_usable_weights_is_one_error(content, message, serve, cache):
    serve(content)
    assert message in problem_of()
    assert sha256(WEIGHTS) not in blobs(cache)


def test_an_index_says_which_shards_are_needed(serve):
    shards = {f"model-0000{n}-of-00002.safetensors": bytes([n]) * 9000 for n in (1, 2)}
    serve(
        {
            "config.json": CONFIG,
            "tokenizer.json": TOKENIZER,
            "model.safetensors.index.json": index(*shards),
            "consolidated.safetensors": WEIGHTS,
            "model.fp16.safetensors": WEIGHTS,
            **shards,
        }
    )
    found = get()
    stored = sorted(one.name for one in found.path.glob("*.safetensors"))
    assert stored == sorted(shards)
    (found.path / stored[1]).unlink()
    assert get().downloaded_bytes == 0  # its bytes are still there: only the link is made
    assert sorted(one.name for one in found.path.glob("*.safetensors")) == stored


GGUFS = {
    "tiny-Q4_K_M.gguf": b"a" * 5000,
    "tiny-Q8_0.gguf": b"b" * 5000,
    "mmproj-tiny.gguf": b"c" * 5000,
    "big/tiny-BF16-00001-of-00002.gguf": b"d" * 5000,
    "big/tiny-BF16-00002-of-00002.gguf": b"e" * 5000,
}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("q8_0", ["tiny-Q8_0.gguf"]),
        ("tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
        ("*q4*", ["tiny-Q4_K_M.gguf"]),
        ("BF16", sorted(name for name in GGUFS if "BF16" in name)),
    ],
)
def test_the_gguf_model_that_is_asked_for_is_downloaded_alone(part, expected, serve):
    repository = serve(GGUFS)
    found = get(f"{REPO}:{part}")
    assert found.path.name == Path(expected[0]).name
    assert found.downloaded_bytes == 5000 * len(expected)
    repository.requests.clear()
    assert get(f"{REPO}:{part}").path == found.path
    assert repository.requests == []


def test_several_gguf_models_are_listed(serve):
    serve(GGUFS)
    problem = problem_of()
    assert "3 GGUF models" in problem
    assert "tiny-Q8_0" in problem
    assert "Q4_K_M.gguf" in problem_of(f"{REPO}:Q5_K")


def test_a_revision_is_another_snapshot(serve, cache):
    repository = serve(files(), revisions=("main", "v2"))
    assert get(f"{REPO}:v2").commit == repository.commit
    assert (cache / "models--own--tiny" / "refs" / "v2").read_text() == repository.commit
    repository.requests.clear()
    assert get(f"{REPO}:v2").downloaded_bytes == 0
    assert get(f"{REPO}:{repository.commit}").downloaded_bytes == 0
    assert repository.requests == []


@pytest.mark.parametrize("name", ["../../x", "a/../../../x", "/x"])
def test_a_revision_cannot_lead_out_of_the_cache(name, cache):
    assert hub.snapshot_of(REPO, name) is None


def test_a_model_of_the_hub_has_its_own_name_and_its_link(serve):
    serve(GGUFS | {"tiny-Q8_0.gguf": gguf_bytes()})
    found = find_model(f"{REPO}:Q8_0")
    assert found.spec.name == REPO
    assert found.path.name == "tiny-Q8_0.gguf"  # not that of the blob, which has no suffix
    assert found.path.is_symlink()


SCRIPT = """
import sys
from llmpq.cli.common import make_parser, run_command
from llmpq.cli.front.hub import hub_model, hub_name
def body(options):
    print(hub_model(hub_name(options.model)).downloaded_bytes)
    return 0
parser = make_parser("llmpq get", "")
parser.add_argument("model")
sys.exit(run_command(parser, body, None))
"""


def test_ctrl_c_leaves_the_cache_whole_and_the_next_command_continues(tmp_path):
    repository = HubRepository(
        repo=REPO, files=files(), token="secret", stalled={"model.safetensors"}
    )
    with HubServer(repository) as server:
        environment = {
            **os.environ,
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(tmp_path),
            "HF_TOKEN": "secret",
            "HF_HUB_OFFLINE": "0",
        }
        command = [sys.executable, "-c", SCRIPT, REPO]
        first = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        part = tmp_path / "hub" / "models--own--tiny" / "blobs" / f"{sha256(WEIGHTS)}.incomplete"
        wait_for(lambda: hub._size(part) or first.poll() is not None, bool)
        first.send_signal(signal.SIGINT)
        _, said = first.communicate()
        assert first.returncode == 130
        assert "interrupted" in said
        assert "Traceback" not in said
        kept = part.stat().st_size
        assert part.read_bytes() == WEIGHTS[:kept]
        repository.stalled.clear()
        repository.resumed.set()
        second = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
    assert int(second.stdout) == len(WEIGHTS) - kept


@pytest.mark.dist
def test_a_model_of_the_hub_answers(serve, monkeypatch, tmp_path, capsys):
    pytest.importorskip("torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repository = serve({one.name: one.read_bytes() for one in DEMO.iterdir()})
    words = [
        "run",
        REPO,
        "-p",
        "To install",
        "--max_tokens",
        "3",
        "--max_model_len",
        "64",
        "--no_measure",
        "--json",
    ]
    assert main(words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens"] == 3
    assert record["model"]["name"] == REPO
    assert record["model"]["commit"] == repository.commit
