# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A wheelhouse: a folder of wheels with `wheelhouse.json`, which names every file with its digest."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import durable

SCHEMA = 1
INDEX = "wheelhouse.json"


class BadWheelhouse(Exception):
    """The folder is not a whole wheelhouse; the message says why, in one sentence."""


@dataclass(frozen=True)
class Wheelhouse:
    """What a wheelhouse.json says. `files` maps each wheel's name to its SHA-256."""

    files: dict[str, str]
    digest: str

    @property
    def relight(self) -> str:
        """The file name of Relight's own wheel."""
        return next(name for name in self.files if name.startswith("relight-"))

    @property
    def pip(self) -> str | None:
        """The file name of the pip that installs from here, which spares the host one of its own."""
        return next((name for name in sorted(self.files) if name.startswith("pip-")), None)


def sha256(path: str) -> str:
    """Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        for chunk in iter(lambda: handle.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def digest_of(files: dict[str, str]) -> str:
    """One digest over names and contents, whatever the order of the folder."""
    return hashlib.sha256("".join(f"{files[name]}  {name}\n" for name in sorted(files)).encode()).hexdigest()


def write_index(folder: str, more: dict[str, Any]) -> Wheelhouse:
    """Write wheelhouse.json over the wheels that lie in `folder`, with `more` beside them. Raises OSError."""
    files = {name: sha256(os.path.join(folder, name)) for name in sorted(os.listdir(folder)) if name.endswith(".whl")}
    house = Wheelhouse(files, digest_of(files))
    durable.write_json(os.path.join(folder, INDEX), {"schema": SCHEMA, "digest": house.digest, "files": files, **more})
    return house


def parse(value: Any) -> Wheelhouse:
    """The wheelhouse that an index describes. Raises BadWheelhouse."""
    try:
        schema, house = value["schema"], Wheelhouse(dict(value["files"]), value["digest"])
        names_are_plain = all(os.path.basename(name) == name and name.endswith(".whl") for name in house.files)
        consistent = digest_of(house.files) == house.digest
    except (KeyError, TypeError, AttributeError, ValueError):
        raise BadWheelhouse(f"its {INDEX} is not one") from None
    if schema != SCHEMA:
        raise BadWheelhouse(f"its {INDEX} has schema {schema}, this version reads {SCHEMA}")
    if not names_are_plain or not consistent:
        raise BadWheelhouse(f"its {INDEX} contradicts itself")
    if not any(name.startswith("relight-") for name in house.files):
        raise BadWheelhouse(f"its {INDEX} names no wheel of relight")
    return house


def read(folder: str) -> Wheelhouse | None:
    """The wheelhouse in `folder` after reading every file of it; None where none is. Raises BadWheelhouse or OSError."""
    try:
        with open(os.path.join(folder, INDEX), encoding="utf-8") as handle:
            value = json.load(handle)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        raise BadWheelhouse(f"its {INDEX} is no JSON") from None
    house = parse(value)
    for name, digest in house.files.items():
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            raise BadWheelhouse(f"{name} is missing")
        if sha256(path) != digest:
            raise BadWheelhouse(f"{name} is not the file that {INDEX} names: its content differs")
    return house


def choose(folder: str, index: Any, check_mode: bool) -> Wheelhouse:
    """The wheelhouse to install from: what lies in `folder`, which must be the one that `index` describes, if that is given.

    In check mode the index stands for files that the real run copies first. Raises BadWheelhouse or OSError.
    """
    wanted = parse(index) if index else None
    try:
        found = read(folder)
    except BadWheelhouse:
        if wanted and check_mode:
            return wanted
        raise
    if found is not None and (wanted is None or wanted.digest == found.digest):
        return found
    if wanted and check_mode:
        return wanted
    raise BadWheelhouse(f"there is no {INDEX} in it" if found is None else "it is not the one of the controller")
