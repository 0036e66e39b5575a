# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""One rank 0's capture: the rows of marked requests out of a forward, into host memory in the form of the file.

On a GPU the rows are gathered in the forward's own stream, at the speed of its memory, into a ring of fixed size, and go from there
to pinned memory in a stream of their own. So the forward waits for no copy while the ring has room, and what it gave may be written
again at once, as a replayed graph does.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable

from ansible_collections.relight.recovery.plugins.module_utils import layers
from ansible_collections.relight.recovery.plugins.module_utils.records import token_digest_of_bytes

from relight.dump.arena import Arena
from relight.dump.refusals import DTYPES
from relight.dump.writer import DumpError, Sample, Tensor, Writer

try:
    import xxhash
except ImportError:  # not every SGLang environment has it; the dump is then without a content digest
    xxhash = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MARKED = re.compile(r"relight-[A-Za-z0-9._-]{1,192}")
HOST_BYTES = 4 << 30  # of states on their way to the dump directory; beyond it a request gets its error file at once
RING_CHUNKS, CHUNK_BYTES = 8, 64 << 20  # device memory: the states of 16,384 tokens of an 8B model
RING_ALIGNMENT = 256
ID_BYTES = 8
PROMPT_BYTES = 8  # behind the body: how long the prompt is, as the device knows it


class Forward:
    """One forward pass with marked requests: rid -> place in the batch."""

    def __init__(self, batch: Any, marked: Mapping[str, int]) -> None:
        self.batch = batch
        self.marked = marked
        self.captured = False


@dataclass(frozen=True)
class _Piece:
    """One request: its rows in the batch, and its region of the host memory."""

    rid: str
    place: int
    first: int
    rows: int
    offset: int
    body_bytes: int


class Dumper:
    """Takes the rows of marked requests out of forwards and hands them to the writers."""

    def __init__(
        self,
        folder: str,
        outputs: tuple[int, ...],
        hidden_size: int,
        dtype: torch.dtype,
        metadata: Mapping[str, str],
        device: str = "cpu",
        host_bytes: int = HOST_BYTES,
    ) -> None:
        import torch

        self.folder = folder
        self.outputs = outputs
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.metadata = dict(metadata)
        self.writer = Writer(folder)
        self.arena = Arena(host_bytes)
        on_gpu = torch.device(device).type == "cuda"
        self.memory = torch.empty(host_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self.view = memoryview(self.memory.numpy())
        self.way: _Direct | _Ring = _Ring(torch.device(device)) if on_gpu else _Direct()

    def begin(self, batch: Any) -> Forward | None:
        """The marked requests of a batch, or None where there is none."""
        mode = getattr(batch, "forward_mode", None)
        rids = getattr(batch, "rids", None)
        if mode is None or not rids or not mode.is_extend():
            return None
        marked = {rid: place for place, rid in enumerate(rids) if isinstance(rid, str) and MARKED.fullmatch(rid)}
        return Forward(batch, marked) if marked else None

    def end(self, forward: Forward) -> None:
        """After the forward: no marked request stays without an answer."""
        if not forward.captured:
            for rid in forward.marked:
                self.writer.fail(rid, "the forward pass did not come through the logits processor.")

    def capture(self, forward: Forward, final: torch.Tensor, aux: Any) -> None:
        """Copy the rows of each marked request. One that cannot be dumped gets its error file."""
        forward.captured = True
        pieces = []
        for rid, place in forward.marked.items():
            try:
                pieces.append(self._piece(forward.batch, rid, place, final, aux))
            except DumpError as error:
                self.writer.fail(rid, str(error))
            except Exception as error:
                self._failed([rid], error)
        if not pieces:
            return
        prompts = getattr(forward.batch, "orig_seq_lens", None)
        try:
            for piece in pieces:
                self._fill(piece, forward.batch.input_ids, final, _parts(aux, self.hidden_size), prompts)
            ready = self.way.done()
        except Exception as error:
            self._failed([piece.rid for piece in pieces], error)
            self.way.done()()  # nothing may be on its way into a region that is given back
            for piece in pieces:
                self._release(piece)
            return
        for piece in pieces:
            self.writer.put(piece.rid, partial(self._finish, piece, ready, prompts is not None), partial(self._release, piece))

    def close(self, seconds: float) -> None:
        """Have all that was captured written, within `seconds`."""
        self.writer.flush(seconds)
        most, size = self.arena.peak >> 20, self.arena.size >> 20
        logger.info("Relight dump: %d requests answered; at most %d of %d MiB of host memory in use", self.writer.done, most, size)

    def _failed(self, rids: list[str], error: Exception) -> None:
        logger.error("Relight dump: requests %s", ", ".join(rids), exc_info=error)
        for rid in rids:
            self.writer.fail(rid, f"the states could not be copied ({type(error).__name__}: {error}).")

    def _piece(self, batch: Any, rid: str, place: int, final: torch.Tensor, aux: Any) -> _Piece:
        """The request's rows, judged, and room for them. Raises DumpError."""
        first, rows = self._rows(batch, place, final)
        self._judge_shapes(final, aux, first + rows)
        body_bytes = rows * (ID_BYTES + self.hidden_size * self.dtype.itemsize * (1 + layers.COUNT))
        offset = self.arena.take(body_bytes + PROMPT_BYTES)
        if offset is None:
            raise DumpError("the writers of the dump directory are too far behind.")
        return _Piece(rid, place, first, rows, offset, body_bytes)

    def _release(self, piece: _Piece) -> None:
        self.arena.give(piece.offset, piece.body_bytes + PROMPT_BYTES)

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

    def _judge_shapes(self, final: torch.Tensor, aux: Any, rows: int) -> None:
        """Raises DumpError where the shapes are not those of the final state and three layers, with so many rows at least."""
        if aux is None:
            raise DumpError("the model gave no auxiliary states.")
        if final.dim() != 2 or final.shape[1] != self.hidden_size:
            raise DumpError(f"the final state has the shape {list(final.shape)}, not [tokens, {self.hidden_size}].")
        parts = _parts(aux, self.hidden_size)
        if len(parts) != layers.COUNT or any(p.dim() != 2 or p.shape[1] != self.hidden_size or p.shape[0] < rows for p in parts):
            raise DumpError(f"the auxiliary states have the shapes {[list(p.shape) for p in parts]}.")

    def _fill(self, piece: _Piece, ids: torch.Tensor, final: torch.Tensor, parts: list[torch.Tensor], prompts: torch.Tensor | None) -> None:
        """Begin the copies of one request: ids, final states, and the three layers side by side, as they lie in the file."""
        import torch

        width, item, rows = self.hidden_size, self.dtype.itemsize, slice(piece.first, piece.first + piece.rows)
        region = self.memory[piece.offset : piece.offset + piece.body_bytes + PROMPT_BYTES]
        ids_end = piece.rows * ID_BYTES
        final_end = ids_end + piece.rows * width * item
        self._lay(region[:ids_end].view(torch.int64), [ids[rows]])
        self._lay(region[ids_end:final_end].view(self.dtype).view(piece.rows, width), [final[rows]])
        wide = region[final_end : piece.body_bytes].view(self.dtype).view(piece.rows, layers.COUNT * width)
        self._lay(wide, [part[rows] for part in parts])
        if prompts is not None:
            self._lay(region[piece.body_bytes :].view(torch.int64), [prompts[piece.place : piece.place + 1]])

    def _lay(self, host: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Copy `parts` side by side, in as many steps as the way there asks for."""
        begin = 0
        while begin < len(host):
            end = begin + min(len(host) - begin, self.way.rows(host[0].nbytes))
            self.way.put(host[begin:end], [part[begin:end] for part in parts])
            begin = end

    def _finish(self, piece: _Piece, ready: Callable[[], None], known: bool) -> Sample:
        """In a writer's thread: the sample, once the copies are there. Raises DumpError."""
        ready()
        end = piece.offset + piece.body_bytes
        if known:
            prompt = int.from_bytes(self.view[end : end + PROMPT_BYTES], "little")
            if prompt != piece.rows:
                raise DumpError(f"{piece.rows} rows for a prompt of {prompt} tokens.")
        body = self.view[piece.offset : end]
        kind = DTYPES[str(self.dtype).replace("torch.", "")]
        row = self.hidden_size * self.dtype.itemsize
        tensors = {
            "input_ids": Tensor("I64", (piece.rows,), piece.rows * ID_BYTES),
            "hidden_state": Tensor(kind, (1, piece.rows, self.hidden_size), piece.rows * row),
            "aux_hidden_state": Tensor(kind, (1, piece.rows, layers.COUNT * self.hidden_size), piece.rows * row * layers.COUNT),
        }
        about = {"rid": piece.rid, "tokens": str(piece.rows), "token_digest": token_digest_of_bytes(body[: piece.rows * ID_BYTES])}
        if xxhash is not None:
            about["content_digest"] = f"xxh3_128:{xxhash.xxh3_128_hexdigest(body)}"
        return Sample(tensors, {**self.metadata, **about}, body)


class _Direct:
    """The way on a CPU: each copy is there when `put` returns."""

    def rows(self, _row_bytes: int) -> int:
        return 1 << 62

    def put(self, host: torch.Tensor, parts: list[torch.Tensor]) -> None:
        _side_by_side(host, parts)

    def done(self) -> Callable[[], None]:
        return lambda: None


class _Ring:
    """The way from a GPU: chunks of device memory that are filled in the forward's stream and emptied in one of their own.

    A chunk is filled again once it is empty. The device sees to that order; no thread waits.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.memory = torch.empty(RING_CHUNKS, CHUNK_BYTES, dtype=torch.uint8, device=device)
        self.stream = torch.cuda.Stream(device)
        self.emptied: list[torch.cuda.Event | None] = [None] * RING_CHUNKS
        self.chunk = self.filled = 0
        self.filling: list[tuple[torch.Tensor, torch.Tensor]] = []  # host, device

    def rows(self, row_bytes: int) -> int:
        """How many rows the next `put` may have; at least one."""
        if CHUNK_BYTES - self.filled < row_bytes:
            self._empty()
        return max(1, (CHUNK_BYTES - self.filled) // row_bytes)

    def put(self, host: torch.Tensor, parts: list[torch.Tensor]) -> None:
        import torch

        emptied = self.emptied[self.chunk]
        if not self.filled and emptied is not None:
            torch.cuda.current_stream(self.memory.device).wait_event(emptied)
        staged = self.memory[self.chunk, self.filled : self.filled + host.nbytes].view(host.dtype).view(host.shape)
        _side_by_side(staged, parts)
        self.filling.append((host, staged))
        self.filled += -(-host.nbytes // RING_ALIGNMENT) * RING_ALIGNMENT

    def done(self) -> Callable[[], None]:
        """A call that waits until all that was put is there."""
        return self._empty().synchronize

    def _empty(self) -> torch.cuda.Event:
        """Begin the copies of what was filled, and go on with the next chunk."""
        import torch

        self.stream.wait_stream(torch.cuda.current_stream(self.memory.device))
        with torch.cuda.stream(self.stream):
            for host, staged in self.filling:
                host.copy_(staged, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # writers that wait sleep
            event.record(self.stream)
        self.emptied[self.chunk] = event
        self.chunk, self.filled, self.filling = (self.chunk + 1) % RING_CHUNKS, 0, []
        return event


def _side_by_side(target: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Copy `parts` into `target`, one behind the other along the last dimension, in the target's dtype."""
    at = 0
    for part in parts:
        target[..., at : at + part.shape[-1]].copy_(part, non_blocking=True)
        at += part.shape[-1]


def _parts(aux: Any, width: int) -> list[torch.Tensor]:
    """The layers, which come as a list or side by side in one tensor."""
    return list(aux) if isinstance(aux, (list, tuple)) else list(aux.split(width, dim=-1))
