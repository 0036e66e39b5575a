# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Are a model's weights whole and of this model? Reads every header and the index; values only where digests are given."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import digests, safetensors
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
NAMED = 5  # how many tensors or files a sentence names before it only counts
NUMBERED = re.compile(r"-(\d{5,6})-of-(\d{5,6})\.safetensors$")
# Where the text model's parts lie in the checkpoints that are served: plain, or nested in a multi-modal one.
TEXT_MODEL = r"(?:model\.|language_model\.)*"
LAYER = re.compile(rf"{TEXT_MODEL}layers\.(\d+)\.")
HEAD = re.compile(rf"{TEXT_MODEL}lm_head\.weight$")  # what a trainer must be told where it is nested, as in Kimi-K2.5
WIDTHS = re.compile(rf"{TEXT_MODEL}(?:embed_tokens|norm)\.weight$")


@dataclass(frozen=True)
class Shard:
    """One file of weights. `fault` is (kind, sentence) where its header breaks a rule, `error` where it cannot be read."""

    name: str
    file_bytes: int = 0
    tensors: int = 0
    tensor_bytes: int = 0
    fault: tuple[str, str] | None = None
    error: str | None = None


@dataclass
class Seen:
    """A model directory as it was found."""

    path: str
    is_directory: bool = True
    config: dict[str, Any] | None = None
    config_fault: str | None = None
    index_fault: str | None = None
    indexed: bool = False
    index_total_bytes: int | None = None
    listed_shards: frozenset[str] = frozenset()
    listed_tensors: int = 0
    shards: list[Shard] = field(default_factory=list)
    missing_shards: list[str] = field(default_factory=list)
    extra_shards: list[str] = field(default_factory=list)
    misplaced: dict[str, tuple[str, str]] = field(default_factory=dict)  # tensor: (shard by the index, shard that has it)
    absent: dict[str, str] = field(default_factory=dict)  # tensor: the shard that should have it
    unlisted: dict[str, str] = field(default_factory=dict)  # tensor: the shard that has it
    dtypes: dict[str, int] = field(default_factory=dict)  # dtype: bytes
    widths: dict[str, int] = field(default_factory=dict)  # tensor: its last extent
    head: str | None = None  # the name of the output head; None where the embedding is the head
    layers: frozenset[int] = frozenset()
    fingerprint: str | None = None
    digests: dict[str, str | None] = field(default_factory=dict)  # file: its sha256, None where there is no such file
    undigested: tuple[str, ...] = ()  # files that the time did not suffice to read
    digested_bytes: int = 0


@dataclass(frozen=True)
class Expected:
    """What the baseline or the inventory says of this model; None where they say nothing."""

    shards: int | None = None
    fingerprint: str | None = None
    digests: dict[str, str] = field(default_factory=dict)
    complete: bool = False  # the digests name every weight file


@dataclass(frozen=True)
class Reading:
    """How files with known digests are read: `cache_dir` remembers digests, `write` says whether it may."""

    files: tuple[str, ...] = ()
    cache_dir: str | None = None
    write: bool = True
    reread: bool = False
    seconds: float = 600.0


def look(path: str, reading: Reading = Reading()) -> Seen:
    """Read a model directory. Raises OSError where the directory itself cannot be listed."""
    seen = Seen(path)
    if not os.path.isdir(path):
        seen.is_directory = False
        return seen
    _read_config(seen)
    weight_map = _read_index(seen)
    present = sorted(os.path.basename(name) for name in glob.glob(os.path.join(glob.escape(path), "*.safetensors")))
    _read_shards(seen, present, weight_map)
    if reading.files:
        cache = digests.Cache(reading.cache_dir, reading.write)
        answer = digests.of(path, reading.files, cache, reading.seconds, reading.reread)
        seen.digests, seen.undigested, seen.digested_bytes = answer.found, answer.unread, answer.read_bytes
    return seen


def _read_json(path: str) -> dict[str, Any]:
    """Raises OSError or ValueError."""
    with open(path, encoding="utf-8") as handle:
        value = json.load(handle)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def _read_config(seen: Seen) -> None:
    try:
        seen.config = _read_json(os.path.join(seen.path, CONFIG))
    except FileNotFoundError:
        seen.config_fault = "missing"
    except (OSError, ValueError) as error:
        seen.config_fault = str(error)


def _read_index(seen: Seen) -> dict[str, str]:
    """The index's weight map; empty where there is no index or it is broken."""
    try:
        index = _read_json(os.path.join(seen.path, INDEX))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        seen.index_fault = str(error)
        return {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(_plain_name(name) for name in weight_map.values()):
        seen.index_fault = "its weight_map does not name a shard for each tensor"
        return {}
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    seen.index_total_bytes = int(total) if isinstance(total, (int, float)) else None
    seen.indexed = True
    seen.listed_shards = frozenset(weight_map.values())
    seen.listed_tensors = len(weight_map)
    return weight_map


def _plain_name(name: Any) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..")


def _read_shards(seen: Seen, present: list[str], weight_map: dict[str, str]) -> None:
    """Read every header once, in the order of names; keep what judging needs, not the headers."""
    seen.missing_shards = sorted(seen.listed_shards.difference(present))
    seen.extra_shards = [name for name in present if seen.indexed and name not in seen.listed_shards]
    digest = hashlib.blake2b(digest_size=16)
    owner: dict[str, str] = {}
    layers: set[int] = set()
    for name in present:
        if name in seen.extra_shards:
            continue
        try:
            header = safetensors.read_header(os.path.join(seen.path, name))
        except safetensors.BadFile as error:
            seen.shards.append(Shard(name, fault=(error.kind, str(error))))
            continue
        except FileNotFoundError:  # a link into a cache whose blob is gone
            seen.missing_shards.append(name)
            continue
        except OSError as error:
            seen.shards.append(Shard(name, error=str(error)))
            continue
        digest.update(f"{name}\0{header.file_bytes}\0".encode())
        digest.update(header.raw)
        for tensor_name, tensor in header.tensors.items():
            _note(seen, layers, tensor_name, tensor)
            if seen.indexed and weight_map.get(tensor_name) != name:
                seen.unlisted.setdefault(tensor_name, name)
            owner[tensor_name] = name
        total = sum(tensor.end - tensor.begin for tensor in header.tensors.values())
        seen.shards.append(Shard(name, header.file_bytes, len(header.tensors), total))
    seen.layers = frozenset(layers)
    _compare_with_index(seen, weight_map, owner)
    if seen.shards and not seen.missing_shards and all(s.fault is None and s.error is None for s in seen.shards):
        seen.fingerprint = f"headers:{digest.hexdigest()}"


def _note(seen: Seen, layers: set[int], name: str, tensor: safetensors.Tensor) -> None:
    seen.dtypes[tensor.dtype] = seen.dtypes.get(tensor.dtype, 0) + tensor.end - tensor.begin
    layer = LAYER.match(name)
    if layer:
        layers.add(int(layer.group(1)))
    elif HEAD.match(name):
        seen.head = name
    elif WIDTHS.match(name) and tensor.shape and tensor.dtype in ("F32", "F16", "BF16"):
        seen.widths[name] = tensor.shape[-1]


def _compare_with_index(seen: Seen, weight_map: dict[str, str], owner: dict[str, str]) -> None:
    """Sort what does not lie where the index says into misplaced, absent and unlisted."""
    unread = {shard.name for shard in seen.shards if shard.fault or shard.error}.union(seen.missing_shards)
    for tensor, shard in weight_map.items():
        if shard in unread:
            continue  # told of the shard already
        if tensor not in owner:
            seen.absent[tensor] = shard
        elif tensor in seen.unlisted:
            seen.misplaced[tensor] = (shard, seen.unlisted.pop(tensor))
    for tensor in [name for name in seen.unlisted if weight_map.get(name) in unread]:
        seen.misplaced[tensor] = (weight_map[tensor], seen.unlisted.pop(tensor))


def judge(seen: Seen, expected: Expected) -> Gate:
    """Compare what was found with the index, the configuration and what the baseline says."""
    gate = Gate("weights_check")
    if not seen.is_directory:
        gate.problems.append(_problem("weights-no-directory", seen.path, "there is no such directory", "correct relight_model_dir"))
        return gate
    if seen.config_fault == "missing" and not seen.shards and not seen.missing_shards and not seen.index_fault:
        what = "not a model directory: it holds neither config.json nor safetensors files"
        gate.problems.append(_problem("weights-not-a-model", seen.path, what, "correct relight_model_dir"))
        return gate
    gate.evidence = _evidence(seen, expected)
    gate.problems += [
        *_config_problems(seen),
        *_index_problems(seen),
        *_shard_problems(seen),
        *_tensor_problems(seen),
        *_expectation_problems(seen, expected),
    ]
    return gate


def _evidence(seen: Seen, expected: Expected) -> dict[str, Any]:
    return {
        "shards": len(seen.shards),
        "tensors": sum(shard.tensors for shard in seen.shards),
        "bytes": sum(shard.file_bytes for shard in seen.shards),
        "dtype_bytes": dict(sorted(seen.dtypes.items())),
        "layers": len(seen.layers) or None,
        "lm_head": seen.head,
        "fingerprint": seen.fingerprint,
        "digested_bytes": seen.digested_bytes,
        "compared_with": [name for name, given in (("fingerprint", expected.fingerprint), ("digests", expected.digests)) if given],
    }


def _problem(code: str, where: str, what: str, remedy: str, verdict: Verdict = Verdict.FAIL) -> Problem:
    return Problem(code, where, what, remedy, verdict)


def _some(names: Any) -> str:
    """The first few names, and how many there are."""
    listed = sorted(names)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(listed[:NAMED]) + more


def _config_problems(seen: Seen) -> list[Problem]:
    where = os.path.join(seen.path, CONFIG)
    again = "copy config.json from the model's source again"
    if seen.config_fault == "missing":
        return [_problem("weights-config-missing", where, "there is no config.json", again)]
    if seen.config_fault:
        return [_problem("weights-config-torn", where, f"it cannot be read: {seen.config_fault}", again)]
    config = seen.config or {}
    nested = config.get("text_config")
    text: dict[str, Any] = nested if isinstance(nested, dict) else config
    other = "these weights belong to another configuration: restore both from one source"
    found = []
    hidden = text.get("hidden_size")
    wrong = {name: width for name, width in seen.widths.items() if isinstance(hidden, int) and width != hidden}
    for name, width in sorted(wrong.items())[:NAMED]:
        found.append(_problem("weights-shape", name, f"it is {width} wide, config.json says hidden_size {hidden}", other))
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and seen.layers and not seen.missing_shards and not any(s.fault or s.error for s in seen.shards):
        spare = text.get("num_nextn_predict_layers") or 0
        lacking = sorted(set(range(layers)) - seen.layers)
        if lacking:
            what = f"config.json says {layers} layers, the weights lack {len(lacking)} of them, the first is {lacking[0]}"
            found.append(_problem("weights-layers", seen.path, what, other))
        elif max(seen.layers) >= layers + spare:
            what = f"config.json says {layers} layers, the weights have a layer {max(seen.layers)}"
            found.append(_problem("weights-layers", seen.path, what, other))
    return found


def _index_problems(seen: Seen) -> list[Problem]:
    where = os.path.join(seen.path, INDEX)
    again = "copy the index from the model's source again"
    if seen.index_fault:
        return [_problem("weights-index-torn", where, f"it cannot be read: {seen.index_fault}", again)]
    one_of_many = any(match and int(match.group(2)) > 1 for match in (NUMBERED.search(shard.name) for shard in seen.shards))
    if not seen.indexed and (one_of_many or len(seen.shards) > 1):
        return [_problem("weights-index-missing", where, f"{len(seen.shards)} shards lie there without an index", again)]
    found = []
    whole = not seen.missing_shards and not any(shard.fault or shard.error for shard in seen.shards)
    total = sum(shard.tensor_bytes for shard in seen.shards)
    if seen.index_total_bytes is not None and whole and total != seen.index_total_bytes:
        what = f"it says {seen.index_total_bytes} bytes of tensors, the shards hold {total}"
        remedy = "compare with the model's source; some published indexes are wrong here"
        found.append(_problem("weights-total-size", where, what, remedy, Verdict.WARN))
    counts = sorted({int(match.group(2)) for match in map(NUMBERED.search, sorted(seen.listed_shards)) if match})
    if counts and counts != [len(seen.listed_shards)]:
        what = f"it lists {len(seen.listed_shards)} shards, their names say {' and '.join(map(str, counts))}"
        found.append(_problem("weights-shard-count", where, what, again))
    return found


def _shard_problems(seen: Seen) -> list[Problem]:
    again = "copy this file from the model's source again"
    found = []
    for name in seen.missing_shards:
        found.append(_problem("weights-shard-missing", os.path.join(seen.path, name), "the shard is missing", again))
    for shard in seen.shards:
        where = os.path.join(seen.path, shard.name)
        if shard.fault:
            found.append(_problem(f"weights-shard-{shard.fault[0]}", where, shard.fault[1], again))
        elif shard.error:
            remedy = "make it readable for this user, or run with become"
            found.append(_problem("weights-unreadable", where, shard.error, remedy, Verdict.UNKNOWN))
    for name in seen.extra_shards:
        alike = NUMBERED.search(name)
        what = "the index does not know this shard" + (": two checkpoints may lie mixed here" if alike else "")
        verdict = Verdict.FAIL if alike else Verdict.WARN
        found.append(_problem("weights-shard-extra", os.path.join(seen.path, name), what, "move it out of the model directory", verdict))
    if not seen.shards and not seen.missing_shards:
        found.append(_problem("weights-none", seen.path, "there is no safetensors file", "copy the weights from the model's source"))
    return found


def _tensor_problems(seen: Seen) -> list[Problem]:
    again = "copy the shards named here, and the index, from one source again"
    found = []
    if seen.misplaced:
        shards = {shard for pair in seen.misplaced.values() for shard in pair}
        what = f"{len(seen.misplaced)} tensors lie in another shard than the index says, among {_some(shards)}: {_some(seen.misplaced)}"
        found.append(_problem("weights-tensor-misplaced", seen.path, what, again))
    if seen.absent:
        what = f"the index names {len(seen.absent)} tensors that {_some(set(seen.absent.values()))} lacks: {_some(seen.absent)}"
        found.append(_problem("weights-tensor-absent", seen.path, what, again))
    if seen.unlisted:
        what = f"{len(seen.unlisted)} tensors stand in no index, in {_some(set(seen.unlisted.values()))}: {_some(seen.unlisted)}"
        found.append(_problem("weights-tensor-unlisted", seen.path, what, again))
    return found


def _expectation_problems(seen: Seen, expected: Expected) -> list[Problem]:
    found = []
    count = len(seen.shards)
    if expected.shards is not None and count + len(seen.missing_shards) != expected.shards:
        what = f"{count} shards lie there, {expected.shards} are expected"
        found.append(_problem("weights-shard-count", seen.path, what, "copy the model from its source again, or correct the expectation"))
    if expected.fingerprint and seen.fingerprint and seen.fingerprint != expected.fingerprint:
        what = f"the fingerprint is {seen.fingerprint}, the baseline says {expected.fingerprint}"
        found.append(_problem("weights-other", seen.path, what, "restore the weights that the samples were made with"))
    found += _digest_problems(seen, expected)
    return found


def _digest_problems(seen: Seen, expected: Expected) -> list[Problem]:
    """Files that are not what the baseline, or the user's list, says byte for byte."""
    found = []
    wanted = {name: digest.lower() for name, digest in expected.digests.items()}
    for name, digest in sorted(seen.digests.items()):
        where = os.path.join(seen.path, name)
        if digest is None and name not in seen.missing_shards:
            found.append(_problem("weights-shard-missing", where, "a file with a known digest is missing", "copy it again"))
        elif digest is not None and digest != wanted[name]:
            twin = next((other for other, known in sorted(wanted.items()) if known == digest), None)
            if twin:
                what = f"it holds what {twin} should hold: files were swapped or renamed"
                found.append(_problem("weights-swapped", where, what, "give both their names back, or copy them again"))
            else:
                what = f"its sha256 is {digest}, not {wanted[name]}"
                found.append(_problem("weights-digest", where, what, "copy this file from the model's source again"))
    if seen.undigested:
        what = f"{len(seen.undigested)} files are not read yet, of {len(wanted)} with known digests"
        remedy = "run again, it goes on where it stopped; or raise timeout_seconds"
        found.append(_problem("weights-undigested", seen.path, what, remedy, Verdict.UNKNOWN))
    if expected.complete:
        for shard in seen.shards:
            if shard.name not in wanted:
                where = os.path.join(seen.path, shard.name)
                what = "the baseline does not know this weight file"
                found.append(_problem("weights-shard-extra", where, what, "move it out of the model directory"))
    return found
