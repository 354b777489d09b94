"""What a host does for another one that plans over its devices, whatever carries the messages.

``llmpq worker`` takes them from a socket, ``--launcher ray`` from the calls of an actor.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmpq import __version__
from llmpq.cli.common import CommandParser
from llmpq.cli.engine_options import add_engine_options
from llmpq.cli.front.host_devices import with_kept_figures, with_measured_figures
from llmpq.cli.front.hub import snapshot_of
from llmpq.cli.workers.connection import LINK, Message
from llmpq.cli.workers.link import answer_link, measure_link
from llmpq.dist.io.prompts import Prompt, write_prompts
from llmpq.dist.launch.process_environment import python_path
from llmpq.dist.launch.ranks import CLOSE_TIMEOUT_S
from llmpq.dist.launch.signals import clean_up_if_killed, ending_with_this_process
from llmpq.dist.transport.endpoint import HANDSHAKE_S, Acceptor, Endpoint
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.options.run import address_text
from llmpq.profiler.device import host_cluster
from llmpq.spec.cluster import Cluster
from llmpq.spec.fields import Fields, to_json, write_text
from llmpq.spec.model_files.config import absolute_model_path, model_digest

POLL_S = 0.1
COMMANDS = {"serve": "llmpq.cli.commands.serve", "dist": "llmpq.cli.commands.dist"}
"""What starts the ranks: of a server, and of requests in batches."""
OWN_FOLDERS = ("--store", "--kv_offloading_folder")
"""Options that name folders of this host, which no other host chooses."""
_ERROR = ": error: "


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """The part of a host that is planned for.

    Attributes:
        threads: of its CPU; 0 leaves it out.
        gpus: number of accelerators.
        memory_bytes: of its CPU.
    """

    threads: int
    gpus: int
    memory_bytes: int

    def applied(self, cluster: Cluster) -> Cluster:
        """Return this part of a host's devices.

        Raises:
            SpecError: nothing is left.
        """
        groups, num_gpus = [], 0
        for group in cluster.nodes[0].devices:
            if group.type != "cpu":
                num_gpus += 1
                if num_gpus <= self.gpus:
                    groups.append(group)
            elif self.threads:
                threads = min(group.threads or self.threads, self.threads)
                memory = min(group.memory_bytes or self.memory_bytes, self.memory_bytes)
                groups.append(replace(group, threads=threads, memory_bytes=memory))
        if not groups:
            raise SpecError(
                f"found {self.threads} CPUs and {self.gpus} GPUs of this host to plan for, "
                "expected at least one that it has"
            )
        return replace(cluster, nodes=(replace(cluster.nodes[0], devices=tuple(groups)),))


class Lender(contextlib.AbstractContextManager["Lender"]):
    """Answers the messages of another host: devices, links, the ranks of a plan.

    Call it in one thread: the kernel ends ranks with the thread that started them.

    Args:
        token: the secret of all hosts, also of the ranks.
        key_file: that has it; by default it is written where only this user can read it.
        model: weights on this host; by default the path of the other host, or the hub's cache.
        limits: of what is lent; by default all devices.
        measures: whether devices are measured when the other host asks for it.
    """

    def __init__(
        self,
        token: bytes,
        *,
        key_file: Path | None = None,
        model: Path | None = None,
        limits: HostLimits | None = None,
        measures: bool = False,
    ) -> None:
        self._token = token
        self._key_file = key_file
        self._own_model = model
        self._limits = limits
        self._measures = measures
        self._resources = contextlib.ExitStack()
        self._model: Path | None = None
        self._ranks: _StartedRanks | None = None

    def __exit__(self, *error: object) -> None:
        """End the ranks."""
        self.close(0.0)

    def close(self, timeout_s: float) -> None:
        """End the ranks: by signals where they do not end by themselves in time."""
        try:
            if self._ranks is not None:
                self._ranks.end(timeout_s)
        finally:
            self._resources.close()

    def ended(self) -> Message | None:
        """Return the message that the ranks have ended, once; ``None`` before."""
        if self._ranks is None or (status := self._ranks.status()) is None:
            return None
        error = self._ranks.last_error()
        self._ranks = None
        return {"kind": "ended", "status": status, "message": error or "no message"}

    def answer(self, message: Message, name: str) -> Message:
        """Return the answer to a message of the host ``name``, an error of llmpq included."""
        asked = Fields(message, name)
        answers: dict[str, Callable[[Fields], dict[str, Any]]] = {
            "devices": self._devices,
            "link": self._link,
            "model": self._find_model,
            "start": self._start,
            "stop": self._stop,
        }
        try:
            kind = asked.text("kind", answers)
            return {"kind": kind, **answers[kind](asked)}
        except LlmpqError as error:
            return {"kind": "error", "status": error.exit_status, "message": str(error)}

    def _devices(self, asked: Fields) -> dict[str, Any]:
        cluster = host_cluster() if self._limits is None else self._limits.applied(host_cluster())
        is_measured = self._measures and asked.flag("measure")
        figures = with_measured_figures if is_measured else with_kept_figures
        return {"cluster": to_json(figures(cluster))}

    def _link(self, asked: Fields) -> dict[str, Any]:
        """Measure the link to another host that lends devices."""
        address = (asked.text("host"), asked.integer("port"))
        endpoint, deadline_s = Endpoint(address=address), time.monotonic() + HANDSHAKE_S
        try:
            sock = endpoint.connect_authenticated(self._token, LINK, deadline_s)
            return to_json(measure_link(sock, HANDSHAKE_S))
        except (OSError, StageError) as error:
            raise StageError(f"{address_text(address)}: cannot be measured: {error}") from None

    def _find_model(self, asked: Fields) -> dict[str, Any]:
        """Find the model of a plan on this host, and compare it with the other host's."""
        folder = self._own_folder(asked)
        if model_digest(folder) != asked.text("digest"):
            raise SpecError(
                f"{folder}: found another model than on the other host, expected the same "
                "config.json and the same tensors"
            )
        self._model = folder
        return {"path": str(folder)}

    def _own_folder(self, asked: Fields) -> Path:
        if self._own_model is not None:
            return absolute_model_path(self._own_model)
        path = Path(asked.text("path"))
        if path.exists():
            return path
        repo, commit = asked.optional_text("repo"), asked.optional_text("commit")
        if repo is None or commit is None:
            raise SpecError(
                f"{path}: no such folder, expected the model there (llmpq worker: or --model DIR)"
            )
        snapshot = snapshot_of(repo, commit)
        folder = None if snapshot is None else snapshot / asked.text("file")
        if folder is None or not folder.exists():
            raise SpecError(
                f"{repo}: found no files of commit {commit} in the hub's cache, expected them "
                f"(hf download {repo} --revision {commit}; llmpq worker: or --model DIR)"
            )
        return folder

    def _start(self, asked: Fields) -> dict[str, Any]:
        """Start the ranks of a plan on this host, after the end of those of an earlier one."""
        if self._model is None:
            raise SpecError("start: found no model, expected the message 'model' before")
        self._stop(asked)
        folder, command = self._new_folder(), asked.text("command", COMMANDS)
        plan, key_file = folder / "plan.json", self._key_file or folder / "token"
        if self._key_file is None:
            key_file.touch(mode=0o600)
            key_file.write_bytes(self._token)
        write_text(plan, asked.text("plan"))
        words = [sys.executable, "-m", COMMANDS[command], "--strat_file_name", str(plan)]
        words += ["--model", str(self._model), "--token_file", str(key_file)]
        words += ["--nnodes", str(asked.integer("nnodes"))]
        words += ["--node_rank", str(asked.integer("node_rank"))]
        words += ["--master_addr", asked.text("master_addr")]
        words += ["--master_port", str(asked.integer("master_port"))]
        words += _checked_words(asked.items("words"))
        if command == "dist":
            words += _prompt_files(folder)
        self._ranks = _StartedRanks(words)
        return {}

    def _new_folder(self) -> Path:
        """Return a folder that only this user can enter, until the ranks have ended."""
        made = tempfile.TemporaryDirectory(prefix="llmpq-")
        folder = Path(self._resources.enter_context(made))
        self._resources.enter_context(clean_up_if_killed(folder))
        return folder

    def _stop(self, _: Fields) -> dict[str, Any]:
        if self._ranks is not None:
            self._ranks.end(0.0)
            self._ranks = None
        self._resources.close()
        return {}


def _prompt_files(folder: Path) -> list[str]:
    """Return the options of the files of prompts and answers, which only host 0 reads."""
    prompts = folder / "prompts.jsonl"
    write_prompts(prompts, [Prompt(id="none", where="", token_ids=(0,), max_new_tokens=1)])
    return ["--prompts", str(prompts), "--output", str(folder / "answers.jsonl")]


def _checked_words(words: Sequence[object]) -> list[str]:
    """Return options of the engine; no others come from another host."""
    found = [str(word) for word in words]
    parser = CommandParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_engine_options(parser)
    try:
        others = parser.parse_known_args(found)[1]
    except (argparse.ArgumentError, SystemExit):
        others = found
    others += [word for word in found if word.startswith(OWN_FOLDERS)]
    if others:
        raise SpecError(f"start: found {' '.join(others)}, expected options of the engine")
    return found


class _StartedRanks:
    """The command that runs the ranks of a plan on this host, until it ends or its caller does."""

    def __init__(self, words: Sequence[str]) -> None:
        # Ctrl-C reaches the caller alone, which ends the ranks.
        self._process = subprocess.Popen(
            ending_with_this_process(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": python_path(os.environ)},
        )
        self._error = ""
        self._copy = threading.Thread(target=self._copy_errors, daemon=True)
        self._copy.start()

    def status(self) -> int | None:
        """Return the exit status, ``None`` while they run."""
        return self._process.poll()

    def last_error(self) -> str:
        """Return the error of the command, else its last line."""
        self._copy.join()
        return self._error

    def end(self, timeout_s: float) -> None:
        """Wait ``timeout_s`` for the end, then ask for it, and end the command if it goes on."""
        process = self._process
        for act, wait_s in (
            (process.poll, timeout_s),
            (process.terminate, CLOSE_TIMEOUT_S),
            (process.kill, None),
        ):
            act()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
                break
        self._copy.join()

    def _copy_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                sys.stderr.write(line)
                sys.stderr.flush()
                if _ERROR in line or (_ERROR not in self._error and line.strip()):
                    self._error = line.strip()
        self._error = self._error.rpartition(_ERROR)[2]


class ActorLender:
    """A lender whose messages are the calls of an actor; it needs no key file beforehand.

    Args:
        token: secret of all hosts of the command.
        limits: of what is lent.
    """

    def __init__(self, token: str, limits: HostLimits) -> None:
        self._token = token.encode("ascii")
        self._lender = Lender(self._token, limits=limits, measures=True)
        self._listening = contextlib.ExitStack()

    def version(self) -> str:
        """Return the version of llmpq on this host."""
        return __version__

    def listen(self, host: str) -> int:
        """Answer measurements of links at this address; return the port."""
        endpoint = Endpoint(address=(host, 0))
        listener = self._listening.enter_context(endpoint.listening())
        acceptor = Acceptor([listener], self._token, [LINK])
        stop = threading.Event()
        self._listening.callback(stop.set)
        threading.Thread(target=_answer_links, args=(acceptor, stop), daemon=True).start()
        return int(listener.getsockname()[1])

    def stop_listening(self) -> None:
        """Answer no more measurements."""
        self._listening.close()

    def answer(self, message: Message, name: str) -> Message:
        """Return the answer to a message."""
        return self._lender.answer(message, name)

    def ended(self) -> Message | None:
        """Return the message that the ranks have ended, once; ``None`` before."""
        return self._lender.ended()

    def close(self) -> None:
        """End the ranks, which end by themselves once their master has."""
        self._listening.close()
        self._lender.close(CLOSE_TIMEOUT_S)


def _answer_links(acceptor: Acceptor, stop: threading.Event) -> None:
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            _, sock = acceptor.take(time.monotonic() + POLL_S)
            start_answering_link(sock)


def start_answering_link(sock: socket.socket) -> None:
    """Answer the measurements of a connection in a thread of its own."""
    threading.Thread(target=_answer_link, args=(sock,), daemon=True).start()


def _answer_link(sock: socket.socket) -> None:
    with contextlib.suppress(OSError, StageError):  # the other end is done
        answer_link(sock, HANDSHAKE_S)
