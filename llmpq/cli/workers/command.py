"""llmpq-worker: lend the devices of this host to a command on another one.

``llmpq serve|chat|run MODEL --workers`` there connects here, proves the key, asks for the devices,
and says which ranks of its plan to start. They are those of ``llmpq-serve`` or ``llmpq-dist`` with
``--nnodes`` and ``--node_rank``, and load their layers from the files of this host. One host is
served at a time; the worker then waits for the next one.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llmpq import __version__
from llmpq.cli.common import CommandParser, make_parser, print_json, require, run_command
from llmpq.cli.engine_options import add_engine_options
from llmpq.cli.front.host_devices import with_kept_figures, with_measured_figures
from llmpq.cli.front.hub import snapshot_of
from llmpq.cli.workers.connection import CONTROL, LEAVE, LINK, Connection
from llmpq.cli.workers.link import answer_link, measure_link
from llmpq.dist.io.prompts import Prompt, write_prompts
from llmpq.dist.launch.ranks import CLOSE_TIMEOUT_S
from llmpq.dist.launch.signals import StopRequest, ending_with_this_process
from llmpq.dist.transport.endpoint import (
    HANDSHAKE_S,
    Acceptor,
    Endpoint,
    read_token,
    receive_json,
    send_json,
)
from llmpq.errors import LlmpqError, SpecError, StageError
from llmpq.options.declare import add_options, read_options
from llmpq.options.run import WorkerOptions, address_text
from llmpq.profiler.device import host_cluster
from llmpq.spec.cluster import host_text
from llmpq.spec.fields import Fields, to_json, write_text
from llmpq.spec.model_files.config import absolute_model_path, model_digest

POLL_S = 0.1
COMMANDS = {"serve": "llmpq.cli.commands.serve", "dist": "llmpq.cli.commands.dist"}
"""What starts the ranks: of a server, and of requests that are answered one batch at a time."""
OWN_FOLDERS = ("--store", "--kv_offloading_folder")
"""Options that name folders of this host, which no other host chooses."""
_ERROR = ": error: "


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "llmpq-worker",
        "Lend the devices of this host to llmpq serve, chat or run with --workers on another one.",
    )
    add_options(parser, WorkerOptions)
    return parser


def _run(options: argparse.Namespace) -> int:
    asked = read_options(WorkerOptions, options)
    require("torch", "transformers", "safetensors")
    token, stop = read_token(asked.key_file), StopRequest()
    if asked.model is not None and not asked.model.exists():
        raise SpecError(f"--model: {asked.model}: no such folder, expected a model")
    cluster = with_kept_figures(host_cluster())
    if not asked.no_measure:
        cluster = with_measured_figures(cluster)
    listening = Endpoint(address=(asked.host, asked.port)).listening()
    with stop.from_signals(), listening as listener:
        host, port = listener.getsockname()[:2]
        devices = [f"{one.label} ({host_text(one)})" for one in cluster.devices]
        if options.json:
            print_json({"host": host, "port": port, "devices": devices})
        else:
            print(f"ready {address_text((host, port))}")
        sys.stdout.flush()
        _say(f"lends {', '.join(devices)} at {address_text((host, port))}; Ctrl-C ends it")
        Worker(asked, token).serve(listener, stop)
    return 0


def _say(text: str) -> None:
    print(f"llmpq-worker: {text}", file=sys.stderr, flush=True)


class Worker:
    """Serves one host after the other.

    Args:
        options: what to lend.
        token: that a host proves.
    """

    def __init__(self, options: WorkerOptions, token: bytes) -> None:
        self._options = options
        self._token = token
        self._waiting: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._served: str | None = None  # host that uses this one

    def serve(self, listener: socket.socket, stop: StopRequest) -> None:
        """Serve until asked to stop.

        Call it in the main thread: the kernel ends ranks with the thread that started them.
        """
        purposes = [CONTROL, LINK]
        acceptor = Acceptor([listener], self._token, purposes, self._say_refused)
        threading.Thread(target=self._sort, args=(acceptor, stop), daemon=True).start()
        while not stop.is_requested:
            try:
                sock = self._waiting.get(timeout=POLL_S)
            except queue.Empty:
                continue
            with sock:
                self._serve_one(sock, stop)
            self._served = None

    def _say_refused(self, host: str) -> None:
        _say(f"refused {host}: found another key, expected that of {self._options.key_file}")

    def _sort(self, acceptor: Acceptor, stop: StopRequest) -> None:
        """Answer measurements and the second host; leave the first one to the main thread."""
        while not stop.is_requested:
            try:
                purpose, sock = acceptor.take(time.monotonic() + POLL_S)
            except TimeoutError:
                continue
            if purpose == LINK:
                threading.Thread(target=_answer_link, args=(sock,), daemon=True).start()
            elif self._served is None:
                self._served = _host_of(sock)
                self._waiting.put(sock)
            else:
                with sock, contextlib.suppress(OSError):
                    refusal = {"kind": "busy", "host": self._served or "no host any more"}
                    send_json(sock, refusal, time.monotonic() + HANDSHAKE_S)

    def _serve_one(self, sock: socket.socket, stop: StopRequest) -> None:
        """Serve a host until it leaves, is lost, or this worker is asked to stop."""
        host = _host_of(sock)
        try:
            deadline_s = time.monotonic() + HANDSHAKE_S
            hello = Fields(receive_json(sock, deadline_s), host)
            send_json(sock, {"kind": "hello", "version": __version__}, deadline_s)
            if (version := hello.text("version")) != __version__:
                raise SpecError(f"found llmpq {version}, expected {__version__} as on this host")
            timeout_s = hello.number("timeout_s")
        except (OSError, StageError, SpecError) as error:
            _say(f"refused {host}: {error}")
            return
        _say(f"{host} has joined")
        with contextlib.closing(Connection(sock, host, timeout_s)) as connection:
            why = "has left"
            try:
                with _Lender(connection, self._options, self._token) as lender:
                    while not (stop.is_requested or lender.is_left):
                        lender.step()
            except StageError:
                why = f"is lost: {connection.lost}"
        _say(f"{host} {why}")


def _host_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:  # it has gone
        return "a host"


def _answer_link(sock: socket.socket) -> None:
    with contextlib.suppress(OSError, StageError):  # the other end is done
        answer_link(sock, HANDSHAKE_S)


class _Lender(contextlib.AbstractContextManager["_Lender"]):
    """What this host does for another one, until ``is_left``."""

    def __init__(self, connection: Connection, options: WorkerOptions, token: bytes) -> None:
        self._connection = connection
        self._options = options
        self._token = token
        self._resources = contextlib.ExitStack()
        name = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="llmpq-"))
        self._folder = Path(name)
        self.is_left = False
        self._model: Path | None = None
        self._ranks: _StartedRanks | None = None

    def __exit__(self, *error: object) -> None:
        """End the ranks: by themselves where the other host has closed them, else by signals."""
        try:
            if self._ranks is not None:
                is_over = self.is_left or self._connection.lost is not None
                self._ranks.end(CLOSE_TIMEOUT_S if is_over else 0.0)
        finally:
            self._resources.close()

    def step(self) -> None:
        """Answer a message, if there is one, and report the end of the ranks.

        Raises:
            StageError: the other host is lost.
        """
        message = self._connection.receive(POLL_S)
        if message is not None:
            self.is_left = message["kind"] == LEAVE
            if self.is_left:
                self._connection.close()
                return
            self._answer(message)
        if self._ranks is not None and (status := self._ranks.status()) is not None:
            error = self._ranks.last_error()
            self._ranks = None
            self._connection.send("ended", status=status, message=error or "no message")

    def _answer(self, message: dict[str, Any]) -> None:
        asked = Fields(message, self._connection.name)
        answers: dict[str, Callable[[Fields], dict[str, Any]]] = {
            "devices": self._devices,
            "link": self._link,
            "model": self._find_model,
            "start": self._start,
            "stop": self._stop,
        }
        try:
            kind = asked.text("kind", answers)
            answer = answers[kind](asked)
        except LlmpqError as error:
            self._connection.send("error", status=error.exit_status, message=str(error))
        else:
            self._connection.send(kind, **answer)

    def _devices(self, _: Fields) -> dict[str, Any]:
        return {"cluster": to_json(with_kept_figures(host_cluster()))}

    def _link(self, asked: Fields) -> dict[str, Any]:
        """Measure the link to another worker."""
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
        if self._options.model is not None:
            return absolute_model_path(self._options.model)
        path = Path(asked.text("path"))
        if path.exists():
            return path
        repo, commit = asked.optional_text("repo"), asked.optional_text("commit")
        if repo is None or commit is None:
            raise SpecError(f"{path}: no such folder, expected the model there, or --model DIR")
        snapshot = snapshot_of(repo, commit)
        folder = None if snapshot is None else snapshot / asked.text("file")
        if folder is None or not folder.exists():
            raise SpecError(
                f"{repo}: found no files of commit {commit} in the hub's cache, expected them "
                f"(hf download {repo} --revision {commit}), or --model DIR"
            )
        return folder

    def _start(self, asked: Fields) -> dict[str, Any]:
        """Start the ranks of a plan on this host, after the end of those of an earlier one."""
        if self._model is None:
            raise SpecError("start: found no model, expected the message 'model' before")
        self._stop(asked)
        command, plan = asked.text("command", COMMANDS), self._folder / "plan.json"
        write_text(plan, asked.text("plan"))
        words = [sys.executable, "-m", COMMANDS[command], "--strat_file_name", str(plan)]
        words += ["--model", str(self._model), "--token_file", str(self._options.key_file)]
        words += ["--nnodes", str(asked.integer("nnodes"))]
        words += ["--node_rank", str(asked.integer("node_rank"))]
        words += ["--master_addr", asked.text("master_addr")]
        words += ["--master_port", str(asked.integer("master_port"))]
        words += _checked_words(asked.items("words"))
        if command == "dist":
            words += ["--max_restarts", "0", *self._prompt_files()]
        self._ranks = _StartedRanks(words)
        return {}

    def _prompt_files(self) -> list[str]:
        """Return the options of the files of prompts and answers, which only host 0 reads."""
        prompts = self._folder / "prompts.jsonl"
        write_prompts(prompts, [Prompt(id="none", where="", token_ids=(0,), max_new_tokens=1)])
        return ["--prompts", str(prompts), "--output", str(self._folder / "answers.jsonl")]

    def _stop(self, _: Fields) -> dict[str, Any]:
        if self._ranks is not None:
            self._ranks.end(0.0)
            self._ranks = None
        return {}


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
    """The command that runs the ranks of a plan on this host, until it ends or the worker does."""

    def __init__(self, words: Sequence[str]) -> None:
        # Ctrl-C reaches the worker alone, which ends the ranks.
        self._process = subprocess.Popen(
            ending_with_this_process(words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
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
