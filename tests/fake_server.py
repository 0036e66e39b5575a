# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server that behaves like SGLang with the dump plugin at the protocol's border, and misbehaves on request.

States follow from the ids and the layer alone, so a test knows what every sample must hold. It runs as its own process:
`python -m tests.fake_server --dump-dir D --port-file F`, and is told its faults by POST /control.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from aiohttp import web
from ansible_collections.relight.recovery.plugins.module_utils.journal import boot_id
from ansible_collections.relight.recovery.plugins.module_utils.records import token_digest

LAYERS = (1, 3, 5)
HIDDEN = 16


def states(ids: Sequence[int], layer: int, seed: int = 0, noise: float = 0.0) -> np.ndarray[Any, Any]:
    """What this model computes for one layer (-1: final): a smooth mix of every token with those before it."""
    positions = np.arange(1, len(ids) + 1, dtype=np.float64)[:, None]
    columns = np.arange(1, HIDDEN + 1, dtype=np.float64)[None, :]
    prefix = np.cumsum(np.asarray(ids, dtype=np.float64))[:, None]
    tokens = np.sin(0.37 * np.asarray(ids)[:, None] * columns + (layer + 2) * 1.7 + seed * 0.9)
    out = tokens + np.cos(prefix * 0.013 + positions * columns * 0.11)
    if noise:
        out = out * (1 + noise * np.random.default_rng(len(ids)).standard_normal(out.shape))
    return out.astype("<f4")


def sample(
    ids: Sequence[int], layers: Sequence[int] = LAYERS, seed: int = 0, noise: float = 0.0
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The final [1, L, H] and auxiliary [1, L, 3H] states."""
    aux = np.concatenate([states(ids, layer, seed, noise) for layer in layers], axis=1)
    return states(ids, -1, seed, noise)[None], aux[None]


def safetensors(tensors: dict[str, np.ndarray[Any, Any]], meta: dict[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": meta}
    body = b""
    for name, value in tensors.items():
        data = value.tobytes()
        kind = {"int64": "I64", "float32": "F32"}[str(value.dtype)]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


class Fake:
    """The server's state. `faults` maps a record's index, or "*", to {"kind": ..., "times": n}; times absent means always."""

    def __init__(self, dump_dir: str, delay: float) -> None:
        self.dump_dir = dump_dir
        self.delay = delay
        self.instance = uuid.uuid4().hex
        self.layers: Sequence[int] = LAYERS
        self.computed: Sequence[int] | None = None  # the layers that it dumps, where they are not those that it tells
        self.final_scale = 1.0
        self.norm = "post"  # which final state it dumps; one that is not the usual is told
        self.seed = 0
        self.noise = 0.0
        self.faults: dict[str, dict[str, Any]] = {}
        self.requests: list[dict[str, Any]] = []
        self.at_once = 0
        self.most_at_once = 0
        self.most_bytes = 0
        self.announce()

    def announce(self) -> None:
        about = {
            "schema": 1, "instance": self.instance, "pid": os.getpid(), "start_time": 0, "sglang": "0.5.23", "plugin": "0", "torch": "0",
            "layers": list(self.layers), "hidden_size": HIDDEN, "dtype": "float32", "model_path": "", "tp": 1, "boot_id": boot_id(),
        }  # fmt: skip
        if self.norm != "post":
            about["norm"] = self.norm
        self.place("server.json", json.dumps(about).encode())

    def place(self, name: str, data: bytes) -> None:
        temporary = os.path.join(self.dump_dir, f".{name}.{os.getpid()}.tmp")
        with open(temporary, "wb") as handle:
            handle.write(data)
        os.rename(temporary, os.path.join(self.dump_dir, name))
        held = 0
        for entry in os.scandir(self.dump_dir):
            with suppress(FileNotFoundError):  # the client takes them away meanwhile
                held += entry.stat().st_size if entry.name.startswith("relight-") else 0
        self.most_bytes = max(self.most_bytes, held)

    def fault(self, rid: str) -> str:
        index = rid.split("-")[2]
        for key in (index, "*"):
            fault = self.faults.get(key)
            if fault and fault.get("times", 1) > 0:
                if "times" in fault:
                    fault["times"] -= 1
                return str(fault["kind"])
        return ""

    def dump(self, rid: str, ids: list[int], kind: str) -> None:
        if kind == "error":
            self.place(f"{rid}.error", json.dumps({"error": "the forward refused this request"}).encode())
            return
        told = ids
        if kind == "short":
            ids = ids[:-1]
        if kind == "tokens":
            ids = [*ids[:-1], ids[-1] + 1]
        final, aux = sample(ids, self.computed or self.layers, self.seed, self.noise)
        final = final * np.float32(self.final_scale)
        if kind == "nan":
            aux[0, -1, -1] = np.nan
        meta_ids = told if kind == "lie" else ids
        if kind == "lie":
            ids = [*ids[:-1], ids[-1] + 1]
        meta = {
            "format": "relight-dump-1", "rid": rid, "tokens": str(len(meta_ids)), "token_digest": token_digest(meta_ids),
            "layers": json.dumps(list(self.layers)), "norm": self.norm, "dtype": "float32", "instance": self.instance, "sglang": "0.5.23",
            "plugin": "0", "torch": "0", "tp": "1",
        }  # fmt: skip
        data = safetensors({"input_ids": np.asarray(ids, dtype="<i8"), "hidden_state": final, "aux_hidden_state": aux}, meta)
        self.place(rid, data[:-8] if kind == "torn" else data)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        rid, ids = body["rid"], body["input_ids"]
        kind = self.fault(rid)
        self.requests.append({"rid": rid, "tokens": len(ids), "fault": kind})
        if kind == "503":
            return web.json_response({"error": "loading"}, status=503)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.delay)
            if kind == "never":
                await asyncio.Event().wait()
            if kind in ("500", "400"):
                return web.json_response({"error": {"message": f"planned {kind}"}}, status=int(kind))
            if kind == "drop":
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            if kind != "no-dump":
                self.dump(rid, ids, kind)
        finally:
            self.at_once -= 1
        return web.json_response({"text": "", "meta_info": {"id": rid, "prompt_tokens": len(ids)}})

    async def control(self, request: web.Request) -> web.Response:
        """Set faults, delay and what is computed; `restart` makes it another instance."""
        told = await request.json()
        for name in ("faults", "delay", "seed", "layers", "noise", "computed", "final_scale", "norm"):
            if name in told:
                setattr(self, name, told[name])
        if told.get("restart"):
            self.instance = uuid.uuid4().hex
        self.announce()
        return web.json_response(self.report())

    async def seen(self, _request: web.Request) -> web.Response:
        return web.json_response(self.report())

    def report(self) -> dict[str, Any]:
        return {
            "instance": self.instance, "requests": self.requests, "tokens": sum(request["tokens"] for request in self.requests),
            "most_at_once": self.most_at_once, "most_bytes": self.most_bytes,
        }  # fmt: skip


async def serve(fake: Fake, port_file: str, port: int) -> None:
    app = web.Application(client_max_size=1 << 28)
    app.add_routes([web.post("/generate", fake.generate), web.post("/control", fake.control), web.get("/seen", fake.seen)])
    app.add_routes([web.post("/abort_request", fake.seen)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    assert site._server is not None
    bound = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    with open(f"{port_file}.tmp", "w", encoding="utf-8") as handle:
        handle.write(str(bound))
    os.rename(f"{port_file}.tmp", port_file)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dump-dir", required=True)
    parser.add_argument("--port-file", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    options = parser.parse_args()
    asyncio.run(serve(Fake(options.dump_dir, options.delay), options.port_file, options.port))


if __name__ == "__main__":
    main()
