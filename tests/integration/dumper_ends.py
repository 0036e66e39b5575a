# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A rank that ends with dumps still waiting for a writer. Run by an interpreter with torch: DIRECTORY signal|exit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from types import SimpleNamespace

import torch

from relight.dump import plugin
from relight.dump.capture import Dumper

HIDDEN, ROWS, REQUESTS = 256, 500, 24


def rank(folder: str, how: str) -> None:
    dumper = Dumper(folder, (1, 2, 3), HIDDEN, torch.float32, {"format": "relight-dump-1"}, "cpu", 256 << 20)
    plugin._flush_at_the_end(dumper)
    slow, finish = dumper._finish, time.sleep

    def late(*args: object) -> object:
        finish(0.05)
        return slow(*args)  # type: ignore[arg-type]

    dumper._finish = late  # type: ignore[method-assign, assignment]
    mode = SimpleNamespace(is_extend=lambda: True)
    batch = SimpleNamespace(
        forward_mode=mode,
        rids=[f"relight-{n}" for n in range(REQUESTS)],
        input_ids=torch.arange(REQUESTS * ROWS),
        extend_seq_lens_cpu=[ROWS] * REQUESTS,
        extend_prefix_lens_cpu=[0] * REQUESTS,
        seq_lens_cpu=None,
    )
    states = torch.ones(REQUESTS * ROWS, HIDDEN)
    forward = dumper.begin(batch)
    assert forward is not None
    dumper.capture(forward, states, [states] * 3)
    print("captured", dumper.writer.done, flush=True)
    if how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=rank, args=(sys.argv[1], sys.argv[2]))
    child.start()
    child.join()
    print("ended", child.exitcode)
