# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Batches that a plain server never makes, given to the real Dumper. Run by an interpreter with torch: DIRECTORY DEVICE.

Prints one JSON object: case -> what lies in the dump directory for it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from relight.dump import capture
from relight.dump.capture import Dumper

capture.RING_CHUNKS, capture.CHUNK_BYTES = 2, 4096  # on a GPU: so small that every batch goes round
FOLDER, DEVICE = Path(sys.argv[1]), sys.argv[2]
HIDDEN = 8


class Mode:
    def __init__(self, extend: bool = True) -> None:
        self.extend = extend

    def is_extend(self) -> bool:
        return self.extend


def rows(tokens: int, layer: int, width: int = HIDDEN) -> torch.Tensor:
    """Row t of layer l holds 100 * l + t everywhere: each number tells where it comes from."""
    return (100.0 * layer + torch.arange(tokens, dtype=torch.float32)).unsqueeze(1).repeat(1, width).to(DEVICE)


def batch(rids: list[str], lengths: list[int], pad: int = 0, **change: Any) -> SimpleNamespace:
    total = sum(lengths) + pad
    plain = {
        "forward_mode": Mode(),
        "rids": rids,
        "input_ids": torch.arange(1000, 1000 + total, dtype=torch.int64).to(DEVICE),
        "extend_seq_lens_cpu": lengths,
        "extend_prefix_lens_cpu": [0] * len(lengths),
        "seq_lens_cpu": torch.tensor(lengths),
        "orig_seq_lens": torch.tensor(lengths, dtype=torch.int32).to(DEVICE),
    }
    return SimpleNamespace(**{**plain, **change})


def dumper(dtype: torch.dtype = torch.float32) -> Dumper:
    return Dumper(str(FOLDER), (1, 2, 3), HIDDEN, dtype, {"format": "relight-dump-1", "layers": "[1, 2, 3]"}, DEVICE, 1 << 20)


def run(use: Dumper, given: SimpleNamespace, final: torch.Tensor, aux: Any, logits: bool = True) -> None:
    """What the hooks do around one forward, whose memory is then written again, as that of a replayed graph is."""
    forward = use.begin(given)
    if forward is None:
        return
    if logits:
        use.capture(forward, final, aux)
    use.end(forward)
    for tensor in (final, *(aux if isinstance(aux, (list, tuple)) else [aux] if aux is not None else [])):
        tensor.fill_(-1)
    given.input_ids.fill_(-1)


def answer(rid: str, folder: Path = FOLDER) -> dict[str, Any]:
    """The dump or the error of a request, waited for."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (folder / f"{rid}.error").exists():
            return {"error": json.loads((folder / f"{rid}.error").read_text())["error"]}
        if (folder / rid).exists():
            return read((folder / rid).read_bytes())
        time.sleep(0.01)
    return {"error": "nothing came"}


def read(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    told: dict[str, Any] = {"metadata": header.pop("__metadata__"), "aligned": size % 8 == 0}
    for name, entry in header.items():
        kind = {"I64": torch.int64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[entry["dtype"]]
        begin, end = entry["data_offsets"]
        tensor = torch.frombuffer(bytearray(data[8 + size + begin : 8 + size + end]), dtype=kind).reshape(entry["shape"])
        told[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "rows": tensor.reshape(-1).tolist()}
        if name != "input_ids":
            told[name]["rows"] = tensor[0].float().tolist()
    return told


def three(tokens: int) -> list[torch.Tensor]:
    return [rows(tokens, layer) for layer in (1, 2, 3)]


def main() -> None:
    told: dict[str, Any] = {}
    plain, half, slow = dumper(), dumper(torch.bfloat16), dumper()

    run(plain, batch(["a", "relight-b", "relight-c"], [2, 3, 1], pad=4), rows(10, 9), three(10))  # a padded, mixed batch
    told["listed"] = [answer("relight-b"), answer("relight-c")]
    run(plain, batch(["relight-packed", "x"], [2, 1]), rows(3, 9), torch.cat(three(3), dim=-1))
    told["packed"] = answer("relight-packed")
    run(half, batch(["relight-half"], [2]), rows(2, 9), three(2))
    told["half"] = answer("relight-half")
    run(plain, batch(["x", "relight-prefix"], [2, 2], extend_prefix_lens_cpu=[0, 5]), rows(4, 9), three(4))
    told["prefix"] = answer("relight-prefix")
    run(plain, batch(["relight-longer"], [2], seq_lens_cpu=torch.tensor([7])), rows(2, 9), three(2))
    told["longer"] = answer("relight-longer")
    run(plain, batch(["relight-chunk"], [2], orig_seq_lens=torch.tensor([9], device=DEVICE)), rows(2, 9), three(2))
    told["chunk"] = answer("relight-chunk")
    run(plain, batch(["relight-short"], [4]), rows(3, 9), three(3))
    told["short"] = answer("relight-short")
    run(plain, batch(["relight-two"], [2]), rows(2, 9), three(2)[:2])
    told["two"] = answer("relight-two")
    run(plain, batch(["relight-none"], [2]), rows(2, 9), None)
    told["none"] = answer("relight-none")
    run(plain, batch(["relight-untold"], [2], extend_seq_lens_cpu=None), rows(2, 9), three(2))
    told["untold"] = answer("relight-untold")
    run(plain, batch(["relight-skipped"], [2]), rows(2, 9), three(2), logits=False)
    told["skipped"] = answer("relight-skipped")
    slow.arena.take(1 << 20)  # samples that no writer has taken yet
    run(slow, batch(["relight-late"], [2]), rows(2, 9), three(2))
    told["late"] = answer("relight-late")

    lengths = [1 + 7 * n % 50 for n in range(60)]
    folder = FOLDER.with_name(FOLDER.name + "-many")
    folder.mkdir()
    total, rids = sum(lengths), [f"relight-{n}" for n in range(60)]
    many = Dumper(str(folder), (1, 2, 3), HIDDEN, torch.float32, {}, DEVICE, 4 << 20)
    run(many, batch(rids, lengths), rows(total, 9), three(total))
    told["many"] = [answer(rid, folder) for rid in rids]

    for given in (
        batch(["relight-decode"], [1], forward_mode=Mode(False)),
        batch(["HEALTH_CHECK", "plain", "relight-", "relight-/x"], [1] * 4),
    ):
        run(plain, given, rows(4, 9), three(4))
    run(plain, batch(["relight-last"], [1]), rows(1, 9), three(1))
    answer("relight-last")
    told["files"] = sorted(path.name for path in FOLDER.iterdir())
    print(json.dumps(told))


main()
