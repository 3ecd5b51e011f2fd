"""A stand-in for the Hugging Face hub: its HTTP interface as huggingface_hub uses it, on 127.0.0.1.

    with HubServer() as hub:
        hub.add("me/tiny", {"config.json": b"{}"})          # a commit of its main branch
        os.environ["HF_ENDPOINT"] = hub.url

Files travel in plain requests. The hub itself takes large ones through Xet, whose client is compiled and
whose protocol is not played here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_standin"
"""The login that may see private and gated models, and write."""


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def files(self, revision: str) -> dict[str, bytes] | None:
        return self.commits.get(self.refs.get(revision, revision))


class HubServer:
    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        """"GET /api/models/me/tiny/revision/main", ... in the order of arrival."""
        self.cut: dict[str, int] = {}
        """File name -> bytes after which the connection breaks, once."""
        self.broken = 0
        """A status that every request is answered with, such as 503."""
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HubServer:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, name: str, files: dict[str, bytes], ref: str = "main", **how: bool) -> str:
        """A new commit, which `ref` names from now on."""
        repository = self.repositories.setdefault(name, Repository(**how))
        identity = repr((name, sorted(files.items()), len(repository.commits))).encode()
        commit = hashlib.sha1(identity).hexdigest()
        repository.commits[commit], repository.refs[ref] = dict(files), commit
        return commit

    def fetched(self) -> list[str]:
        """Names of files that were downloaded."""
        return sorted(
            {r.split("/")[-1] for r in self.requests if r.startswith("GET") and "/resolve/" in r}
        )


class _Handler(BaseHTTPRequestHandler):
    server_hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Tests read `requests`."""

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub = self.server_hub
        length = int(self.headers.get("Content-Length") or 0)
        body = (
            self._chunked()
            if self.headers.get("Transfer-Encoding") == "chunked"
            else self.rfile.read(length)
        )
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        if hub.broken:
            return self._json({"error": "out of order"}, hub.broken)
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        for pattern, method in (
            (r"/api/models/([^/]+/[^/]+)/revision/(.+)", self._info),
            (r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?.*", self._tree),
            (r"/api/models/([^/]+/[^/]+)/preupload/(.+)", self._preupload),
            (r"/api/models/([^/]+/[^/]+)/commit/(.+)", self._commit),
            (r"/([^/]+/[^/]+)/resolve/([^/]+/.+)", self._file),
            (r"/api/models/([^/]+/[^/]+)()", self._info),
        ):
            if found := re.fullmatch(pattern, path):
                if (repository := self._open(found[1])) is not None:
                    method(found[1], repository, found[2], body)
                return None
        return self._json({"error": f"the stand-in has no {self.command} {path}"}, 501)

    def _chunked(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _open(self, name: str) -> Repository | None:
        """Refused as the hub refuses: 401 without a login, whether it exists or not."""
        repository = self.server_hub.repositories.get(name)
        has_login = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repository is not None and repository.gated:  # terms that are not accepted
            code = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}
            self._json({"error": "gated"}, 403 if has_login else 401, code)
        elif repository is not None and (has_login or not repository.private):
            return repository
        elif has_login:
            self._json({"error": "none"}, 404, {"X-Error-Code": "RepoNotFound"})
        else:
            self._json({"error": "Invalid username or password."}, 401)
        return None

    def _info(self, name: str, repository: Repository, revision: str, body: bytes) -> None:
        files = repository.files(revision or "main")
        if files is None and repository.commits:
            return self._json({"error": "none"}, 404, {"X-Error-Code": "RevisionNotFound"})
        commit = repository.refs.get(revision or "main", revision)
        listed = [{"rfilename": file} for file in files or ()]
        info = {"id": name, "sha": commit, "siblings": listed, "private": repository.private}
        return self._json({**info, "tags": [], "downloads": 0, "likes": 0})

    def _tree(self, name: str, repository: Repository, revision: str, body: bytes) -> None:
        files = repository.files(revision) or {}
        self._json(
            [
                {"type": "file", "path": file, "size": len(content), "oid": _oid(content)}
                for file, content in files.items()
            ]
        )

    def _file(self, name: str, repository: Repository, rest: str, body: bytes) -> None:
        revision, _, file = rest.partition("/")
        content = (repository.files(revision) or {}).get(file)
        if content is None:
            return self._json({"error": "none"}, 404, {"X-Error-Code": "EntryNotFound"})
        start = 0
        if wanted := re.match(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(wanted[1])
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{_oid(content)}"')
        self.send_header("X-Repo-Commit", repository.refs.get(revision, revision))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            most = self.server_hub.cut.pop(file, None)
            self.wfile.write(content[start:][:most])
            if most is not None:
                self.close_connection = True
        return None

    def _create(self, request: dict[str, Any]) -> None:
        hub = self.server_hub
        name = f"{request.get('organization') or 'me'}/{request['name']}"
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "Invalid username or password."}, 401)
        if name.startswith("others/"):
            return self._json({"error": "You don't have the rights"}, 403)
        is_new = name not in hub.repositories
        if is_new:
            is_private = request.get("private") or request.get("visibility") == "private"
            hub.repositories[name] = Repository({}, {}, private=bool(is_private))
        return self._json({"url": f"{hub.url}/{name}", "id": name}, 200 if is_new else 409)

    def _preupload(self, name: str, repository: Repository, revision: str, body: bytes) -> None:
        files = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
            for file in json.loads(body)["files"]
        ]
        self._json({"files": files})

    def _commit(self, name: str, repository: Repository, revision: str, body: bytes) -> None:
        files = dict(repository.files(revision) or {})
        for line in body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        commit = self.server_hub.add(name, files, revision)
        self._json(
            {
                "success": True,
                "commitOid": commit,
                "commitUrl": f"{self.server_hub.url}/{name}/commit/{commit}",
            }
        )

    def _json(
        self,
        content: Any,
        status: int = 200,
        headers: dict[str, str] | None = None,
        kind: str = "application/json",
    ) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
