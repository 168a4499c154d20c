"""A stand-in for the Hub: repositories in memory behind the part of its HTTP API that is used."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_REPOSITORY = r"(?P<repository>[\w.-]+/[\w.-]+)"
_API = re.compile(rf"/api/models/{_REPOSITORY}/(?P<kind>revision|tree)/(?P<revision>.+)")
_FILE = re.compile(rf"/{_REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<name>.+)")


@dataclass
class Hub:
    """``repositories``: files by repository. ``gated``: those that nobody may read.

    ``fetched``: files whose content was asked for, in order. ``cut``: bytes of an answer after
    which the connection is closed, by file.
    """

    repositories: Mapping[str, Mapping[str, bytes]]
    revisions: tuple[str, ...] = ("main", COMMIT)
    gated: frozenset[str] = frozenset()
    fetched: list[str] = field(default_factory=list)
    cut: dict[str, int] = field(default_factory=dict)
    url: str = ""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        """As for GET, without the body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Facts of a revision, its files, or one of them."""
        path = unquote(urlsplit(self.path).path)
        found = _API.fullmatch(path) or _FILE.fullmatch(path)
        if found is None:
            self._refuse(404, "EntryNotFound")
            return
        repository, revision = found["repository"], found["revision"]
        hub = self.server.hub
        if repository in hub.gated:
            self._refuse(403, "GatedRepo")
        elif repository not in hub.repositories:
            self._refuse(401, "RepoNotFound")
        elif revision not in hub.revisions:
            self._refuse(404, "RevisionNotFound")
        elif found.re is _FILE:
            self._answer_file(hub.repositories[repository], found["name"])
        else:
            self._answer_api(hub.repositories[repository], repository, found["kind"])

    def _answer_api(self, files: Mapping[str, bytes], repository: str, kind: str) -> None:
        if kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            body: object = {"id": repository, "sha": COMMIT, "siblings": siblings}
        else:
            body = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in files.items()
            ]
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _answer_file(self, files: Mapping[str, bytes], name: str) -> None:
        if name not in files:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": COMMIT}
        if self.command == "GET":
            self.server.hub.fetched.append(name)
        self._send(200, files[name], headers, self.server.hub.cut.get(name))

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """``hub`` with its address, until the block ends."""
    server = _Server(hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
