# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""host_env and dump_plugin as they run on a host: real environments, real pips, real kills."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import environments, wheelhouse

from relight.cli.wheelhouse import own_wheel, rewheel
from tests.harness import ROOT, run_module, skip_without_sight


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Relight's own wheel and a pip, and no registry."""
    folder = tmp_path_factory.mktemp("wheelhouse")
    own_wheel(folder)
    rewheel(folder, "pip")
    wheelhouse.write_index(str(folder), {})
    return folder


@pytest.fixture(scope="module")
def later_house(house, tmp_path_factory):
    """The next version of the same: one file of Relight's wheel differs."""
    folder = tmp_path_factory.mktemp("later")
    shutil.copytree(house, folder, dirs_exist_ok=True)
    wheel = next(folder.glob("relight-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    content["relight/__init__.py"] += b"LATER = True\n"
    record = next(name for name in content if name.endswith("/RECORD"))
    out = io.StringIO()
    for name, digest, size in csv.reader(content[record].decode().splitlines()):
        data = content[name]
        if digest:
            digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        csv.writer(out, lineterminator="\n").writerow([name, digest, size and len(data)])
    content[record] = out.getvalue().encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    wheelhouse.write_index(str(folder), {})
    return folder


def host_env(tmp_path, house, **options):
    return run_module(
        "host_env", venv=str(tmp_path / "venv"), wheelhouse=str(house), extras=[], state_dir=str(tmp_path / "state"), **options
    )


def codes(result):
    return [problem["code"] for problem in result["gate"]["problems"]]


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_check_mode_tells_what_the_run_then_does_and_a_second_run_does_nothing(tmp_path, house):
    planned = host_env(tmp_path, house, check=True)
    assert planned["changed"]
    assert tree(tmp_path) == set()
    done = host_env(tmp_path, house)
    assert done["actions"] == planned["actions"]
    assert len(done["actions"]) == 2
    python = tmp_path / "venv" / "bin" / "python"
    where = subprocess.run(
        [python, "-I", "-c", "import relight; print(relight.__file__)"], capture_output=True, text=True, check=True
    ).stdout
    assert where.startswith(str(tmp_path / "venv"))
    again = host_env(tmp_path, house)
    assert (again["changed"], again["actions"], again["gate"]["verdict"]) == (False, [], "pass")


def test_a_build_that_was_killed_is_made_anew(tmp_path, house):
    options = {"venv": str(tmp_path / "venv"), "wheelhouse": str(house), "extras": [], "state_dir": str(tmp_path / "state")}
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; from tests.harness import run_module; run_module('host_env', **{options!r})"
    build = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(f"venv.*/{environments.BUILDING}")):
        assert time.monotonic() < deadline
        assert build.poll() is None
        time.sleep(0.005)
    os.killpg(build.pid, signal.SIGKILL)
    build.wait()
    assert not (tmp_path / "venv").exists()
    half = next(tmp_path.glob("venv.*"))
    assert not (half / environments.WHOLE).exists()
    (half / "left over").touch()
    done = host_env(tmp_path, house)
    assert done["gate"]["verdict"] == "pass"
    assert len(done["actions"]) == 2
    assert not (half / "left over").exists()
    assert (half / environments.WHOLE).exists()
    assert not (half / environments.BUILDING).exists()


def test_an_environment_whose_python_no_longer_runs_is_made_anew(tmp_path, house):
    host_env(tmp_path, house)
    python = tmp_path / "venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/no/such/python")
    done = host_env(tmp_path, house)
    assert [action.split()[0] for action in done["actions"]] == ["Build"]
    assert done["gate"]["verdict"] == "pass"
    (tmp_path / "venv" / environments.WHOLE).rename(tmp_path / "venv" / environments.BUILDING)  # killed when all but the mark was there
    assert [action.split()[0] for action in host_env(tmp_path, house, check=True)["actions"]] == ["Build"]


def test_a_new_wheelhouse_is_built_beside_the_old_one_and_removal_takes_only_ours(tmp_path, house, later_house):
    host_env(tmp_path, house)
    old = Path(os.path.realpath(tmp_path / "venv"))
    (tmp_path / "venv.mine").mkdir()
    (tmp_path / "venv.0123456789abcdef").mkdir()  # looks like ours and carries no mark of ours
    host_env(tmp_path, later_house)
    new = Path(os.path.realpath(tmp_path / "venv"))
    assert new != old
    assert (old / "bin" / "python").exists()
    assert "LATER" in next(new.glob("lib/python3*/site-packages/relight/__init__.py")).read_text()
    planned = run_module("host_env", state="absent", venv=str(tmp_path / "venv"), state_dir=str(tmp_path / "state"), check=True)
    assert new.exists()
    gone = run_module("host_env", state="absent", venv=str(tmp_path / "venv"), state_dir=str(tmp_path / "state"))
    assert gone["actions"] == planned["actions"] == [f"Remove the host environment {folder}" for folder in sorted(map(str, (old, new)))]
    assert {path.name for path in tmp_path.iterdir()} == {"state", "venv.mine", "venv.0123456789abcdef"}
    assert not run_module("host_env", state="absent", venv=str(tmp_path / "venv"), state_dir=str(tmp_path / "state"))["changed"]


def test_what_stands_in_the_way_stays(tmp_path, house):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "theirs").touch()
    result = host_env(tmp_path, house)
    assert (codes(result), result["gate"]["verdict"], result["changed"]) == (["host-env-in-the-way"], "fail", False)
    assert (tmp_path / "venv" / "theirs").exists()


@pytest.mark.parametrize("check", [False, True])
def test_a_torn_wheel_is_found_before_anything_is_built(tmp_path, house, check):
    torn = tmp_path / "torn"
    shutil.copytree(house, torn)
    os.truncate(next(torn.glob("relight-*.whl")), 1000)
    result = host_env(tmp_path, torn, check=check)
    assert (codes(result), result["changed"]) == (["host-env-wheelhouse"], False)
    assert not list(tmp_path.glob("venv*"))


def test_wheels_that_do_not_fit_are_told_with_the_word_of_pip(tmp_path, house):
    lacking = run_module(
        "host_env", venv=str(tmp_path / "v"), wheelhouse=str(house), extras=["host"], state_dir=str(tmp_path / "state")
    )  # aiohttp and the rest are not in this wheelhouse
    assert codes(lacking) == ["host-env-build"]
    assert "No matching distribution" in lacking["gate"]["problems"][0]["what"]
    assert not (tmp_path / "v").exists()


def test_a_python_that_does_not_run_is_told(tmp_path, house):
    false = shutil.which("false")
    assert codes(host_env(tmp_path, house, python=false)) == ["host-env-python"]
    assert codes(host_env(tmp_path, house, python="/no/such/python")) == ["host-env-python"]


# --- the user's environment -------------------------------------------------------------------------------------------


@pytest.fixture
def theirs(tmp_path):
    """The environment of the user's server, as bare as uv makes them: without pip."""
    skip_without_sight()
    folder = tmp_path / "sglang"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder


def dump_plugin(tmp_path, house, theirs, **options):
    return run_module(
        "dump_plugin", python=str(theirs / "bin" / "python"), wheelhouse=str(house), state_dir=str(tmp_path / "state"), **options
    )


def entry_points(theirs: Path) -> str:
    code = "from importlib.metadata import entry_points as e; print(*(p.value for p in e().get('sglang.srt.plugins', ())))"
    if sys.version_info >= (3, 12):
        code = "from importlib.metadata import entry_points as e; print(*(p.value for p in e(group='sglang.srt.plugins')))"
    return subprocess.run([theirs / "bin" / "python", "-I", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def process(argv: list[str], executable: str):
    """A process that says when it runs, and is gone at the end."""
    child = subprocess.Popen(argv, executable=executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def test_the_plugin_goes_in_and_comes_out_without_a_trace(tmp_path, house, theirs):
    before = tree(theirs)
    planned = dump_plugin(tmp_path, house, theirs, check=True)
    assert tree(theirs) == before
    done = dump_plugin(tmp_path, house, theirs)
    assert done["actions"] == planned["actions"]
    assert len(done["actions"]) == 1
    assert entry_points(theirs) == "relight.dump.plugin:activate"
    added = {name.split("/")[3] for name in tree(theirs) - before if "site-packages/" in name}
    assert {re.sub(r"-[0-9.]+\.dist", ".dist", name) for name in added} == {
        "relight",
        "relight.dist-info",
        "ansible_collections",
    }  # no dependency
    again = dump_plugin(tmp_path, house, theirs)
    assert (again["changed"], again["gate"]["evidence"]["found"]) == (False, "same")
    out = dump_plugin(tmp_path, house, theirs, state="absent")
    assert out["changed"]
    assert tree(theirs) == before
    assert not dump_plugin(tmp_path, house, theirs, state="absent")["changed"]


def test_the_plugin_comes_out_of_every_environment_that_got_it(tmp_path, house, theirs):
    dump_plugin(tmp_path, house, theirs)
    moved, deleted = tmp_path / "newer", tmp_path / "deleted"
    for other in (moved, deleted):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", other], check=True)
        dump_plugin(tmp_path, house, other)
    shutil.rmtree(deleted)
    out = run_module("dump_plugin", state="absent", state_dir=str(tmp_path / "state"))
    assert (len(out["actions"]), out["gate"]["verdict"]) == (2, "pass")
    assert entry_points(theirs) == entry_points(moved) == ""
    assert environments.read_installs(str(tmp_path / "state")) == {}


def test_what_the_user_installed_is_not_taken_out(tmp_path, house, theirs):
    dump_plugin(tmp_path, house, theirs)
    (tmp_path / "state" / environments.RECORD).unlink()
    result = dump_plugin(tmp_path, house, theirs, state="absent")
    assert (result["changed"], result["gate"]["verdict"]) == (False, "pass")
    assert entry_points(theirs) == "relight.dump.plugin:activate"


@pytest.mark.parametrize(
    "damage",
    [
        lambda site: (site / "relight" / "__init__.py").write_text("# half"),
        lambda site: next(site.glob("relight-*.dist-info/RECORD")).unlink(),
        lambda site: shutil.copytree(next(site.glob("relight-*.dist-info")), site / "relight-0.0.1.dist-info"),
    ],
    ids=["changed file", "no record", "two versions"],
)
def test_a_half_installed_plugin_is_installed_anew(tmp_path, house, theirs, damage):
    dump_plugin(tmp_path, house, theirs)
    damage(next(theirs.glob("lib/python3*/site-packages")))
    assert dump_plugin(tmp_path, house, theirs)["changed"]
    assert not dump_plugin(tmp_path, house, theirs)["changed"]
    assert entry_points(theirs) == "relight.dump.plugin:activate"


def test_nothing_is_exchanged_under_a_running_server(tmp_path, house, later_house, theirs):
    python = str(theirs / "bin" / "python")
    with process([python, "-c", "print('ready', flush=True); input()", "sglang.launch_server"], python) as pid:
        refused = dump_plugin(tmp_path, house, theirs)
        assert (codes(refused), refused["changed"]) == (["dump-plugin-in-use"], False)
        assert f"pid {pid}" in refused["gate"]["problems"][0]["what"]
        assert entry_points(theirs) == ""
    dump_plugin(tmp_path, house, theirs)
    with process([python, "-c", "print('ready', flush=True); input()", "sglang.launch_server"], python):
        assert dump_plugin(tmp_path, house, theirs)["gate"]["verdict"] == "pass"  # the same version is there already
        assert codes(dump_plugin(tmp_path, later_house, theirs)) == ["dump-plugin-in-use"]
        assert codes(dump_plugin(tmp_path, house, theirs, state="absent")) == ["dump-plugin-in-use"]
    assert dump_plugin(tmp_path, later_house, theirs)["changed"]


def test_a_worker_that_renamed_itself_is_known_by_what_it_has_mapped(theirs):
    library = theirs / "lib" / "library.so"
    library.write_bytes(b"\0" * 4096)
    code = f"import mmap; f = open({str(library)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0); print('ready', flush=True); input()"
    with process(["sglang::scheduler", "-I", "-c", code], sys.executable) as pid:
        assert environments.users_of(str(theirs)).pids == (pid,)
        assert environments.users_of(str(theirs.parent / "other")).pids == ()


def test_a_process_that_cannot_be_looked_into_is_unknown(tmp_path):
    fake = tmp_path / "proc" / "4242"
    fake.mkdir(parents=True)
    (fake / "cmdline").write_bytes(b"sglang::scheduler\0")
    (fake / "maps").mkdir()  # cannot be read, as another user's cannot
    users = environments.users_of("/opt/sglang", str(tmp_path / "proc"))
    assert users == environments.Users((), (4242,))
