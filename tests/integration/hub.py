"""A stand-in for the Hugging Face hub on this machine: repositories of small files, as its library asks for them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_of_a_test"
COMMIT = "c" * 40


class Hub:
    """A stand-in for the Hugging Face hub. It keeps uploaded files, and the requests that it got."""

    def __init__(self) -> None:
        self.address = ""
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []
        self.created: list[dict[str, Any]] = []


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

    def do_POST(self) -> None:
        self.hub.asked.append(f"POST {self.path}")
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path.startswith("/api/validate-yaml"):
            return self._json({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, b'{"error": "Invalid token"}')
        if self.path == "/api/repos/create":
            told = json.loads(data)
            self.hub.created.append(told)
            name = f"{told['organization']}/{told['name']}" if told.get("organization") else str(told["name"])
            self.hub.repositories.setdefault(name, {})
            return self._json({"url": f"{self.hub.address}/{name}", "id": name, "name": name})
        if found := re.match(r"/api/models/([^/]+/[^/]+)/preupload/main", self.path):
            files = json.loads(data)["files"]
            told = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None} for one in files]
            return self._json({"files": told})
        if found := re.match(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            for line in data.splitlines():
                if (one := json.loads(line))["key"] == "file":
                    content = base64.b64decode(one["value"]["content"])
                    self.hub.repositories[found[1]][one["value"]["path"]] = content
            url = f"{self.hub.address}/{found[1]}/commit/{COMMIT}"
            return self._json({"success": True, "commitOid": COMMIT, "commitUrl": url})
        return self._answer(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/revision/\w+)?", path):
            if files := self.hub.repositories.get(found[1]):
                told = {"id": found[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                return self._json(told | {"private": False, "tags": [], "downloads": 0, "likes": 0})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/\w+/.+", path):
            return self._answer(404, X_Error_Code="EntryNotFound")  # no folder is in them
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
