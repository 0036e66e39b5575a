# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""`relight snapshot`: a durable list of the samples that are whole now, for a trainer that reads while the extraction runs.

A sample is listed when its manifest knows it and its file has the size that the manifest says: it was written durably before its
line was. A listed file never changes; the list is replaced in one step. With --links the list is a directory of links too, which
a reader that walks directories can be pointed at.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils.durable import replacing
from ansible_collections.relight.recovery.plugins.module_utils.layouts import UnknownLayout, layout
from ansible_collections.relight.recovery.plugins.module_utils.store import HERE, Entry, NewerStore, Store

from relight.extract.config import BAD_INPUT, DONE, GAVE_UP, BadInput

SCHEMA = 1


@dataclass(frozen=True)
class Listed:
    """One sample; `path` is relative to the store."""

    path: str
    entry: Entry

    def line(self) -> str:
        entry = self.entry
        told = {"index": entry.index, "file": self.path, "bytes": entry.bytes, "tokens": entry.tokens, "token_digest": entry.token_digest}
        return json.dumps({**told, "digest": entry.digest}, sort_keys=True)


def listed(store: Store) -> Iterator[Listed]:
    """The samples that are whole by their manifest, in the order of their indices. Raises OSError, NewerStore."""
    for shard in store.shards():
        known = store.entries_of(shard)
        for index in sorted(known):
            entry = known[index]
            path = entry.file if shard == HERE else f"{shard}/{entry.file}"
            with suppress(FileNotFoundError):
                if os.stat(os.path.join(store.path, path)).st_size == entry.bytes:
                    yield Listed(path, entry)


def write(path: str, store: Store, samples: Sequence[Listed]) -> dict[str, Any]:
    """Replace the list: a line about the whole, then a line a sample. Returns the first line. Raises OSError."""
    lines = [sample.line() for sample in samples]
    head = {
        "schema": SCHEMA,
        "store": os.path.abspath(store.path),
        "layout": store.layout.name,
        "time": round(time.time(), 3),
        "samples": len(samples),
        "tokens": sum(sample.entry.tokens for sample in samples),
        "bytes": sum(sample.entry.bytes for sample in samples),
        "digest": blake2b("".join(f"{line}\n" for line in lines).encode(), digest_size=16).hexdigest(),
    }
    with replacing(path) as handle:
        handle.write("".join(f"{line}\n" for line in [json.dumps(head, sort_keys=True), *lines]).encode())
    return head


def link(folder: str, store: Store, samples: Sequence[Listed]) -> None:
    """Make a directory of links the same as the list; other things in it are left alone. Raises OSError, BadInput."""
    base = os.path.abspath(store.path)
    if os.path.commonpath([os.path.realpath(folder), os.path.realpath(base)]) == os.path.realpath(base):
        raise BadInput("the links must lie outside the store, whose files a trainer would find twice")
    wanted = {sample.path: os.path.join(base, sample.path) for sample in samples}
    for here, _folders, names in os.walk(folder):
        for name in names:
            path = os.path.join(here, name)
            inside = os.path.relpath(path, folder)
            if os.path.islink(path) and os.readlink(path).startswith(f"{base}/") and os.readlink(path) != wanted.get(inside):
                os.unlink(path)
    for inside, target in wanted.items():
        path = os.path.join(folder, inside)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not os.path.islink(path):
            os.symlink(target, path)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `relight snapshot`; the exit code."""
    parser = argparse.ArgumentParser(prog="relight snapshot", description="List the samples that are whole now.")
    parser.add_argument("--store", required=True, metavar="DIR")
    parser.add_argument("--layout", default="specforge", metavar="NAME")
    parser.add_argument("--to", required=True, metavar="FILE", help="the list: JSON lines, the first about the whole")
    parser.add_argument("--links", metavar="DIR", help="make this directory links to the listed samples as well")
    options = parser.parse_args(argv)
    try:
        store = Store(options.store, layout(options.layout))
        samples = list(listed(store))
        if options.links:
            link(options.links, store, samples)
        head = write(options.to, store, samples)
    except (BadInput, UnknownLayout) as error:
        print(f"relight snapshot: {error}", file=sys.stderr)
        return BAD_INPUT
    except (OSError, NewerStore) as error:
        print(f"relight snapshot: {error}", file=sys.stderr)
        return GAVE_UP
    print(f"{options.to}: {head['samples']} samples, {head['tokens']} tokens, {head['bytes']} bytes, digest {head['digest']}")
    return DONE
