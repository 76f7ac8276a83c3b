"""A local stand-in for the Hugging Face Hub, sufficient for load_dataset, streamed or not, from a folder of files."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import parse_qs, unquote, urlparse

import pytest

COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """Answers the GET and POST requests of huggingface_hub; `server.root` holds owner/name/files."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        path = unquote(urlparse(self.path).path).strip("/").split("/")
        if path[:2] == ["api", "datasets"]:
            self.describe("/".join(path[2:4]), path[4:])
        elif path[0] == "datasets" and path[3:4] == ["resolve"]:
            self.send_file("/".join(path[1:3]), "/".join(path[5:]))
        else:
            self.refuse("EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self):
        """Answers paths-info: which of the given paths exist."""
        path = unquote(urlparse(self.path).path).strip("/").split("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        wanted = json.loads(body)["paths"] if body.startswith("{") else parse_qs(body).get("paths", [])
        repository = "/".join(path[2:4])
        files = self.files(repository) or []
        folders = {str(parent) for file in files for parent in Path(file).parents} - {"."}
        there = [self.entry(repository, file) for file in files if file in wanted]
        there += [{"type": "directory", "path": w, "oid": "0" * 40} for w in wanted if w in folders]
        self.answer(json.dumps(there).encode())

    def describe(self, repository: str, what: list[str]):
        files = self.files(repository)
        if files is None:
            self.refuse("RepoNotFound")
        elif not what or what[0] == "revision":
            about = {"id": repository, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": []}
            about |= {"downloads": 0, "likes": 0, "lastModified": "2024-01-01T00:00:00.000Z"}
            self.answer(json.dumps(about | {"siblings": [{"rfilename": file} for file in files]}).encode())
        elif what[0] == "tree":
            folder = "".join(part + "/" for part in what[2:])
            inside = [file for file in files if file.startswith(folder)]
            flat = [file for file in inside if "/" not in file.removeprefix(folder)]
            deep = "recursive=true" in self.path.lower()
            listing = [self.entry(repository, file) for file in (inside if deep else flat)]
            if not deep:
                names = {folder + file.removeprefix(folder).split("/")[0] for file in set(inside) - set(flat)}
                listing += [{"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(names)]
            self.answer(json.dumps(listing).encode()) if inside else self.refuse("EntryNotFound")
        else:
            self.refuse("EntryNotFound")

    def files(self, repository: str) -> list[str] | None:
        folder = self.server.root / repository
        if not folder.is_dir():
            return None
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())

    def entry(self, repository: str, file: str) -> dict:
        content = (self.server.root / repository / file).read_bytes()
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return {"type": "file", "path": file, "size": len(content), "oid": oid}

    def send_file(self, repository: str, file: str):
        path = self.server.root / repository / file
        if not path.is_file():
            return self.refuse("EntryNotFound")
        content, status = path.read_bytes(), 200
        headers = {
            "ETag": f'"{self.entry(repository, file)["oid"]}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            first, last = int(first), min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        if self.command == "GET" and file in self.server.breaks and len(content) > 1000:
            self.answer(content[: len(content) // 2], status, headers, length=len(content))
            self.server.breaks[file] -= 1
            if self.server.breaks[file] == 0:
                del self.server.breaks[file]
            self.close_connection = True
            return None
        return self.answer(content, status, headers)

    def refuse(self, code: str):
        self.answer(b'{"error": "not found"}', 404, {"X-Error-Code": code})

    def answer(self, body: bytes, status: int = 200, headers: dict | None = None, length: int | None = None):
        self.server.asked += 1
        self.send_response(status)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(length or len(body))} | (
            headers or {}
        )
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path):
    """The server; put files into hub.root / "owner" / "name". `hub.breaks[file] = n`: only half is sent, n times."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.root, server.breaks, server.asked = tmp_path / "hub", {}, 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
