# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A workplace for tests of the extraction client: records, a fake server as its own process, the client as a real child."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ansible_collections.relight.recovery.plugins.module_utils import ckpt
from ansible_collections.relight.recovery.plugins.module_utils.layouts import SpecForge
from ansible_collections.relight.recovery.plugins.module_utils.store import Store

from tests.fake_server import HIDDEN, LAYERS, sample
from tests.harness import ROOT

ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'collections'}:{ROOT}", "PYTHONUNBUFFERED": "1"}


def wait_until(condition: Callable[[], Any], seconds: float = 30.0, what: str = "the condition") -> Any:
    """Look again and again until the condition holds; its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come true within {seconds} s")


def records(count: int, seed: int = 1, least: int = 5, most: int = 60) -> list[dict[str, Any]]:
    """Records with token ids and masks, the same for the same seed."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        length = rng.randrange(least, most)
        ids = [rng.randrange(1000) for _ in range(length)]
        made.append({"id": f"record-{number}", "input_ids": ids, "loss_mask": [0, 0] + [1] * (length - 2)})
    return made


class Work:
    """One extraction's folder. `store` may lie elsewhere, on a file system of its own."""

    def __init__(self, path: Path, data: list[dict[str, Any]], **config: Any) -> None:
        self.path = path
        self.data = data
        self.dump, self.state, self.store = path / "dump", path / "state", path / "store"
        self.dump.mkdir()
        self.state.mkdir()
        (path / "data.json").write_text(json.dumps(data))
        self.server: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.config: dict[str, Any] = {
            "dataset": str(path / "data.json"),
            "store": str(self.store),
            "layout": "specforge",
            "server": "http://127.0.0.1:9",
            "dump_dir": str(self.dump),
            "layers": list(LAYERS),
            "hidden_size": HIDDEN,
            "state_dir": str(self.state),
            "identity": {"dtype": "float32", "weights": "w1"},
            "retry_seconds": 0.02,
            "reserve_bytes": 0,
            **config,
        }

    # the server

    def start_server(self, delay: float = 0.0, port: int | None = None) -> None:
        port_file = self.path / "port"
        port_file.unlink(missing_ok=True)
        argv = [sys.executable, "-m", "tests.fake_server", "--dump-dir", str(self.dump), "--port-file", str(port_file)]
        argv += ["--delay", str(delay), "--port", str(self.port if port is None else port)]
        self.server = subprocess.Popen(argv, env=ENV, cwd=ROOT)
        wait_until(port_file.exists, what="the fake server")
        self.port = int(port_file.read_text())
        self.config["server"] = f"http://127.0.0.1:{self.port}"

    def kill_server(self) -> None:
        if self.server is not None:
            self.server.kill()
            self.server.wait()
            self.server = None

    def control(self, **told: Any) -> dict[str, Any]:
        """Tell the server its faults; what it has seen so far."""
        request = urllib.request.Request(
            f"{self.config['server']}/control", json.dumps(told).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            value: dict[str, Any] = json.load(response)
            return value

    def seen(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.config['server']}/seen", timeout=10) as response:
            value: dict[str, Any] = json.load(response)
            return value

    # the client

    def write_config(self, **changes: Any) -> Path:
        path = self.path / "extract.json"
        path.write_text(json.dumps({**self.config, **changes}))
        return path

    def start(
        self, command: str = "extract", prefix: tuple[str, ...] = (), options: tuple[str, ...] = (), **changes: Any
    ) -> subprocess.Popen[str]:
        argv = [*prefix, sys.executable, "-m", "relight", command, "--config", str(self.write_config(**changes)), *options]
        return subprocess.Popen(argv, env=ENV, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, seconds: float = 60.0, **changes: Any) -> tuple[int, str]:
        """Run the client to its end; its exit code and what it said."""
        client = self.start(**changes)
        try:
            _out, err = client.communicate(timeout=seconds)
        finally:
            kill(client)
        return client.returncode, err

    def continuity(self, *options: str, **changes: Any) -> dict[str, Any]:
        """Run the continuity check; its gate."""
        argv = [sys.executable, "-m", "relight", "continuity", "--config", str(self.write_config(**changes)), *options]
        done = subprocess.run(argv, env=ENV, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout, done.stderr
        gate: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert (done.returncode == 0) == (gate["verdict"] == "pass")
        return gate

    # what came of it

    def progress(self) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads((self.state / "progress.json").read_text())
            return value
        except FileNotFoundError:
            return {}

    def place(self) -> Store:
        return Store(self.config["store"], SpecForge())

    def indices(self) -> set[int]:
        """The samples whose files are in place."""
        place = self.place()
        return {index for index in range(len(self.data)) if os.path.exists(place.path_of(index))}

    def wrong(self, seed: int = 0) -> list[int]:
        """The samples in place that are not exactly what they must be, by their own bytes, and the manifest's lines against the files."""
        place = self.place()
        return [index for index in sorted(self.indices()) if not self._right(place.path_of(index), self.data[index], seed)]

    def _right(self, path: str, record: dict[str, Any], seed: int) -> bool:
        header = ckpt.read_header(path)
        found = {name: np.frombuffer(ckpt.read_tensor(path, tensor), DTYPES[tensor.dtype]) for name, tensor in header.tensors.items()}
        final, aux = sample(record["input_ids"], seed=seed)
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        length = len(record["input_ids"])
        return (
            shapes["hidden_state"] == (1, length, HIDDEN)
            and shapes["aux_hidden_state"] == (1, length, 3 * HIDDEN)
            and found["input_ids"].tolist() == record["input_ids"]
            and found["loss_mask"].tolist() == record["loss_mask"]
            and found["hidden_state"].tobytes() == final.tobytes()
            and found["aux_hidden_state"].tobytes() == aux.tobytes()
            and not ckpt.broken_entries(path, header)
        )

    def left_in_dump(self) -> list[str]:
        return sorted(path.name for path in self.dump.iterdir() if path.name != "server.json")

    def close(self) -> None:
        self.kill_server()


DTYPES = {"int64": "<i8", "float32": "<f4"}


def kill(process: subprocess.Popen[Any]) -> None:
    """End one of our own children for sure."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
