# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Writes that survive a kill at any moment: temporary name, fsync, rename, fsync of the directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

TEMPORARY = ".relight-tmp-"  # a prefix that no trainer's reader lists: names end in the writer's pid, not in .ckpt


def fsync_directory(path: str) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(path: str, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """Yield a file that becomes `path` durably when the block ends well, and leaves nothing when it does not."""
    folder, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(folder, f"{TEMPORARY}{name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.rename(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except FileNotFoundError:
            pass
        raise
    fsync_directory(folder)


def write_json(path: str, value: Any, mode: int = 0o644) -> None:
    """Replace `path` durably by `value` as JSON. Raises OSError."""
    with replacing(path, mode) as handle:
        handle.write(json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


def append_line(path: str, line: str, mode: int = 0o644) -> None:
    """Append one line in one write and fsync it. A torn last line of a former life is closed first. Raises OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        end = os.fstat(fd).st_size
        torn = end > 0 and os.pread(fd, 1, end - 1) != b"\n"
        data = (b"\n" if torn else b"") + line.encode() + b"\n"
        if os.write(fd, data) != len(data):
            raise OSError(28, "short append", path)
        os.fsync(fd)
    finally:
        os.close(fd)


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a .jsonl file, passing over torn lines. A missing file yields nothing."""
    try:
        handle = open(path, "rb")
    except FileNotFoundError:
        return
    with handle:
        for line in handle:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value
