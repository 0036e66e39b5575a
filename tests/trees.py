# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A tree that holds all that a copy can lose, and what rsync says of two trees."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
from pathlib import Path

MIB = 1 << 20


def acl_of(uid: int) -> bytes:
    """An ACL as the kernel keeps it: owner rw, one more user r, group r, mask r, others nothing."""
    entries = [(1, 6, 0xFFFFFFFF), (2, 4, uid), (4, 4, 0xFFFFFFFF), (16, 4, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF)]
    return (2).to_bytes(4, "little") + b"".join(
        tag.to_bytes(2, "little") + mode.to_bytes(2, "little") + who.to_bytes(4, "little") for tag, mode, who in entries
    )


def make(root: Path, seed: int = 1, large: int = 3, small: int = 40) -> None:
    """Fill `root`. As root it also holds other owners, devices and ACLs."""
    rng = random.Random(seed)
    root.mkdir(exist_ok=True)
    store = root / "store" / "rows_0-2000"
    store.mkdir(parents=True)
    for index in range(large):
        (store / f"data_{index}.ckpt").write_bytes(rng.randbytes(2 * MIB + index * 4097 + 1))
    many = root / "many small"
    many.mkdir()
    for index in range(small):
        (many / f"{index}.json").write_bytes(rng.randbytes(rng.randrange(0, 9000)))
    (root / "empty").mkdir()
    (root / "empty file").touch()
    odd = root / "odd names"
    odd.mkdir()
    for name in (b"with\nnewline", "größe ✓".encode(), b"not utf-8 \xff\xfe", b"-rf", b" lead and trail ", b"q\"'\\$`", b"n" * 255):
        (Path(os.fsdecode(os.fsencode(odd) + b"/" + name))).write_bytes(name)
    links = root / "links"
    links.mkdir()
    (links / "first").write_bytes(rng.randbytes(MIB + 5))
    os.link(links / "first", links / "second")
    os.link(links / "first", root / "third name")
    (links / "small").write_bytes(b"shared")
    os.link(links / "small", links / "small too")
    (links / "relative").symlink_to("../store")
    (links / "dangling").symlink_to("/nowhere/at all")
    with open(root / "sparse", "wb") as handle:
        handle.seek(3 * MIB)
        handle.write(rng.randbytes(5000))
        handle.seek(20 * MIB)
        handle.write(b"tail")
        handle.truncate(24 * MIB + 77)
    with open(root / "only a hole", "wb") as handle:
        handle.truncate(5 * MIB)
    with open(root / "small hole", "wb") as handle:
        handle.seek(300_000)
        handle.write(b"x")
    os.mkfifo(root / "fifo")
    os.setxattr(root / "sparse", "user.note", b"kept \0 binary")
    os.setxattr(root / "empty", "user.of.a.folder", b"yes")
    (root / "private").write_bytes(b"secret")
    os.chmod(root / "private", 0o2600)
    os.chmod(root / "empty", 0o1777)
    if os.geteuid() == 0:
        os.chown(root / "private", 1234, 4321)
        os.chmod(root / "private", 0o6640)
        os.lchown(links / "dangling", 1234, 0)
        os.mknod(root / "null", 0o20666, os.makedev(1, 3))
        os.setxattr(root / "empty file", "system.posix_acl_access", acl_of(1234))
        os.setxattr(odd, "system.posix_acl_default", acl_of(4321))
        os.setxattr(root / "private", "trusted.mark", b"t")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(root, os.O_PATH)
        listener.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
    for path in sorted(root.rglob("*"), reverse=True):
        moment = 1_600_000_000_000_000_000 + rng.randrange(10**15)
        os.utime(path, ns=(moment, moment), follow_symlinks=False)
    os.utime(root, ns=(1_500_000_000_123_456_789, 1_500_000_000_123_456_789))


def differences(source: Path, target: Path) -> str:
    """What rsync would have to do to make them equal, every byte read: nothing, for a good copy."""
    # XFS shows an ACL under a second name, which rsync would see as an attribute that the other side lacks.
    options = ["-aHAXSn", "--checksum", "--delete", "--itemize-changes", "--filter=-x trusted.SGI_ACL_*"]
    done = subprocess.run(["rsync", *options, f"{source}/", f"{target}/"], capture_output=True, text=True, check=True)
    return done.stdout


def have_rsync() -> bool:
    return shutil.which("rsync") is not None


def blocks(path: Path) -> int:
    return os.lstat(path).st_blocks
