# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What dumping costs: prefill rates of one SGLang server with Relight's dumps, without any, and with its peers, in one run.

All servers are alive at the same time, on one GPU, with random weights of one shape, and get the same prompts, one after another,
in several rounds. Needs a GPU and an interpreter that serves (SGLang, with what it wants in PYTHONPATH); elsewhere it says so and
ends. By environment:

  RELIGHT_BENCH_PYTHON   the interpreter that serves (this one)
  RELIGHT_BENCH_ARGS     more arguments for every server, for example "--attention-backend triton --disable-cuda-graph"
  RELIGHT_BENCH_WORK     where servers' logs, samples and records go: the disk that end_to_end writes to (build/bench/dump)
  RELIGHT_BENCH_ROUNDS   rounds (5)
  RELIGHT_BENCH_SAMPLES  prompts a round (384)
  RELIGHT_BENCH_MODES    which modes (undumped,dumped,end_to_end,sync,json)

The last line is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "collections")]

from ansible_collections.relight.recovery.plugins.module_utils import nvml  # noqa: E402

PYTHON = os.environ.get("RELIGHT_BENCH_PYTHON") or sys.executable
WORK = Path(os.environ.get("RELIGHT_BENCH_WORK") or ROOT / "build" / "bench" / "dump")
ROUNDS = int(os.environ.get("RELIGHT_BENCH_ROUNDS") or 5)
SAMPLES = int(os.environ.get("RELIGHT_BENCH_SAMPLES") or 384)
MODES = (os.environ.get("RELIGHT_BENCH_MODES") or "undumped,dumped,end_to_end,sync,json").split(",")
SHM = Path("/dev/shm/relight-bench")
CONCURRENCY = 32
LAYERS = (1, 17, 32)
READY = "The server is fired up and ready to roll!"
READY_SECONDS = 300
MIB = 1 << 20
# How many of the round's prompts a slow peer gets: the first 1/n of them.
SHARE = {"sync": 2, "json": 32}
# An 8B shape. The weights are random: --load-format dummy.
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
ARGS: tuple[str, ...] = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache", "--chunked-prefill-size", "-1"),
    *("--max-prefill-tokens", "16384", "--max-total-tokens", "120000", "--mem-fraction-static", "0.75"),
)


def prompts(count: int) -> list[list[int]]:
    """The load, the same in every run: log-normal lengths (median 1,720 tokens, 64 to 8,192) of random tokens."""
    rnd = random.Random(1)
    lengths = [max(64, min(8192, int(rnd.lognormvariate(7.45, 0.8)))) for _ in range(count)]
    return [[rnd.randrange(1000, 150000) for _ in range(length)] for length in lengths]


# --- servers -----------------------------------------------------------------------------------------------------------------


@dataclass
class Server:
    """One server; `plugin` is the entry point that it loads, or none."""

    name: str
    plugin: str = ""
    env: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return WORK / f"server-{self.name}.log"

    def environment(self) -> dict[str, str]:
        """The server's; its plugin's entry point is made where it is looked for."""
        paths = [str(ROOT), str(ROOT / "collections"), *filter(None, [os.environ.get("PYTHONPATH")])]
        if self.plugin:
            name = f"{self.plugin.partition('.')[0]}_{self.name.replace('-', '_')}"
            info = WORK / f"plugin-{self.name}" / f"{name}-0.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
            (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\nrelight = {self.plugin}\n")
            paths.insert(0, str(info.parent))
        return {**os.environ, "PYTHONUNBUFFERED": "1", **self.env, "PYTHONPATH": ":".join(paths)}

    def command(self) -> list[str]:
        """With a free port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        more = [*ARGS, *self.args, *shlex.split(os.environ.get("RELIGHT_BENCH_ARGS", ""))]
        place = ["--model-path", str(WORK / "model"), "--port", str(self.port), "--served-model-name", self.name]
        return [PYTHON, "-m", "sglang.launch_server", *place, *more]

    def start(self) -> None:
        """As the leader of a session of its own."""
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment(), start_new_session=True
            )

    def wait(self) -> None:
        """Until it is ready. Raises RuntimeError."""
        wait_ready(self, lambda: self.process is not None and self.process.poll() is None)

    def stop(self) -> None:
        """SIGTERM to its head, as a service manager does; SIGKILL to what is left."""
        if self.process is None:
            return
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def gpu_mib(self) -> int:
        """GPU memory of its processes, as NVML counts it."""
        members = _session(self.process.pid) if self.process else set()
        return sum(held.mib or 0 for gpu in nvml.read() for held in gpu.held if held.pid in members)


def wait_ready(server: Server, is_alive: Callable[[], bool]) -> None:
    """Until its log says that it is ready. Raises RuntimeError with the log's end."""
    deadline = time.monotonic() + READY_SECONDS
    while not server.log.exists() or READY not in server.log.read_text(errors="replace"):
        if not is_alive() or time.monotonic() > deadline:
            raise RuntimeError(f"server {server.name} is not ready:\n{server.log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.2)


def _session(leader: int) -> set[int]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader:
                    found.add(int(name))
    return found


def servers() -> dict[str, Server]:
    """Mode -> the server that serves it."""
    plain = Server("plain", args=("--enable-return-hidden-states",) if "json" in MODES else ())
    listed = ",".join(map(str, LAYERS))
    relight = Server("relight", "relight.dump.plugin:activate", {"RELIGHT_DUMP_DIR": str(SHM / "relight"), "RELIGHT_DUMP_LAYERS": listed})
    peer = Server("sync", "bench.dump_sync_peer:activate", {"SYNC_PEER_DIR": str(SHM / "sync"), "SYNC_PEER_LAYERS": listed})
    by_mode = {"undumped": plain, "json": plain, "dumped": relight, "end_to_end": relight, "sync": peer}
    return {mode: by_mode[mode] for mode in MODES}


# --- load --------------------------------------------------------------------------------------------------------------------


class Reaper:
    """Takes whole dumps out of a directory as they come, which is the least that a client does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes = self.errors = self.peak_bytes = 0
        self.seen: set[str] = set()
        self.last = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Reaper:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._end.set()
        self._thread.join()

    def wait(self, rids: set[str], seconds: float) -> None:
        """Until all have come. Raises RuntimeError."""
        deadline = time.monotonic() + seconds
        while not self.seen >= rids:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{len(rids - self.seen)} of {len(rids)} dumps did not come")
            time.sleep(0.005)

    def _run(self) -> None:
        while not self._end.is_set():
            with os.scandir(self.folder) as entries:
                found = [(entry.name, entry.stat().st_size) for entry in entries if entry.name.startswith("relight-")]
            self.peak_bytes = max(self.peak_bytes, sum(size for _name, size in found))
            for name, size in found:
                os.unlink(self.folder / name)
                self.bytes += size
                self.errors += name.endswith(".error")
                self.seen.add(name)
                self.last = time.monotonic()
            time.sleep(0.01)


async def _post_all(server: Server, bodies: list[dict[str, Any]], concurrency: int = CONCURRENCY) -> tuple[int, int]:
    """Send all with bounded concurrency; the number of answers that are no 200, and the bytes of all answers."""
    queue, failed, received = list(reversed(bodies)), 0, 0
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(600), connector=connector, trust_env=False) as http:

        async def worker() -> None:
            nonlocal failed, received
            while queue:
                async with http.post(f"http://127.0.0.1:{server.port}/generate", json=queue.pop()) as answer:
                    received += len(await answer.read())
                    failed += answer.status != 200

        await asyncio.gather(*(worker() for _ in range(concurrency)))
    return failed, received


def _bodies(load: list[list[int]], prefix: str, **more: Any) -> list[dict[str, Any]]:
    plain = {"max_new_tokens": 1, "temperature": 0}
    return [{"rid": f"{prefix}-{number}", "input_ids": ids, "sampling_params": plain, **more} for number, ids in enumerate(load)]


def run_load(mode: str, server: Server, load: list[list[int]], label: str) -> dict[str, Any]:
    """One mode's turn in a round: tokens a second until the last answer (the prefill), and until the last dump where there are dumps."""
    marked = mode in ("dumped", "sync")
    more = {"return_hidden_states": True} if mode == "json" else {}
    bodies = _bodies(load, f"relight-{label}" if marked else f"plain-{label}", **more)
    memory = HostMemory()
    begin = time.monotonic()
    if not marked:
        with memory:
            failed, received = asyncio.run(_post_all(server, bodies))
        end = answered = time.monotonic()
        told: dict[str, Any] = {"bytes": received}
    else:
        with memory, Reaper(SHM / server.name) as reaper:
            failed, _received = asyncio.run(_post_all(server, bodies))
            answered = time.monotonic()
            reaper.wait({str(body["rid"]) for body in bodies}, 60)
        end, told = reaper.last, {"bytes": reaper.bytes, "peak_dump_mib": reaper.peak_bytes // MIB}
        failed += reaper.errors
    if failed:
        raise RuntimeError(f"{mode}: {failed} of {len(load)} requests failed")
    tokens = sum(map(len, load))
    told.update(tokens=tokens, rate=tokens / (end - begin), prefill_rate=tokens / (answered - begin), host_peak_mib=memory.peak_mib)
    return told


class HostMemory:
    """The most memory in use on this host during a block: what is neither free nor a cache, the tmpfs included."""

    def __init__(self) -> None:
        self.peak_mib = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> HostMemory:
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.1):
            self.peak_mib = max(self.peak_mib, host_used_mib())


def host_used_mib() -> int:
    sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return (int(sizes["MemTotal"].split()[0]) - int(sizes["MemAvailable"].split()[0])) // 1024


# --- end to end --------------------------------------------------------------------------------------------------------------


def run_end_to_end(server: Server, load: list[list[int]], label: str) -> dict[str, Any]:
    """The resume client with a store on the disk: from its first request to its end, every sample durable by then."""
    folder = WORK / f"end-to-end-{label}"
    folder.mkdir(parents=True)
    records = folder / "records.jsonl"
    with records.open("w") as handle:
        for number, ids in enumerate(load):
            handle.write(json.dumps({"id": f"{label}-{number}", "input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n")
    config = {
        "dataset": str(records),
        "store": str(folder / "store"),
        "layout": "specforge",
        "server": f"http://127.0.0.1:{server.port}",
        "dump_dir": str(SHM / server.name),
        "layers": list(LAYERS),
        "hidden_size": MODEL["hidden_size"],
        "state_dir": str(folder / "state"),
        "concurrency": CONCURRENCY,
        "max_bytes_in_flight": 8 << 30,
        "identity": {"dtype": "bfloat16"},
        "writers": 8,
    }
    (folder / "extract.json").write_text(json.dumps(config))
    memory = HostMemory()
    env = {**os.environ, "PYTHONPATH": ":".join([str(ROOT), str(ROOT / "collections"), os.environ.get("PYTHONPATH", "")])}
    with memory:
        command = [sys.executable, "-m", "relight", "extract", "--config", str(folder / "extract.json")]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"the client ended with {done.returncode}: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "state" / "journal.jsonl").read_text().splitlines()]
    seconds = next(x["time"] for x in lines if x["event"] == "end") - next(x["time"] for x in lines if x["event"] == "begin")
    size = sum(path.stat().st_size for path in (folder / "store").rglob("*.ckpt"))
    stored = len(list((folder / "store").rglob("*.ckpt")))
    if stored != len(load):
        raise RuntimeError(f"{stored} samples of {len(load)}")
    shutil.rmtree(folder)
    tokens = sum(map(len, load))
    return {"seconds": seconds, "tokens": tokens, "rate": tokens / seconds, "bytes": size, "host_peak_mib": memory.peak_mib}


def disk_rate(load: list[list[int]]) -> float:
    """Bytes a second of the disk itself: files of the samples' sizes, written and made durable by as many threads as the client has."""
    folder = WORK / "disk"
    folder.mkdir(parents=True)
    size = 4 * 2 * MODEL["hidden_size"]
    data = memoryview(os.urandom(8 << 20) * (8192 * size >> 23))

    def write(number: int) -> int:
        fd = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            rest = data[: len(load[number]) * size]
            total = len(rest)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        return total

    begin = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        written = sum(pool.map(write, range(len(load))))
    seconds = time.monotonic() - begin
    shutil.rmtree(folder)
    return written / seconds


# --- the same numbers? -------------------------------------------------------------------------------------------------------


def compare(chosen: dict[str, Server], load: list[list[int]]) -> dict[str, Any]:
    """Dumps of the same prompts, one at a time, by Relight and by the synchronous peer: are they equal, bit for bit?"""
    if not {"dumped", "sync"} <= set(chosen):
        return {"skipped": "no two servers that dump"}
    try:
        import torch
        from safetensors.torch import load_file
    except ImportError as error:
        return {"skipped": str(error)}
    picked = [*sorted(load, key=len)[:: max(1, len(load) // 7)], max(load, key=len)]
    bodies, paths = _bodies(picked, "relight-same"), {}
    for mode in ("dumped", "sync"):
        asyncio.run(_post_all(chosen[mode], bodies, concurrency=1))
        paths[mode] = [SHM / chosen[mode].name / str(body["rid"]) for body in bodies]
    deadline = time.monotonic() + 30
    while not all(path.exists() for both in paths.values() for path in both):
        if time.monotonic() > deadline:
            raise RuntimeError("not all dumps came to be compared")
        time.sleep(0.05)
    told: dict[str, Any] = {"requests": len(picked), "tokens": sum(map(len, picked)), "tensors_equal": 0, "tensors": 0}
    for ours, theirs in zip(paths["dumped"], paths["sync"]):
        left, right = load_file(ours), torch.load(theirs, weights_only=True)
        for name, tensor in left.items():
            told["tensors"] += 1
            told["tensors_equal"] += torch.equal(tensor.reshape(-1), right[name].reshape(-1))
        ours.unlink()
        theirs.unlink()
    return told


# --- the run -----------------------------------------------------------------------------------------------------------------


def no_gpu() -> str:
    """Why this host cannot run the bench, or nothing."""
    try:
        gpus = nvml.read()
    except nvml.NvmlError as error:
        return str(error)
    return "" if gpus else "NVML sees no GPU"


@contextmanager
def started(chosen: dict[str, Server]) -> Iterator[None]:
    """All servers at once, each ready."""
    each = list({server.name: server for server in chosen.values()}.values())
    try:
        for server in each:
            if server.plugin:
                (SHM / server.name).mkdir(parents=True, exist_ok=True)
            server.start()
        for server in each:
            server.wait()
        yield
    finally:
        for server in each:
            server.stop()
        shutil.rmtree(SHM, ignore_errors=True)


def measure(chosen: dict[str, Server], load: list[list[int]]) -> tuple[dict[str, list[dict[str, Any]]], dict[str, int]]:
    """Every mode in every round, in an order that turns; then the GPU memory of each server; then the rounds of json."""
    told: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for mode in MODES:  # a first, uncounted turn of each, with the longest and many of the others
        if mode != "json":
            turn(mode, chosen[mode], sorted(load, key=len)[-24:], f"warm-{mode}")
    turning = [mode for mode in MODES if mode != "json"]  # whose answers leave its server slower than it was: it comes last
    orders = [turning[n % len(turning) :] + turning[: n % len(turning)] for n in range(ROUNDS)]
    gpu_mib: dict[str, int] = {}
    for number, order in enumerate([*orders, *([["json"]] * ROUNDS if "json" in MODES else [])]):
        for mode in order:
            result = turn(mode, chosen[mode], load[: len(load) // SHARE.get(mode, 1)], f"{number}-{mode}")
            told[mode].append(result)
            print(f"round {number} {mode}: " + json.dumps({k: round(v, 2) for k, v in result.items()}), flush=True)
        if order != ["json"]:
            gpu_mib = {server.name: server.gpu_mib() for server in chosen.values()}
    return told, gpu_mib


def turn(mode: str, server: Server, load: list[list[int]], label: str) -> dict[str, Any]:
    return run_end_to_end(server, load, label) if mode == "end_to_end" else run_load(mode, server, load, label)


def result(told: dict[str, list[dict[str, Any]]], disk: float) -> dict[str, Any]:
    """The last line: medians of the rounds' ratios."""

    def rate(mode: str) -> float:
        return statistics.median(one["rate"] for one in told[mode])

    def ratio(mode: str, other: str, by: str = "rate") -> float | None:
        if not told.get(mode) or not told.get(other):
            return None
        return round(statistics.median(a[by] / b["rate"] for a, b in zip(told[mode], told[other])), 3)

    names = {
        "dumped_vs_undumped": ratio("dumped", "undumped", "prefill_rate"),
        "last_dump_vs_undumped": ratio("dumped", "undumped"),
        "vs_sync": ratio("dumped", "sync"),
        "vs_json": ratio("dumped", "json"),
        "end_to_end_vs_undumped": ratio("end_to_end", "undumped"),
    }
    what: dict[str, Any] = {
        "tokens_per_s": {mode: round(rate(mode)) for mode in MODES},
        "spread": {mode: [round(min(x["rate"] for x in told[mode])), round(max(x["rate"] for x in told[mode]))] for mode in MODES},
        "samples": {mode: SAMPLES // SHARE.get(mode, 1) for mode in MODES},
        "tokens": {mode: told[mode][0]["tokens"] for mode in MODES},
        "concurrency": CONCURRENCY,
        "model": "random weights, Qwen3 8B shape, bfloat16",
        "server_args": [*ARGS, *shlex.split(os.environ.get("RELIGHT_BENCH_ARGS", ""))],
        "disk_mb_per_s": round(disk / 1e6),
        "gpu": _gpu_name(),
    }
    if told.get("end_to_end"):
        written = statistics.median(one["bytes"] / one["seconds"] for one in told["end_to_end"])
        what["end_to_end_mb_per_s"] = round(written / 1e6)
        names["end_to_end_vs_disk"] = round(written / disk, 3)
    peak = None
    if told.get("dumped") and told.get("undumped"):
        grown = max(x["host_peak_mib"] for x in told["dumped"]) - max(x["host_peak_mib"] for x in told["undumped"])
        pinned = relight_host_mib()
        what["host_growth_mib"], what["pinned_mib"] = grown, pinned
        what["dump_dir_peak_mib"] = max(x["peak_dump_mib"] for x in told["dumped"])
        peak = pinned + max(0, grown)
    return {"bench": "dump", "ratios": {k: v for k, v in names.items() if v is not None}, "peak_mib": peak, "rounds": ROUNDS, "what": what}


def _gpu_name() -> str:
    if shutil.which("nvidia-smi") is None:
        return nvml.read()[0].uuid
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.strip()


def relight_host_mib() -> int:
    """The plugin's host memory, taken when the model is loaded: it is in every round's figure, dumped or not."""
    from relight.dump.plugin import host_bytes

    return host_bytes(os.environ) // MIB


def main() -> int:
    why = no_gpu()
    if why:
        print(f"bench dump: SKIPPED, nothing was measured: {why}", file=sys.stderr)
        print(json.dumps({"bench": "dump", "skipped": why}))
        return 0
    shutil.rmtree(WORK, ignore_errors=True)
    (WORK / "model").mkdir(parents=True)
    (WORK / "model" / "config.json").write_text(json.dumps(MODEL))
    load, chosen = prompts(SAMPLES), servers()
    begin = time.monotonic()
    with started(chosen):
        print(f"{len(set(map(id, chosen.values())))} servers ready after {time.monotonic() - begin:.0f} s", flush=True)
        disk = disk_rate(load) if "end_to_end" in MODES else 0.0
        same = compare(chosen, load)
        print(f"against the synchronous peer: {json.dumps(same)}", flush=True)
        told, gpu_mib = measure(chosen, load)
        last = result(told, disk)
        last["what"].update(gpu_mib=gpu_mib, equal_to_sync=same)
    for server in chosen.values():
        last["what"].setdefault("plugin_said", [])
        said = [line for line in server.log.read_text(errors="replace").splitlines() if "of host memory in use" in line]
        last["what"]["plugin_said"] += [line[line.index("Relight") :] for line in said if line not in last["what"]["plugin_said"]]
    print(json.dumps(last))
    return 0


if __name__ == "__main__":
    sys.exit(main())
