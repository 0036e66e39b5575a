# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The entry point of group `sglang.srt.plugins`, and the hooks that it sets.

Without RELIGHT_DUMP_DIR nothing happens. With it, the launcher refuses what would make wrong dumps, each rank has the layers
captured, and attention-TP rank 0 writes a dump of each marked request. Whatever goes wrong with a dump ends in its error file
and in the log; the forward itself is never disturbed.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from multiprocessing import util as multiprocessing_util
from types import SimpleNamespace
from typing import Any, Callable, NoReturn

from ansible_collections.relight.recovery.plugins.module_utils import durable, journal, layers

from relight import __version__
from relight.dump.budget import Budget
from relight.dump.capture import HOST_BYTES, MARKED, Dumper, Forward
from relight.dump.refusals import ARGUMENTS, DTYPES, refusals

logger = logging.getLogger(__name__)

FORMAT = "relight-dump-1"
SCHEMA = 1
FLUSH_SECONDS = 10.0  # for the dumps that wait for a writer when the rank ends
REFUSED = 78  # EX_CONFIG: the exit status of a launch that was refused

# Hook target -> the parameters that the hook relies on, by name and order. hs_patch_check compares them with the source.
TARGETS: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.server_args.ServerArgs.check_server_args": ("self",),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request": ("self", "obj", "input_ids"),
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": ("self",),
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": ("self", "forward_batch"),
    "sglang.srt.layers.logits_processor.LogitsProcessor.forward": (
        "self",
        "input_ids",
        "hidden_states",
        "lm_head",
        "logits_metadata",
        "aux_hidden_states",
    ),
}
CHECK_ARGS, VALIDATE_REQUEST, LOAD_MODEL, RUN_FORWARD, PROCESS_LOGITS = TARGETS


def activate() -> None:
    """Set the hooks. Called by SGLang in each of its processes, the launcher first."""
    if not os.environ.get("RELIGHT_DUMP_DIR"):
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(CHECK_ARGS, _after_check_args, HookType.AFTER)
        if _is_launcher() and os.environ.get("RELIGHT_DUMP_BUDGET_BYTES"):
            HookRegistry.register(VALIDATE_REQUEST, _after_validate_request, HookType.AFTER)
        if _is_launcher() or _is_detokenizer():  # the model is not run here, and importing its modules would cost the start seconds
            return
        HookRegistry.register(LOAD_MODEL, _after_load_model, HookType.AFTER)
        HookRegistry.register(RUN_FORWARD, _around_run_forward, HookType.AROUND)
        HookRegistry.register(PROCESS_LOGITS, _around_process_logits, HookType.AROUND)
    except Exception as error:  # SGLang would log it and serve without dumps
        refuse([f"the hooks cannot be set ({type(error).__name__}: {error}); this SGLang is not one that the plugin knows."])


def _is_launcher() -> bool:
    import multiprocessing

    return multiprocessing.parent_process() is None


def _is_detokenizer() -> bool:
    return "sglang.srt.managers.detokenizer_manager" in sys.modules and "sglang.srt.managers.scheduler" not in sys.modules


def refuse(sentences: list[str]) -> NoReturn:
    """End this process, and so the launch, by saying why on standard error.

    SystemExit, because SGLang logs and swallows a plugin's Exception.
    """
    for sentence in sentences:
        print(f"Relight dump plugin {__version__} refuses to start: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(REFUSED)


# --- the launcher ------------------------------------------------------------------------------------------------------------


def arguments(server_args: Any, environ: Mapping[str, str]) -> SimpleNamespace:
    """What `refusals` judges: SGLang's arguments as resolved so far, and what the environment asks of the plugin."""
    try:
        view = importlib.import_module("sglang.srt.arg_groups.overrides").resolving_view(server_args)
    except (ImportError, AttributeError):  # before 0.5.20 or so, the record itself holds the resolved values
        view = server_args
    args = SimpleNamespace(**{name: _read(view, name) for name in ARGUMENTS})
    args.dump_dir = environ["RELIGHT_DUMP_DIR"]
    args.dump_dir_error = unwritable(args.dump_dir)
    args.layers = environ.get("RELIGHT_DUMP_LAYERS")
    args.dtype = environ.get("RELIGHT_DUMP_DTYPE")
    args.patch_dir = environ.get("SGLANG_HS_DUMP_DIR")
    args.model_layers = _layers_of(str(_read(view, "model_path")))
    return args


def _read(view: Any, name: str) -> Any:
    try:
        return getattr(view, name, None)
    except Exception:
        return None


def _layers_of(model_path: str) -> int | None:
    """The number of layers that a local model's config.json tells, or None: the ranks check again once the model is loaded."""
    try:
        with open(os.path.join(model_path, "config.json"), encoding="utf-8") as handle:
            return layers.shape(json.load(handle)).layers
    except (OSError, ValueError, layers.BadLayers):
        return None


def unwritable(folder: str) -> str | None:
    """Why no file can be written in `folder`, or None. Makes the folder where only it is missing."""
    probe = os.path.join(folder, f".probe.{os.getpid()}.tmp")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(probe, "wb") as handle:
            handle.write(b"relight")
        os.unlink(probe)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _after_check_args(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """The launcher's arguments are final and no child is started yet: refuse here what cannot be served."""
    found = refusals(arguments(self, os.environ))
    if found:
        refuse(found)


_budget: Budget | None = None


def _after_validate_request(result: Any, manager: Any, obj: Any, input_ids: Any, *args: Any, **kwargs: Any) -> None:
    """Let a marked request in, or answer 503 while the dump directory's budget is used up. No rank has seen it yet."""
    global _budget
    rid = getattr(obj, "rid", None)
    if not isinstance(rid, str) or not MARKED.fullmatch(rid):
        return
    try:
        if _budget is None:
            _budget = Budget(os.environ["RELIGHT_DUMP_DIR"], int(os.environ["RELIGHT_DUMP_BUDGET_BYTES"]))
        why = _budget.refuse(rid, len(input_ids or ()), manager.rid_to_state.__contains__)
    except OSError as error:
        logger.error("Relight dump: the budget cannot be told: %s", error)
        _budget = None
        return
    if why:
        raise importlib.import_module("fastapi").HTTPException(status_code=503, detail=f"Relight dump: {why}")


# --- the ranks ---------------------------------------------------------------------------------------------------------------


_dumper: Dumper | None = None
_forward: Forward | None = None


def _after_load_model(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Have the layers captured on every rank, and announce the dump on attention-TP rank 0. Raises to end the launch."""
    global _dumper
    if getattr(runner, "is_draft_worker", False):
        return
    import sglang

    found = refusals(arguments(runner.server_args, os.environ))
    if found:
        raise RuntimeError(f"Relight dump plugin {__version__} refuses to start: {' '.join(found)}")
    model = runner.model_config
    outputs = layers.parse(os.environ["RELIGHT_DUMP_LAYERS"])
    shape = layers.Shape(
        (getattr(model.hf_config, "architectures", None) or [""])[0],
        int(model.num_hidden_layers),
        int(model.hidden_size),
        str(model.dtype),
        (getattr(getattr(model, "hf_text_config", None), "architectures", None) or [""])[0],
    )
    capture(runner.model, outputs, shape, sglang.__version__)
    if attention_tp_rank(runner):
        return
    _dumper = announce(runner, outputs, shape, sglang.__version__)
    _flush_at_the_end(_dumper)


def capture(model: Any, outputs: tuple[int, ...], shape: layers.Shape, version: str) -> None:
    """Have the model capture these layer outputs, and compare what it then says with what was meant. Raises RuntimeError."""
    try:
        layers.check(outputs, shape.layers)
        model.set_eagle3_layers_to_capture(layers.ids_to_pass(outputs, shape, version))
    except layers.BadLayers as error:
        raise RuntimeError(f"Relight dump plugin refuses to start: {error}.") from None
    except AttributeError as error:
        name = type(model).__name__
        raise RuntimeError(f"Relight dump plugin refuses to start: {name} cannot capture auxiliary states ({error}).") from None
    said = captured_by(model)
    if said is not None and said != layers.inside(outputs):
        raise RuntimeError(
            f"Relight dump plugin refuses to start: asked for the layer outputs {list(outputs)}, "
            f"SGLang {version} would capture {[k - 1 for k in said]} of {shape.architecture}."
        )
    if said is None and not layers.is_known(shape):
        logger.warning("Relight dump: %s does not say which layers it captures; only a continuity check proves them", shape.architecture)


def captured_by(model: Any) -> list[int] | None:
    """SGLang's own numbers of what a loaded model captures, or None where the model does not keep them in a known place."""
    place = model
    for _ in range(4):
        found = getattr(place, "layers_to_capture", None)
        if found:
            return sorted(int(k) for k in found)
        place = getattr(place, "language_model", None) or getattr(place, "model", None)
        if place is None:
            return None
    return None


def attention_tp_rank(runner: Any) -> int:
    """This rank's place in its attention-TP group."""
    for module, call in (("sglang.srt.runtime_context", "get_parallel"), ("sglang.srt.layers.dp_attention", "get_attention_tp_rank")):
        try:
            value = getattr(importlib.import_module(module), call)()
        except (ImportError, AttributeError):
            continue
        return int(value if isinstance(value, int) else value.attn_tp_rank)
    return int(runner.tp_rank)


def announce(runner: Any, outputs: tuple[int, ...], shape: layers.Shape, version: str) -> Dumper:
    """Make the dumper, write server.json and log one line."""
    import torch

    folder = os.environ["RELIGHT_DUMP_DIR"]
    asked = os.environ.get("RELIGHT_DUMP_DTYPE") or str(runner.model_config.dtype).replace("torch.", "")
    if asked not in DTYPES:
        raise RuntimeError(f"Relight dump plugin refuses to start: states of {asked} cannot be dumped, set RELIGHT_DUMP_DTYPE.")
    view = runner.server_args
    instance, tp = uuid.uuid4().hex, int(_read(view, "tp_size") or 1)
    listed = json.dumps(list(outputs))
    about = {"instance": instance, "sglang": version, "plugin": __version__, "torch": torch.__version__, "dtype": asked}
    server = {
        "schema": SCHEMA,
        **about,
        "pid": os.getpid(),
        "start_time": start_ticks(),
        "time": round(time.time(), 3),
        "layers": list(outputs),
        "hidden_size": shape.hidden_size,
        "model_path": str(_read(view, "model_path")),
        "architecture": shape.architecture,
        "tp": tp,
        "boot_id": journal.boot_id(),
    }
    metadata = {"format": FORMAT, "norm": "post", "layers": listed, "tp": str(tp), **about}
    device = next(runner.model.parameters()).device
    dumper = Dumper(folder, outputs, shape.hidden_size, getattr(torch, asked), metadata, str(device), host_bytes(os.environ))
    durable.write_json(os.path.join(folder, "server.json"), server)
    logger.info("Relight dump plugin %s: instance %s, layers %s as layer outputs, directory %s", __version__, instance, listed, folder)
    return dumper


def _flush_at_the_end(dumper: Dumper) -> None:
    """Have what was captured written before this rank ends: when it leaves by itself, and when SIGTERM comes."""
    multiprocessing_util.Finalize(None, dumper.close, args=(FLUSH_SECONDS,), exitpriority=100)
    former = signal.getsignal(signal.SIGTERM)

    def end() -> None:
        dumper.close(FLUSH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    def on_term(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if former is None else former)
        threading.Thread(target=end, name="relight-dump-end", daemon=True).start()  # this thread may hold what a writer waits for

    try:
        signal.signal(signal.SIGTERM, on_term)
    except ValueError:  # not the main thread
        logger.warning("Relight dump: SIGTERM ends this rank without writing the dumps that wait")


def host_bytes(environ: Mapping[str, str]) -> int:
    """How much host memory holds states on their way to the dump directory."""
    return int(environ.get("RELIGHT_DUMP_HOST_BYTES") or HOST_BYTES)


def start_ticks() -> int:
    """When this process started, in clock ticks since boot: with the pid, its unmistakable name."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as handle:
        return int(handle.read().rpartition(")")[2].split()[19])


def _around_run_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the batch while it is run: where a graph is replayed, the logits processor sees another one."""
    global _forward
    if _dumper is None or getattr(runner, "is_draft_worker", False):
        return original(runner, forward_batch, *args, **kwargs)
    _forward = _guarded(_dumper.begin, forward_batch)
    try:
        output = original(runner, forward_batch, *args, **kwargs)
        if _forward is not None:
            _guarded(_dumper.end, _forward)
        return output
    finally:
        _forward = None


def _around_process_logits(
    original: Callable[..., Any],
    processor: Any,
    input_ids: Any,
    hidden_states: Any,
    lm_head: Any,
    logits_metadata: Any,
    aux_hidden_states: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The one place where the final state after the norm and the auxiliary states lie side by side."""
    if _dumper is not None and _forward is not None and not _forward.captured:
        _guarded(_dumper.capture, _forward, hidden_states, aux_hidden_states)
    return original(processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *args, **kwargs)


def _guarded(call: Callable[..., Any], *args: Any) -> Any:
    """What `call` gives, or None where it raised: the forward must go on."""
    try:
        return call(*args)
    except Exception:
        logger.exception("Relight dump: a batch went by without its dumps")
        return None
