# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Which samples of a store are intact, and what the others are. Done is judged by content; a file name proves nothing.

`survey` walks one directory of the store and yields one plain dict a file, so that it can run in a child: forked, or of the host
environment, which can also digest and look at the values. `take` adds the lines up. Standard library only, Python 3.9 and newer.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Callable

from ansible_collections.relight.recovery.plugins.module_utils import ckpt, layouts
from ansible_collections.relight.recovery.plugins.module_utils.dataset import HEADER as FIXED_HEADER
from ansible_collections.relight.recovery.plugins.module_utils.dataset import BadDataset, Fixed, FixedRecords, entries
from ansible_collections.relight.recovery.plugins.module_utils.durable import TEMPORARY
from ansible_collections.relight.recovery.plugins.module_utils.layouts import Layout, Seen
from ansible_collections.relight.recovery.plugins.module_utils.store import HERE, Entry, Manifest, Runs, Store

DEPTHS = ("names", "headers", "content")
INTACT, TORN, CORRUPT, FOREIGN, DOUBTFUL, MISSING = "intact", "torn", "corrupt", "foreign", "doubtful", "missing"
UNJUDGED, UNREAD = "unjudged", "unread"  # could not be looked at; was not, since only names were
MOVED = (TORN, CORRUPT, FOREIGN, DOUBTFUL)  # what quarantine is for; what could not be judged stays where it is
ADOPTED = "adopted"  # the run of samples that are older than this store's manifests
# What an intact sample is trusted by: its digest was made while Relight wrote it; the format's own checksums held when it was read
# whole; its values could be states when it was read whole, in a format without checksums; its structure and tokens alone.
WRITTEN, CHECKSUMS, VALUES, STRUCTURE = "written", "checksums", "values", "structure"
TRUST = (WRITTEN, CHECKSUMS, VALUES, STRUCTURE)
ZERO_BYTES = 3584  # so many zero bytes in a row are a hole in a page, not a state


@dataclass(frozen=True)
class Request:
    """What to look at. `folder` is a shard directory's name, or '' for the top of the store; `skip` are names in it."""

    store: str
    layout: str
    dataset: str | None = None
    identity: dict[str, Any] | None = None
    depth: str = "headers"
    folder: str = ""
    skip: tuple[str, ...] = ()


@dataclass(frozen=True)
class Content:
    """What a file's bytes say: its digest (None where no digest can be made here), entries whose checksum fails, bad values."""

    digest: str | None
    broken: tuple[str, ...] = ()
    non_finite: int = 0
    zero_bytes: int = 0


@dataclass(frozen=True)
class Found:
    """The verdict on one file, or on an index that has none. `enter` is the manifest line that it lacks and has earned."""

    path: str
    index: int | None
    verdict: str
    why: str = ""
    bytes: int = 0
    tokens: int = 0
    unknown_before: bool = False
    enter: dict[str, Any] | None = None
    trust: str = ""


ContentLook = Callable[[str, Seen], Content]


def checksums(path: str, seen: Seen) -> Content:
    """The content look of the standard library: the format's own checksums and no digest. Raises OSError, ckpt.Torn."""
    return Content(None, layouts.broken_parts(path, seen))


# --- judging one file: pure --------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """An identity's value in a form that compares: JSON text is read, `torch.float32` is `float32`."""
    if isinstance(value, str):
        try:
            return _plain(json.loads(value)) if value[:1] in "[{" else value.rpartition("torch.")[2]
        except ValueError:
            return value
    return list(value) if isinstance(value, tuple) else value


def differing(reference: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names under which two identities differ; a name that either lacks is not compared."""
    return sorted(name for name in reference if name in other and _plain(reference[name]) != _plain(other[name]))


def _judge_identity(seen: Seen, entry: Entry | None, runs: Runs, reference: Mapping[str, Any] | None) -> tuple[str, str]:
    run = seen.extra.get("run") or (entry.run if entry else "")
    if not run or run == ADOPTED:
        own: Mapping[str, Any] = {}
    else:
        known = runs.identity_of(run)
        if known is None and not runs.runs:
            return UNJUDGED, f"runs.json does not tell of its run {run!r}"
        if known is None:
            return FOREIGN, f"is of the run {run!r}, which runs.json does not know"
        own = known
    told = {**own, **{name: value for name, value in seen.extra.items() if name in ("layers", "norm", "dtype")}}
    real: dict[str, Any] = {"dtype": seen.dtype, "hidden_size": seen.hidden_size}
    if seen.norm is not None:
        said = seen.extra.get("norm", seen.norm)  # the file's flag knows no surrogates
        real["norm"] = said if said.startswith(seen.norm) else seen.norm
    for left, right in ((own, seen.extra), (told, real), (reference or {}, {**told, **real})):
        names = differing(left, right)
        if names:
            return FOREIGN, f"is of another run: its {names[0]} is {right[names[0]]}, not {left[names[0]]}"
    return INTACT, ""


def judge_structure(
    seen: Seen, entry: Entry | None, record: Fixed | None, runs: Runs, reference: Mapping[str, Any] | None
) -> tuple[str, str]:
    """The verdict on a file whose structure is whole, by its length, tokens, manifest line and identity."""
    if entry and seen.bytes != entry.bytes:
        return (TORN if seen.bytes < entry.bytes else CORRUPT), f"has {seen.bytes} bytes, the manifest says {entry.bytes}"
    if seen.extra.get("token_digest", seen.token_digest) != seen.token_digest:
        return CORRUPT, "holds other tokens than those it was written with"
    if entry and (entry.token_digest, entry.tokens) != (seen.token_digest, seen.tokens):
        return CORRUPT, "holds other tokens than the manifest says"
    if record and (record.token_digest, record.tokens) != (seen.token_digest, seen.tokens):
        return FOREIGN, f"holds {seen.tokens} tokens that are not those of its record ({record.tokens} tokens)"
    if record and seen.record_digest is not None and record.digest != seen.record_digest:
        return FOREIGN, "has another loss mask than its record"
    return _judge_identity(seen, entry, runs, reference)


def judge_content(content: Content, entry: Entry | None) -> tuple[str, str]:
    """The verdict on a file whose structure was found right, by its bytes."""
    if content.broken:
        return CORRUPT, f"does not match its checksum in {content.broken[0]}"
    if entry and content.digest and content.digest != entry.digest:
        return CORRUPT, "does not match the digest in the manifest"
    if content.non_finite:
        return DOUBTFUL, f"has {content.non_finite} states that are not finite numbers"
    if content.zero_bytes >= ZERO_BYTES:
        return DOUBTFUL, f"has {content.zero_bytes} zero bytes in a row among its states"
    return INTACT, ""


# --- looking -----------------------------------------------------------------------------------------------------------


class _Judge:
    """One directory's files against what is known of them."""

    def __init__(self, request: Request, place: Store, records: FixedRecords | None, content: ContentLook) -> None:
        self.request = request
        self.place = place
        self.records = records
        self.content = content
        self.runs = place.runs()
        self.reference = request.identity or self.runs.identity

    def _record(self, index: int) -> Fixed | None:
        return self.records.items[index] if self.records is not None and index < len(self.records) else None

    def file(self, path: str, index: int, entry: Entry | None) -> Found:
        """The verdict on one sample. What the operating system will not read is unjudged."""
        full = os.path.join(self.place.path, path)
        try:
            size = os.stat(full).st_size
            if self.records is not None and index >= len(self.records):
                return Found(path, index, FOREIGN, f"is of record {index}, and there are {len(self.records)}", size)
            if self.request.depth == "names":
                return self._by_name(path, index, entry, size)
            return self._by_content(path, full, index, entry, size)
        except FileNotFoundError:
            return Found(path, index, MISSING, "went away while it was looked at")
        except OSError as error:
            return Found(path, index, UNJUDGED, f"cannot be read: {error.strerror or error}")

    def _by_name(self, path: str, index: int, entry: Entry | None, size: int) -> Found:
        if entry is None:
            return Found(path, index, UNREAD, "is not in the manifest, and only its name was looked at", size)
        if size != entry.bytes:
            return Found(path, index, TORN if size < entry.bytes else CORRUPT, f"has {size} bytes, the manifest says {entry.bytes}", size)
        return Found(path, index, INTACT, bytes=size, tokens=entry.tokens, trust=_trust(entry))

    def _by_content(self, path: str, full: str, index: int, entry: Entry | None, size: int) -> Found:
        record = self._record(index)
        tokens = record.tokens if record else entry.tokens if entry else 0
        try:
            seen = self.place.layout.look(full)
            verdict, why = judge_structure(seen, entry, record, self.runs, self.reference)
            digest = None
            if verdict == INTACT and (self.request.depth == "content" or entry is None):
                content = self.content(full, seen)
                verdict, why = judge_content(content, entry)
                digest = content.digest
        except ckpt.Torn as error:
            same = entry is not None and size == entry.bytes
            return Found(path, index, CORRUPT if same else TORN, f"{error}", size, tokens)
        except ckpt.Strange as error:
            return Found(path, index, CORRUPT if entry and size == entry.bytes else FOREIGN, f"{error}", size, tokens)
        except layouts.Unsupported as error:
            return Found(path, index, UNJUDGED, f"{error}", size, tokens)
        enter, trust = None, ""
        if verdict == INTACT:
            trust = _trust(entry) if entry else CHECKSUMS if seen.checked else VALUES if digest else STRUCTURE
        if verdict == INTACT and entry is None and digest:
            run = seen.extra.get("run") or ADOPTED
            name, time = os.path.basename(path), round(seen.mtime, 3)
            enter = asdict(Entry(index, name, seen.bytes, seen.tokens, seen.token_digest, run, digest, time, trust))
        before = entry.run == ADOPTED if entry else not seen.extra.get("run")
        return Found(path, index, verdict, why, seen.bytes, seen.tokens, before, enter, trust)


def _trust(entry: Entry) -> str:
    """What a manifest's line rests on. Lines of adopted samples were written before lines said it: checksums, of archives."""
    return entry.evidence or (CHECKSUMS if entry.run == ADOPTED else WRITTEN)


def _newest_first(folder: str, names: list[str]) -> list[str]:
    """What is younger is in more doubt, and is looked at first; what is gone by now last."""

    def age(name: str) -> tuple[float, str]:
        try:
            return -os.stat(os.path.join(folder, name)).st_mtime, name
        except OSError:
            return 0.0, name

    return sorted(names, key=age)


def _in_doubt_first(place: Store, shards: list[str]) -> list[str]:
    """Directories without a manifest hold what nobody vouches for: the newest of them first, then the others in order."""
    bare = [name for name in shards if not os.path.exists(Manifest(os.path.join(place.path, name)).path)]
    return _newest_first(place.path, bare) + [name for name in shards if name not in set(bare)]


def _listing(path: str, layout: Layout) -> tuple[list[str], int]:
    """The names in a directory that a trainer's reader would list, sorted, and how many temporary names there are."""
    names, temporaries = [], 0
    with os.scandir(path) as items:
        for item in items:
            if item.name.startswith(TEMPORARY):
                temporaries += 1
            elif item.name.endswith(layout.suffixes):
                names.append(item.name)
    return sorted(names), temporaries


def _strays(place: Store, shards: list[str]) -> Iterator[str]:
    """Files outside the shard directories that a trainer's reader would list where it walks the whole store."""
    if not place.layout.walked:
        return
    for folder, folders, names in os.walk(place.path):
        inside = os.path.relpath(folder, place.path)
        folders[:] = [name for name in folders if inside != "." or name not in shards]
        for name in names if inside != "." or HERE not in shards else ():
            if name.endswith(place.layout.suffixes) and not name.startswith(TEMPORARY):
                yield os.path.normpath(os.path.join(inside, name))


def _top(request: Request, place: Store, records: FixedRecords | None) -> Iterator[dict[str, Any]]:
    try:
        shards = _in_doubt_first(place, place.shards())
    except FileNotFoundError:
        shards, there = [], False
    else:
        there = True
    total: int | None = len(records) if records is not None else None
    if records is None and request.dataset and os.path.isfile(request.dataset):
        with suppress(BadDataset):  # the dataset's own gate tells of it
            total = sum(1 for _entry in entries(request.dataset))
    told = {"shards": shards, "total": total, "tokens": records.tokens if records is not None else None, "fixed": records is not None}
    compared = [link.get("samples") for link in place.runs().links if link.get("verdict") == "pass"]
    yield {"top": {**told, "compared": sum(number for number in compared if isinstance(number, int))}}
    if not there:
        return
    temporaries = 0 if HERE in shards else _listing(place.path, place.layout)[1]
    yield {"temporaries": temporaries, "quarantined": len(place.quarantined())}
    for path in _strays(place, shards):
        yield _line(Found(path, None, FOREIGN, "is where no sample belongs", os.path.getsize(os.path.join(place.path, path))))


def _shard(request: Request, judge: _Judge) -> Iterator[dict[str, Any]]:
    place, folder = judge.place, request.folder
    known = Manifest(os.path.join(place.path, folder)).read()
    names, temporaries = _listing(os.path.join(place.path, folder), place.layout)
    yield {"temporaries": temporaries}
    by_name = {entry.file: entry.index for entry in known.values()} if place.layout.by_record else {}
    there = set()
    files = {entry.file for entry in known.values()}
    new = _newest_first(os.path.join(place.path, folder), [name for name in names if name not in files])
    for name in [*new, *(name for name in names if name in files)]:
        path = inside(folder, name)
        index = place.layout.index_of(path)
        index = by_name.get(name) if index is None else index
        if index is not None:
            there.add(index)
        if name in request.skip:
            continue
        yield {"now": name}
        if index is not None:
            yield _line(judge.file(path, index, known.get(index)))
        elif name.endswith(".gz"):
            yield _line(Found(path, None, UNJUDGED, "is compressed, which cannot be judged yet"))
        elif place.layout.by_record and judge.records is None:
            yield _line(Found(path, None, UNJUDGED, "is named by its record, and the fixed records are not there to tell which"))
        else:
            yield _line(Found(path, None, FOREIGN, "is where no sample of its name belongs"))
    for index in sorted(set(known) - there):
        yield _line(Found(inside(folder, known[index].file), index, MISSING, "is in the manifest only"))


def inside(folder: str, name: str) -> str:
    """A file's path in the store."""
    return name if folder == HERE else f"{folder}/{name}"


def _line(found: Found) -> dict[str, Any]:
    return {"found": asdict(found)}


def open_records(dataset: str | None) -> FixedRecords | None:
    """The fixed records where `dataset` is their directory. Raises BadDataset, OSError."""
    if dataset and os.path.exists(os.path.join(dataset, FIXED_HEADER)):
        return FixedRecords(dataset)
    return None


def survey(request: Request, content: ContentLook = checksums) -> Iterator[dict[str, Any]]:
    """Look at one directory of the store; yields plain dicts for `Tally.add`.

    Raises layouts.UnknownLayout, store.NewerStore, BadDataset, ValueError (runs.json), OSError.
    """
    place = Store(request.store, layouts.layout(request.layout, request.dataset))
    records = open_records(request.dataset)
    try:
        if request.folder:
            yield from _shard(request, _Judge(request, place, records, content))
        else:
            place.runs()  # unreadable runs are told at once
            yield from _top(request, place, records)
    finally:
        if records is not None:
            records.close()


# --- adding up ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What a store was found to hold. Only what is not intact is kept by name, so that memory stays bounded."""

    total: int | None = None
    tokens_total: int | None = None
    fixed: bool = False
    shards: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((INTACT, *MOVED, UNJUDGED, UNREAD), 0))
    bytes: int = 0
    tokens_intact: int = 0
    adopted: int = 0
    trusted: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TRUST, 0))
    compared: int = 0
    unentered: int = 0
    temporaries: int = 0
    quarantined: int = 0
    found: list[Found] = field(default_factory=list)
    enter: list[Found] = field(default_factory=list)
    _there: set[int] = field(default_factory=set)
    _gone: set[int] = field(default_factory=set)

    def add(self, line: dict[str, Any]) -> None:
        """Take in one line of a survey.

        A host's environment may be older than this: a check run, or an assessment after an upgrade, looks with the former one.
        """
        if "top" in line:
            top = line["top"]
            self.shards, self.total, self.tokens_total, self.fixed = top["shards"], top["total"], top["tokens"], top["fixed"]
            self.compared = top.get("compared", 0)
        self.temporaries += line.get("temporaries", 0)
        self.quarantined += line.get("quarantined", 0)
        if "found" in line:
            self._add(Found(**{item.name: line["found"][item.name] for item in fields(Found) if item.name in line["found"]}))

    def _add(self, found: Found) -> None:
        if found.verdict == MISSING:
            if found.index is not None:
                self._gone.add(found.index)
            return
        self.counts[found.verdict] += 1
        self.bytes += found.bytes
        if found.index is not None:
            self._there.add(found.index)
        if found.verdict != INTACT:
            self.found.append(found)
            return
        self.tokens_intact += found.tokens
        self.adopted += found.unknown_before
        if found.trust:
            self.trusted[found.trust] += 1
        if found.enter is not None:
            self.unentered += 1
            self.enter.append(found)

    @property
    def intact(self) -> int:
        return self.counts[INTACT]

    def missing(self) -> array[int]:
        """The indices that have no file, in order. Without a dataset only those that a manifest knows can be named."""
        wanted = range(self.total) if self.total is not None else sorted(self._gone)
        return array("q", (index for index in wanted if index not in self._there))

    def to_do(self) -> array[int]:
        """The indices that have no intact sample, in order."""
        bad = {item.index for item in self.found if item.index is not None}
        wanted = range(self.total) if self.total is not None else sorted(self._gone | self._there)
        return array("q", (index for index in wanted if index not in self._there or index in bad))

    def intact_indices(self) -> set[int]:
        """The indices that have an intact sample."""
        return self._there - {item.index for item in self.found if item.index is not None}

    def after(self, moved: list[Found]) -> Tally:
        """What the store holds once `moved` are in quarantine and `enter` is in the manifests. Counts stay as they were found."""
        gone = {item.index for item in moved if item.index is not None}
        paths = {item.path for item in moved}
        left = [item for item in self.found if item.path not in paths]
        return replace(
            self, found=left, enter=[], quarantined=self.quarantined + len(moved), _there=self._there - gone, _gone=self._gone | gone
        )

    def evidence(self) -> dict[str, Any]:
        missing = len(self.missing())
        return {
            "total": self.total if self.total is not None else len(self._there | self._gone),
            "tokens_total": self.tokens_total,
            **self.counts,
            "missing": missing,
            "bytes": self.bytes,
            "tokens_intact": self.tokens_intact,
            "adopted": self.adopted,
            "trusted_by": dict(self.trusted),
            "compared_by_continuity": self.compared,
            "not_in_manifest": self.unentered,
            "temporary_files": self.temporaries,
            "files_in_quarantine": self.quarantined,
        }


def take(
    path: str,
    layout: str,
    dataset: str | None = None,
    identity: dict[str, Any] | None = None,
    depth: str = "headers",
    content: ContentLook = checksums,
    enter: Callable[[Found], None] | None = None,
) -> Tally:
    """Look at a whole store in this process; for callers that may hang with it. Raises what `survey` raises.

    `enter` is called for each sample that has earned a line in the manifest, at once, so that no kill makes it be read again.
    """
    tally = Tally()
    for line in survey(Request(path, layout, dataset, identity, depth), content):
        tally.add(line)
    for folder in list(tally.shards):
        for line in survey(Request(path, layout, dataset, identity, depth, folder), content):
            tally.add(line)
            if enter is not None and line.get("found", {}).get("enter"):
                enter(tally.enter[-1])
    return tally
