# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A storage migration on real disks: loop devices, mounts, a table of mounts, a service manager, in a namespace of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import migration, migration_acts, migration_watch

from tests import disks
from tests.disks import MIB

pytestmark = disks.needed
ENVIRONMENT = {**os.environ, **disks.UNIT_ENVIRONMENT}


@pytest.fixture
def host():
    with disks.host() as found:
        yield found


def filled(host, **more):
    """An old volume with a whole tree on it. It is made by hand, outside of what is tested."""
    uuid = host.old_volume(**more)
    host.python("import sys; from pathlib import Path; from tests import trees; trees.make(Path(sys.argv[1]))", host.data)
    return uuid


def codes(result):
    return [problem["code"] for problem in result["gate"]["problems"]]


def consents(result):
    return [problem["consent"] for problem in result["gate"]["problems"] if problem["consent"]]


def verdicts(results):
    return [(result["gate"]["verdict"], codes(result)) for result in results]


def differences(host, source, target):
    return host.python("import sys; from tests import trees; print(trees.differences(*sys.argv[1:]))", source, target).strip()


def journal(host, event):
    path = host.state / "journal.jsonl"
    lines = host.run("cat", path, check=False).stdout.splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == event]


def snapshot(host):
    """Everything that a run could change: mounts, table, signatures, and the state directory without observations."""
    mounted = host.run("findmnt", "-rn", "-o", "TARGET,SOURCE,OPTIONS").stdout
    signatures = "".join(host.run("blkid", "-p", f"/dev/{name}", check=False).stdout for name in sorted(os.listdir("/sys/block")))
    names = host.run("find", host.root / "var", host.root / "etc", "-type", "f", "-not", "-name", "journal.jsonl", "-not", "-name", "lock")
    return mounted, host.run("cat", host.fstab).stdout, signatures, sorted(names.stdout.split())


@pytest.mark.parametrize(("fstype", "partitioned"), [("xfs", False), ("ext4", True)])
def test_a_whole_move_there_and_back_and_the_old_disk_given_up(host, fstype, partitioned):
    old = filled(host)
    before_table = host.run("cat", host.fstab).stdout
    target = host.disk("new", 400 * MIB)
    options = {"fstype": fstype, "partitioned": partitioned, "consent": [f"wipe:{target}"]}
    results = host.whole(target, **options)
    assert verdicts(results) == [("pass", [])] * 7
    new = host.mounted(host.data)
    assert new == results[-1]["gate"]["evidence"]["target_uuid"] != old
    assert host.mounted(host.root / "aside") == old
    assert host.read_only(host.root / "aside")
    assert differences(host, host.root / "aside", host.data) == ""
    after_table = host.run("cat", host.fstab).stdout
    passno = 0 if fstype == "xfs" else 2
    line = f"UUID={new} {host.data} {fstype} defaults,nosuid,noatime,nofail,x-systemd.device-timeout=300s 0 {passno}\n"
    assert after_table == re.sub(rf"/dev/\S+\t{host.data} .*\n", line, before_table)
    # Nothing is written under the bare mount point, not even by root.
    looked = host.run("unshare", "-m", "sh", "-c", f"umount {host.data} && touch {host.data}/x", check=False)
    assert "not permitted" in looked.stderr
    # Once more: nothing to do.
    seen = snapshot(host)
    again = host.whole(target, **options)
    assert [(result["changed"], result["actions"], result["gate"]["verdict"]) for result in again] == [(False, [], "pass")] * 7
    assert snapshot(host) == seen
    # Back: the old disk takes its place, the new one keeps what was written since.
    host.run("sh", "-c", f"echo since > {host.data}/since")
    back = host.migrate("rolled_back", target)
    assert back["gate"]["verdict"] == "pass" or codes(back) == ["rollback-leaves-files"]
    assert host.mounted(host.data) == old
    assert not host.read_only(host.data)
    assert host.run("cat", host.fstab).stdout == before_table
    assert host.run("cat", host.root / "aside" / "since").stdout == "since\n"
    assert host.migrate("rolled_back", target)["changed"] is False
    # And there again, without another format, then the old disk is given up.
    host.run("sh", "-c", f"echo more > {host.data}/more && rm '{host.data}/store/rows_0-2000/data_0.ckpt'")
    third = host.whole(target, fstype=fstype, partitioned=partitioned)
    assert {verdict for verdict, _ in verdicts(third)} == {"pass"}
    assert host.mounted(host.data) == new
    assert differences(host, host.root / "aside", host.data) == ""
    assert host.run("cat", host.data / "more").stdout == "more\n"
    assert len(journal(host, "formatted")) == 1
    refused = host.migrate("reclaimed", target)
    assert consents(refused) == [f"reclaim:{old}"]
    assert host.mounted(host.root / "aside") == old
    given = host.migrate("reclaimed", target, consent=[f"reclaim:{old}"])
    assert (given["gate"]["verdict"], given["changed"]) == ("pass", True)
    assert host.uuid(host.device("old")) == ""
    assert host.migrate("reclaimed", target)["changed"] is False
    assert codes(host.migrate("rolled_back", target)) == ["migration-reclaimed"]
    # Leaving: unit and guard go, the data stays where it is.
    assert len(host.migrate("released", target)["actions"]) == 2
    assert host.migrate("released", target)["changed"] is False
    host.run("unshare", "-m", "sh", "-c", f"umount {host.data} && touch {host.data}/x && rm {host.data}/x")
    assert host.mounted(host.data) == new
    assert host.whole(target, fstype=fstype, partitioned=partitioned)[-1]["changed"] is False


def test_check_mode_tells_the_plan_and_changes_nothing(host):
    filled(host)
    target = host.disk("new", 400 * MIB)
    seen = snapshot(host)
    result = host.migrate("prepared", target, check=True, consent=[f"wipe:{target}"])
    assert result["changed"]
    assert [action.split()[0] for action in result["actions"]] == ["format", "mount", "copy", "stop", "edit", "mount", "guard"]
    assert result["plan"] == result["actions"] == host.migrate("planned", target, consent=[f"wipe:{target}"])["plan"]
    for state in ("copied", "quiesced", "verified", "cut_over"):
        later = host.migrate(state, target, check=True, consent=[f"wipe:{target}"])
        assert (later["changed"], codes(later)) == (False, ["depends-on-planned-act"])
    assert host.migrate("prepared", target, check=True)["changed"] is False
    assert snapshot(host) == seen
    assert host.run("ls", host.state).stdout == "journal.jsonl\n"  # of the look that was no check run


def test_a_disk_is_not_formatted_without_the_consent_that_names_it(host):
    filled(host)
    target = host.disk("new", 400 * MIB)
    twin = host.disk("twin", 400 * MIB)
    for granted in ([], ["wipe"], [f"wipe:{target}x"], [f"wipe:{twin}"], [f"wipe:{host.device('new')}"]):
        result = host.migrate("prepared", target, consent=granted)
        assert codes(result) == ["target-not-consented"]
        assert consents(result) == [f"wipe:{target}"]
    assert host.uuid(host.device("new")) == host.uuid(host.device("twin")) == ""
    # Of two disks of one size the named one is taken.
    assert host.migrate("prepared", twin, fstype="ext4", partitioned=False, consent=[f"wipe:{twin}"])["gate"]["verdict"] == "pass"
    assert host.uuid(host.device("new")) == ""
    assert host.uuid(host.device("twin")) != ""
    # The consent is spent: the same words do not format what the disk carries later.
    host.run("umount", host.root / "new")
    host.run("wipefs", "-qa", host.device("twin"))
    host.run("dd", "if=/dev/zero", f"of={host.device('twin')}", "bs=1M", "count=400", check=False)
    host.migrate("rolled_back", twin)
    result = host.migrate("prepared", twin, fstype="ext4", partitioned=False, consent=[f"wipe:{twin}"])
    assert consents(result) == [f"wipe:{twin}#2"]


def test_names_that_do_not_last_and_names_of_nothing(host):
    filled(host)
    target = host.disk("new", 400 * MIB)
    unstable = host.migrate("planned", host.device("new"))
    assert codes(unstable) == ["target-name-unstable"]
    assert target in unstable["gate"]["problems"][0]["remedy"]
    assert codes(host.migrate("planned", "serial:none")) == ["target-missing"]
    assert codes(host.migrate("planned", "")) == ["target-not-named"]


@pytest.mark.parametrize("kind", ["ext4", "swap", "partitions", "unknown"])
def test_a_disk_that_holds_something_is_not_empty(host, kind):
    filled(host)
    target = host.disk("new", 400 * MIB)
    device = host.device("new")
    if kind == "ext4":
        host.run("mkfs.ext4", "-q", "-L", "theirs", device)
    elif kind == "swap":
        host.run("mkswap", device)
    elif kind == "partitions":
        host.run("sfdisk", "-q", device, input="label: gpt\ntype=L\n", check=False)
        host.run("partx", "-a", device)
    else:
        host.run("sh", "-c", f"printf secret | dd of={device} bs=1 seek=70000 conv=notrunc")
    before = host.run("sha256sum", host.root / "disks" / "new").stdout
    result = host.migrate("prepared", target, consent=[f"wipe:{target}"])
    assert codes(result) == ["target-has-partitions" if kind == "partitions" else "target-not-empty"]
    assert host.run("sha256sum", host.root / "disks" / "new").stdout == before
    if kind == "partitions":
        host.run("partx", "-d", device)
        assert consents(result) == []
        return
    (consent,) = consents(result)
    assert consent.startswith(f"wipe:{target}#{kind}")
    given = host.migrate("prepared", target, fstype="ext4", partitioned=False, consent=[consent])
    assert given["gate"]["verdict"] == "pass"


def test_a_disk_in_use_a_small_disk_and_a_mount_point_with_things_under_it(host):
    filled(host)
    small = host.disk("small", 84 * MIB)
    assert "target-too-small" in codes(host.migrate("planned", small, consent=[f"wipe:{small}"]))
    large = host.disk("new", 400 * MIB)
    assert codes(host.migrate("planned", large, need_bytes=1 << 30, consent=[f"wipe:{large}"])) == ["target-too-small"]
    used = f"loop:{host.root}/disks/old"
    assert codes(host.migrate("planned", used, consent=[f"wipe:{used}"])) == ["target-in-use"]
    host.run("unshare", "-m", "sh", "-c", "true")
    host.run("umount", host.data)
    host.run("touch", host.data / "written while nothing was mounted")
    assert codes(host.migrate("planned", large, consent=[f"wipe:{large}"])) == ["source-not-mounted"]
    host.run("mount", host.device("old"), host.data)
    result = host.migrate("prepared", large, consent=[f"wipe:{large}"])
    assert codes(result) == ["mount-point-not-empty"]
    assert "written while nothing was mounted" in result["gate"]["problems"][0]["what"]
    assert host.uuid(host.device("new")) == ""


def test_writers_of_others_are_named_and_ours_are_stopped(host):
    filled(host)
    target = host.disk("new", 400 * MIB)
    options = {"consent": [f"wipe:{target}"]}
    assert {v for v, _ in verdicts(host.whole(target, until="copied", **options))} == {"pass"}
    ours = f"/bin/sh -c 'exec sleep 1000 >> {host.data}/ours.log'"
    host.manager.add("relight-extract", ours)
    stranger = host.start("sh", "-c", f"exec sleep 1000 > {host.data}/stranger.log")
    try:
        disks.supervisor.wait_for(lambda: host.run("ls", host.data / "stranger.log", check=False).returncode == 0)
        result = host.migrate("quiesced", target, **options)
        assert codes(result) == ["source-held"]
        assert f"pid {stranger.pid}" in result["gate"]["problems"][0]["what"]
        assert not host.read_only(host.data)
    finally:
        stranger.kill()
        stranger.wait()
    assert not host.manager.running("relight-extract")
    assert host.migrate("quiesced", target, **options)["gate"]["verdict"] == "pass"
    assert host.read_only(host.data)
    assert host.migrate("verified", target, **options)["gate"]["verdict"] == "pass"
    assert host.wait("final")["gate"]["verdict"] == "pass"
    # Someone has it open for reading only: it cannot be unmounted, and is named.
    reader = host.start("sleep", "1000", stdin=os.open("/dev/null", os.O_RDONLY), cwd=None)
    reader.kill()
    reader.wait()
    holder = host.start("sh", "-c", f"cd {host.data} && exec sleep 1000")
    try:
        disks.supervisor.wait_for(lambda: os.readlink(f"/proc/{holder.pid}/cwd") == str(host.data))
        result = host.migrate("cut_over", target, **options)
        assert codes(result) == ["source-held"]
    finally:
        holder.kill()
        holder.wait()
    assert host.migrate("cut_over", target, **options)["gate"]["verdict"] == "pass"
    assert differences(host, host.root / "aside", host.data) == ""


def test_a_volume_that_was_moved_by_hand_is_proven_or_told_what_it_lacks(host):
    uuid = host.old_volume()
    host.run("mkdir", "-p", host.data / "models", host.root / "old" / "models", host.root / "units")
    for folder in (host.data, host.root / "old"):
        host.write(folder / "models" / "weights", "the same")
    host.write(host.root / "units" / "serve.service", "ExecStart=/bin/serve /mnt/ceph/models\n")
    asked = {
        "path": str(host.data),
        "fstab": str(host.fstab),
        "uuid": uuid,
        "paths": [f"{host.data}/models", "/mnt/ceph/records.json"],
        "former_paths": ["/mnt/ceph"],
        "unit_folders": [str(host.root / "units")],
        "old_copy": str(host.root / "old"),
        "mounts_from": "here",
    }
    result = host.module("storage_attached", **asked)
    stale = ["attached-path-missing", "attached-path-stale"]
    table = ["attached-by-device-name", "attached-no-nofail"]
    assert codes(result) == ["attached-not-guarded", *stale, *table, "attached-stale-path"]
    assert result["changed"] is False
    # Each remedy is what it takes.
    line = next(p["remedy"] for p in result["gate"]["problems"] if p["code"] == "attached-by-device-name").partition(": ")[2]
    host.write(host.fstab, f"{line}\n")
    host.run("umount", host.data)
    host.run("chattr", "+i", host.data)
    host.run("mount", host.device("old"), host.data)
    host.write(host.root / "units" / "serve.service", f"ExecStart=/bin/serve {host.data}/models\n")
    asked["paths"] = [f"{host.data}/models"]
    right = host.module("storage_attached", **asked)
    assert (right["gate"]["verdict"], codes(right)) == ("pass", [])
    assert (right["gate"]["evidence"]["guard"], right["gate"]["evidence"]["compared_bytes"]) == ("immutable", 8)
    host.write(host.data / "models" / "weights", "not that!")
    assert codes(host.module("storage_attached", **asked)) == ["attached-file-differs"]
    host.run("umount", host.data)
    assert codes(host.module("storage_attached", **asked))[0] == "attached-not-mounted"


@pytest.mark.skipif(not os.path.exists("/dev/fuse"), reason="needs /dev/fuse for the faulty source")
def test_a_source_that_fails_and_hangs_in_places_is_copied_around_them(host):
    kept = host.root / "kept"
    host.python("import sys; from pathlib import Path; from tests import trees; trees.make(Path(sys.argv[1]), large=6)", kept)
    names = [f"store/rows_0-2000/data_{index}.ckpt" for index in (1, 4)]
    faults = json.dumps({names[0]: "eio", names[1]: "hang"})
    server = host.start(sys.executable, "-m", "tests.faulty_fs", kept, host.data, faults, stdout=subprocess.PIPE, env=ENVIRONMENT)
    try:
        assert server.stdout.readline() == b"ready\n"
        folder, new = host.state / "migration", host.root / "new"
        host.run("mkdir", folder, new)
        host.write(new / migration.MARKER, "m1")
        job = {"id": "m1", "source": str(host.data), "target": str(new), "folder": str(folder), "final": True}
        host.write(folder / "job.json", json.dumps({**job, "digest": "blake2b_128", "stall_seconds": 2}))
        # The unit ends although a thread of its hangs in the kernel.
        service = host.start(sys.executable, "-m", migration_acts.SERVICE, folder / "job.json", env=ENVIRONMENT)
        assert service.wait(60) == 0
        done = json.loads(host.run("cat", folder / "progress.json").stdout)
        assert (done["phase"], done["error"]) == ("done", None)
        assert done["unreadable"] == {names[0]: "Input/output error", names[1]: "did not answer for 2 s"}
        assert migration_watch.samples_of(done, "/data", "/data/store", "specforge") == {names[0]: 1, names[1]: 4}
    finally:
        server.kill()
        server.wait()
    missing = [line.split(maxsplit=1)[1] for line in differences(host, kept, new).splitlines() if line.startswith(">f")]
    assert missing == names


def test_a_source_that_does_not_answer_at_all_is_left_only_by_consent(host):
    kept = host.root / "kept"
    host.run("mkdir", kept)
    target = host.disk("new", 400 * MIB)
    server = host.start(sys.executable, "-m", "tests.faulty_fs", kept, host.data, "{}", stdout=subprocess.PIPE, env=ENVIRONMENT)
    try:
        assert server.stdout.readline() == b"ready\n"
        os.kill(server.pid, signal.SIGSTOP)
        result = host.migrate("planned", target, look_seconds=2, consent=[f"wipe:{target}"])
        assert codes(result) == ["source-hung"]
        assert consents(result) == [f"lazy-umount:{host.data}"]
        assert result["gate"]["seconds"] < 20
    finally:
        server.kill()
        server.wait()


def test_a_frozen_source_is_rescued_while_its_writer_hangs(host):
    """As on a full storage pool: reads answer, writes hang in the kernel, nothing can be killed or unmounted."""
    filled(host)
    target = host.disk("new", 400 * MIB)
    options = {"consent": [f"wipe:{target}"], "stop_seconds": 5}
    lazily = {**options, "consent": [f"wipe:{target}", f"lazy-umount:{host.data}"]}
    writer = host.start("sh", "-c", f"exec 3>>{host.data}/log; while :; do echo x >&3; sleep 0.01; done")
    thaw = host.root / "thaw"
    host.run("mkdir", thaw)
    host.run("mount", "--bind", host.data, thaw)
    try:
        results = host.whole(target, until="copied", **options)
        assert results[-1]["gate"]["verdict"] == "pass", results[-1]["gate"]
        host.run("fsfreeze", "--freeze", thaw)
        stuck = lambda: Path(f"/proc/{writer.pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"  # noqa: E731
        disks.supervisor.wait_for(stuck)
        refused = host.migrate("quiesced", target, **options)
        assert codes(refused) == ["source-held"]
        assert "stuck in the kernel" in refused["gate"]["problems"][0]["what"]
        assert consents(refused) == [f"lazy-umount:{host.data}"]
        assert (host.migrate("quiesced", target, **lazily)["gate"]["verdict"], host.read_only(host.data)) == ("warn", False)
        assert host.migrate("verified", target, **lazily)["gate"]["verdict"] == "pass"
        assert host.wait("final")["gate"]["verdict"] == "pass"
        done = host.migrate("cut_over", target, **lazily)
        assert done["gate"]["verdict"] == "pass", done["gate"]
        assert any("unmount lazily" in action for action in done["actions"])
        assert host.mounted(host.data) == done["gate"]["evidence"]["target_uuid"]
        assert stuck()
        assert differences(host, thaw, host.data) == ""
    finally:
        host.run("fsfreeze", "--unfreeze", thaw, check=False)
        writer.kill()
        writer.wait()


def test_a_full_target_and_a_failing_one_fail_the_copy_and_harm_nothing(host):
    filled(host)
    host.run("dd", "if=/dev/urandom", f"of={host.data}/bulk", "bs=1M", "count=48")
    # The disk claims 600 MiB; the tmpfs behind it ends long before: writes fail as on a dying disk.
    host.run("sh", "-c", f"mkdir {host.root}/tiny && mount -t tmpfs -o size=32m tmpfs {host.root}/tiny")
    host.run("truncate", "-s", str(600 * MIB), host.root / "tiny" / "image")
    device = host.run("losetup", "--find", "--show", host.root / "tiny" / "image").stdout.strip()
    host.ask(device)
    host.run("losetup", "--detach", device)
    target = f"loop:{host.root}/tiny/image"
    results = host.whole(target, fstype="ext4", partitioned=False, consent=[f"wipe:{target}"], until="copied")
    assert results[-1]["gate"]["verdict"] == "fail"
    assert codes(results[-1])[0] in ("target-io-error", "target-full")
    assert host.mounted(host.data) != ""
    assert not host.read_only(host.data)
    assert codes(host.migrate("quiesced", target)) == ["copy-not-done"]
    assert host.migrate("rolled_back", target)["gate"]["verdict"] == "pass"
