# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Disks by what names them for good, and whether one is empty: no signature, no partition, no holder, nobody has it open.

What the kernel shows under /sys is asked, so that no udev is needed; the signatures are asked of blkid and wipefs, which read
the disk itself and no cache. A disk that cannot be looked at is not empty.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
from dataclasses import dataclass, replace

from ansible_collections.relight.recovery.plugins.module_utils import mounts

SYS_BLOCK = "/sys/block"
BY_ID = "/dev/disk/by-id"
LOOK_SECONDS = 15.0
EDGE_BYTES = 1 << 20  # this much at either end must be zero on a disk that was never used
PARTITION_TABLES = ("gpt", "dos", "PMBR", "mac", "sun", "bsd", "sgi", "atari")


class CannotLook(Exception):
    """A tool that is needed is missing or did not answer; the message says which."""


@dataclass(frozen=True)
class Disk:
    """A block device. `names` are its stable names, the best first; `used_by` says who has it, in words."""

    device: str
    number: tuple[int, int]
    size_bytes: int
    names: tuple[str, ...]
    model: str = ""
    read_only: bool = False
    partition: bool = False
    partitions: tuple[str, ...] = ()
    used_by: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The stable name, or nothing for a disk that has none."""
        return self.names[0] if self.names else ""


@dataclass(frozen=True)
class Content:
    """What is on a disk. `fingerprint` names what a consent would destroy; empty for an empty disk."""

    empty: bool
    fingerprint: str = ""
    told: str = ""
    fstype: str = ""
    uuid: str = ""
    table: str = ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read().strip().strip("\0")
    except OSError:
        return ""


def run(*command: str, seconds: float = LOOK_SECONDS, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """A command's outcome, whatever its exit status; `given` is its standard input. Raises CannotLook."""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            input=given or "",
            env={**os.environ, "LC_ALL": "C", "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"},
        )
    except FileNotFoundError:
        raise CannotLook(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise CannotLook(f"{command[0]} did not answer within {seconds:g} s") from None


# --- which disks there are ---------------------------------------------------------------------------------------------


def disks() -> list[Disk]:
    """Every disk and partition that the kernel shows. Raises OSError."""
    table = mounts.read()
    swaps = {line.split()[0] for line in _text("/proc/swaps").splitlines()[1:]}
    links = _links(BY_ID)
    found: list[Disk] = []
    for name in sorted(os.listdir(SYS_BLOCK)):
        folder = os.path.join(SYS_BLOCK, name)
        parts = sorted(part for part in os.listdir(folder) if os.path.exists(os.path.join(folder, part, "partition")))
        whole = _disk(folder, name, links, table, swaps)
        if not whole.size_bytes:
            continue  # a loop device or a card reader with nothing in it
        inner = [_disk(os.path.join(folder, part), part, links, table, swaps) for part in parts]
        found.append(replace(whole, partitions=tuple(parts), used_by=(*whole.used_by, *(who for part in inner for who in part.used_by))))
        found += [replace(part, partition=True) for part in inner]
    return found


def _disk(folder: str, name: str, links: dict[str, list[str]], table: list[mounts.Mount], swaps: set[str]) -> Disk:
    major, _colon, minor = _text(os.path.join(folder, "dev")).partition(":")
    number = (int(major), int(minor))
    device = f"/dev/{name.replace('!', '/')}"
    holders = os.path.join(folder, "holders")
    used = [f"mounted at {mount.point}" for mount in table if mount.device == number or _same_source(mount, device)]
    used += [f"held by {holder}" for holder in sorted(os.listdir(holders))] if os.path.isdir(holders) else []
    used += ["in use as swap"] if device in swaps else []
    return Disk(
        device=device,
        number=number,
        size_bytes=int(_text(os.path.join(folder, "size")) or 0) * 512,
        names=tuple(_names(folder, device, links)),
        model=_text(os.path.join(folder, "device/model")),
        read_only=_text(os.path.join(folder, "ro")) == "1",
        used_by=tuple(dict.fromkeys(used)),
    )


def _same_source(mount: mounts.Mount, device: str) -> bool:
    """btrfs and overlay show a device number of their own."""
    return mount.fstype not in ("overlay", "tmpfs") and mount.source == device


def _links(folder: str) -> dict[str, list[str]]:
    """The links of a folder by the device that they lead to."""
    found: dict[str, list[str]] = {}
    try:
        names = sorted(
            os.listdir(folder), key=lambda name: (name.startswith(("wwn-", "nvme-eui.", "nvme-nvme.", "dm-uuid")), len(name), name)
        )
    except FileNotFoundError:
        return found
    for name in names:
        path = os.path.join(folder, name)
        found.setdefault(os.path.realpath(path), []).append(path)
    return found


def _names(folder: str, device: str, links: dict[str, list[str]]) -> list[str]:
    """Stable names: udev's links first, as people know them, then what the kernel says itself."""
    names = list(links.get(os.path.realpath(device), []))
    serial = _text(os.path.join(folder, "device/serial")) or _text(os.path.join(folder, "serial"))
    wwn = _text(os.path.join(folder, "wwid")) or _text(os.path.join(folder, "device/wwid"))
    backing = _text(os.path.join(folder, "loop/backing_file"))
    partuuid = next((line[9:] for line in _text(os.path.join(folder, "uevent")).splitlines() if line.startswith("PARTUUID=")), "")
    return [
        *names,
        *([f"serial:{serial}"] if serial else []),
        *([f"wwn:{wwn}"] if wwn else []),
        *([f"loop:{backing}"] if backing else []),
        *([f"partuuid:{partuuid}"] if partuuid else []),
    ]


def matching(wanted: str, found: list[Disk]) -> list[Disk]:
    """The disks that a stable name means. A kernel name (/dev/sdb) means none: it may mean another disk after a reboot."""
    if wanted.startswith("/dev/disk/"):
        real = os.path.realpath(wanted)
        return [disk for disk in found if disk.device == real] if os.path.exists(wanted) else []
    kind, colon, value = wanted.partition(":")
    if not colon:
        return [disk for disk in found if f"serial:{wanted}" in disk.names] if not wanted.startswith("/") else []
    if kind.lower() == "uuid":
        return [disk for disk in found if uuid_of(disk.device) == value.lower()]
    return [disk for disk in found if wanted in disk.names]


def partition_of(disk: Disk, found: list[Disk]) -> Disk | None:
    """The one partition of a disk, as it is shown now."""
    inner = [part for part in found if part.partition and os.path.basename(part.device) in disk.partitions]
    return inner[0] if len(inner) == 1 else None


# --- what is on one ----------------------------------------------------------------------------------------------------


def probe(device: str) -> dict[str, str]:
    """What blkid reads from the disk itself; empty where it recognizes nothing. Raises CannotLook."""
    done = run("blkid", "-p", "-o", "export", device)
    if done.returncode not in (0, 2):
        raise CannotLook(f"blkid cannot say what {device} holds: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def uuid_of(device: str) -> str:
    """The file system's UUID; empty where there is none or it cannot be read."""
    try:
        return probe(device).get("UUID", "").lower()
    except CannotLook:
        return ""


def content(disk: Disk) -> Content:
    """What a disk holds, by its signatures and its edges. Raises CannotLook, OSError."""
    told = run("wipefs", "--json", "--no-act", disk.device)
    if told.returncode:
        raise CannotLook(f"wipefs cannot read {disk.device}: {told.stderr.strip()}")
    signatures = json.loads(told.stdout)["signatures"] if told.stdout.strip() else []
    seen = probe(disk.device)
    kinds = [item["type"] for item in signatures]
    table = seen.get("PTTYPE", "") if not seen.get("TYPE") else ""
    if kinds or seen.get("TYPE") or table:
        kind = seen.get("TYPE") or table or kinds[0]
        name = seen.get("UUID") or seen.get("PTUUID") or "no-uuid"
        label = f" labelled {seen['LABEL']!r}" if seen.get("LABEL") else ""
        inner = f" with {len(disk.partitions)} partitions" if disk.partitions else ""
        return Content(
            False, f"{kind}-{name}", f"holds {kind} {name}{label}{inner}", seen.get("TYPE", ""), seen.get("UUID", "").lower(), table
        )
    if disk.partitions:
        return Content(False, "partitions", f"has {len(disk.partitions)} partitions")
    if not _edges_are_zero(disk):
        return Content(False, "unknown", "holds data of a kind that blkid and wipefs do not know")
    return Content(True)


def _edges_are_zero(disk: Disk) -> bool:
    with open(disk.device, "rb", buffering=0) as handle:
        for offset in (0, max(0, disk.size_bytes - EDGE_BYTES)):
            handle.seek(offset)
            data = handle.read(EDGE_BYTES)
            if data.strip(b"\0"):
                return False
    return True


def opens_exclusively(device: str) -> bool:
    """Whether nobody has it mounted, held or open exclusively. Raises OSError for any other reason."""
    try:
        os.close(os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True
