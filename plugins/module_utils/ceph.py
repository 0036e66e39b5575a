# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Is the Ceph cluster under a host's disks well, and is there room? Judged from the cluster's own JSON. `judge` is pure.

A cluster blocks all writes once one of its OSDs is full, however much the others have free: the fullest one counts, not the
sum. A guest's file system cannot tell: it looks half empty and hangs.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict

NAME = "ceph_check"
COMMANDS = {"health": ("health", "detail"), "df": ("df",), "osd_df": ("osd", "df"), "osd_dump": ("osd", "dump")}
RATIOS = {"full_ratio": 0.95, "backfillfull_ratio": 0.90, "nearfull_ratio": 0.85}  # Ceph's own defaults
STOPS_WRITES = ("full", "pausewr", "pauserd", "pause")
# Health checks that tell that writes block or will soon, and what they are called here.
CHECKS = {
    "OSD_FULL": ("ceph-full", Verdict.FAIL),
    "POOL_FULL": ("ceph-full", Verdict.FAIL),
    "POOL_QUOTA_FULL": ("ceph-full", Verdict.FAIL),
    "OSD_BACKFILLFULL": ("ceph-backfillfull", Verdict.WARN),
    "POOL_BACKFILLFULL": ("ceph-backfillfull", Verdict.WARN),
    "PG_BACKFILL_FULL": ("ceph-backfillfull", Verdict.WARN),
    "PG_RECOVERY_FULL": ("ceph-backfillfull", Verdict.FAIL),
    "OSD_NEARFULL": ("ceph-nearfull", Verdict.WARN),
    "POOL_NEAR_FULL": ("ceph-nearfull", Verdict.WARN),
    "POOL_NEARFULL": ("ceph-nearfull", Verdict.WARN),
    "PG_AVAILABILITY": ("ceph-unavailable", Verdict.FAIL),
    "SLOW_OPS": ("ceph-slow", Verdict.WARN),
}
FREE_OSDS = "remove data or add OSDs; to thaw writes meanwhile, raise the full ratio a little: ceph osd set-full-ratio 0.97"


class Unreadable(Exception):
    """The cluster does not answer, or answers what is no Ceph's; the message is for the operator."""


@dataclass(frozen=True)
class Osd:
    """One OSD. `used` is its share of itself, from 0 to 1."""

    name: str
    used: float
    bytes: int
    up: bool


@dataclass(frozen=True)
class Cluster:
    """What the cluster says of itself. `checks` are (code, severity, message)."""

    status: str
    checks: tuple[tuple[str, str, str], ...] = ()
    osds: tuple[Osd, ...] = ()
    pools: Mapping[str, int] = field(default_factory=dict)  # name: bytes that it can still take
    total_bytes: int = 0
    free_bytes: int = 0
    flags: tuple[str, ...] = ()
    ratios: Mapping[str, float] = field(default_factory=lambda: dict(RATIOS))

    @property
    def fullest(self) -> Osd | None:
        return max(self.osds, key=lambda osd: osd.used, default=None)


@dataclass(frozen=True)
class Need:
    """What the run will write, and into which pools. Without pools all that the cluster has count."""

    bytes: int = 0
    pools: tuple[str, ...] = ()


# Looking


def ask(command: tuple[str, ...], seconds: float) -> dict[str, str]:
    """The cluster's JSON by its names in COMMANDS. `command` is how `ceph` is called. Raises Unreadable."""
    found = {}
    for name, words in COMMANDS.items():
        try:
            done = subprocess.run(
                [*command, "--connect-timeout", str(int(seconds)), *words, "--format", "json"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=2 * seconds,
                check=False,
            )
        except OSError as error:
            raise Unreadable(f"{command[0]} cannot be run: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise Unreadable(f"ceph {' '.join(words)} did not answer within {2 * seconds:g} s") from None
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise Unreadable(f"ceph {' '.join(words)} ended with {done.returncode}: {said}")
        found[name] = done.stdout
    return found


def parse(texts: Mapping[str, str]) -> Cluster:
    """The cluster from its JSON. Raises Unreadable for anything that does not tell what is needed."""
    try:
        values = {name: json.loads(text) for name, text in texts.items()}
        health, df, dump = values["health"], values["df"], values.get("osd_dump") or {}
        checks = tuple(
            (str(code), str(check.get("severity", "")), _message(check)) for code, check in sorted(_dict(health, "checks").items())
        )
        osds = tuple(_osd(node) for node in values["osd_df"]["nodes"] if node.get("type", "osd") == "osd")
        stats = _dict(df, "stats")
        flags = dump.get("flags_set") or str(dump.get("flags") or "").split(",")
        return Cluster(
            status=str(health["status"]),
            checks=checks,
            osds=osds,
            pools={str(pool["name"]): int(pool["stats"]["max_avail"]) for pool in df["pools"]},
            total_bytes=int(stats["total_bytes"]),
            free_bytes=int(stats["total_avail_bytes"]),
            flags=tuple(str(flag) for flag in flags if flag in STOPS_WRITES),
            ratios={name: float(dump.get(name) or default) for name, default in RATIOS.items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise Unreadable(f"the answer is not what Ceph gives: {type(error).__name__} {error}"[:300]) from None


def _dict(value: Any, name: str) -> dict[str, Any]:
    found = value[name]
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no object")
    return found


def _message(check: Mapping[str, Any]) -> str:
    details = [str(line.get("message", "")) for line in check.get("detail") or []]
    text = str((check.get("summary") or {}).get("message", ""))
    return f"{text}: {'; '.join(details[:3])}" if details else text


def _osd(node: Mapping[str, Any]) -> Osd:
    used = float(node["utilization"]) / 100
    if not 0 <= used <= 2:  # which NaN and infinity fail too
        raise ValueError(f"utilization {node['utilization']!r}")
    return Osd(str(node["name"]), used, int(node["kb"]) * 1024, str(node.get("status", "up")) == "up")


# Judging


def judge(cluster: Cluster, need: Need) -> Gate:
    """Can this cluster take what the run will write, and will it go on taking it? Pure."""
    gate = Gate(NAME, evidence(cluster, need))
    if not cluster.osds:
        what = "the cluster has no OSD, or shows none"
        gate.problems.append(Problem("ceph-unreadable", "ceph", what, "look at it with ceph osd df", Verdict.UNKNOWN))
    if cluster.status not in ("HEALTH_OK", "HEALTH_WARN", "HEALTH_ERR"):
        what = f"its health is {cluster.status!r}"
        gate.problems.append(Problem("ceph-unreadable", "ceph", what, "look at it with ceph health detail", Verdict.UNKNOWN))
    gate.problems += [*_checks(cluster), *_flags(cluster), *_fullest(cluster, gate.problems), *_room(cluster, need)]
    if cluster.status == "HEALTH_ERR" and not any(problem.verdict >= Verdict.FAIL for problem in gate.problems):
        told = "; ".join(f"{code}: {message}" for code, severity, message in cluster.checks if severity == "HEALTH_ERR")
        gate.problems.append(Problem("ceph-error", "ceph", f"HEALTH_ERR: {told or 'it says no more'}", "ceph health detail tells more"))
    return gate


def evidence(cluster: Cluster, need: Need) -> dict[str, Any]:
    fullest = cluster.fullest
    return {
        "status": cluster.status,
        "checks": [code for code, _severity, _message in cluster.checks],
        "osds": len(cluster.osds),
        "osds_down": sum(not osd.up for osd in cluster.osds),
        "fullest_osd": fullest.name if fullest else None,
        "fullest_percent": round(100 * fullest.used, 2) if fullest else None,
        "total_bytes": cluster.total_bytes,
        "free_bytes": cluster.free_bytes,
        "pools_max_avail_bytes": dict(cluster.pools),
        "need_bytes": need.bytes,
        "flags": list(cluster.flags),
        **cluster.ratios,
    }


def _checks(cluster: Cluster) -> Iterator[Problem]:
    for code, _severity, message in cluster.checks:
        if code in CHECKS:
            name, verdict = CHECKS[code]
            remedy = FREE_OSDS if name in ("ceph-full", "ceph-backfillfull", "ceph-nearfull") else "ceph health detail tells more"
            yield Problem(name, "ceph", f"{code}: {message}", remedy, verdict)


def _flags(cluster: Cluster) -> Iterator[Problem]:
    paused = [flag for flag in cluster.flags if flag != "full"]
    if paused:
        what = f"the flag {', '.join(paused)} is set: every read or write waits"
        yield Problem("ceph-paused", "ceph", what, "ceph osd unset pause, once you know who set it and why")
    if "full" in cluster.flags and not any(code == "OSD_FULL" for code, _severity, _message in cluster.checks):
        yield Problem("ceph-full", "ceph", "the flag full is set: every write waits", FREE_OSDS)


def _fullest(cluster: Cluster, told: list[Problem]) -> Iterator[Problem]:
    """The fullest OSD by its own number, also where the cluster's health lags behind."""
    fullest = cluster.fullest
    if fullest is None:
        return
    codes = {CHECKS[code][0] for code, _severity, _message in cluster.checks if code in CHECKS}
    for ratio, name, verdict in (
        ("full_ratio", "ceph-full", Verdict.FAIL),
        ("backfillfull_ratio", "ceph-backfillfull", Verdict.WARN),
        ("nearfull_ratio", "ceph-nearfull", Verdict.WARN),
    ):
        if fullest.used >= cluster.ratios[ratio]:
            if name not in codes:
                what = f"{100 * fullest.used:.1f} % used, {ratio} is {cluster.ratios[ratio]:.2f}"
                yield Problem(name, fullest.name, what, FREE_OSDS, verdict)
            return


def _room(cluster: Cluster, need: Need) -> Iterator[Problem]:
    """What a pool can still take counts its copies and its fullest OSD; the cluster's free bytes count neither."""
    for name in need.pools:
        if name not in cluster.pools:
            yield Problem("ceph-pool-missing", name, "the cluster has no such pool", "correct relight_ceph_pools", Verdict.UNKNOWN)
    pools = {name: room for name, room in cluster.pools.items() if not need.pools or name in need.pools}
    for name, room in sorted(pools.items()):
        if need.bytes > room and (need.pools or len(pools) == 1):
            what = f"it can still take {room} bytes, the run needs {need.bytes}"
            yield Problem("ceph-room", name, what, "add OSDs or remove data; df in the guest does not show this")
