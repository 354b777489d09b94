"""Models of the Hugging Face hub: from the cache as they lie there, or downloaded into it.

``huggingface_hub`` knows the cache, the token and the endpoint, and makes the links of a snapshot.
The bytes are received here, because it keeps no part of a file that broke off and compares no
digest: an incomplete file stays as ``blobs/DIGEST.incomplete`` and is continued by the next run,
and a file gets its name only once its digest is right. Links to the weights come last, so that a
snapshot with weights is whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from queue import Empty, SimpleQueue
from typing import Any

from llmpq import __version__
from llmpq.cli.common import QUIET_S, progress_bar
from llmpq.errors import SpecError
from llmpq.spec.model_files.config import CONFIG_FILE
from llmpq.spec.model_files.weight_headers import INDEX_FILE, SINGLE_FILE, find_weights
from llmpq.units import format_bytes

CONNECTIONS = 4
RETRIES = 5
"""Attempts to continue a file without a byte received, before the download ends."""
PAUSE_S = 1.0
"""Before the first of them; each further pause is twice as long."""
TIMEOUT_S = 30.0
OFFERS = 8
"""Most files that a message lists."""

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<part>[^:]+))?")
_SETTINGS = (
    *(CONFIG_FILE, "generation_config.json", "quantize_config.json", INDEX_FILE, "merges.txt"),
    *("tokenizer*.json", "*tokens*.json", "vocab.*", "chat_template*", "*.model", "*.tiktoken"),
)
"""Patterns of the files that are read besides weights."""
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_OTHER_COPIES = ("adapter_model", "consolidated")
"""How files of safetensors begin that are no part of a model, or a second copy of it."""
_PROJECTOR, _GGUF = "mmproj", ".gguf"
_SPLIT = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TRY_AGAIN = (408, 429, 500, 502, 503, 504)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AGAIN = "the same command continues the download"
_OTHER_DISK = "free some of it, or set HF_HOME to a folder of another disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubName:
    """A model of the hub as a user names it, ``ORG/NAME`` or ``ORG/NAME:PART``.

    Attributes:
        repo: its id.
        part: of the name of a GGUF file, or a revision; ``None`` for the default ones.
    """

    repo: str
    part: str | None

    def __str__(self) -> str:
        return self.repo if self.part is None else f"{self.repo}:{self.part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """Where a model lies in the cache, and what was downloaded of it now.

    Attributes:
        path: folder of its files, or its GGUF file.
        commit: of the repository.
        downloaded_bytes: 0 where all files were there.
    """

    path: Path
    commit: str
    downloaded_bytes: int


def hub_name(text: str) -> HubName | None:
    """Return the model of the hub that a text can name, ``None`` if it cannot."""
    found = _NAME.fullmatch(text)
    return None if found is None else HubName(repo=found["repo"], part=found["part"])


def hub_model(name: HubName, check: Callable[[Path], None] = lambda _: None) -> HubModel:
    """Return a model from the cache, or download it.

    A model that is whole in the cache is used as it lies there, without a request for a newer one.

    Args:
        name: of the model.
        check: called with the folder of the configuration before weights are downloaded.

    Raises:
        SpecError: there is no such model, it cannot be downloaded, or it has no weights that can
            be read.
    """
    found = _cached(name)
    if found is not None:
        return found
    with _clear_errors(name):
        return _Download(name).run(check)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The files of a repository that a model needs.

    Attributes:
        settings: its configuration and tokenizer.
        weights: files of weights.
    """

    settings: tuple[str, ...]
    weights: tuple[str, ...]


def _choose(name: HubName, files: Sequence[str]) -> _Chosen | None:
    """Return the files that a model needs; all safetensors where an index says which of them.

    Returns:
        ``None`` if the name has a part, and no GGUF file is called so.

    Raises:
        SpecError: there are no weights that can be read, or of several models.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(_GGUF) and _PROJECTOR not in file.lower():
            split = _SPLIT.fullmatch(file)
            models.setdefault(split[1] if split else file.removesuffix(_GGUF), []).append(file)
    top = [file for file in files if "/" not in file]
    weights = [
        file for file in top if file.endswith(".safetensors") and not file.startswith(_OTHER_COPIES)
    ]
    if name.part is None and weights:
        settings = [file for file in top if any(fnmatch(file, one) for one in _SETTINGS)]
        if CONFIG_FILE not in settings:
            raise SpecError(
                f"{name}: found weights, but no {CONFIG_FILE}: no model of transformers"
            )
        return _Chosen(settings=tuple(settings), weights=tuple(weights))
    meant = models if name.part is None else _meant(name.part, models)
    if name.part is not None and not meant:
        return None
    if not meant:
        raise SpecError(_no_weights(name, files))
    if len(meant) > 1:
        stems = sorted(meant)
        more = "" if len(stems) <= OFFERS else f" and {len(stems) - OFFERS} more"
        raise SpecError(
            f"{name}: found {len(stems)} GGUF models, expected the name of one behind a colon, "
            f"such as {name.repo}:{PurePosixPath(stems[0]).name}; they are "
            f"{', '.join(stems[:OFFERS])}{more}"
        )
    (parts,) = meant.values()
    return _Chosen(settings=(), weights=tuple(parts))


def _meant(part: str, models: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the GGUF models that a part of their name means: whole words before other parts."""
    wanted = part.lower().removesuffix(_GGUF)
    by_name = {stem: stem.lower() for stem in models}
    rules: tuple[Callable[[str], bool], ...] = (
        lambda stem: wanted in (stem, PurePosixPath(stem).name),
        lambda stem: wanted in re.split(r"[-./]", stem),
        lambda stem: wanted in stem or fnmatch(stem, wanted),
    )
    for rule in rules:
        found = {stem: models[stem] for stem, lower in by_name.items() if rule(lower)}
        if found:
            return found
    return {}


def _no_weights(name: HubName, files: Sequence[str]) -> str:
    pickled = sorted(file for file in files if file.endswith(_PICKLED))
    if pickled:
        return (
            f"{name}: found only pickled weights ({pickled[0]}), expected safetensors or GGUF; "
            "pickles can run code and are never read: look for a repository with safetensors, or "
            "convert the checkpoint"
        )
    return f"{name}: found no weights among {len(files)} files, expected safetensors or GGUF"


def _cached(name: HubName) -> HubModel | None:
    """Return a model whose files are all in the cache."""
    for part, revision in _readings(name):
        folder = snapshot_of(name.repo, revision)
        path = None if folder is None else _whole(HubName(repo=name.repo, part=part), folder)
        if folder is not None and path is not None:
            return HubModel(path=path, commit=folder.name, downloaded_bytes=0)
    return None


def _readings(name: HubName) -> Iterator[tuple[str | None, str]]:
    """Yield what a name can mean: part of a GGUF file's name, and revision."""
    yield name.part, "main"
    if name.part is not None:
        yield None, name.part


def snapshot_of(repo: str, revision: str) -> Path | None:
    """Return the folder of a revision in the cache, ``None`` if there is none."""
    if PurePosixPath(revision).is_absolute() or ".." in PurePosixPath(revision).parts:
        return None
    storage = _storage(repo)
    ref = storage / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    folder = storage / "snapshots" / commit
    return folder if PurePosixPath(commit).name == commit and folder.is_dir() else None


def _storage(repo: str) -> Path:
    return _cache_folder() / f"models--{repo.replace('/', '--')}"


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _whole(name: HubName, folder: Path) -> Path | None:
    """Return the model of a snapshot if none of its files is missing."""
    files = [
        path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()
    ]
    try:
        chosen = _choose(name, files)
        if chosen is None:
            return None
        if chosen.weights[0].endswith(_GGUF):
            split = _SPLIT.fullmatch(chosen.weights[0])
            is_whole = split is None or len(chosen.weights) == int(split[2])
            return folder / chosen.weights[0] if is_whole else None
        has_settings = CONFIG_FILE in files and not set(files).isdisjoint(_TOKENIZERS)
        is_whole = all((folder / file).is_file() for file in find_weights(folder).names)
    except SpecError:
        return None
    return folder if has_settings and is_whole else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file of a repository: its name, size, and digest, which is its name among the blobs."""

    name: str
    nbytes: int
    digest: str

    @classmethod
    def of(cls, sibling: Any) -> _File:
        """Return a file of the hub's answer."""
        digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise SpecError(f"{sibling.rfilename}: found digest {digest!r}, expected a hexadecimal")
        return cls(name=sibling.rfilename, nbytes=int(sibling.size or 0), digest=digest)

    def is_right(self, path: Path) -> bool:
        """Return whether a file has this digest: SHA-256, or git's SHA-1 of small files."""
        sha = hashlib.sha256()
        if len(self.digest) == 40:
            sha = hashlib.sha1(b"blob %d\0" % self.nbytes, usedforsecurity=False)
        with path.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
        return sha.hexdigest() == self.digest


class _Download:
    """Brings a model into the cache.

    Args:
        name: of the model.
    """

    def __init__(self, name: HubName) -> None:
        self._name = name
        self._blobs = _storage(name.repo) / "blobs"
        self._received: dict[str, int] = {}
        self._total = 0
        self._downloaded = 0
        self._stop = threading.Event()
        self._counting = threading.Lock()

    def run(self, check: Callable[[Path], None]) -> HubModel:
        """Download what is missing and return the model."""
        revision, commit, files, chosen = self._listing()
        weights: Sequence[str] = chosen.weights
        with _alone(self._name):
            if chosen.settings:
                settings = [files[one] for one in chosen.settings]
                self._fetch(settings, commit)
                folder = self._link(settings, revision)
                check(folder)
                weights = _listed(self._name, folder, weights)
            self._fetch([files[one] for one in weights], commit)
            folder = self._link([files[one] for one in weights], revision)
        return HubModel(
            path=folder if chosen.settings else folder / weights[0],
            commit=folder.name,
            downloaded_bytes=self._downloaded,
        )

    def _listing(self) -> tuple[str, str, dict[str, _File], _Chosen]:
        """Return revision, its commit, all of its files by name, and which of them are needed."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import RevisionNotFoundError

        name = self._name
        api = HfApi(library_name="llmpq", library_version=__version__)
        others: list[str] = []
        for part, revision in _readings(name):
            try:
                info = api.model_info(
                    name.repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S
                )
            except RevisionNotFoundError:
                raise SpecError(
                    f"{name}: found neither a revision nor a GGUF file of that name"
                    + (f", expected one of {', '.join(others[:OFFERS])}" if others else "")
                ) from None
            siblings = {one.rfilename: one for one in info.siblings or ()}
            chosen = _choose(HubName(repo=name.repo, part=part), list(siblings))
            if chosen is not None:
                needed = (*chosen.settings, *chosen.weights)
                files = {one: _File.of(siblings[one]) for one in needed}
                return revision, str(info.sha), files, chosen
            others = sorted(one for one in siblings if one.endswith(_GGUF))
        raise AssertionError(
            "the last reading has no part: files are chosen, or an error is raised"
        )

    def _fetch(self, files: Sequence[_File], commit: str) -> None:
        """Bring the bytes of files among the blobs."""
        from huggingface_hub import constants

        missing = [
            one
            for one in {one.digest: one for one in files}.values()
            if not (self._blobs / one.digest).exists() and one.nbytes <= _most_bytes()
        ]
        if not missing:
            return
        self._blobs.mkdir(parents=True, exist_ok=True)
        self._received = {one.digest: _size(self._part(one)) for one in missing}
        self._total = sum(one.nbytes for one in missing)
        left = self._total - sum(self._received.values())
        self._check_room(left)
        if left > 1 << 20:
            begun = "" if left == self._total else f", {format_bytes(left)} of it missing"
            _say(
                f"{self._name}: getting {len(missing)} files of {format_bytes(self._total)}{begun} "
                f"from {constants.ENDPOINT} to {_cache_folder()}"
            )
        with progress_bar("download", delay_s=QUIET_S) as show:
            self._stop = threading.Event()
            _in_threads(missing, lambda one: self._fetch_one(one, commit, show), self._stop)

    def _check_room(self, nbytes: int) -> None:
        free = shutil.disk_usage(self._blobs).free
        if nbytes > free:
            raise SpecError(
                f"{self._name}: found {format_bytes(free)} free in {_cache_folder()}, expected "
                f"{format_bytes(nbytes)} for the download; {_OTHER_DISK}"
            )

    def _part(self, file: _File) -> Path:
        return self._blobs / f"{file.digest}.incomplete"

    def _fetch_one(self, file: _File, commit: str, show: Callable[..., None]) -> None:
        part = self._part(file)
        was_begun = _size(part) > 0
        self._receive(file, commit, show)
        if self._stop.is_set():
            return
        if not file.is_right(part):
            part.unlink()
            if was_begun:  # what an earlier run left may be damaged: all of it once more
                self._fetch_one(file, commit, show)
                return
            raise SpecError(
                f"{self._name}: {file.name}: what was received has not the digest that the hub "
                "states, and was deleted; a proxy or mirror may be damaged (HF_ENDPOINT): run the "
                "command again"
            )
        part.replace(self._blobs / file.digest)

    def _receive(self, file: _File, commit: str, show: Callable[..., None]) -> None:
        """Append what is missing of a file, and continue where connections are cut."""
        from huggingface_hub.errors import HfHubHTTPError

        part, failures = self._part(file), 0
        while not self._stop.is_set():
            have = _size(part)
            if have > file.nbytes:
                part.unlink()
                have = 0
            if have == file.nbytes:
                part.touch()  # a file without bytes has no answer
                return
            try:
                self._receive_once(file, commit, have, show)
                problem: Exception = SpecError(
                    f"{self._name}: {file.name}: the answer ended early; {_AGAIN}"
                )
            except HfHubHTTPError as error:
                if error.response.status_code not in _TRY_AGAIN:
                    raise
                problem = error
            except _transport_errors() as error:
                problem = error
            if _size(part) > have:
                failures = 0
            elif failures == RETRIES:
                raise problem
            else:
                self._stop.wait(PAUSE_S * 2**failures)
                failures += 1

    def _receive_once(self, file: _File, commit: str, have: int, show: Callable[..., None]) -> None:
        from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers = build_hf_headers(library_name="llmpq", library_version=__version__)
        headers["Accept-Encoding"] = "identity"  # bytes are counted, and continued by their place
        if have:
            headers["Range"] = f"bytes={have}-"
        url = hf_hub_url(self._name.repo, file.name, revision=commit)
        with get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S) as answer:
            hf_raise_for_status(answer)
            is_rest = answer.status_code == 206
            self._count(file, have if is_rest else 0, show)
            with self._part(file).open("ab" if is_rest else "wb") as out:
                for block in answer.iter_bytes():
                    if self._stop.is_set():
                        return
                    out.write(block)
                    self._count(file, self._received[file.digest] + len(block), show)

    def _count(self, file: _File, nbytes: int, show: Callable[..., None]) -> None:
        with self._counting:
            self._downloaded += max(0, nbytes - self._received[file.digest])
            self._received[file.digest] = nbytes
            done = sum(self._received.values())
            show(done, self._total, f"{format_bytes(done)} of {format_bytes(self._total)}")

    def _link(self, files: Sequence[_File], revision: str) -> Path:
        """Make the links of files in the snapshot; return its folder."""
        from huggingface_hub import snapshot_download
        from tqdm.auto import tqdm

        class NoBar(tqdm):  # type: ignore[type-arg]  # generic in stubs only
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **{**more, "disable": True})

        is_rest = any(one.nbytes > _most_bytes() for one in files)
        folder = snapshot_download(
            self._name.repo,
            revision=revision,
            allow_patterns=[re.sub(r"([*?[])", r"[\1]", one.name) for one in files],
            tqdm_class=None if is_rest else NoBar,
            library_name="llmpq",
            library_version=__version__,
        )
        return Path(folder)


def _listed(name: HubName, folder: Path, weights: Sequence[str]) -> Sequence[str]:
    """Return the files of weights that an index names, else the single file, else all.

    Raises:
        SpecError: the repository lacks files of its index.
    """
    if weights[0].endswith(_GGUF):
        return weights
    if (folder / INDEX_FILE).is_file():
        named = find_weights(folder).names
        missing = sorted(set(named) - set(weights))
        if not missing:
            return named
        if SINGLE_FILE not in weights:
            raise SpecError(f"{name}: {INDEX_FILE} names {missing[0]}, which the repository lacks")
    return (SINGLE_FILE,) if SINGLE_FILE in weights else weights


def _in_threads(
    files: Sequence[_File], work: Callable[[_File], None], stop: threading.Event
) -> None:
    """Do something with every file, several at the same time; the first error ends all.

    After Ctrl-C no thread is waited for: what it has written is the beginning of a file.
    """
    todo: SimpleQueue[_File] = SimpleQueue()
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    for one in sorted(files, key=lambda one: -one.nbytes):
        todo.put(one)

    def run() -> None:
        with contextlib.suppress(Empty):
            while True:
                one = todo.get_nowait()
                try:
                    work(one)
                    done.put(None)
                except BaseException as error:  # the main thread raises it
                    done.put(error)

    count = min(CONNECTIONS, len(files))
    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        error = next(filter(None, (done.get() for _ in files)), None)
    except KeyboardInterrupt:
        stop.set()
        raise
    stop.set()
    for thread in threads:
        thread.join()
    if error is not None:
        raise error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _most_bytes() -> int:
    """Return the size of the largest file that the hub serves over HTTP."""
    from huggingface_hub import constants

    return constants.MAX_HTTP_DOWNLOAD_SIZE


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the errors of connections, of the HTTP package that huggingface_hub uses."""
    from huggingface_hub.errors import HfHubHTTPError

    bases = HfHubHTTPError.__bases__
    return tuple(one for one in bases if issubclass(one, Exception) and one is not OSError)


@contextlib.contextmanager
def _alone(name: HubName) -> Iterator[None]:
    """Wait until no other program of llmpq downloads the same repository."""
    from filelock import FileLock, Timeout

    file = _cache_folder() / ".locks" / _storage(name.repo).name / "llmpq.lock"
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"{name}: waiting for another program that downloads it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _clear_errors(name: HubName) -> Iterator[None]:
    """Raise the errors of a download as ``SpecError``, each with what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        yield
    except GatedRepoError:
        problem = (
            f"its owner wants to know who downloads it: ask for access at {hub}/{name.repo}, then "
            "set HF_TOKEN to a token of that account (or: hf auth login)"
        )
    except RepositoryNotFoundError:
        problem = (
            f"found no such folder here and no such model at {hub}, expected one; for a private "
            "model, set HF_TOKEN"
        )
    except OfflineModeIsEnabled:
        problem = (
            f"found no whole model in {_storage(name.repo)}, expected one, because HF_HUB_OFFLINE "
            "is set; without it, the model is downloaded"
        )
    except HfHubHTTPError as error:
        problem = _answer_text(hub, error.response.status_code)
    except LocalEntryNotFoundError as error:
        problem = f"{hub} cannot be reached: {_first_line(error.__cause__ or error)}; {_AGAIN}"
    except _transport_errors() as error:
        problem = f"the connection to {hub} failed: {_first_line(error)}; {_AGAIN}"
    except OSError as error:
        problem = _disk_text(error)
    else:
        return
    raise SpecError(f"{name}: {problem}") from None


def _disk_text(error: OSError) -> str:
    """Return what prevents writing, and what to do."""
    if error.errno is None:
        raise error
    if error.errno in _FULL:
        return f"{_cache_folder()}: {error.strerror}; {_OTHER_DISK}: {_AGAIN}"
    return f"{error.filename or _cache_folder()}: {error.strerror}; {_OTHER_DISK}"


def _answer_text(hub: str, status: int) -> str:
    """Return what an answer of the hub means that is no file."""
    if status in (401, 403):
        return f"{hub} answered {status}: the token (HF_TOKEN, or hf auth login) has no access"
    if status in _TRY_AGAIN:
        return f"{hub} answered {status}: it is busy; {_AGAIN}"
    return f"{hub} answered {status}, expected a file; is HF_ENDPOINT a mirror of the hub?"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


def _say(text: str) -> None:
    print(f"llmpq: {text}", file=sys.stderr)
