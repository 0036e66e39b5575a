# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The bare directory under a mount point: what lies in it, and a guard that keeps anything from being written there.

A private mount namespace, in a child that ends, takes the mount away and shows the directory; the host's own mounts are not
touched. Without root nothing of this can be seen.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct

from ansible_collections.relight.recovery.plugins.module_utils import bounded, mounts

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE, MNT_DETACH = 0x4000, 1 << 18, 2
GETFLAGS, SETFLAGS, IMMUTABLE = 0x80086601, 0x40086602, 0x10
IMMUTABLE_GUARD, MODE_GUARD, NO_GUARD = "immutable", "mode-0", ""
LOOK_SECONDS = 20.0
NAMES = 5


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _uncovered(path: str) -> int:
    """A descriptor of the bare directory, with the mounts on it taken away from this process alone. Raises OSError."""
    _call("unshare", CLONE_NEWNS)
    _call("mount", None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)
    while any(mount.point == path for mount in mounts.read()):
        _call("umount2", os.fsencode(path), MNT_DETACH)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _names(path: str) -> tuple[int, list[str]]:
    fd = _uncovered(path)
    try:
        names = sorted(os.listdir(fd))
        return len(names), names[:NAMES]
    finally:
        os.close(fd)


def names(path: str) -> tuple[int, list[str]]:
    """How many names the bare directory holds, and some of them. Raises bounded.TimedOut, bounded.ChildFailed."""
    return bounded.call(_names, (path,), LOOK_SECONDS)


def _flags(fd: int) -> int:
    return int(struct.unpack("l", fcntl.ioctl(fd, GETFLAGS, struct.pack("l", 0)))[0])


def _guarded(path: str) -> str:
    fd = _uncovered(path)
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) == 0:
            return MODE_GUARD
        try:
            return IMMUTABLE_GUARD if _flags(fd) & IMMUTABLE else NO_GUARD
        except OSError as error:
            if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return NO_GUARD
            raise
    finally:
        os.close(fd)


def _guard(path: str, on: bool) -> str:
    fd = _uncovered(path)
    try:
        try:
            flags = _flags(fd)
            fcntl.ioctl(fd, SETFLAGS, struct.pack("l", flags | IMMUTABLE if on else flags & ~IMMUTABLE))
            guard = IMMUTABLE_GUARD
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM):
                raise
            guard = MODE_GUARD
        if guard == MODE_GUARD and on:
            os.fchmod(fd, 0)
        elif not on and stat.S_IMODE(os.fstat(fd).st_mode) == 0:
            os.fchmod(fd, 0o755)
        os.fsync(fd)
        return guard if on else NO_GUARD
    finally:
        os.close(fd)


def guarded(path: str) -> str:
    """Which guard the bare directory has. Raises bounded.TimedOut, bounded.ChildFailed."""
    return bounded.call(_guarded, (path,), LOOK_SECONDS)


def guard(path: str, on: bool = True) -> str:
    """Put the guard on, or take it off; returns which there is now.

    Immutable where the file system knows it: not even root writes there by mistake. Else mode 0, which keeps all others out.
    Raises bounded.TimedOut, bounded.ChildFailed.
    """
    return bounded.call(_guard, (path, on), LOOK_SECONDS)
