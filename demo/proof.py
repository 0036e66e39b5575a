# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The proof: the recovered store equals one that never met a disaster, and not a token more was computed than must be.

Nothing here asks Relight what it did. Samples are compared number by number; tokens are those that the server itself counted
in its log; what had to be redone is what the drill wrote down when it broke it.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ansible_collections.relight.recovery.plugins.module_utils import ckpt, layouts
from ansible_collections.relight.recovery.plugins.module_utils.durable import read_lines

LARGEST_RELATIVE_ERROR = 1e-4
BLOCKS = ("hidden_state", "aux_hidden_state")
BATCH = re.compile(r"Prefill batch.*?#new-token: (\d+), #cached-token: (\d+)")
FINISHED = re.compile(r'(\{"timestamp": .*"event": "request\.finished".*\})')
# On a busy machine the dump is there seconds before the HTTP answer, and the client does not wait for that for ever.
DROPPED = re.compile(r"disconnected from the client side.*Abort request obj\.rid='([^']+)'")
OURS = re.compile(r"relight-[0-9a-f]{8}-(\d+)-(\d+)\.\d+\.\d+")


@dataclass
class Comparison:
    """Two stores, sample by sample. `errors` are per sample: the largest relative error of a token in any block."""

    errors: dict[int, float] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def worst(self) -> float:
        return max(self.errors.values(), default=float("nan"))


@dataclass
class Requests:
    """What the server's log says of a stretch of time: its own token counter, and each request that it finished.

    `dropped` are those whose answer nobody waited for.
    """

    counted_tokens: int = 0
    cached_tokens: int = 0
    finished: list[tuple[str, int]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass
class Account:
    """Tokens that the server computed in the run with the disaster, by why it had to. `faults` are sentences; none is proof."""

    counted: int = 0
    one_pass: int = 0
    torn: int = 0
    corrupt: int = 0
    in_flight: int = 0
    continuity: int = 0
    probes: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def explained(self) -> int:
        return self.torn + self.corrupt + self.in_flight + self.continuity + self.probes


def read_sample(path: Path) -> dict[str, Any]:
    """Every tensor of a sample as an array. Raises ckpt.Torn, ckpt.Strange, OSError."""
    header = ckpt.read_header(str(path))
    broken = ckpt.broken_entries(str(path), header)
    if broken:
        raise ckpt.Torn(f"has wrong bytes in {', '.join(broken)}")
    arrays = {}
    for name, tensor in header.tensors.items():
        data = np.frombuffer(ckpt.read_tensor(str(path), tensor), dtype=tensor.dtype)
        arrays[name] = data.reshape(tensor.shape)
    return arrays


def relative_error(found: Any, wanted: Any) -> float:
    """Per token, the norm of the difference over the norm of what is wanted; the largest of them."""
    scale = np.linalg.norm(wanted, axis=-1)
    difference = np.linalg.norm(found - wanted, axis=-1)
    value = np.divide(difference, scale, out=np.where(difference > 0, np.inf, 0.0), where=scale > 0)
    return float(value.max())


def compare(found: Path, wanted: Path, records: int) -> Comparison:
    """Every sample of `found` against the same of `wanted`."""
    layout = layouts.layout("specforge")
    result = Comparison()
    for index in range(records):
        name = layout.path_of(index)
        try:
            ours, theirs = read_sample(found / name), read_sample(wanted / name)
        except (OSError, ckpt.Torn, ckpt.Strange) as error:
            result.faults.append(f"{name}: {error}")
            continue
        if ours.keys() != theirs.keys() or any(ours[k].shape != theirs[k].shape or ours[k].dtype != theirs[k].dtype for k in ours):
            result.faults.append(f"{name}: another shape than in the undisturbed run")
            continue
        if any(not np.array_equal(ours[k], theirs[k]) for k in ("input_ids", "loss_mask")):
            result.faults.append(f"{name}: other tokens than in the undisturbed run")
        result.tokens[index] = int(theirs["input_ids"].shape[0])
        # Three layers lie side by side in the auxiliary block: each is judged by its own scale.
        pairs = [(ours["hidden_state"], theirs["hidden_state"])]
        width = theirs["hidden_state"].shape[-1]
        for start in range(0, theirs["aux_hidden_state"].shape[-1], width):
            layer = slice(start, start + width)
            pairs.append((ours["aux_hidden_state"][..., layer], theirs["aux_hidden_state"][..., layer]))
        result.errors[index] = max(relative_error(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs)
        if not result.errors[index] <= LARGEST_RELATIVE_ERROR:
            result.faults.append(f"{name}: relative error {result.errors[index]:.1e}")
    for folder, _, names in os.walk(found):
        if "quarantine" not in Path(folder).parts:
            for name in names:
                extra = layout.index_of(os.path.relpath(os.path.join(folder, name), found))
                if extra is not None and extra >= records:
                    result.faults.append(f"{name}: a sample of no record")
    return result


def requests(log: Path, start: int = 0, end: int | None = None) -> Requests:
    """Read a stretch of the server's log, given in bytes."""
    with open(log, "rb") as handle:
        handle.seek(start)
        data = handle.read() if end is None else handle.read(end - start)
    result = Requests()
    for line in data.decode(errors="replace").replace("\r", "\n").splitlines():
        batch = BATCH.search(line)
        if batch:
            result.counted_tokens += int(batch[1])
            result.cached_tokens += int(batch[2])
        finished = FINISHED.search(line)
        if finished:
            event = json.loads(finished[1])
            result.finished.append((str(event["rid"]), int(event["out"]["meta_info"]["prompt_tokens"])))
        dropped = DROPPED.search(line)
        if dropped:
            result.dropped.append(dropped[1])
    answered = {rid for rid, _ in result.finished}
    result.dropped = [rid for rid in dict.fromkeys(result.dropped) if rid not in answered]
    return result


def client_pids(journal: Path) -> set[int]:
    """The pids of the extraction clients, by the journal: other users of the same kind of request are not among them."""
    lines = read_lines(str(journal))
    return {int(line["pid"]) for line in lines if line.get("step") == "extract" and line.get("event") == "begin"}


def indexes(names: list[str]) -> set[int]:
    """The records of sample files named relative to a store."""
    layout = layouts.layout("specforge")
    return {index for name in names if (index := layout.index_of(name)) is not None}


def quarantined(folder: Path) -> set[int]:
    """The records whose samples lie in the store's quarantine."""
    found = set()
    for path in _files(folder / "quarantine"):
        match = re.search(r"/(rows_[\d-]+/data_\d+\.ckpt)", str(path))
        if match:
            found |= indexes([match[1]])
    return found


def _files(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent) / name for name in names)


def account(seen: Requests, clients: set[int], tokens: dict[int, int], drill: dict[str, Any], moved: set[int]) -> Account:
    """Explain every token that the server counted. `tokens` are the lengths of all records, `moved` what was quarantined."""
    torn, corrupt = indexes(drill["torn"]), indexes(drill["flipped"])
    in_flight = set(drill["fill"]["progress"]["in_flight"])
    result = Account(counted=seen.counted_tokens, one_pass=sum(tokens.values()))
    result.torn, result.corrupt, result.in_flight = (sum(tokens[index] for index in group) for group in (torn, corrupt, in_flight))
    times: Counter[int] = Counter()
    # One that was dropped is a pass over its record too: the server's own counter, below, refutes it if it was not.
    records = {rid: int(match[1]) for rid in seen.dropped if (match := OURS.fullmatch(rid))}
    ended = [*seen.finished, *((rid, tokens[index]) for rid, index in records.items() if index in tokens)]
    ended_tokens = sum(length for _, length in ended)
    for rid, length in ended:
        match = OURS.fullmatch(rid)
        if match and int(match[2]) in clients:
            times[int(match[1])] += 1
        elif match:
            result.continuity += length
        else:
            result.probes += length
    for index in tokens:
        expected = 1 + sum(index in group for group in (torn, corrupt, in_flight))
        if times[index] != expected:
            result.faults.append(f"record {index} was extracted {times[index]} times, not {expected}")
    if moved != torn | corrupt:
        result.faults.append(f"quarantined were {sorted(moved)}, damaged were {sorted(torn | corrupt)}")
    if seen.cached_tokens:
        result.faults.append(f"{seen.cached_tokens} tokens came from a cache")
    if ended_tokens != seen.counted_tokens:
        result.faults.append(f"the finished requests have {ended_tokens} tokens, the server counted {seen.counted_tokens}")
    if result.counted - result.one_pass != result.explained:
        result.faults.append(f"{result.counted - result.one_pass} tokens beyond one pass, {result.explained} explained")
    middle = sorted(tokens.values())[len(tokens) // 2]
    small = sorted(index for index in torn | corrupt if tokens[index] < middle)
    if small:
        result.faults.append(f"the damaged samples {small} are shorter than the median of {middle} tokens")
    return result


def table(result: Account) -> str:
    """The account as a reader sees it."""
    rows = [
        ("prefilled over both runs, by the server's own counter", result.counted),
        ("less one pass over all records", -result.one_pass),
        ("leaves", result.counted - result.one_pass),
        None,
        ("the torn sample, redone", result.torn),
        ("the sample with flipped bytes, redone", result.corrupt),
        ("in flight at the kill, redone", result.in_flight),
        ("continuity: intact samples extracted again", result.continuity),
        ("probes and warm-ups of the server", result.probes),
        ("together", result.explained),
    ]
    return "\n".join(f"{row[1]:>8,}  {row[0]}" if row else "" for row in rows)


def files_with(secret: str, folders: list[Path], but: list[Path]) -> list[Path]:
    """The files below `folders` that hold the secret, except `but`, which is where the drill put it."""
    kept = {path.resolve() for path in but}
    wanted = secret.encode()
    found = []
    for folder in folders:
        for path in _files(folder):
            if path.is_file() and path.resolve() not in kept and wanted in path.read_bytes():
                found.append(path)
    return found
