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
import sys
import threading
import time
from collections.abc import Sequence

from llmpq import __version__
from llmpq.cli.common import make_parser, print_json, require, run_command
from llmpq.cli.front.host_devices import with_kept_figures, with_measured_figures
from llmpq.cli.workers.connection import CONTROL, LEAVE, LINK, Connection
from llmpq.cli.workers.lender import POLL_S, Lender, start_answering_link
from llmpq.dist.launch.ranks import CLOSE_TIMEOUT_S
from llmpq.dist.launch.signals import StopRequest
from llmpq.dist.transport.endpoint import (
    HANDSHAKE_S,
    Acceptor,
    Endpoint,
    read_token,
    receive_json,
    send_json,
)
from llmpq.errors import SpecError, StageError
from llmpq.options.declare import add_options, read_options
from llmpq.options.run import WorkerOptions, address_text
from llmpq.profiler.device import host_cluster
from llmpq.spec.cluster import host_text
from llmpq.spec.fields import Fields


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
                start_answering_link(sock)
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
                with _Session(connection, self._options, self._token) as session:
                    while not (stop.is_requested or session.is_left):
                        session.step()
            except StageError:
                why = f"is lost: {connection.lost}"
        _say(f"{host} {why}")


def _host_of(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:  # it has gone
        return "a host"


class _Session(contextlib.AbstractContextManager["_Session"]):
    """What a connected host asks of this one, until ``is_left``."""

    def __init__(self, connection: Connection, options: WorkerOptions, token: bytes) -> None:
        self._connection = connection
        self._lender = Lender(token, key_file=options.key_file, model=options.model)
        self.is_left = False

    def __exit__(self, *error: object) -> None:
        """End the ranks: by themselves where the other host has closed them, else by signals."""
        is_over = self.is_left or self._connection.lost is not None
        self._lender.close(CLOSE_TIMEOUT_S if is_over else 0.0)

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
            self._connection.send(**self._lender.answer(message, self._connection.name))
        if (ended := self._lender.ended()) is not None:
            self._connection.send(**ended)
