# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""How fast a tree is moved and read back: Relight's copy service, rsync with its checksum pass, their peers, and the device itself.

Two places: loop devices over files on a tmpfs, where no disk hides the difference, and one disk. In each, every round runs in
turn: the service (copy and read-back), `rsync -aHAX` with its file system synced, `rsync -aHAX --checksum` as its read-back, and
fio moving as many bytes as the large files hold. Before each of them the file systems are unmounted, so that nothing is read from
the page cache; the pair is also given warm, its second pass right after the first. Needs root, rsync and fio. By environment:

  RELIGHT_BENCH_LARGE    large files of 130 MB (24; the goal's size is 160)
  RELIGHT_BENCH_SMALL    small files of up to 8 KiB (4000; the goal's size is 20000)
  RELIGHT_BENCH_ROUNDS   rounds (3)
  RELIGHT_BENCH_WORKERS  files at a time (4)
  RELIGHT_BENCH_PLACES   which places (tmpfs,disk)
  RELIGHT_BENCH_PEERS    peers that are measured once, on the tmpfs (cp,rclone,fpsync)
  RELIGHT_BENCH_DISK     a folder on the disk (build/bench/migrate)

The last line is one JSON object. vs_rsync_pair is on the tmpfs, vs_rsync_pair_disk on the disk; vs_device is the disk's.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "collections")]

from ansible_collections.relight.recovery.plugins.module_utils import copier, migration  # noqa: E402

SERVICE = "ansible_collections.relight.recovery.plugins.module_utils.migration_service"
LARGE = int(os.environ.get("RELIGHT_BENCH_LARGE") or 24)
SMALL = int(os.environ.get("RELIGHT_BENCH_SMALL") or 4000)
ROUNDS = int(os.environ.get("RELIGHT_BENCH_ROUNDS") or 3)
WORKERS = int(os.environ.get("RELIGHT_BENCH_WORKERS") or 4)
PLACES = (os.environ.get("RELIGHT_BENCH_PLACES") or "tmpfs,disk").split(",")
PEERS = [name for name in (os.environ.get("RELIGHT_BENCH_PEERS", "cp,rclone,fpsync")).split(",") if name]
DISK = Path(os.environ.get("RELIGHT_BENCH_DISK") or ROOT / "build" / "bench" / "migrate")
LARGE_BYTES = 31 * (4 << 20)  # 130 MB, in whole blocks of fio's
BYTES = LARGE * LARGE_BYTES
IMAGE_BYTES = BYTES + SMALL * 16384 + (600 << 20)


def run(*words: str | Path, **more: Any) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **more)
    if done.returncode:
        sys.exit(f"bench-migrate: {' '.join(map(str, words))}: {done.stdout}{done.stderr}")
    return done.stdout


def say(text: str) -> None:
    print(f"bench-migrate: {text}", file=sys.stderr, flush=True)


# --- places ------------------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """Two file systems on two devices of one kind. `cold` unmounts both, so that no page of them is cached."""

    name: str
    images: Path
    mounts: Path
    below: str = ""

    @property
    def source(self) -> Path:
        return self.mounts / "source" / self.below

    @property
    def target(self) -> Path:
        return self.mounts / "target"

    def make(self) -> None:
        for name in ("source", "target"):
            (self.mounts / name).mkdir(parents=True)
            image = self.images / name
            run("truncate", "-s", str(IMAGE_BYTES), image)
            run("mkfs.xfs", "-q", image)
        self.attach()

    def attach(self) -> None:
        """Over a disk the loop devices pass by the cache, which would hold every page twice; a tmpfs is the cache."""
        direct = "off" if self.name == "tmpfs" else "on"
        for name in ("source", "target"):
            device = run("losetup", "--find", "--show", f"--direct-io={direct}", self.images / name).strip()
            run("mount", "-o", "noatime", device, self.mounts / name)
            run("losetup", "--detach", device)  # once it is unmounted

    def detach(self) -> None:
        for name in ("source", "target"):
            run("umount", self.mounts / name)

    def cold(self) -> None:
        self.detach()
        self.attach()

    def clear(self) -> None:
        """An empty target, its blocks discarded."""
        for path in self.target.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        run("sync", "-f", self.target)
        self.cold()


@contextmanager
def place(name: str) -> Iterator[Place]:
    root = Path(tempfile.mkdtemp(prefix="relight-bench-", dir=DISK))
    images = root / "images"
    images.mkdir()
    if name == "tmpfs":
        run("mount", "-t", "tmpfs", "-o", f"size={2 * IMAGE_BYTES + (64 << 20)}", "tmpfs", images)
    found = Place(name, images, root / "mounts")
    try:
        found.make()
        yield found
    finally:
        for path in (found.source, found.target, images):
            subprocess.run(["umount", path], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(root)


def fill(root: Path) -> None:
    """The data: large files, small ones in folders of a thousand, and a few of each odd kind."""
    rng = random.Random(4)
    block = rng.randbytes(1 << 20)
    for index in range(LARGE):
        folder = root / "store" / f"rows_{index // 2000 * 2000}"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"data_{index}.ckpt", "wb") as handle:
            left = LARGE_BYTES
            while left:
                part = block[rng.randrange(4096) :][:left] if left < len(block) else block
                handle.write(part[:left])
                left -= min(left, len(part))
    for index in range(SMALL):
        folder = root / "small" / str(index // 1000)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.json").write_bytes(block[index : index + rng.randrange(8192)])
    odd = root / "odd names"
    odd.mkdir()
    for index in range(20):
        (odd / f"größe\n{index}").write_bytes(b"x")
        os.link(odd / f"größe\n{index}", odd / f"link {index}")
        (odd / f"symlink {index}").symlink_to("../small")
        os.setxattr(odd / f"größe\n{index}", "user.note", b"kept")


# --- runs --------------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def relight(at: Place, digest: str) -> tuple[float, float]:
    """The service's one pass: copy, then every byte read back from the medium. Seconds, and its peak of memory in MiB."""
    state = Path(tempfile.mkdtemp(prefix="relight-bench-state-", dir=DISK))
    (at.target / migration.MARKER).write_text("bench")
    job = {"id": "bench", "source": str(at.source), "target": str(at.target), "folder": str(state), "final": True}
    (state / "job.json").write_text(json.dumps({**job, "digest": digest, "workers": WORKERS}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "collections")}
    start = time.monotonic()
    status = subprocess.run([sys.executable, "-m", SERVICE, str(state / "job.json")], env=environment, check=False).returncode
    seconds = time.monotonic() - start
    progress = json.loads((state / "progress.json").read_text())
    if status or progress["read_back_bytes"] != progress["copied_bytes"] or progress["copied_bytes"] < BYTES:
        sys.exit(f"bench-migrate: the service did not do its work: {progress}")
    (at.target / migration.MARKER).unlink()
    shutil.rmtree(state)
    return seconds, progress["peak_kib"] / 1024


def rsync(at: Place, *more: str) -> None:
    run("rsync", "-aHAX", *more, f"{at.source}/", f"{at.target}/")
    run("sync", "-f", at.target)


def fio(at: Place) -> tuple[float, float]:
    """What the devices give: seconds to read and write as many bytes as the large files hold, at once, and to read them back."""
    common = ["--ioengine=libaio", "--direct=1", "--bs=4M", "--iodepth=4", "--output-format=json", "--fallocate=posix", "--end_fsync=1"]
    files = sorted((at.source / "store").rglob("*.ckpt"))
    reading, writing, reading_back = [], [], []
    for number in range(WORKERS):
        share = files[number::WORKERS]
        size = f"--size={len(share) * LARGE_BYTES}"
        names = ":".join(map(str, share))
        reading += [f"--name=r{number}", "--rw=read", f"--filename={names}", "--file_service_type=sequential", size]
        writing += [f"--name=w{number}", "--rw=write", f"--filename={at.target}/fio.{number}", size]
        reading_back += [f"--name=b{number}", "--rw=read", f"--filename={at.target}/fio.{number}", size]
    copied = seconds_of(run("fio", *common, *reading, *writing))
    at.cold()
    return copied, seconds_of(run("fio", *common, *reading_back))


def seconds_of(told: str) -> float:
    """How long fio's longest job took, without its start."""
    jobs = json.loads(told[told.index("{") :])["jobs"]
    return max(max(job["read"]["runtime"], job["write"]["runtime"]) for job in jobs) / 1000


def peers(at: Place) -> dict[str, float]:
    """Seconds of single runs of other tools, synced; none of them reads back."""
    commands: dict[str, list[str | Path]] = {
        "cp": ["cp", "-a", f"{at.source}/.", at.target],
        "rclone": ["rclone", "copy", "--transfers", str(WORKERS), "--metadata", "--links", at.source, at.target],
        "fpsync": ["fpsync", "-n", "2", "-o", "-lptgoDAX --numeric-ids", f"{at.source}/", f"{at.target}/"],
    }
    found = {}
    for name in PEERS:
        if not shutil.which(name):
            say(f"{name} is not installed: skipped")
            continue
        at.clear()
        words = commands[name]
        found[name] = timed(lambda words=words: (run(*words), run("sync", "-f", at.target)))  # type: ignore[misc]
        say(f"{at.name}: {name} {found[name]:.2f} s")
    return found


def measure(at: Place, digest: str) -> dict[str, Any]:
    """All rounds at one place; seconds by name."""
    fill(at.source)
    seconds: dict[str, list[float]] = {}
    peak = 0.0
    for number in range(ROUNDS):
        took: dict[str, float] = {}
        at.clear()
        took["relight"], memory = relight(at, digest)
        peak = max(peak, memory)
        at.clear()
        took["rsync"] = timed(lambda: rsync(at))
        took["rsync_checksum_warm"] = timed(lambda: rsync(at, "--checksum"))
        at.cold()
        took["rsync_checksum"] = timed(lambda: rsync(at, "--checksum"))
        at.clear()
        took["device_copy"], took["device_read"] = fio(at)
        took["relight_large"] = large_alone(at, digest)
        for name, value in took.items():
            seconds.setdefault(name, []).append(value)
        say(f"{at.name}, round {number + 1}: " + ", ".join(f"{name} {value:.2f} s" for name, value in took.items()))
    return {"seconds": seconds, "peak_mib": peak, "peers": peers(at) if at.name == "tmpfs" else {}}


def large_alone(at: Place, digest: str) -> float:
    """The service on the large files alone, which is what the device's limit is for."""
    at.clear()
    return relight(replace(at, below="store"), digest)[0]


def main() -> int:
    if os.geteuid() != 0:
        sys.exit("bench-migrate: needs root, for loop devices")
    lacking = [name for name in ("rsync", "fio", "losetup", "mkfs.xfs") if not shutil.which(name)]
    if lacking:
        sys.exit(f"bench-migrate: not installed: {', '.join(lacking)}")
    if os.environ.get("RELIGHT_BENCH_INSIDE") != "1":  # mounts of its own, which end with it
        os.environ["RELIGHT_BENCH_INSIDE"] = "1"
        os.execvp("unshare", ["unshare", "--mount", "--propagation", "private", sys.executable, __file__])
    DISK.mkdir(parents=True, exist_ok=True)
    digest = copier.best_digest()
    found = {}
    for name in PLACES:
        with place(name) as at:
            found[name] = measure(at, digest)
    with suppress(OSError):
        DISK.rmdir()
    ratios: dict[str, float] = {}
    for name, result in found.items():
        suffix = "" if name == "tmpfs" else f"_{name}"
        seconds = result["seconds"]
        rounds = range(ROUNDS)
        pair = [(seconds["rsync"][i] + seconds["rsync_checksum"][i]) / seconds["relight"][i] for i in rounds]
        warm = [(seconds["rsync"][i] + seconds["rsync_checksum_warm"][i]) / seconds["relight"][i] for i in rounds]
        alone = [seconds["rsync"][i] / seconds["relight"][i] for i in rounds]
        device = [(seconds["device_copy"][i] + seconds["device_read"][i]) / seconds["relight_large"][i] for i in rounds]
        ratios[f"vs_rsync_pair{suffix}"] = round(statistics.median(pair), 2)
        ratios[f"vs_rsync_pair_warm{suffix}"] = round(statistics.median(warm), 2)
        ratios[f"vs_rsync_alone{suffix}"] = round(statistics.median(alone), 2)
        ratios["vs_device" if name == "disk" else "vs_device_tmpfs"] = round(statistics.median(device), 2)
    what = {
        name: {
            **{key: round(statistics.median(values), 2) for key, values in result["seconds"].items()},
            **{f"{key}_once": round(value, 2) for key, value in result["peers"].items()},
        }
        for name, result in found.items()
    }
    summary = {
        "bench": "migrate",
        "ratios": ratios,
        "peak_mib": round(max(result["peak_mib"] for result in found.values()), 1),
        "rounds": ROUNDS,
        "what": {**what, "large_files": LARGE, "large_bytes": BYTES, "small_files": SMALL, "digest": digest, "workers": WORKERS},
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
