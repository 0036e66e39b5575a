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
import re
import sys
import time
import uuid
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, NoReturn

from ansible_collections.relight.recovery.plugins.module_utils import durable, journal, layers
from ansible_collections.relight.recovery.plugins.module_utils.records import token_digest_of_bytes

from relight import __version__
from relight.dump.refusals import ARGUMENTS, DTYPES, refusals
from relight.dump.writer import DumpError, Sample, Tensor, Writer

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

FORMAT = "relight-dump-1"
SCHEMA = 1
MARKED = re.compile(r"relight-[A-Za-z0-9._-]{1,192}")
REFUSED = 78  # EX_CONFIG: the exit status of a launch that was refused

# Hook target -> the parameters that the hook relies on, by name and order. hs_patch_check compares them with the source.
TARGETS: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.server_args.ServerArgs.check_server_args": ("self",),
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
CHECK_ARGS, LOAD_MODEL, RUN_FORWARD, PROCESS_LOGITS = TARGETS


def activate() -> None:
    """Set the hooks. Called by SGLang in each of its processes, the launcher first."""
    if not os.environ.get("RELIGHT_DUMP_DIR"):
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(CHECK_ARGS, _after_check_args, HookType.AFTER)
        if _is_launcher_or_detokenizer():  # the model is not run here, and importing its modules would cost the start seconds
            return
        HookRegistry.register(LOAD_MODEL, _after_load_model, HookType.AFTER)
        HookRegistry.register(RUN_FORWARD, _around_run_forward, HookType.AROUND)
        HookRegistry.register(PROCESS_LOGITS, _around_process_logits, HookType.AROUND)
    except Exception as error:  # SGLang would log it and serve without dumps
        refuse([f"the hooks cannot be set ({type(error).__name__}: {error}); this SGLang is not one that the plugin knows."])


def _is_launcher_or_detokenizer() -> bool:
    import multiprocessing

    if multiprocessing.parent_process() is None:
        return True
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


# --- the ranks ---------------------------------------------------------------------------------------------------------------


class Dumper:
    """One rank 0's capture: takes the rows of marked requests out of a forward and hands copies of them to the writer."""

    def __init__(self, folder: str, outputs: tuple[int, ...], hidden_size: int, dtype: torch.dtype, metadata: Mapping[str, str]) -> None:
        self.folder = folder
        self.outputs = outputs
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.metadata = dict(metadata)
        self.writer = Writer(folder)
        self.copier: _CudaCopier | None = None

    def begin(self, batch: Any) -> _Forward | None:
        """The marked requests of a batch, or None where there is none."""
        mode = getattr(batch, "forward_mode", None)
        rids = getattr(batch, "rids", None)
        if mode is None or not rids or not mode.is_extend():
            return None
        marked = {rid: place for place, rid in enumerate(rids) if isinstance(rid, str) and MARKED.fullmatch(rid)}
        if self.copier is not None:
            self.copier.hold_back()  # a replayed graph writes its states where those of the last batch were
        return _Forward(batch, marked) if marked else None

    def capture(self, forward: _Forward, final: torch.Tensor, aux: Any) -> None:
        """Copy the rows of each marked request. One that cannot be dumped gets its error file."""
        forward.captured = True
        for rid, place in forward.marked.items():
            try:
                self._capture_one(forward.batch, rid, place, final, aux)
            except DumpError as error:
                self.writer.fail(rid, str(error))
            except Exception as error:
                logger.exception("Relight dump: request %s", rid)
                self.writer.fail(rid, f"the states could not be copied ({type(error).__name__}: {error}).")

    def end(self, forward: _Forward) -> None:
        """After the forward: no marked request stays without an answer."""
        if not forward.captured:
            for rid in forward.marked:
                self.writer.fail(rid, "the forward pass did not come through the logits processor.")

    def _capture_one(self, batch: Any, rid: str, place: int, final: torch.Tensor, aux: Any) -> None:
        first, rows = self._rows(batch, place, final)
        parts = self._aux_parts(aux, final, first, rows)
        item = self.dtype.itemsize
        size = rows * (8 + self.hidden_size * item * (1 + layers.COUNT))
        if not self.writer.admit(size):
            raise DumpError("the writers of the dump directory are too far behind.")
        try:
            ids = batch.input_ids[first : first + rows]
            prompts = getattr(batch, "orig_seq_lens", None)
            prompt = None if prompts is None else prompts[place : place + 1]
            copies, ready = self._copy([ids, final[first : first + rows], parts, prompt])
            self.writer.put(rid, size, lambda: self._finish(rid, rows, copies, ready))
        except BaseException:
            self.writer.release(size)
            raise

    def _rows(self, batch: Any, place: int, final: torch.Tensor) -> tuple[int, int]:
        """The first row of request `place` and the number of its rows. Raises DumpError where they are not its whole prompt."""
        lengths = batch.extend_seq_lens_cpu
        prefixes = batch.extend_prefix_lens_cpu
        if lengths is None or prefixes is None or not len(lengths) == len(prefixes) == len(batch.rids):
            raise DumpError("the batch does not tell its requests apart.")
        prefix, rows = int(prefixes[place]), int(lengths[place])
        if prefix:
            raise DumpError(f"{prefix} tokens of its prompt came from a cache and have no states.")
        if batch.seq_lens_cpu is not None and int(batch.seq_lens_cpu[place]) != rows:
            raise DumpError(f"{rows} rows for a prompt of {int(batch.seq_lens_cpu[place])} tokens.")
        total = sum(int(n) for n in lengths)
        if final.shape[0] < total or batch.input_ids.shape[0] < total:
            raise DumpError(f"{final.shape[0]} rows and {batch.input_ids.shape[0]} token ids for a batch of {total} tokens.")
        return sum(int(n) for n in lengths[:place]), rows

    def _aux_parts(self, aux: Any, final: torch.Tensor, first: int, rows: int) -> list[torch.Tensor]:
        """The request's rows of the three layers. Raises DumpError where the shapes are not theirs."""
        if aux is None:
            raise DumpError("the model gave no auxiliary states.")
        if final.dim() != 2 or final.shape[1] != self.hidden_size:
            raise DumpError(f"the final state has the shape {list(final.shape)}, not [tokens, {self.hidden_size}].")
        parts = list(aux) if isinstance(aux, (list, tuple)) else list(aux.split(self.hidden_size, dim=-1))
        if len(parts) != layers.COUNT or any(p.dim() != 2 or p.shape[1] != self.hidden_size or p.shape[0] < first + rows for p in parts):
            raise DumpError(f"the auxiliary states have the shapes {[list(p.shape) for p in parts]}.")
        return [part[first : first + rows] for part in parts]

    def _copy(self, sources: list[Any]) -> tuple[list[Any], Callable[[], None]]:
        """Copies in host memory, and a call that waits until they are there."""
        import torch

        ids, final, parts, prompt = sources
        if final.device.type == "cuda":
            if self.copier is None:
                self.copier = _CudaCopier(final.device)
            return self.copier.copy(ids, final, parts, prompt, self.dtype)
        wide = torch.cat([part.to(self.dtype) for part in parts], dim=-1)
        copies = [
            ids.to("cpu", torch.int64, copy=True),
            final.to("cpu", self.dtype, copy=True).contiguous(),
            wide.to("cpu").contiguous(),
            None if prompt is None else prompt.to("cpu", copy=True),
        ]
        return copies, lambda: None

    def _finish(self, rid: str, rows: int, copies: list[Any], ready: Callable[[], None]) -> Sample:
        """In the writer's thread: the sample, once the copies are there. Raises DumpError."""
        ready()
        ids, final, wide, prompt = copies
        if prompt is not None and int(prompt[0]) != rows:
            raise DumpError(f"{rows} rows for a prompt of {int(prompt[0])} tokens.")
        kind = DTYPES[str(self.dtype).replace("torch.", "")]
        id_view = _bytes(ids)
        tensors = {
            "input_ids": Tensor("I64", (rows,), id_view),
            "hidden_state": Tensor(kind, (1, rows, self.hidden_size), _bytes(final)),
            "aux_hidden_state": Tensor(kind, (1, rows, layers.COUNT * self.hidden_size), _bytes(wide)),
        }
        return Sample(tensors, {**self.metadata, "rid": rid, "tokens": str(rows), "token_digest": token_digest_of_bytes(id_view)})


class _Forward:
    """One forward pass with marked requests: rid -> place in the batch."""

    def __init__(self, batch: Any, marked: Mapping[str, int]) -> None:
        self.batch = batch
        self.marked = marked
        self.captured = False


class _CudaCopier:
    """Copies on a stream of its own into pinned memory, so that the forward does not wait for them."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.stream = torch.cuda.Stream(device)
        self.last: torch.cuda.Event | None = None

    def hold_back(self) -> None:
        """Let what is queued next on the forward's stream wait for the last copies: their sources may be written again."""
        import torch

        if self.last is not None:
            torch.cuda.current_stream().wait_event(self.last)

    def copy(
        self, ids: torch.Tensor, final: torch.Tensor, parts: list[torch.Tensor], prompt: torch.Tensor | None, dtype: torch.dtype
    ) -> tuple[list[Any], Callable[[], None]]:
        import torch

        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            wide = torch.cat([part.to(dtype) for part in parts], dim=-1)
            sources = [ids.to(torch.int64), final.to(dtype), wide, prompt]
            copies: list[Any] = [None] * len(sources)
            for place, source in enumerate(sources):
                if source is not None:
                    copies[place] = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
                    copies[place].copy_(source, non_blocking=True)
            for tensor in (ids, final, *parts, *(() if prompt is None else (prompt,))):
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)
            done = torch.cuda.Event()
            done.record(self.stream)
        self.last = done
        return copies, done.synchronize


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    import torch

    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


_dumper: Dumper | None = None
_forward: _Forward | None = None


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
    dumper = Dumper(folder, outputs, shape.hidden_size, getattr(torch, asked), metadata)
    durable.write_json(os.path.join(folder, "server.json"), server)
    logger.info("Relight dump plugin %s: instance %s, layers %s as layer outputs, directory %s", __version__, instance, listed, folder)
    return dumper


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
