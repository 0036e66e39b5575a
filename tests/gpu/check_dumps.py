# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Dumps of a real server on a GPU against Hugging Face's states of the same random weights. Usage: check_dumps.py WORK [ARGS...]

Needs a GPU, and an interpreter with SGLang and transformers; elsewhere it says so and ends. WORK takes 16 GB. ARGS go to every
server. One server without CUDA graphs, one with the defaults, and one whose prefills are replayed from graphs, all at once: each
gets the same prompts, some marked and some not, and each dump is compared token by token with a float32 reference. Hugging Face's
own bfloat16 error is the yardstick; the same dump read as its neighbours' layers shows what a shift would look like.

The last line is one JSON object.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "collections")]

from bench import dump as bench  # noqa: E402
from bench.dump import Server  # noqa: E402

LENGTHS = (1, 2, 17, 64, 65, 130, 333, 512, 777, 1024, 1500, 2049, 4096, 8000)
LAYERS = bench.LAYERS
QUANTILES = (0.5, 0.9, 0.99, 1.0)
VARIANTS: dict[str, tuple[str, ...]] = {
    "no-graphs": ("--disable-cuda-graph",),
    "defaults": (),
    "prefill-graphs": ("--cuda-graph-backend-prefill", "breakable", "--cuda-graph-bs-prefill", "256", "1024", "4096"),
}


def prompts() -> dict[str, list[int]]:
    rnd = random.Random(5)
    return {f"relight-check-{n}": [rnd.randrange(1000, 150000) for _ in range(length)] for n, length in enumerate(LENGTHS)}


def make_model(folder: Path) -> None:
    """Random weights that Hugging Face and SGLang both read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(bench.MODEL))
    torch.manual_seed(11)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="4GB")
    (folder / "config.json").write_text(json.dumps(bench.MODEL))


def reference(folder: Path, given: dict[str, list[int]], dtype: Any) -> dict[str, list[Any]]:
    """rid -> the final state, and for each layer the states before it, of it and after it, on the host."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, attn_implementation="sdpa").to("cuda").eval()
    told = {}
    for rid, ids in given.items():
        with torch.no_grad():
            states = model(torch.tensor([ids], device="cuda"), output_hidden_states=True, logits_to_keep=1).hidden_states
        wanted = [states[-1], *(states[k + 1 + shift] for k in LAYERS for shift in (-1, 0, 1))]
        told[rid] = [state[0].to("cpu", torch.float32) for state in wanted]
    del model, states
    gc.collect()
    torch.cuda.empty_cache()
    return told


def errors(got: Any, want: Any) -> list[float]:
    """The relative error (L2) of each token; NaN counts as infinite."""
    found = ((got - want).norm(dim=-1) / want.norm(dim=-1)).tolist()
    return [e if e == e else float("inf") for e in found]


def quantiles(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [float(f"{ordered[min(len(ordered) - 1, int(q * len(ordered)))]:.3g}") for q in QUANTILES]


def send(server: Server, rid: str, ids: list[int]) -> int:
    body = {"rid": rid, "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/generate", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def check(server: Server, given: dict[str, list[int]], truth: dict[str, list[Any]]) -> dict[str, Any]:
    """Send all mixed with unmarked ones, and compare the dumps."""
    import torch
    from safetensors.torch import load_file

    folder = Path(server.env["RELIGHT_DUMP_DIR"])
    jobs = [*given.items(), *((f"other-{n}", ids) for n, ids in enumerate(given.values()))]
    random.Random(3).shuffle(jobs)
    with ThreadPoolExecutor(len(jobs)) as pool:
        statuses = list(pool.map(lambda job: send(server, *job), jobs))
    deadline = time.monotonic() + 30
    while not all((folder / rid).exists() for rid in given) and time.monotonic() < deadline:
        time.sleep(0.05)
    per_state: dict[str, list[float]] = {}
    width = bench.MODEL["hidden_size"]
    for rid, ids in given.items():
        dump = load_file(folder / rid)
        assert dump["input_ids"].tolist() == ids, rid
        assert dump["hidden_state"].dtype is torch.bfloat16, rid
        assert list(dump["hidden_state"].shape) == [1, len(ids), width], rid
        parts = dump["aux_hidden_state"][0].float().split(width, dim=-1)
        want = truth[rid]
        per_state.setdefault("final", []).extend(errors(dump["hidden_state"][0].float(), want[0]))
        for place, layer in enumerate(LAYERS):
            before, right, after = want[1 + 3 * place : 4 + 3 * place]
            per_state.setdefault(f"layer {layer}", []).extend(errors(parts[place], right))
            per_state.setdefault(f"layer {layer} as {layer - 1}", []).extend(errors(parts[place], before))
            per_state.setdefault(f"layer {layer} as {layer + 1}", []).extend(errors(parts[place], after))
    return {
        "statuses": sorted(set(statuses)),
        "unmarked_files": sorted(name for name in os.listdir(folder) if name.startswith("other")),
        "graph_replays": server.log.read_text(errors="replace").count("cuda graph: True"),
        "quantiles": {name: quantiles(values) for name, values in per_state.items()},
        "smallest": {name: float(f"{min(values):.3g}") for name, values in per_state.items() if " as " in name},
    }


def check_flush(server: Server, to_rank: bool) -> dict[str, Any]:
    """SIGTERM right after the last answer: every dump must still come."""
    folder = Path(server.env["RELIGHT_DUMP_DIR"])
    rnd = random.Random(9)
    jobs = {f"relight-flush-{n}": [rnd.randrange(1000, 150000) for _ in range(4000)] for n in range(12)}
    with ThreadPoolExecutor(len(jobs)) as pool:
        statuses = list(pool.map(lambda job: send(server, *job), jobs.items()))
    assert server.process is not None
    target = json.loads((folder / "server.json").read_text())["pid"] if to_rank else server.process.pid
    there = sum((folder / rid).exists() for rid in jobs)
    os.kill(target, signal.SIGTERM)
    begin = time.monotonic()
    try:
        server.process.wait(40)
    except subprocess.TimeoutExpired:
        pass
    took = round(time.monotonic() - begin, 2)
    return {
        "statuses": sorted(set(statuses)),
        "asked": len(jobs),
        "there_at_the_signal": there,
        "there_at_the_end": sum((folder / rid).exists() for rid in jobs),
        "unfinished": [name for name in os.listdir(folder) if name.endswith(".tmp")],
        "seconds_to_exit": took,
    }


def main() -> int:
    why = bench.no_gpu()
    if why or len(sys.argv) < 2:
        print(f"check_dumps: SKIPPED, nothing was checked: {why or 'no WORK given'}", file=sys.stderr)
        return 0
    import torch

    work, more = Path(sys.argv[1]), tuple(sys.argv[2:])
    bench.WORK, bench.ARGS = work, tuple(arg for arg in bench.ARGS if arg not in ("--load-format", "dummy"))
    given, begin = prompts(), time.monotonic()
    make_model(work / "model")
    truth, rounded = reference(work / "model", given, torch.float32), reference(work / "model", given, torch.bfloat16)
    print(f"reference after {time.monotonic() - begin:.0f} s", flush=True)
    told: dict[str, Any] = {"quantiles_of": list(QUANTILES), "tokens": sum(LENGTHS), "layers": list(LAYERS)}
    yard: dict[str, list[float]] = {}
    for rid, states in rounded.items():
        yard.setdefault("final", []).extend(errors(states[0], truth[rid][0]))
        for place, layer in enumerate(LAYERS):
            yard.setdefault(f"layer {layer}", []).extend(errors(states[2 + 3 * place], truth[rid][2 + 3 * place]))
    told["hugging_face_bfloat16"] = {name: quantiles(values) for name, values in yard.items()}
    servers = []
    for name, args in VARIANTS.items():
        env = {"RELIGHT_DUMP_DIR": str(work / f"dumps-{name}"), "RELIGHT_DUMP_LAYERS": ",".join(map(str, LAYERS))}
        servers.append(Server(name, "relight.dump.plugin:activate", env, (*args, *more)))
        servers[-1].start()
    for number, server in enumerate(servers):
        try:
            server.wait()
            told[server.name] = check(server, given, truth)
            told[server.name]["flush"] = check_flush(server, to_rank=number % 2 == 1)
        except Exception as error:  # what one variant cannot do says nothing of the others
            told[server.name] = {"failed": f"{type(error).__name__}: {str(error)[-1500:]}"}
        print(f"{server.name} after {time.monotonic() - begin:.0f} s: {json.dumps(told[server.name])}", flush=True)
    for server in servers:
        server.stop()
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
