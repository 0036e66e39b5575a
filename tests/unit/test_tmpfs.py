"""tmpfs_check judged as a table, and on real segments of real dead and living processes in /dev/shm."""

import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import tmpfs
from ansible_collections.relight.recovery.plugins.module_utils.tmpfs import Segment, Tmpfs, family_of, judge

from tests.harness import run_module

GIB = 1 << 30
DEAD = Segment("/dev/shm/sgl_shm_kv_7_a1", "sglang", 30 * GIB, creator=7, creator_alive=False)
USED = replace(DEAD, open_by=9)
HIDDEN = replace(DEAD, surely_free=False)
UNKNOWN = Segment("/dev/shm/nccl-a1", "nccl", 30 * GIB)
LIVE = replace(DEAD, creator_alive=True)
STALE = Segment("/dev/shm/relight/relight-a-1-0", "dump", 30 * GIB, creator_alive=False)
FRESH = replace(STALE, creator=8, creator_alive=True)
SHM = Tmpfs("/dev/shm", "tmpfs", 252 * GIB)


@pytest.mark.parametrize(
    ("changes", "verdict", "codes"),
    [
        ({"free_bytes": 252 * GIB}, "pass", []),
        ({"free_bytes": 64 * GIB - 1}, "fail", ["tmpfs-small"]),  # 60 + 4 needed
        ({"free_bytes": 64 * GIB}, "pass", []),
        ({"free_bytes": 40 * GIB, "segments": (DEAD,)}, "fail", ["tmpfs-orphan", "tmpfs-small"]),
        ({"free_bytes": 100 * GIB, "segments": (DEAD,)}, "warn", ["tmpfs-orphan"]),
        ({"free_bytes": 100 * GIB, "segments": (USED,)}, "warn", ["tmpfs-in-use"]),
        ({"free_bytes": 100 * GIB, "segments": (HIDDEN,)}, "warn", ["tmpfs-in-use"]),
        ({"free_bytes": 100 * GIB, "segments": (LIVE, UNKNOWN)}, "pass", []),
        ({"free_bytes": 100 * GIB, "dumps": (STALE,)}, "warn", ["dump-stale"]),
        ({"free_bytes": 34 * GIB, "dumps": (FRESH,), "extracting": 8}, "pass", []),  # the run's own need, already taken
        ({"free_bytes": 34 * GIB - 1, "dumps": (FRESH,), "extracting": 8}, "fail", ["tmpfs-small"]),
        ({"free_bytes": 100 * GIB, "memory_limit_bytes": 63 * GIB}, "fail", ["tmpfs-memory-limit"]),
        ({"free_bytes": 100 * GIB, "memory_limit_bytes": 64 * GIB}, "pass", []),
        ({"free_bytes": 100 * GIB, "fstype": "ext4"}, "fail", ["tmpfs-not-tmpfs"]),
    ],
)
def test_judge(changes, verdict, codes):
    gate = judge(replace(SHM, **changes), need_bytes=60 * GIB, reserve_bytes=4 * GIB)
    assert ([p.code for p in gate.problems], gate.verdict.word) == (codes, verdict)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (replace(SHM, free_bytes=40 * GIB, segments=(DEAD,)), "state: swept frees enough"),
        (replace(SHM, free_bytes=40 * GIB, total_bytes=50 * GIB), "mount -o remount,size="),
        (replace(SHM, free_bytes=40 * GIB, segments=(UNKNOWN,)), "/dev/shm/nccl-a1"),
    ],
)
def test_the_remedy_for_too_little_room(seen, words):
    assert words in judge(seen, 60 * GIB, 4 * GIB).problems[-1].remedy


@pytest.mark.parametrize(
    ("name", "family", "pid"),
    [
        ("sgl_shm_kv_cache_4242_ab12", "sglang", 4242),
        ("multi_tokenizer_args_77", "sglang", 77),
        ("sglang_loads_x", "sglang", None),
        ("nccl-Xy12", "nccl", None),
        ("cuda.shm.0.1f.2", "cuda", None),
        ("torch_123_456_0", "torch", 123),
        ("sem.loky-99-abc", "loky", 99),
        ("sem.other", None, None),
        ("database", None, None),
        ("my_sgl_shm_kv_4242_ab", None, None),
    ],
)
def test_families(name, family, pid):
    assert family_of(name) == (family, pid)


def test_many_orphans_are_counted():
    many = tuple(replace(DEAD, path=f"/dev/shm/s{n}", bytes=1) for n in range(25))
    problems = judge(replace(SHM, free_bytes=100 * GIB, segments=many), 60 * GIB, 0).problems
    assert len(problems) == tmpfs.NAMED + 1
    assert problems[-1].what == "15 more, 15 bytes"


def test_the_memory_limit_is_the_least_on_the_way_up(tmp_path):
    own = tmp_path / "own"
    for path, value in (("a/b", "max"), ("a", "5000"), ("", "9000")):
        (tmp_path / "fs" / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / path / "memory.max").write_text(value)
    own.write_text("0::/a/b\n")
    assert tmpfs.memory_limit(str(tmp_path / "fs"), str(own)) == 5000
    v1 = tmp_path / "fs" / "memory"
    (v1 / "a").mkdir(parents=True)
    (v1 / "a" / "memory.limit_in_bytes").write_text("7000")
    (v1 / "memory.limit_in_bytes").write_text("9223372036854771712")
    own.write_text("5:cpu,memory:/a\n")
    assert tmpfs.memory_limit(str(tmp_path / "fs"), str(own)) == 7000
    assert tmpfs.memory_limit(str(tmp_path / "fs"), str(tmp_path / "none")) is None


# ---- real files and processes ------------------------------------------------------------------------------------


@pytest.fixture
def shm():
    folder = tempfile.mkdtemp(prefix="relight-test-", dir="/dev/shm")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def dead():
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def put(folder, name, size=8192, age=0):
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as handle:
        handle.write(bytes(size))
    if age:
        then = os.stat(path).st_mtime - age
        os.utime(path, (then, then))
    return path


def check(folder, check=False, **options):
    given = {"path": folder, "dump_dir": f"{folder}/dumps", "need_bytes": 1, "reserve_bytes": 0, "state_dir": f"{folder}/state"}
    return run_module("tmpfs_check", check=check, **{**given, **options})


def codes(result):
    return sorted(problem["code"] for problem in result["gate"]["problems"])


def names(folder):
    return sorted(os.listdir(folder))


def test_a_real_tmpfs_passes(shm):
    result = check(shm)
    assert result["gate"]["verdict"] == "pass"
    assert result["gate"]["evidence"]["fstype"] == "tmpfs"
    assert result["gate"]["evidence"]["total_bytes"] == os.statvfs(shm).f_blocks * os.statvfs(shm).f_frsize
    assert codes(check(shm, need_bytes=1 << 60)) == ["tmpfs-small"]


def test_a_directory_on_a_disk_is_no_tmpfs():
    assert "tmpfs-not-tmpfs" in codes(check("/proc", state_dir=None))


def test_the_sweep_takes_the_dead_and_leaves_the_rest(shm, dead):
    put(shm, f"sgl_shm_kv_{dead}_a1")
    put(shm, f"torch_{dead}_1_0")
    put(shm, f"sgl_shm_kv_{os.getpid()}_b2")  # alive
    put(shm, "nccl-unknown")
    put(shm, "database")
    put(shm, f"dumps/.relight-x-1-0.{dead}.tmp")
    put(shm, f"dumps/.relight-x-2-0.{os.getpid()}.tmp")  # its writer lives
    put(shm, "dumps/relight-x-3-0")
    put(shm, "dumps/relight-x-4-0.error")
    put(shm, "dumps/server.json")
    put(shm, "dumps/notes")
    before = check(shm)
    assert codes(before) == ["dump-stale"] * 3 + ["tmpfs-orphan"] * 2
    assert (before["changed"], before["gate"]["verdict"]) == (False, "warn")
    assert before["gate"]["evidence"]["reclaimable_bytes"] == 5 * 8192
    shutil.rmtree(f"{shm}/state")
    planned = check(shm, check=True, state="swept")
    assert len(os.listdir(f"{shm}/dumps")) == 6
    assert not os.path.exists(f"{shm}/state")
    done = check(shm, state="swept")
    assert (done["changed"], done["actions"]) == (True, planned["actions"])
    assert f"remove {shm}/torch_{dead}_1_0: 8192 bytes of process {dead}, which is gone" in done["actions"]
    assert codes(planned) == ["depends-on-planned-act"]
    assert done["gate"]["verdict"] == "pass"
    assert [name for name in names(shm) if name not in ("dumps", "state")] == ["database", "nccl-unknown", f"sgl_shm_kv_{os.getpid()}_b2"]
    assert names(f"{shm}/dumps") == sorted([f".relight-x-2-0.{os.getpid()}.tmp", "notes", "server.json"])
    again = check(shm, state="swept")
    assert (again["changed"], again["actions"]) == (False, [])


def test_a_reused_pid_is_not_the_creator(shm):
    put(shm, f"sgl_shm_kv_{os.getpid()}_a1", age=10 * 24 * 3600)  # made long before this process began
    assert codes(check(shm)) == ["tmpfs-orphan"]


# Python's own mmap keeps a descriptor; shared memory of a C library does not.
MAP = (
    "import ctypes; m = ctypes.CDLL(None).mmap; m.restype = ctypes.c_void_p; m(None, ctypes.c_size_t(4096), 1, 1, f.fileno(), 0); f.close()"
)


@pytest.mark.parametrize("way", ["open", "mapped"])
def test_a_segment_that_somebody_uses_stays(shm, dead, way):
    path = put(shm, f"sgl_shm_kv_{dead}_a1")
    code = f"f = open({path!r}, 'r+b'); {MAP if way == 'mapped' else 'pass'}; print('up', flush=True); input()"
    user = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert user.stdout.readline() == b"up\n"
    result = check(shm, state="swept")
    user.communicate(b"\n")
    assert (codes(result), result["changed"]) == (["tmpfs-in-use"], False)
    assert f"pid {user.pid} may use" in result["gate"]["problems"][0]["what"]
    assert os.path.exists(path)


def test_dumps_of_a_live_client_are_its_own(shm):
    put(shm, "dumps/relight-x-3-0")
    client = subprocess.Popen(["sleep", "60"], env={**os.environ, "RELIGHT_UNIT": "relight-extract", "RELIGHT_UNIT_HASH": "1"})
    try:
        result = check(shm, state="swept")
    finally:
        client.kill()
        client.wait()
    assert (result["gate"]["verdict"], result["changed"], names(f"{shm}/dumps")) == ("pass", False, ["relight-x-3-0"])
    assert result["gate"]["evidence"]["extracting_pid"] == client.pid
    assert check(shm, state="swept")["changed"] is True


def test_another_file_under_a_swept_name_stays(shm, dead):
    path = put(shm, f"sgl_shm_kv_{dead}_a1")
    seen = tmpfs.look(shm).orphans[0]
    other = put(shm, "other")
    os.rename(other, path)
    assert (tmpfs.sweep(seen), os.path.exists(path)) == (False, True)
    os.unlink(path)
    assert tmpfs.sweep(seen) is False


def test_our_own_mapping_is_seen(shm, dead):
    path = put(shm, f"torch_{dead}_1_0")
    with open(path, "r+b") as handle:
        kept = mmap.mmap(handle.fileno(), 0)
    status = os.stat(path)
    users, _ = tmpfs.users_of([(status.st_dev, status.st_ino)])
    kept.close()
    assert users == {(status.st_dev, status.st_ino): os.getpid()}


def test_a_path_that_is_not_there_is_unknown():
    result = check("/nowhere", state_dir=None)
    assert (codes(result), result["gate"]["verdict"]) == (["tmpfs-unreadable"], "unknown")


@pytest.mark.parametrize("mapped", [False, True])
def test_the_kernel_tells_whether_anybody_uses_a_file(tmp_path, mapped):
    path = tmp_path / "segment"
    path.write_bytes(b"x" * 4096)
    assert tmpfs.nobody_uses(str(path))
    handle = open(path, "rb")
    memory = mmap.mmap(handle.fileno(), 4096, prot=mmap.PROT_READ) if mapped else None
    if memory:
        handle.close()
    assert not tmpfs.nobody_uses(str(path))
    (memory or handle).close()
    assert tmpfs.nobody_uses(str(path))
    assert not tmpfs.nobody_uses(str(tmp_path / "absent"))
