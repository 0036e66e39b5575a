# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A read-only view of a folder through FUSE, with faults: files that fail to be read, and files that never answer.

Speaks the kernel's protocol itself, so that it needs nothing but /dev/fuse and root. Run as
`python -m tests.faulty_fs SOURCE MOUNT FAULTS`, where FAULTS is a JSON object from a path to "eio" or "hang" (after the first MiB),
it mounts, prints "ready" and serves until it is killed or unmounted.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import struct
import sys

MIB = 1 << 20
LOOKUP, FORGET, GETATTR, READLINK, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 5, 14, 15, 17, 18
GETXATTR, LISTXATTR, INIT, OPENDIR, READDIR, RELEASEDIR, BATCH_FORGET, DESTROY = 22, 23, 26, 27, 28, 29, 42, 38
IN_HEADER = struct.Struct("<IIQQIIIHH")
OUT_HEADER = struct.Struct("<IiQ")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")


class Faulty:
    """The file system. A node is a path within the source; its number is its inode's."""

    def __init__(self, source: str, fd: int, faults: dict[str, str]) -> None:
        self.source = source
        self.fd = fd
        self.faults = faults
        self.paths = {1: ""}
        self.listings: dict[int, list[tuple[str, os.stat_result]]] = {}

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.fd, MIB + 4096)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.EINTR):
                    continue
                return  # unmounted
            length, code, unique, node, *_rest = IN_HEADER.unpack_from(request)
            body = request[IN_HEADER.size : length]
            try:
                answer = self.answer(code, node, body)
            except OSError as error:
                self.reply(unique, b"", error.errno or errno.EIO)
                continue
            if answer is not None:
                self.reply(unique, answer, 0)
            if code == DESTROY:
                return

    def reply(self, unique: int, data: bytes, number: int) -> None:
        try:
            os.write(self.fd, OUT_HEADER.pack(OUT_HEADER.size + len(data), -number, unique) + data)
        except OSError as error:
            if error.errno != errno.ENOENT:  # the caller was killed
                raise

    def full(self, node: int) -> str:
        return os.path.join(self.source, self.paths[node])

    def attributes(self, status: os.stat_result) -> bytes:
        def whole(moment: int) -> int:
            return moment // 10**9

        return ATTR.pack(
            status.st_ino,
            status.st_size,
            status.st_blocks,
            whole(status.st_atime_ns),
            whole(status.st_mtime_ns),
            whole(status.st_ctime_ns),
            status.st_atime_ns % 10**9,
            status.st_mtime_ns % 10**9,
            status.st_ctime_ns % 10**9,
            status.st_mode,
            status.st_nlink,
            status.st_uid,
            status.st_gid,
            status.st_rdev,
            4096,
            0,
        )

    def answer(self, code: int, node: int, body: bytes) -> bytes | None:
        """The answer's bytes; None for what gets no answer: a forget, or a read that hangs."""
        if code in (FORGET, BATCH_FORGET):
            return None
        if code == INIT:
            return struct.pack("<IIIIHHIIHH", 7, 31, MIB, 0, 12, 10, MIB, 1, 256, 0) + bytes(28)
        if code == LOOKUP:
            path = os.path.join(self.paths[node], os.fsdecode(body.rstrip(b"\0")))
            status = os.lstat(os.path.join(self.source, path))
            number = 1 if not path else status.st_ino
            self.paths[number] = path
            return struct.pack("<QQQQII", number, 0, 60, 60, 0, 0) + self.attributes(status)
        if code == GETATTR:
            return struct.pack("<QII", 60, 0, 0) + self.attributes(os.lstat(self.full(node)))
        if code == READLINK:
            return os.fsencode(os.readlink(self.full(node)))
        if code in (OPEN, OPENDIR):
            if code == OPENDIR:
                with os.scandir(self.full(node)) as found:
                    self.listings[node] = [(item.name, item.stat(follow_symlinks=False)) for item in found]
            return struct.pack("<QII", node, 0, 0)
        if code == READ:
            return self.read(node, *struct.unpack_from("<QI", body, 8))
        if code == READDIR:
            return self.directory(node, *struct.unpack_from("<QI", body, 8))
        if code == STATFS:
            room = os.statvfs(self.source)
            numbers = (room.f_blocks, room.f_bfree, room.f_bavail, room.f_files, room.f_ffree, room.f_bsize, 255, room.f_frsize, 0)
            return struct.pack("<QQQQQIIII", *numbers) + bytes(24)
        if code in (RELEASE, RELEASEDIR, DESTROY):
            return b""
        raise OSError(errno.ENOSYS, "not served")

    def read(self, node: int, offset: int, size: int) -> bytes | None:
        fault = self.faults.get(self.paths[node])
        if fault and offset + size > MIB:
            if fault == "hang":
                return None
            raise OSError(errno.EIO, "seeded")
        fd = os.open(self.full(node), os.O_RDONLY)
        try:
            return os.pread(fd, size, offset)
        finally:
            os.close(fd)

    def directory(self, node: int, offset: int, size: int) -> bytes:
        out = b""
        for index, (name, status) in enumerate(self.listings[node][offset:], offset + 1):
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", status.st_ino, index, len(raw), stat.S_IFMT(status.st_mode) >> 12) + raw
            entry += bytes(-len(entry) % 8)
            if len(out) + len(entry) > size:
                break
            out += entry
        return out


def main() -> None:
    source, point, faults = sys.argv[1:4]
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"faulty", os.fsencode(point), b"fuse.faulty", 1, options) != 0:
        sys.exit(os.strerror(ctypes.get_errno()))
    print("ready", flush=True)
    Faulty(source, fd, json.loads(faults)).serve()


if __name__ == "__main__":
    main()
