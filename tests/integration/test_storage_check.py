"""storage_check on real directories, a real full tmpfs in a namespace of its own, and a storage that hangs."""

import json
import subprocess
import sys

import pytest

from tests.harness import ROOT, run_module

ENDLESS = 1 << 60
MIB = 1 << 20


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    (folder / "store").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "store" / "data_0.ckpt").write_bytes(bytes(4 * MIB))
    (folder / "model" / "weights").write_bytes(bytes(3 * MIB))
    (folder / "filler").write_bytes(bytes(2 * MIB))
    (folder / "old").write_bytes(bytes(MIB))
    return folder


def check(folder, **options):
    given = {
        "path": str(folder),
        "store": str(folder / "store"),
        "keep": [str(folder / "model")],
        "state_dir": str(folder.parent / "state"),
    }
    check_mode = options.pop("check", False)
    return run_module("storage_check", check=check_mode, **{**given, **options})


def codes(result):
    return [problem["code"] for problem in result["gate"]["problems"]]


def consents(result):
    return [problem["consent"] for problem in result["gate"]["problems"]]


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


ALL = ["filler", "model", "model/weights", "old", "store", "store/data_0.ckpt"]


def test_a_good_storage_passes_and_the_write_leaves_nothing(data):
    result = check(data, need_bytes=1, need_inodes=1)
    assert (result["gate"]["verdict"], result["changed"]) == ("pass", False)
    evidence = result["gate"]["evidence"]
    assert evidence["write_seconds"] > 0
    assert evidence["free_bytes"] > 0
    assert names(data) == ALL
    assert check(data, check=True)["gate"]["evidence"]["write_seconds"] is None


def test_what_a_killed_probe_left_is_swept(data):
    (data / ".relight-probe-4194999").write_bytes(b"x")
    check(data)
    assert names(data) == ALL


def test_short_of_room_names_the_largest_files_that_are_not_the_runs_own(data):
    result = check(data, need_bytes=ENDLESS)
    assert codes(result) == ["storage-full", "storage-full"]
    assert consents(result) == [f"remove:{data}/filler", f"remove:{data}/old"]
    assert result["gate"]["verdict"] == "fail"
    assert names(data) == ALL


def test_without_consent_nothing_is_removed(data):
    result = check(data, need_bytes=ENDLESS, state="relieved", consent=[])
    assert (result["changed"], result["actions"], result["gate"]["verdict"]) == (False, [], "fail")
    assert names(data) == ALL


WRONG = ("{}/fill", "{}/filler ", "{}/filler#2", "{}/../data/filler", "{}/store/data_0.ckpt", "{}/model/weights")


@pytest.mark.parametrize("name", WRONG)
def test_a_name_counts_whole_and_never_for_the_runs_own(data, name):
    result = check(data, need_bytes=ENDLESS, state="relieved", consent=["remove:" + name.format(data), f"{data}/filler"])
    assert (result["changed"], names(data)) == (False, ALL)


def test_exactly_the_consented_file_goes_once(data):
    consent = [f"remove:{data}/filler"]
    planned = check(data, check=True, need_bytes=ENDLESS, state="relieved", consent=consent)
    assert names(data) == ALL
    assert not (data.parent / "state").exists()
    done = check(data, need_bytes=ENDLESS, state="relieved", consent=consent)
    assert (done["changed"], done["actions"]) == (True, planned["actions"])
    assert done["actions"] == [f"remove {data}/filler ({2 * MIB} bytes), by consent remove:{data}/filler"]
    assert "depends-on-planned-act" in codes(planned)
    assert names(data) == [name for name in ALL if name != "filler"]
    spent = [json.loads(line) for line in (data.parent / "state" / "journal.jsonl").read_text().splitlines()]
    assert [line["consent"] for line in spent if line["event"] == "spent"] == consent

    again = check(data, need_bytes=ENDLESS, state="relieved", consent=consent)
    assert (again["changed"], again["actions"]) == (False, [])

    (data / "filler").write_bytes(bytes(2 * MIB))  # another file of the same name
    other = check(data, need_bytes=ENDLESS, state="relieved", consent=consent)
    assert (other["changed"], consents(other)[0]) == (False, f"remove:{data}/filler#2")
    last = check(data, need_bytes=ENDLESS, state="relieved", consent=[f"remove:{data}/filler#2"])
    assert (last["changed"], (data / "filler").exists()) == (True, False)


def test_a_kill_after_the_consent_was_spent_is_made_good(data):
    status = (data / "filler").stat()
    state = data.parent / "state"
    state.mkdir()
    line = {"event": "spent", "consent": f"remove:{data}/filler", "identity": [status.st_ino, status.st_size, status.st_mtime_ns]}
    (state / "journal.jsonl").write_text(json.dumps(line) + "\n")
    result = check(data, need_bytes=ENDLESS, state="relieved", consent=[f"remove:{data}/filler"])
    assert (result["changed"], (data / "filler").exists()) == (True, False)


def test_a_file_that_a_process_has_open_is_not_removed(data):
    code = f"f = open({str(data / 'filler')!r}); print('open', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"open\n"
    result = check(data, need_bytes=ENDLESS, state="relieved", consent=[f"remove:{data}/filler"])
    holder.communicate(b"\n")
    assert (result["changed"], (data / "filler").exists()) == (False, True)
    assert (set(codes(result)), consents(result)[0]) == ({"storage-full"}, None)
    assert f"open by pid {holder.pid}" in result["gate"]["problems"][0]["what"]


def test_links_and_folders_are_not_removed(data, tmp_path):
    (tmp_path / "outside").write_bytes(bytes(5 * MIB))
    (data / "link").symlink_to(tmp_path / "outside")
    (data / "folder").symlink_to(tmp_path)
    wanted = [f"remove:{data}/link", f"remove:{data}/folder/outside", f"remove:{data}/store", f"remove:{tmp_path}/outside"]
    assert check(data, need_bytes=ENDLESS, state="relieved", consent=wanted)["changed"] is False
    assert (tmp_path / "outside").exists()
    assert (data / "link").is_symlink()


def test_no_room_is_asked_for_no_file_is_removed(data):
    assert check(data, state="relieved", consent=[f"remove:{data}/filler"])["changed"] is False
    assert names(data) == ALL


def test_a_missing_directory_and_a_missing_mount(data):
    assert codes(check(data / "gone")) == ["storage-path-missing"]
    result = check(data, mounted=True)
    assert (codes(result), result["gate"]["verdict"]) == (["storage-not-mounted"], "fail")
    assert result["gate"]["evidence"]["write_seconds"] is None  # nothing is written below a bare mount point
    assert run_module("storage_check", check=True, path="/proc", mounted=True)["gate"]["evidence"]["mount_point"] == "/proc"


def test_a_uuid_that_no_device_has(data):
    assert codes(check(data, uuid="6b1f-none")) == ["storage-device-missing"]


def namespaced(tmp_path, setup):
    """A python whose /mnt-like folder is a small tmpfs of its own, made by `setup`; it ends with the call."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec unshare -rm sh -c \'{setup}; exec {sys.executable} "$@"\' sh "$@"\n')
    wrapper.chmod(0o755)
    if subprocess.run([wrapper, "-c", "0"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives no user namespace")
    return str(wrapper)


def test_a_really_full_file_system_and_its_relief(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=2m tmpfs {folder}; head -c 9000000 /dev/zero > {folder}/filler 2>/dev/null"
    python = namespaced(tmp_path, mount)
    options = {"path": str(folder), "mounted": True, "state_dir": str(tmp_path / "state"), "with_python": python}
    full = run_module("storage_check", **options)
    assert (codes(full), consents(full)) == (["storage-full"], [f"remove:{folder}/filler"])
    assert full["gate"]["evidence"]["fstype"] == "tmpfs"
    assert codes(run_module("storage_check", check=True, **options)) == ["storage-full"]
    relieved = run_module("storage_check", state="relieved", consent=[f"remove:{folder}/filler"], **options)
    assert (relieved["gate"]["verdict"], relieved["changed"]) == ("pass", True)
    assert relieved["gate"]["evidence"]["free_bytes"] == 2 * MIB


def test_a_read_only_mount(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    python = namespaced(tmp_path, f"mount -t tmpfs -o ro,size=2m tmpfs {folder}")
    result = run_module("storage_check", path=str(folder), with_python=python)
    assert (codes(result), result["gate"]["verdict"]) == (["storage-read-only"], "fail")


def test_no_inodes_left(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    python = namespaced(tmp_path, f"mount -t tmpfs -o size=2m,nr_inodes=2 tmpfs {folder}; : > {folder}/a")
    assert codes(run_module("storage_check", path=str(folder), with_python=python)) == ["storage-inodes"]


HANGS = """
import os, signal
real = os.statvfs
os.statvfs = lambda path: signal.pause() if str(path).endswith("/data") else real(path)
"""


def test_a_storage_that_hangs_is_unknown(data, tmp_path):
    """The kernel's call never returns, as it does on a frozen mount; the module does."""
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    path = f"{tmp_path}:{ROOT / 'collections'}:{ROOT}"
    result = run_module("storage_check", path=str(data), look_seconds=0.5, with_env={"PYTHONPATH": path})
    assert (codes(result), result["gate"]["verdict"]) == (["mount-hung"], "unknown")


def test_the_baselines_mounts_are_compared_and_the_kernel_log_is_told(data):
    def against(**more):
        before = {"path": str(data), "mount_point": point, "uuid": None, "by_id": None, "source": None, **more}
        return check(data, baseline_mounts=[before])

    point = check(data)["gate"]["evidence"]["mount_point"]
    assert codes(against()) == []
    assert codes(against(mount_point="/elsewhere")) == ["storage-not-baseline"]
    assert codes(against(path=str(data / "gone"))) == ["storage-not-baseline"]
    assert check(data, kernel_log="off")["gate"]["evidence"]["kernel_log"] == "not asked for"
    assert check(data)["gate"]["evidence"]["kernel_log"] != "not asked for"
