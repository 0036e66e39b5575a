# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""One rank of a bounded all-reduce, run as text by the interpreter that serves. Imports nothing of ours.

It tells on standard output, as lines of JSON, which phase it is in, and four times a second that it lives and how many
all-reduces it has entered: a rank that was stopped falls silent, one that lags has entered fewer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

WARM_UPS = 2
BEAT_SECONDS = 0.25


class Teller:
    """Writes lines whole, from two threads."""

    def __init__(self, out: int) -> None:
        self.out = out
        self.entered = 0
        self.phase = "importing"

    def tell(self, **more: Any) -> None:
        line = {"phase": self.phase, "entered": self.entered, **more}
        os.write(self.out, (json.dumps(line) + "\n").encode())

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.tell()

    def beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)  # a beat is a beat
            self.tell()


def reduce(question: dict[str, Any], teller: Teller) -> None:
    """Join the others, reduce, and tell the seconds of each timed round."""
    import torch
    import torch.distributed as dist

    rank, size, backend = question["rank"], question["size"], question["backend"]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else None
    teller.tell(torch=torch.__version__, nccl=nccl)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    teller.enter("joining")
    dist.init_process_group(backend, init_method=f"file://{question['meeting']}", rank=rank, world_size=size)
    values = torch.ones(question["bytes"] // 4, dtype=torch.float32, device=device)
    teller.enter("reducing")
    seconds = []
    for number in range(WARM_UPS + question["rounds"]):
        values.fill_(rank + 1.0)
        _settle(torch, backend)
        start = time.perf_counter()
        teller.entered += 1
        dist.all_reduce(values)
        _settle(torch, backend)
        if number >= WARM_UPS:
            seconds.append(time.perf_counter() - start)
    wanted = size * (size + 1) / 2
    right = bool((values == wanted).all().item())
    teller.enter("done")
    teller.tell(seconds=seconds, right=right)
    sys.stdout.flush()
    os._exit(0)  # taking a process group down is another way to hang


def _settle(torch: Any, backend: str) -> None:
    if backend == "nccl":
        torch.cuda.synchronize()


def main() -> None:
    question = json.loads(sys.argv[1])
    signal.alarm(int(question["limit_seconds"]) + 10)  # ends us even where our caller was killed
    teller = Teller(os.dup(1))
    os.dup2(2, 1)  # whatever libraries print is not for the protocol
    threading.Thread(target=teller.beat, daemon=True).start()
    teller.tell()
    reduce(question, teller)


if __name__ == "__main__":
    main()
