# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Dump files, written off the forward thread: a safetensors file renamed into place, or `<rid>.error` that says why not.

No torch here: a tensor comes as its dtype's safetensors name, its shape and its bytes.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

QUEUE_BYTES = 8 << 30  # of states that wait for a writer; beyond it a request gets its error file at once
THREADS = 2


class DumpError(Exception):
    """A request that gets no dump; the message is the sentence of its error file."""


@dataclass(frozen=True)
class Tensor:
    dtype: str  # I64, F32, F16 or BF16
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True)
class Sample:
    """What one dump file holds."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


# Called in the writer's thread: waits for the copies, checks them, and gives the sample. Raises DumpError.
Finish = Callable[[], Sample]


def encode_header(sample: Sample) -> bytes:
    """The length and the JSON header of a safetensors file, padded so that the tensors begin at a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": dict(sample.metadata)}
    begin = 0
    for name, tensor in sample.tensors.items():
        end = begin + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_whole(folder: str, name: str, chunks: list[memoryview]) -> None:
    """Write a file under a temporary name and rename it to `name`, or leave nothing. Raises OSError."""
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try:
            for chunk in chunks:
                rest = chunk.cast("B")
                while rest:
                    rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)
        os.rename(temporary, os.path.join(folder, name))
    except BaseException:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass
        raise


def write_sample(folder: str, rid: str, sample: Sample) -> None:
    """Put the dump of `rid` into place. Raises OSError."""
    write_whole(folder, rid, [memoryview(encode_header(sample)), *(t.data for t in sample.tensors.values())])


def write_error(folder: str, rid: str, sentence: str) -> None:
    """Put the error file of `rid` into place; where even that fails, say so in the log. Never raises."""
    logger.error("Relight dump: request %s has no dump: %s", rid, sentence)
    try:
        write_whole(folder, f"{rid}.error", [memoryview(json.dumps({"error": sentence}).encode())])
    except OSError as error:
        logger.error("Relight dump: the error file of request %s cannot be written either: %s", rid, error)


class Writer:
    """Threads that write samples in the order in which they are given, with a bound on the bytes that wait."""

    def __init__(self, folder: str, threads: int = THREADS, limit_bytes: int = QUEUE_BYTES) -> None:
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        # Unbounded in number, because an item beyond the byte limit is only a sentence.
        self._queue: queue.SimpleQueue[tuple[str, int, Finish | None, str]] = queue.SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._run, name=f"relight-dump-{number}", daemon=True).start()

    def admit(self, size_bytes: int) -> bool:
        """Reserve room for a sample. False where the writers are too far behind: then it must not be copied at all."""
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + size_bytes > self.limit_bytes:
                return False
            self._waiting_bytes += size_bytes
            return True

    def put(self, rid: str, size_bytes: int, finish: Finish) -> None:
        """Hand over a sample whose room was admitted."""
        self._queue.put((rid, size_bytes, finish, ""))

    def fail(self, rid: str, sentence: str) -> None:
        """Hand over a request that gets an error file."""
        self._queue.put((rid, 0, None, sentence))

    def release(self, size_bytes: int) -> None:
        """Give back room that was admitted."""
        with self._lock:
            self._waiting_bytes -= size_bytes

    def _run(self) -> None:
        while True:
            rid, size_bytes, finish, sentence = self._queue.get()
            try:
                if finish is None:
                    write_error(self.folder, rid, sentence)
                else:
                    self._write(rid, finish)
            except Exception:  # a writer that died would leave every later request without an answer
                logger.exception("Relight dump: request %s", rid)
            finally:
                del finish  # and with it the tensors, before the next wait
                self.release(size_bytes)

    def _write(self, rid: str, finish: Finish) -> None:
        try:
            write_sample(self.folder, rid, finish())
        except DumpError as error:
            write_error(self.folder, rid, str(error))
        except Exception as error:
            write_error(self.folder, rid, f"the dump could not be written ({type(error).__name__}: {error}).")
