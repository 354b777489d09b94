"""A server with the protocol of the Hugging Face hub, for one repository, with faults on demand.

It answers what a download asks for: the description of a model with sizes and digests, its tree,
and its files with ETag, ``X-Linked-*``, ``Range``, and a redirect of large files (LFS) to another
host. Its commit is the digest of all files.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

LARGE = 4096
"""Bytes from which a file is stored apart (LFS)."""


@dataclass
class HubRepository:
    """A repository and its faults, which tests set.

    Attributes:
        repo: its id.
        files: bytes by name.
        revisions: further names of the only commit.
        token: that a request needs, ``None`` for none.
        gated: whether files alone need the token, after the owner's consent.
        cuts: by name of a file, after how many bytes each further answer breaks off.
        damaged: names of files whose bytes are changed on the way.
        statuses: answered in this order before the bytes of large files are.
        stalled: names of files whose answers stop in their middle until ``resumed`` is set.
        requests: method, path and Range of every request.
        tokens: by path, the token of a request.
    """

    repo: str
    files: Mapping[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    token: str | None = None
    gated: bool = False
    cuts: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    damaged: set[str] = field(default_factory=set)
    statuses: list[int] = field(default_factory=list)
    stalled: set[str] = field(default_factory=set)
    resumed: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: dict[str, str | None] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        sha = hashlib.sha1(usedforsecurity=False)
        for name in sorted(self.files):
            sha.update(name.encode() + b"\0" + self.files[name])
        return sha.hexdigest()

    def ranges(self, name: str) -> list[str | None]:
        """Return the Range of every request for the bytes of a file."""
        ends = (f"/{name}", f"/{sha256(self.files[name])}")
        return [
            asked
            for method, path, asked in self.requests
            if method == "GET" and path.endswith(ends) and f"/{self.repo}/resolve" not in path
        ]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_id(data: bytes) -> str:
    sha = hashlib.sha1(b"blob %d\0" % len(data), usedforsecurity=False)
    sha.update(data)
    return sha.hexdigest()


class HubServer:
    """Serves a repository on this host while the context lasts."""

    def __init__(self, repository: HubRepository) -> None:
        self.repository = repository
        handler = type("Handler", (_Handler,), {"repository": repository})
        self._server = ThreadingHTTPServer(("0.0.0.0", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.repository.resumed.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    repository: HubRepository
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        repository, url = self.repository, urlsplit(self.path)
        repository.requests.append((self.command, url.path, self.headers["Range"]))
        given = self.headers["Authorization"]
        repository.tokens[url.path] = given
        if url.path.startswith("/lfs/"):
            if repository.statuses:
                self._send(repository.statuses.pop(0), b"busy")
                return
            name = next(
                one for one, data in repository.files.items() if url.path[5:] == sha256(data)
            )
            self._send_bytes(name)
            return
        is_file = f"/{repository.repo}/resolve/" in url.path
        if not url.path.removeprefix("/api/models").startswith(f"/{repository.repo}/"):
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif repository.token and given not in (None, f"Bearer {repository.token}"):
            text = "Invalid credentials in Authorization header"
            self._send(401, b"", {"X-Error-Message": text})
        elif repository.token and given is None and (is_file or not repository.gated):
            code = "GatedRepo" if repository.gated else "RepoNotFound"
            self._send(401, b"", {"X-Error-Code": code})
        elif is_file:
            self._send_file(*url.path.partition("/resolve/")[2].split("/", 1))
        else:
            self._send_listing(url.path, parse_qs(url.query))

    def _send_listing(self, path: str, query: dict[str, list[str]]) -> None:
        repository = self.repository
        kind, _, revision = path.partition(f"/{repository.repo}/")[2].partition("/")
        if not self._knows(revision):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif kind == "tree":
            self._send_json([self._entry(name) for name in repository.files])
        else:
            assert kind == "revision"
            siblings = []
            for name in repository.files:
                entry = self._entry(name)
                sibling = {"rfilename": name}
                if "blobs" in query:
                    sibling |= {"size": entry["size"], "blobId": entry["oid"]}
                    if "lfs" in entry:
                        lfs = {**entry["lfs"], "sha256": entry["lfs"]["oid"]}
                        sibling["lfs"] = lfs
                siblings.append(sibling)
            self._send_json({"id": repository.repo, "sha": repository.commit, "siblings": siblings})

    def _entry(self, name: str) -> dict[str, Any]:
        data = self.repository.files[name]
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data)}
        entry["oid"] = git_id(data)
        if len(data) >= LARGE:
            entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
        return entry

    def _knows(self, revision: str) -> bool:
        return revision in (*self.repository.revisions, self.repository.commit)

    def _send_file(self, revision: str, name: str) -> None:
        repository = self.repository
        data = repository.files.get(name)
        if not self._knows(revision) or data is None:
            code = "EntryNotFound" if self._knows(revision) else "RevisionNotFound"
            self._send(404, b"", {"X-Error-Code": code, "X-Repo-Commit": repository.commit})
        elif len(data) >= LARGE:
            # Another address of this host, as the hub's large files are on other hosts.
            host = f"http://127.0.0.2:{self.server.server_address[1]}"  # type: ignore[misc]
            headers = {
                "Location": f"{host}/lfs/{sha256(data)}",
                "X-Repo-Commit": repository.commit,
                "X-Linked-Etag": f'"{sha256(data)}"',
                "X-Linked-Size": str(len(data)),
            }
            self._send(302, b"", headers)
        else:
            self._send_bytes(name, {"X-Repo-Commit": repository.commit})

    def _send_bytes(self, name: str, headers: Mapping[str, str] | None = None) -> None:
        data = self.repository.files[name]
        more = {"ETag": f'"{sha256(data) if len(data) >= LARGE else git_id(data)}"'}
        if name in self.repository.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        begin, status = 0, 200
        if self.headers["Range"]:
            begin, status = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")), 206
            more["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        cuts = self.repository.cuts[name] if self.command == "GET" else []
        end = cuts.pop(0) if cuts else None
        self._send(status, data[begin:], {**more, **(headers or {})}, end=end, name=name)

    def _send_json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        end: int | None = None,
        name: str | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if name in self.repository.stalled:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.repository.resumed.wait()
            self.close_connection = True
            return
        self.wfile.write(body if end is None else body[:end])
        if end is not None:
            self.close_connection = True
