# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A store to another place as it is: the files by rsync, then the manifests, and all of it checked where it arrived.

The files go first and the manifests after them. Here every file is read against the digest in its manifest; there it is read
again, by us where we can, else by rsync's own checksum of both sides.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ansible_collections.relight.recovery.plugins.module_utils import ckpt
from ansible_collections.relight.recovery.plugins.module_utils.durable import fsync_directory, replacing
from ansible_collections.relight.recovery.plugins.module_utils.store import MANIFEST, RUNS, Entry, Store

from relight.extract.config import DONE, SOME_GIVEN_UP, BadInput, GiveUp
from relight.extract.missing import file_digest

NAMED = 8
_REMOTE = re.compile(r"[^/:]+:.+|rsync://")


@dataclass(frozen=True)
class Held:
    """One sample to be carried: its path in the store and its line in the manifest."""

    path: str
    entry: Entry


def is_remote(place: str) -> bool:
    return _REMOTE.match(place) is not None


def run(source: Store, place: str, wanted: frozenset[int] | None, say: Callable[[str], None]) -> int:
    """Carry the samples that `wanted` names, all where it names none; the exit code. Raises BadInput, GiveUp, OSError."""
    remote = is_remote(place)
    if not remote and os.path.realpath(place) == os.path.realpath(source.path):
        raise BadInput("the other place must not be the store itself")
    if remote and shutil.which("rsync") is None:
        raise BadInput(f"there is no rsync here to reach {place} with")
    held, bad = _judged(source, wanted)
    if not held and not bad:
        raise BadInput(f"no manifest in {source.path} knows such a sample: let the inventory judge and enter them first")
    paths = [item.path for item in held]
    _send(source.path, place, paths)
    _send(source.path, place, _notes(source, paths))
    wrong = _differing(source.path, place, paths) if remote else _wrong_there(place, held)
    if wrong:  # of a former life for one, whose time and size are right
        _send(source.path, place, wrong, again=True)
        wrong = _differing(source.path, place, wrong) if remote else _wrong_there(place, [item for item in held if item.path in wrong])
    if wrong:
        raise GiveUp(f"{len(wrong)} samples arrived at {place} with other bytes ({_named(wrong)}): see to its disk, then run it again")
    told = f"{len(held)} samples are at {place}, each read there and found equal"
    say(f"{told}; not carried, since they do not match their manifest: {len(bad)} ({_named(bad)})" if bad else told)
    return SOME_GIVEN_UP if bad else DONE


def _named(paths: list[str]) -> str:
    return ", ".join(paths[:NAMED]) + (" and others" if len(paths) > NAMED else "")


def _judged(source: Store, wanted: frozenset[int] | None) -> tuple[list[Held], list[str]]:
    """The samples that match their manifest, byte for byte, and the paths of those that do not."""
    held, bad = [], []
    for index, entry in sorted(source.entries().items()):
        if wanted is not None and index not in wanted:
            continue
        path = source.path_of(index)
        item = Held(os.path.relpath(path, source.path), entry)
        if _digest(path) == entry.digest:
            held.append(item)
        elif os.path.exists(path):
            bad.append(item.path)
    return held, bad


def _digest(path: str) -> str | None:
    try:
        return file_digest(path, os.path.getsize(path))
    except (OSError, ckpt.Torn):
        return None


def _notes(source: Store, paths: Iterable[str]) -> list[str]:
    """The manifests of these files, and what is known of their runs."""
    folders = sorted({os.path.dirname(path) for path in paths})
    names = [os.path.join(folder, MANIFEST) for folder in folders] + [RUNS]
    return [name for name in names if os.path.exists(os.path.join(source.path, name))]


def _send(source: str, place: str, paths: list[str], again: bool = False) -> None:
    """Carry what is not there yet; `again`: also what looks as if it were."""
    if shutil.which("rsync"):
        _rsync(source, place, paths, *(["--ignore-times"] if again else []))
    else:
        _copy(source, place, paths, again)


def _rsync(source: str, place: str, paths: list[str], *options: str) -> str:
    """Carry files by their relative paths; what rsync says. Raises GiveUp."""
    with tempfile.NamedTemporaryFile("w", prefix="relight-export-") as listed:
        listed.write("".join(f"{path}\0" for path in paths))
        listed.flush()
        argv = ["rsync", "--times", "--perms", "--from0", f"--files-from={listed.name}", *options]
        done = subprocess.run(
            [*argv, "--", f"{source}/", place], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
        )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise GiveUp(f"rsync to {place} failed ({said}): mend that, then run it again: what has arrived is not sent again")
    return done.stdout


def _differing(source: str, place: str, paths: list[str]) -> list[str]:
    """The files that differ there, by rsync's checksum of the whole of each on both sides."""
    said = _rsync(source, place, paths, "--checksum", "--dry-run", "--itemize-changes", "--no-times", "--no-perms")
    return [line.split(" ", 1)[1] for line in said.splitlines() if line.startswith(("<f", ">f"))]


def _wrong_there(place: str, held: list[Held]) -> list[str]:
    """The files that are not what their manifest says, read from the disk."""
    wrong = []
    for item in held:
        path = os.path.join(place, item.path)
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if _digest(path) != item.entry.digest:
            wrong.append(item.path)
    for folder in sorted({os.path.dirname(item.path) for item in held}):
        fsync_directory(os.path.join(place, folder))
    return wrong


def _copy(source: str, place: str, paths: list[str], again: bool) -> None:
    """Without rsync: each file durably under a temporary name first; one of equal size and time is there already."""
    for path in paths:
        old, new = os.path.join(source, path), os.path.join(place, path)
        os.makedirs(os.path.dirname(new) or ".", exist_ok=True)
        told = os.stat(old)
        if not again and os.path.exists(new) and (os.stat(new).st_size, os.stat(new).st_mtime_ns) == (told.st_size, told.st_mtime_ns):
            continue
        with open(old, "rb") as reader, replacing(new) as writer:
            shutil.copyfileobj(reader, writer, 4 << 20)
        os.utime(new, ns=(told.st_atime_ns, told.st_mtime_ns))
