# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The peer that `bench/dump.py` names `sync`: the shortest patch that dumps, with torch.save of .cpu() inside the forward.

Same layers, same tensors, same requests as Relight's plugin; only the way to the file is the plain one.
"""

from __future__ import annotations

import os
from typing import Any, Callable

_batch: Any = None


def activate() -> None:
    if not os.environ.get("SYNC_PEER_DIR"):
        return
    import multiprocessing

    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.load_model", _after_load_model, HookType.AFTER)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.forward", _around_forward, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.logits_processor.LogitsProcessor.forward", _around_logits, HookType.AROUND)


def _after_load_model(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    runner.model.set_eagle3_layers_to_capture([int(layer) for layer in os.environ["SYNC_PEER_LAYERS"].split(",")])


def _around_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    global _batch
    _batch = forward_batch
    try:
        return original(runner, forward_batch, *args, **kwargs)
    finally:
        _batch = None


def _around_logits(
    original: Callable[..., Any],
    self: Any,
    input_ids: Any,
    hidden: Any,
    head: Any,
    metadata: Any,
    aux: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    import torch

    if _batch is not None and _batch.forward_mode.is_extend() and aux is not None:
        wide = torch.cat(list(aux), dim=-1) if isinstance(aux, (list, tuple)) else aux
        first = 0
        for rid, rows in zip(_batch.rids or (), _batch.extend_seq_lens_cpu or ()):
            if rid.startswith("relight-"):
                part = slice(first, first + rows)
                folder = os.environ["SYNC_PEER_DIR"]
                sample = {"input_ids": _batch.input_ids[part], "hidden_state": hidden[part], "aux_hidden_state": wide[part]}
                torch.save({name: tensor.cpu() for name, tensor in sample.items()}, os.path.join(folder, f".{rid}.tmp"))
                os.rename(os.path.join(folder, f".{rid}.tmp"), os.path.join(folder, rid))
            first += rows
    return original(self, input_ids, hidden, head, metadata, aux, *args, **kwargs)
