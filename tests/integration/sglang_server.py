# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A real SGLang server on CPUs for tests: the demo's model, the demo's import stand-ins, our plugin by its entry point."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv" / "sglang" / "bin" / "python"
MODEL = ROOT / "build" / "demo" / "model"
READY = "The server is fired up and ready to roll!"
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--max-total-tokens", "20000", "--mem-fraction-static", "0.3", "--sleep-on-idle"),
)
RIGHT = ("--disable-radix-cache", "--chunked-prefill-size", "-1")


def make_model() -> Path:
    """The demo's model; at once where it is whole."""
    subprocess.run([str(PYTHON), str(ROOT / "demo" / "model.py"), str(MODEL)], check=True, capture_output=True, timeout=280)
    return MODEL


def entry_point(folder: Path) -> Path:
    """A folder that, on PYTHONPATH, makes this checkout's plugin an installed one: what the wheel's own metadata says."""
    info = folder / "relight-0.1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: relight\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nrelight = relight.dump.plugin:activate\n")
    return folder


def environment(plugins: Path, **more: str) -> dict[str, str]:
    """The environment of a server: nothing of the test's own that could turn a dump on or a plugin off."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RELIGHT_", "SGLANG_", "PYTHON"))}
    paths = (ROOT / "demo" / "import_stubs", plugins, ROOT, ROOT / "collections")
    return {
        **kept,
        "PYTHONPATH": ":".join(str(p) for p in paths),
        "PYTHONUNBUFFERED": "1",
        "RELIGHT_IMPORT_STAND_INS": "torchvision,sgl_kernel",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Poll until `condition` is true and return what it gave. Raises AssertionError at the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"after {seconds:g} s: {what}"
        time.sleep(0.05)


class Server:
    """One running server and its log."""

    def __init__(self, log: Path, env: dict[str, str], *flags: str) -> None:
        self.port = free_port()
        self.log = log
        command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(MODEL), "--port", str(self.port), *FLAGS, *flags]
        with log.open("wb") as handle:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=handle, stderr=handle, env=env, cwd=ROOT, start_new_session=True
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self, seconds: float = 240) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.text()[-3000:]}"
            return READY in self.text()

        wait_for(ready, seconds, f"not ready:\n{self.text()[-2000:]}")

    def post(self, body: dict[str, Any], seconds: float = 60) -> tuple[int, str]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/generate", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def get(self, path: str, seconds: float = 30) -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=seconds) as answer:
            answer.read()
            return int(answer.status)

    def stop(self) -> None:
        """Kill the whole session that was started and wait for its head."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
