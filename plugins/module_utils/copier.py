# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Copy one file or link so that it is the same in every respect, digesting what was read, and read it back from the medium.

The page cache is passed by (O_DIRECT) where the file system allows it, and dropped where it does not, so that a copy of terabytes
evicts nothing and a read-back is one. Errors of the source are told from errors of the target: the former concern one file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Callable

from ansible_collections.relight.recovery.plugins.module_utils import durable
from ansible_collections.relight.recovery.plugins.module_utils.migration import Entry

try:
    from xxhash import xxh3_128
except ImportError:  # a bare host
    xxh3_128 = None  # type: ignore[assignment, misc]

ALIGN = 4096
CHUNK_BYTES = 8 << 20
SMALL_BYTES = 1 << 20  # up to here a file is read whole, and many share one sync
NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
NO_XATTRS = (errno.EOPNOTSUPP, errno.ENOSYS)
XXH3 = "xxh3_128"
BLAKE2B = "blake2b_128"
ZEROS = bytes(CHUNK_BYTES)
_LIBC = ctypes.CDLL(None, use_errno=True)


class SourceError(Exception):
    """The source could not be read; the copy of the rest goes on."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))
        self.errno = error.errno


class Changed(Exception):
    """The source was written to while it was read."""


class NoDigest(Exception):
    """This Python cannot make the digest that was asked for."""


def best_digest() -> str:
    return XXH3 if xxh3_128 is not None else BLAKE2B


def hasher(kind: str) -> Any:
    """A fresh digest of this kind. Raises NoDigest."""
    if kind == BLAKE2B:
        return hashlib.blake2b(digest_size=16)
    if kind == XXH3 and xxh3_128 is not None:
        return xxh3_128()
    raise NoDigest(f"{kind} is not available in this Python")


def buffer() -> memoryview:
    """Page-aligned memory for direct input and output."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


@contextmanager
def of_source() -> Iterator[None]:
    """What fails in here is the source's fault."""
    try:
        yield
    except OSError as error:
        raise SourceError(error) from None


def sync_file_system(path: str) -> None:
    """Make all of the file system that holds `path` durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _LIBC.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(fd)


# --- files that pass by the page cache ---------------------------------------------------------------------------------


@dataclass
class Opened:
    """A descriptor, and whether it passes by the page cache."""

    fd: int
    direct: bool

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill the view from `offset` on; fewer bytes than asked for only at the end of the file. Raises OSError."""
        done = 0
        while done < len(view):
            try:
                got = os.preadv(self.fd, [view[done:]], offset + done)
            except OSError as error:
                if not self.direct or error.errno not in NO_DIRECT:
                    raise
                self.through_cache()
                continue
            if not got:
                break
            done += got
            if done % ALIGN and self.direct:
                break  # a direct read ends off a block only at the end of the file
        return done

    def write_all(self, view: memoryview, offset: int) -> None:
        """Raises OSError."""
        done = 0
        while done < len(view):
            try:
                done += os.pwritev(self.fd, [view[done:]], offset + done)
            except OSError as error:
                if not self.direct or error.errno not in NO_DIRECT:
                    raise
                self.through_cache()

    def through_cache(self) -> None:
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False

    def drop_cache(self) -> None:
        with suppress(OSError):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def opened(path: str, flags: int, direct: bool = True, mode: int = 0o600) -> Iterator[Opened]:
    """Open past the page cache where that is possible, and leave nothing of the file in it where it is not. Raises OSError."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    file = None
    if direct:
        with suppress_only(*NO_DIRECT):
            file = Opened(os.open(path, flags | os.O_DIRECT, mode), True)
    if file is None:
        file = Opened(os.open(path, flags, mode), False)
    try:
        yield file
    finally:
        if not file.direct and direct:
            file.drop_cache()
        os.close(file.fd)


@contextmanager
def suppress_only(*numbers: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


# --- metadata ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Metadata:
    """What a copy takes over beside the content. ACLs are extended attributes."""

    status: os.stat_result
    xattrs: tuple[tuple[str, bytes], ...]

    def apply(self, target: int | str) -> None:
        """Give it to an open file, or to a path whose links are not followed. Raises OSError."""
        follow: dict[str, Any] = {} if isinstance(target, int) else {"follow_symlinks": False}
        os.chown(target, self.status.st_uid, self.status.st_gid, **follow)
        if not stat.S_ISLNK(self.status.st_mode):
            os.chmod(target, stat.S_IMODE(self.status.st_mode))
        wanted = dict(self.xattrs)
        for name in listed(target):
            if name not in wanted and not name.startswith("security.selinux"):
                os.removexattr(target, name, **follow)
        for name, value in self.xattrs:
            os.setxattr(target, name, value, **follow)
        os.utime(target, ns=(self.status.st_atime_ns, self.status.st_mtime_ns), **follow)


def listed(target: int | str) -> list[str]:
    """The names of the extended attributes; none where there can be none. Raises OSError.

    XFS shows an ACL under a second name of its own, which is left out.
    """
    try:
        names = os.listxattr(target) if isinstance(target, int) else os.listxattr(target, follow_symlinks=False)
        return [name for name in names if not name.startswith("trusted.SGI_ACL_")]
    except OSError as error:
        if error.errno in NO_XATTRS:
            return []
        raise


def metadata(target: int | str, status: os.stat_result) -> Metadata:
    """Raises OSError."""
    if isinstance(target, int):
        return Metadata(status, tuple((name, os.getxattr(target, name)) for name in listed(target)))
    return Metadata(status, tuple((name, os.getxattr(target, name, follow_symlinks=False)) for name in listed(target)))


def is_regular(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode)


def same_metadata(a: os.stat_result, b: os.stat_result) -> bool:
    return (a.st_mode, a.st_uid, a.st_gid, a.st_mtime_ns) == (b.st_mode, b.st_uid, b.st_gid, b.st_mtime_ns)


# --- copying -----------------------------------------------------------------------------------------------------------


def extents(fd: int, status: os.stat_result) -> Iterator[tuple[int, int]]:
    """The parts of a file that hold data, as (start, end); all of it where the file has no holes. Raises OSError."""
    size = status.st_size
    if status.st_blocks * 512 >= size:
        if size:
            yield 0, size
        return
    start = 0
    while start < size:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no data from here on
                return
            raise
        yield start // ALIGN * ALIGN, min(end, size)
        start = end


def unchanged(a: os.stat_result, b: os.stat_result) -> bool:
    return (a.st_size, a.st_mtime_ns, a.st_ctime_ns, a.st_ino) == (b.st_size, b.st_mtime_ns, b.st_ctime_ns, b.st_ino)


def entry_of(path: str, status: os.stat_result, digest: str) -> Entry:
    return Entry(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, digest)


@dataclass
class Copier:
    """Copies below two roots with memory of its own; one a thread. `beat` is called with every piece and may raise."""

    source: str
    target: str
    digest: str
    label: str
    beat: Callable[[int, str], None]
    memory: memoryview | None = None

    def temporary(self, path: str) -> str:
        """Where a file is written before it bears its name."""
        parent, name = os.path.split(os.path.join(self.target, path))
        short = hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()  # a long name has no room for a prefix
        return os.path.join(parent, f"{durable.TEMPORARY}{short}.{self.label}")

    def large(self, path: str) -> Entry:
        """Copy one regular file to its name, durably. Raises SourceError, Changed, OSError (of the target)."""
        temporary = self.temporary(path)
        with of_source():
            reading = opened(os.path.join(self.source, path), os.O_RDONLY)
            source = reading.__enter__()
        try:
            with of_source():
                before = os.fstat(source.fd)
                about = metadata(source.fd, before)
            with opened(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC) as target:
                digest = self._stream(source, target, before)
                about.apply(target.fd)
                os.fsync(target.fd)
            with of_source():
                after = os.fstat(source.fd)
            if not unchanged(before, after):
                raise Changed(path)
            os.rename(temporary, os.path.join(self.target, path))
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            reading.__exit__(None, None, None)
        return entry_of(path, before, digest)

    def _stream(self, source: Opened, target: Opened, status: os.stat_result) -> str:
        """The content with its holes; its digest is that of the plain bytes."""
        digest = hasher(self.digest)
        size, at = status.st_size, 0
        memory = self.memory = self.memory or buffer()
        dense = status.st_blocks * 512 >= size
        if dense and size:
            os.posix_fallocate(target.fd, 0, size)  # one extent, and a full disk is met before the copy
        with of_source():
            parts = list(extents(source.fd, status))
        for start, end in parts:
            for offset in range(at, start, CHUNK_BYTES):
                digest.update(ZEROS[: min(CHUNK_BYTES, start - offset)])
            for offset in range(start, end, CHUNK_BYTES):
                self.beat(0, "source")
                wanted = min(CHUNK_BYTES, end - offset)
                padded = -(-wanted // ALIGN) * ALIGN
                with of_source():
                    got = min(source.read_into(memory[:padded], offset), wanted)
                if got < wanted:
                    raise Changed("became shorter")
                digest.update(memory[:wanted])
                if padded > wanted:
                    memory[wanted:padded] = ZEROS[: padded - wanted]
                self.beat(0, "target")
                target.write_all(memory[:padded], offset)
                self.beat(wanted, "target")
            at = end
        for offset in range(at, size, CHUNK_BYTES):
            digest.update(ZEROS[: min(CHUNK_BYTES, size - offset)])
        os.ftruncate(target.fd, size)
        return f"{self.digest}:{digest.hexdigest()}"

    def small(self, path: str) -> Entry:
        """Copy one small regular file to its temporary name, without a sync. Raises SourceError, Changed, OSError."""
        self.beat(0, "source")
        with of_source():
            fd = os.open(os.path.join(self.source, path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            with of_source():
                before = os.fstat(fd)
                about = metadata(fd, before)
                data = b""
                while len(data) <= before.st_size:
                    piece = os.read(fd, before.st_size + 1 - len(data))
                    if not piece:
                        break
                    data += piece
                after = os.fstat(fd)
        finally:
            os.close(fd)
        if len(data) != before.st_size or not unchanged(before, after):
            raise Changed(path)
        digest = hasher(self.digest)
        digest.update(data)
        self.beat(0, "target")
        target = os.open(self.temporary(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if before.st_blocks * 512 < before.st_size:
                _write_around_holes(target, data)
            elif data and os.write(target, data) != len(data):
                raise OSError(errno.ENOSPC, "short write", path)
            about.apply(target)
        finally:
            os.close(target)
        self.beat(len(data), "target")
        return entry_of(path, before, f"{self.digest}:{digest.hexdigest()}")

    def name(self, path: str) -> None:
        """Give a synced temporary file its name. Raises OSError."""
        os.rename(self.temporary(path), os.path.join(self.target, path))

    def link(self, path: str, first: str) -> None:
        """Make `path` another name of `first` on the target. Raises OSError."""
        temporary = self.temporary(path)
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        os.link(os.path.join(self.target, first), temporary, follow_symlinks=False)
        os.rename(temporary, os.path.join(self.target, path))
        with suppress(FileNotFoundError):  # a rename onto the same inode leaves both names
            os.unlink(temporary)

    def special(self, path: str, status: os.stat_result) -> None:
        """Make a symbolic link, a device, a fifo or a socket as it is at the source. Raises SourceError, OSError."""
        temporary = self.temporary(path)
        source = os.path.join(self.source, path)
        with of_source():
            about = metadata(source, status)
            goes_to = os.readlink(source) if stat.S_ISLNK(status.st_mode) else ""
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        if goes_to:
            os.symlink(goes_to, temporary)
        else:
            os.mknod(temporary, stat.S_IFMT(status.st_mode) | 0o600, status.st_rdev)
        about.apply(temporary)
        os.rename(temporary, os.path.join(self.target, path))

    def same_special(self, path: str, status: os.stat_result) -> bool:
        """Whether the target already has it."""
        target = os.path.join(self.target, path)
        try:
            have = os.lstat(target)
            if stat.S_ISLNK(status.st_mode) and os.readlink(target) != os.readlink(os.path.join(self.source, path)):
                return False
        except OSError:
            return False
        return same_metadata(status, have) and have.st_rdev == status.st_rdev

    def read_back(self, entry: Entry) -> str | None:
        """What is wrong with the copy as the medium gives it, or None. Raises OSError (of the target), NoDigest."""
        kind, _colon, wanted = entry.digest.partition(":")
        digest = hasher(kind)
        memory = self.memory = self.memory or buffer()
        with opened(os.path.join(self.target, entry.path), os.O_RDONLY) as target:
            if not target.direct:
                target.drop_cache()
            at = 0
            while at < entry.bytes:
                self.beat(0, "target")
                length = min(CHUNK_BYTES, -(-(entry.bytes - at) // ALIGN) * ALIGN)
                got = min(target.read_into(memory[:length], at), entry.bytes - at)
                if not got:
                    break
                digest.update(memory[:got])
                at += got
                self.beat(got, "target")
            if at != entry.bytes or os.fstat(target.fd).st_size != entry.bytes:
                return "its length differs"
        return None if digest.hexdigest() == wanted else "other bytes than were read from the source"


def _write_around_holes(fd: int, data: bytes) -> None:
    """Write blocks that hold something, and set the length. Raises OSError."""
    for offset in range(0, len(data), ALIGN):
        block = data[offset : offset + ALIGN]
        if block.strip(b"\0") and os.pwrite(fd, block, offset) != len(block):
            raise OSError(errno.ENOSPC, "short write")
    os.ftruncate(fd, len(data))
