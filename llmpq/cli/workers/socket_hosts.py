"""The hosts that ``--workers`` names, each with a socket to the ``llmpq worker`` there."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from llmpq import __version__
from llmpq.cli.workers.connection import CONTROL, LINK, Connection
from llmpq.cli.workers.hosts import OtherHost, OtherHosts
from llmpq.cli.workers.lender import POLL_S
from llmpq.cli.workers.link import measure_link
from llmpq.dist.transport.endpoint import (
    HANDSHAKE_S,
    Endpoint,
    read_token,
    receive_json,
    send_json,
)
from llmpq.errors import SpecError, StageError
from llmpq.options.run import WorkersOptions, address_text
from llmpq.spec.fields import Fields

BUSY_S = 10.0
"""How long a worker may take to end the ranks of the host that used it before."""


class WorkerHosts(OtherHosts):
    """The workers of a command; the arguments are those of :class:`OtherHosts`."""

    TITLE = "worker"

    def __init__(self, options: WorkersOptions, timeout_s: float, program: str) -> None:
        if options.key_file is None:
            raise SpecError("--workers: found no --key_file, expected the secret of all hosts")
        self._key_file = options.key_file
        self._token = read_token(options.key_file)
        super().__init__(options, timeout_s, program)

    def _token_file(self) -> Path:
        return self._key_file

    def _connect_all(self) -> None:
        addresses: Sequence[tuple[str, int]] = self._options.workers
        if len(set(addresses)) < len(addresses):
            raise SpecError("--workers: found one twice, expected each once")
        hosts = [host for host, _ in addresses]
        for address in addresses:
            name = address[0] if hosts.count(address[0]) == 1 else address_text(address)
            self._connect(name, address)
        self._measure_between()

    def _connect(self, name: str, address: tuple[str, int]) -> None:
        """Connect to a worker, and measure its link."""
        where = f"{self.TITLE} {address_text(address)}"
        try:
            sock = self._greeted(Endpoint(address=address), where)
            deadline_s = time.monotonic() + HANDSHAKE_S
            probe = Endpoint(address=address).connect_authenticated(self._token, LINK, deadline_s)
            measured = measure_link(probe, HANDSHAKE_S)
        except (OSError, StageError) as error:
            raise StageError(f"{where}: {error}") from None
        host = OtherHost(
            name=name,
            title=f"{self.TITLE} {name}",
            connection=Connection(sock, name, self._timeout_s),
            address=(sock.getpeername()[0], address[1]),
            here=sock.getsockname()[0],
            link=measured,
        )
        self._join(host)

    def _greeted(self, endpoint: Endpoint, where: str) -> socket.socket:
        """Return a connection to a worker of the same version, once it is not in use."""
        end_s = time.monotonic() + BUSY_S
        hello = {"version": __version__, "timeout_s": self._timeout_s}
        while True:
            deadline_s = time.monotonic() + HANDSHAKE_S
            try:
                sock = endpoint.connect_authenticated(self._token, CONTROL, deadline_s)
            except SpecError:
                raise SpecError(
                    f"{where}: found another key there, expected that of {self._key_file}"
                ) from None
            with contextlib.ExitStack() as stack:
                stack.enter_context(sock)
                deadline_s = time.monotonic() + HANDSHAKE_S
                send_json(sock, hello, deadline_s)
                answer = Fields(receive_json(sock, deadline_s), where)
                if answer.text("kind", ("hello", "busy")) == "hello":
                    if (version := answer.text("version")) != __version__:
                        raise SpecError(
                            f"{where}: found llmpq {version}, expected {__version__} as on this "
                            "host"
                        )
                    stack.pop_all()
                    return sock
            if time.monotonic() >= end_s:
                user = answer.text("host")
                raise StageError(f"found it in use by {user}, expected an idle worker")
            time.sleep(POLL_S)
