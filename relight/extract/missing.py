# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""What the store lacks, at the depth of headers: cheap enough for every start, and never fooled by a name."""

from __future__ import annotations

import time
from dataclasses import dataclass

import xxhash
from ansible_collections.relight.recovery.plugins.module_utils import ckpt, inventory, surveying
from ansible_collections.relight.recovery.plugins.module_utils.store import DIGEST, Store

from relight.extract import links
from relight.extract.config import BadInput, Config
from relight.hostlook import look_at_content


@dataclass(frozen=True)
class Standing:
    """What is there, and what is to do."""

    done: int
    tokens: int
    bytes: int
    missing: tuple[int, ...]
    quarantined: int
    intact: frozenset[int] = frozenset()


def stand(store: Store, fixed_folder: str, config: Config) -> Standing:
    """Look at every sample; what is torn or corrupt is moved to quarantine, so that its record is missing.

    A whole sample of other tokens or another identity, or one that cannot be judged, stops the start: not this client but
    `relight recover` decides about it. Raises BadInput, and what the inventory raises.
    """
    identity = links.identity(config, "")

    def enter(found: inventory.Found) -> None:
        surveying.enter(store, found)

    wanted = {name: value for name, value in identity.items() if value}
    tally = inventory.take(store.path, config.layout, fixed_folder, wanted, "headers", look_at_content, enter)
    bad = [found for found in tally.found if found.index is not None or found.verdict == inventory.UNJUDGED]
    stopping = [found for found in bad if found.verdict in (inventory.FOREIGN, inventory.UNJUDGED)]
    if stopping:
        first = stopping[0]
        raise BadInput(
            f"{len(stopping)} samples in {store.path} are in doubt ({first.path} {first.why}): "
            "let `relight recover` move them to quarantine, mend the configuration, or start a new store"
        )
    utc = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    for found in bad:
        store.quarantine(found.path, found.verdict, utc, found.why)
    size = tally.bytes - sum(found.bytes for found in tally.found)
    return Standing(tally.intact, tally.tokens_intact, size, tuple(tally.to_do()), len(bad), frozenset(tally.intact_indices()))


def file_digest(path: str, size: int) -> str:
    """The digest of a whole file as the manifest keeps it. Raises OSError, ckpt.Torn."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as handle:
        for piece in ckpt.chunks(handle, 0, size):
            hasher.update(piece)
    return f"{DIGEST}:{hasher.hexdigest()}"
