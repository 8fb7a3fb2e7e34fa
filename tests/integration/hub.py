"""A stand-in for the Hugging Face hub on this machine: repositories of small files, as its library asks for them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c" * 40


class Hub:
    """A stand-in for the Hugging Face hub."""

    def __init__(self) -> None:
        self.address = ""
        self.repositories: dict[str, dict[str, bytes]] = {}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None: ...

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/revision/\w+)?", path):
            if files := self.hub.repositories.get(found[1]):
                told = {"id": found[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                return self._json(told | {"private": False, "tags": [], "downloads": 0, "likes": 0})
        elif found := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/\w+(?:/.*)?", path):
            files = self.hub.repositories.get(found[1], {})
            told = [{"type": "file", "path": n, "size": len(d), "oid": _oid(d)} for n, d in files.items()]
            return self._json(told)
        elif found := re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/\w+/(.+)", path):
            data = self.hub.repositories.get(found[1], {}).get(found[2])
            if data is not None:
                tag = f'"{_oid(data)}"'
                return self._answer(200, data, ETag=tag, X_Repo_Commit=COMMIT)
            return self._answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        return self._answer(404, X_Error_Code="RepoNotFound")


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def hub_here() -> Iterator[Hub]:
    """Serve a hub on the loopback interface."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
