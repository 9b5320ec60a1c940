"""A Hub on loopback: the routes that huggingface_hub uses for models, over folders of this machine.

    GET       /api/models/{repo}[/revision/{revision}]            commit and list of files
    GET       /api/models/{repo}/tree/{revision}                  list of files, in pages
    HEAD GET  /{repo}/resolve/{revision}/{file}                   a small file; a redirect for a large one
    GET       http://localhost/cdn/{sha256}                       a large file, on another host, in ranges

Every request is kept in `requests`, every byte of a body is counted there. `faults` make it fail, and
`on_request` is called before each answer, while the client waits: tests look at the world at these
moments, without sleeping, and change what will be answered.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

#: Files of a page of the list of files.
PAGE = 7


@dataclass
class Request:
    """One request and what was sent in answer: the status, and bytes of the body."""

    method: str
    path: str
    range: str | None
    authorization: str | None
    host: str
    status: int = 0
    sent: int = 0


@dataclass
class Fault:
    """Something that goes wrong for the next `times` requests whose path contains `where`.

    status: answer with it, and with `headers`. cut: send that many bytes of the body and hang up; with
    `chunked` in a way that looks like an ordinary end. alter: change the body's first byte.
    whole: ignore the range that was asked for.
    """

    where: str
    method: str = "GET"
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    chunked: bool = False
    alter: bool = False
    whole: bool = False

    def takes(self, request: Request) -> bool:
        fits = self.times > 0 and self.where in request.path and self.method == request.method
        self.times -= fits
        return fits


@dataclass(frozen=True)
class Blob:
    path: Path
    size: int
    oid: str
    sha256: str | None


class HubServer:
    """A context manager: the server runs while it is entered. Large files are those of .safetensors."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, dict[str, Blob]]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.gated: set[str] = set()
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.on_request: Callable[[Request], None] = lambda request: None
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def push(self, repo: str, folder: Path, ref: str = "main") -> str:
        """Make a commit of a folder's files as they are now; the files themselves must not change."""
        files = {
            path.relative_to(folder).as_posix(): _blob(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        commit = hashlib.sha1(repr(sorted((n, b.oid) for n, b in files.items())).encode()).hexdigest()
        self.commits.setdefault(repo, {})[commit] = files
        self.refs.setdefault(repo, {})[ref] = commit
        return commit

    def sent(self, *, where: str = "") -> int:
        """Bytes of bodies sent so far for paths that contain `where`."""
        return sum(request.sent for request in self.requests if where in request.path)

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, Blob]] | None:
        commit = self.refs.get(repo, {}).get(revision, revision)
        files = self.commits.get(repo, {}).get(commit)
        return None if files is None else (commit, files)

    def begin(self, request: Request) -> Fault | None:
        self.on_request(request)
        with self._lock:
            self.requests.append(request)
            return next((fault for fault in self.faults if fault.takes(request)), None)


def _blob(path: Path) -> Blob:
    data = path.read_bytes()
    large = path.suffix == ".safetensors"
    sha256 = hashlib.sha256(data).hexdigest() if large else None
    pointer = f"oid sha256:{sha256}\nsize {len(data)}\n".encode() if large else data
    oid = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
    return Blob(path, len(data), oid, sha256)


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            headers = self.headers
            host = (headers["Host"] or "").partition(":")[0]
            self.request_ = Request(self.command, self.path, headers["Range"], headers["Authorization"], host)
            self.fault = hub.begin(self.request_)
            if self.fault and self.fault.status:
                self._send(self.fault.status, b"", self.fault.headers)
                return
            url = urlsplit(self.path)
            parts = unquote(url.path).strip("/").split("/")
            if parts[0] == "cdn":
                self._cdn(parts[1])
            elif parts[:2] == ["api", "models"]:
                self._api("/".join(parts[2:4]), parts[4:], parse_qs(url.query))
            elif parts[2:3] == ["resolve"]:
                self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
            else:
                self._fail(404, "")

        def _api(self, repo: str, rest: list[str], query: dict[str, list[str]]) -> None:
            kind, revision = rest[:2] or ("revision", "main")
            found = self._find(repo, revision)
            if found is None:
                return
            commit, files = found
            if kind == "revision":
                siblings = [
                    {"rfilename": name, "size": blob.size, "blobId": blob.oid}
                    | ({"lfs": _lfs(blob) | {"sha256": blob.sha256}} if blob.sha256 else {})
                    for name, blob in files.items()
                ]
                if "blobs" not in query:
                    siblings = [{"rfilename": file["rfilename"]} for file in siblings]
                self._json({"id": repo, "modelId": repo, "sha": commit, "siblings": siblings})
                return
            begin = int(query.get("cursor", ["0"])[0])
            page = [
                {"type": "file", "path": name, "size": blob.size, "oid": blob.oid}
                | ({"lfs": _lfs(blob) | {"oid": blob.sha256}} if blob.sha256 else {})
                for name, blob in [*files.items()][begin : begin + PAGE]
            ]
            more = {}
            if begin + PAGE < len(files):
                path = f"{hub.url}/api/models/{repo}/tree/{commit}?recursive=True&cursor={begin + PAGE}"
                more = {"Link": f'<{path}>; rel="next"'}
            self._json(page, more)

        def _resolve(self, repo: str, revision: str, name: str) -> None:
            found = self._find(repo, revision)
            if found is None:
                return
            commit, files = found
            if repo in hub.gated:
                self._fail(403, "GatedRepo")
                return
            blob = files.get(name)
            if blob is None:
                self._fail(404, "EntryNotFound", {"X-Repo-Commit": commit})
            elif blob.sha256 is None:
                headers = {"X-Repo-Commit": commit, "ETag": f'"{blob.oid}"'}
                self._content(blob, headers)
            else:
                # The real Hub redirects to another host too, one that must not see the token.
                headers = {
                    "X-Repo-Commit": commit,
                    "X-Linked-Etag": f'"{blob.sha256}"',
                    "X-Linked-Size": str(blob.size),
                    "Location": f"http://localhost:{hub.port}/cdn/{blob.sha256}?name={name}",
                }
                self._send(302, b"", headers)

        def _cdn(self, sha256: str) -> None:
            blobs = [
                blob for repo in hub.commits.values() for files in repo.values() for blob in files.values()
            ]
            self._content(next(blob for blob in blobs if blob.sha256 == sha256), {"ETag": f'"{sha256}"'})

        def _content(self, blob: Blob, headers: dict[str, str]) -> None:
            data = blob.path.read_bytes()
            asked = self.request_.range
            if asked is None or (self.fault and self.fault.whole):
                self._send(200, data, headers)
                return
            begin, _, last = asked.removeprefix("bytes=").partition("-")
            part = data[int(begin) : int(last) + 1 if last else None]
            if not part:
                self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            span = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(data)}"
            self._send(206, part, headers | {"Content-Range": span})

        def _find(self, repo: str, revision: str) -> tuple[str, dict[str, Blob]] | None:
            found = hub.find(repo, revision)
            if found is None:
                self._fail(404, "RevisionNotFound" if repo in hub.commits else "RepoNotFound")
            return found

        def _fail(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
            self._send(status, b"", {"X-Error-Code": code} | (headers or {}))

        def _json(self, value: object, headers: dict[str, str] | None = None) -> None:
            self._send(
                200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {})
            )

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            fault = self.fault
            if fault and fault.alter and data:
                data = bytes([data[0] ^ 0xFF]) + data[1:]
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            if fault and fault.chunked:
                self.send_header("Connection", "close")  # the end of the connection is the end of the body
            else:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.request_.status = status
            if self.command == "HEAD":
                return
            if fault and fault.cut is not None:
                data = data[: fault.cut]
                self.close_connection = True
            self.wfile.write(data)
            self.request_.sent += len(data)

    return Handler


def _lfs(blob: Blob) -> dict[str, Any]:
    return {"size": blob.size, "pointerSize": 134}
