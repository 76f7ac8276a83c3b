"""A W&B server small enough for tests, on this machine.

Like the real one it keeps a run's rows by line number: a row sent for an existing line replaces it.
"""

import base64
import gzip
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Run:
    """What the server has received of a run."""

    name: str = ""
    group: str | None = None
    project: str = ""
    config: dict = field(default_factory=dict)
    rows: dict[int, dict] = field(default_factory=dict)
    summary: dict = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def history(self) -> list[dict]:
        return [self.rows[line] for line in sorted(self.rows)]


@dataclass
class Artifact:
    """A version of an artifact."""

    name: str
    type: str
    aliases: list[str]
    files: list[str] = field(default_factory=list)


class Server(ThreadingHTTPServer):
    """Holds runs by id and artifacts in the order of their arrival; waits `delay` seconds before each answer."""

    def __init__(self, port: int, key: str | None, delay: float):
        super().__init__(("127.0.0.1", port), Handler)
        self.key, self.delay = key, delay
        self.runs: dict[str, Run] = {}
        self.artifacts: list[Artifact] = []
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):
        """Clients that hang up are ignored."""


@contextmanager
def wandb_server(port: int = 0, key: str | None = None, delay: float = 0.0) -> Iterator[Server]:
    """Runs a server until the block ends or a test shuts it down; `key`: the only one that it accepts."""
    server = Server(port, key, delay)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_):
        pass

    def answer(self, content: dict, status: int = 200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def do_GET(self):
        self.answer({})

    def do_PUT(self):
        """Receives an uploaded file: /files/RUN/NAME, or one of an artifact."""
        body = self.body()
        if found := re.fullmatch(r"/files/(\w+)/(.+)", self.path):
            self.server.runs[found[1]].files[found[2]] = body
        self.answer({})

    def do_POST(self):
        body = self.body()
        time.sleep(self.server.delay)
        if not self.path.endswith(("/graphql", "/file_stream")):  # W&B's own telemetry
            return self.answer({})
        if self.server.key is not None:
            expected = base64.b64encode(f"api:{self.server.key}".encode()).decode()
            if self.headers.get("Authorization") != f"Basic {expected}":
                return self.answer({"errors": [{"message": "permission denied"}]}, status=401)
        if found := re.fullmatch(r"/files/[^/]+/[^/]+/(\w+)/file_stream", self.path):
            self.stream(self.server.runs.setdefault(found[1], Run()), json.loads(body))
            return self.answer({})
        request = json.loads(body)
        name = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])[1]
        self.server.asked.append(name)
        reply = getattr(self, name, None)
        return self.answer({"data": reply(request.get("variables") or {}) if reply else {}})

    def stream(self, run: Run, content: dict):
        for name, chunk in content.get("files", {}).items():
            lines = [json.loads(line) for line in chunk["content"]] if name.endswith((".jsonl", ".json")) else []
            if name == "wandb-history.jsonl":
                run.rows.update(enumerate(lines, chunk["offset"]))
            if name == "wandb-summary.json":
                run.summary = lines[-1]
        if content.get("complete"):
            run.exit_code = content.get("exitcode")

    def Viewer(self, _) -> dict:  # noqa: N802 - named as the GraphQL operations are
        return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}

    def ServerFeaturesQuery(self, _) -> dict:  # noqa: N802
        return {"serverInfo": {"features": []}}

    def RunResumeStatus(self, asked: dict) -> dict:  # noqa: N802
        run = self.server.runs.get(asked["name"])
        bucket = run and {
            "id": asked["name"],
            "name": asked["name"],
            "displayName": run.name,
            "summaryMetrics": json.dumps(run.summary),
            "logLineCount": 0,
            "historyLineCount": len(run.rows),
            "eventsLineCount": 0,
            "historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]),
            "eventsTail": "[]",
            "config": json.dumps({name: {"value": value} for name, value in run.config.items()}),
            "tags": [],
            "notes": "",
            "wandbConfig": json.dumps({"t": 1}),
        }
        return {"model": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}, "bucket": bucket}}

    def UpsertBucket(self, asked: dict) -> dict:  # noqa: N802
        name = asked.get("name") or asked["id"]
        inserted = name not in self.server.runs
        run = self.server.runs.setdefault(name, Run())
        run.name, run.group = asked.get("displayName") or run.name, asked.get("groupName") or run.group
        run.project = asked.get("project") or run.project
        config = json.loads(asked.get("config") or "{}")
        run.config.update({name: item["value"] for name, item in config.items() if name != "_wandb"})
        project = {"id": "p", "name": run.project, "entity": {"id": "e", "name": "me"}}
        about = {"id": name, "name": name, "displayName": run.name, "description": "", "config": "{}"}
        about |= {"sweepName": None, "historyLineCount": len(run.rows), "project": project}
        return {"upsertBucket": {"inserted": inserted, "bucket": about}}

    def CreateRunFiles(self, asked: dict) -> dict:  # noqa: N802
        at = f"{self.server.url}/files/{asked['run']}"
        files = [{"name": name, "uploadUrl": f"{at}/{name}"} for name in asked["files"]]
        return {"createRunFiles": {"runID": asked["run"], "uploadHeaders": [], "files": files}}

    def ArtifactType(self, _) -> dict:  # noqa: N802
        return {"project": None}

    def CreateArtifact(self, asked: dict) -> dict:  # noqa: N802
        asked = asked["input"]
        aliases = [item["alias"] for item in asked.get("aliases") or []]
        self.server.artifacts.append(Artifact(asked["artifactCollectionName"], asked["artifactTypeName"], aliases))
        id = str(len(self.server.artifacts) - 1)
        sequence = {"id": "s", "latestArtifact": None}
        return {"createArtifact": {"artifact": {"id": id, "state": "PENDING", "artifactSequence": sequence}}}

    def CreateArtifactManifest(self, asked: dict) -> dict:  # noqa: N802
        return {"createArtifactManifest": {"artifactManifest": self.manifest(asked["artifactID"])}}

    def UpdateArtifactManifest(self, asked: dict) -> dict:  # noqa: N802
        return {"updateArtifactManifest": {"artifactManifest": self.manifest(asked["artifactManifestID"])}}

    def manifest(self, id: str) -> dict:
        file = {"id": id, "uploadUrl": f"{self.server.url}/manifest/{id}", "uploadHeaders": []}
        return {"id": id, "file": file}

    def CreateArtifactFiles(self, asked: dict) -> dict:  # noqa: N802
        files = asked["input"]["artifactFiles"]
        nodes = []
        for file in files:
            id, name = file["artifactID"], file["name"]
            self.server.artifacts[int(id)].files.append(name)
            url = f"{self.server.url}/artifact/{id}/{name}"
            node = {"storagePath": name, "uploadUrl": url, "uploadHeaders": [], "uploadMultipartUrls": None}
            nodes.append({"node": node | {"name": name, "displayName": name, "artifact": {"id": id}}})
        return {"createArtifactFiles": {"files": {"edges": nodes}}}

    def CommitArtifact(self, asked: dict) -> dict:  # noqa: N802
        return {"commitArtifact": {"artifact": {"id": asked["artifactID"], "digest": "d"}}}
