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
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

THREADS = 4  # each spends its time in the kernel, without the GIL, copying into the dump directory's memory


class DumpError(Exception):
    """A request that gets no dump; the message is the sentence of its error file."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file. The tensors of a sample lie one after another in its body."""

    dtype: str  # I64, F32, F16 or BF16
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Sample:
    """What one dump file holds: its tensors in the order of `body`, which is written as it lies in memory."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]
    body: memoryview


# Called in the writer's thread: waits for the copies, checks them, and gives the sample. Raises DumpError.
Finish = Callable[[], Sample]


@dataclass(frozen=True)
class _Order:
    """What a writer's thread is given. Without `finish` it is a sentence for the error file."""

    rid: str
    finish: Finish | None = None
    release: Callable[[], None] | None = None
    sentence: str = ""


def encode_header(sample: Sample) -> bytes:
    """The length and the JSON header of a safetensors file, padded so that the tensors begin at a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": dict(sample.metadata)}
    begin = 0
    for name, tensor in sample.tensors.items():
        end = begin + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_whole(folder: str, name: str, head: bytes, body: memoryview) -> None:
    """Write a file under a temporary name and rename it to `name`, or leave nothing. Raises OSError."""
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try:
            left = [memoryview(head), body]
            while left:
                left = _after(left, os.writev(fd, left))
        finally:
            os.close(fd)
        os.rename(temporary, os.path.join(folder, name))
    except BaseException:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass
        raise


def _after(parts: list[memoryview], written: int) -> list[memoryview]:
    """What is left to write; one call may write less than it was given, and at most 2 GiB."""
    left = []
    for part in parts:
        skipped = min(written, len(part))
        written -= skipped
        if skipped < len(part):
            left.append(part[skipped:])
    return left


def write_sample(folder: str, rid: str, sample: Sample) -> None:
    """Put the dump of `rid` into place. Raises OSError."""
    write_whole(folder, rid, encode_header(sample), sample.body)


def write_error(folder: str, rid: str, sentence: str) -> None:
    """Put the error file of `rid` into place; where even that fails, say so in the log. Never raises."""
    logger.error("Relight dump: request %s has no dump: %s", rid, sentence)
    try:
        write_whole(folder, f"{rid}.error", json.dumps({"error": sentence}).encode(), memoryview(b""))
    except OSError as error:
        logger.error("Relight dump: the error file of request %s cannot be written either: %s", rid, error)


class Writer:
    """Threads that write samples in the order in which they are given. `put` and `fail` are for one thread, the forward's."""

    def __init__(self, folder: str, threads: int = THREADS) -> None:
        self.folder = folder
        self.given = 0
        self.done = 0
        self._lock = threading.Lock()  # among the writers only: nothing that gives may ever wait for them
        self._queue: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._run, name=f"relight-dump-{number}", daemon=True).start()

    def put(self, rid: str, finish: Finish, release: Callable[[], None]) -> None:
        """Hand over a sample. `release` is called once its memory is not needed any more."""
        self.given += 1
        self._queue.put(_Order(rid, finish, release))

    def fail(self, rid: str, sentence: str) -> None:
        """Hand over a request that gets an error file."""
        self.given += 1
        self._queue.put(_Order(rid, sentence=sentence))

    def flush(self, seconds: float) -> bool:
        """Wait until all that was given so far is in place, for `seconds` at the most."""
        given, deadline = self.given, time.monotonic() + seconds
        while self.done < given:
            if time.monotonic() > deadline:
                logger.error("Relight dump: %d dumps were not written within %g s", given - self.done, seconds)
                return False
            time.sleep(0.005)
        return True

    def _run(self) -> None:
        while True:
            order = self._queue.get()
            try:
                self._serve(order)
            except Exception:  # a writer that died would leave every later request without an answer
                logger.exception("Relight dump: request %s", order.rid)
            with self._lock:
                self.done += 1
            if order.release is not None:
                order.release()
            del order  # and with it the tensors, before the next wait

    def _serve(self, order: _Order) -> None:
        if order.finish is None:
            write_error(self.folder, order.rid, order.sentence)
            return
        try:
            write_sample(self.folder, order.rid, order.finish())
        except DumpError as error:
            write_error(self.folder, order.rid, str(error))
        except Exception as error:
            write_error(self.folder, order.rid, f"the dump could not be written ({type(error).__name__}: {error}).")
