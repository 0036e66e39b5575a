# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server that answers as SGLang does, well or badly: what `sglang_ready` is tried on, as a process of its own.

Its behaviour is read from a JSON file for each request, so that a test changes it while the server runs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy
from ansible_collections.relight.recovery.plugins.module_utils.journal import boot_id
from ansible_collections.relight.recovery.plugins.module_utils.records import token_digest
from safetensors.numpy import save

HIDDEN = 8


def place(folder: Path, name: str, data: bytes) -> None:
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    temporary.write_bytes(data)
    temporary.rename(folder / name)


def dump(rid: str, ids: list[int], layers: list[int], instance: str) -> bytes:
    rng = numpy.random.default_rng(len(ids))
    tensors = {
        "input_ids": numpy.array(ids, numpy.int64),
        "hidden_state": rng.normal(size=(1, len(ids), HIDDEN)).astype(numpy.float32),
        "aux_hidden_state": rng.normal(size=(1, len(ids), 3 * HIDDEN)).astype(numpy.float32),
    }
    about = {"format": "relight-dump-1", "rid": rid, "tokens": str(len(ids)), "token_digest": token_digest(ids)}
    return save(tensors, {**about, "layers": json.dumps(layers), "norm": "post", "instance": instance})


class Handler(BaseHTTPRequestHandler):
    folder: Path
    release = threading.Event()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def note(self, what: Any) -> dict[str, Any]:
        """Record the request; return how to behave."""
        with (self.folder / "requests.jsonl").open("a") as handle:
            handle.write(json.dumps(what) + "\n")
        return json.loads((self.folder / "behaviour.json").read_text())

    def reply(self, status: int, value: Any = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(self.note([self.path]).get("health", 200))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        how = self.note([self.path, body])
        if self.path != "/generate":
            self.reply(200)
            return
        batches = how.get("batches")
        if batches:
            with open(batches, "a") as handle:
                handle.write("Prefill batch, #new-seq: 1\n")
        if how.get("wedged"):
            self.release.wait()
        self.dump(body["rid"], body["input_ids"], how)
        self.reply(how.get("generate", 200), {"output_ids": [1], "meta_info": {"prompt_tokens": len(body["input_ids"])}})

    def dump(self, rid: str, ids: list[int], how: dict[str, Any]) -> None:
        kind = how.get("dump", "good")
        if not rid.startswith("relight-") or kind == "none":
            return
        folder = self.folder / "dumps"
        if kind == "error":
            place(folder, f"{rid}.error", b'{"error": "no room in the dump directory"}')
            return
        data = dump(rid, ids[:-1] if kind == "short" else ids, how.get("layers", [1, 2, 3]), "feed" * 8)
        place(folder, rid, data[:-3] if kind == "torn" else data)


def main(folder: Path) -> None:
    """Announce, wait for leave to open the port, serve."""
    about = {"schema": 1, "instance": "feed" * 8, "pid": os.getpid(), "hidden_size": HIDDEN, "boot_id": boot_id()}
    if json.loads((folder / "behaviour.json").read_text()).get("announce", True):
        place(folder / "dumps", "server.json", json.dumps(about).encode())
    if "--late" in sys.argv:
        print("waiting", flush=True)
        sys.stdin.readline()
    Handler.folder = folder
    port = int(sys.argv[sys.argv.index("--port") + 1])
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    print("listening", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
