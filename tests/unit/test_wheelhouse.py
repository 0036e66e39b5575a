# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""A wheelhouse is whole or it is refused."""

from __future__ import annotations

import hashlib
import json
import zipfile

import pytest
from ansible_collections.relight.recovery.plugins.module_utils import wheelhouse
from ansible_collections.relight.recovery.plugins.module_utils.wheelhouse import BadWheelhouse

from relight.cli.wheelhouse import unmet

OWN = "relight-1.0-py3-none-any.whl"
PIP = "pip-9.0-py3-none-any.whl"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / OWN).write_bytes(b"own")
    (tmp_path / PIP).write_bytes(b"pip")
    (tmp_path / "notes.txt").write_text("not a wheel")
    wheelhouse.write_index(str(tmp_path), {"extras": ["host"]})
    return tmp_path


def index(folder):
    return json.loads((folder / wheelhouse.INDEX).read_text())


def test_an_index_names_the_wheels_and_only_them(folder):
    house = wheelhouse.read(str(folder))
    assert sorted(house.files) == [PIP, OWN]
    assert (house.relight, house.pip) == (OWN, PIP)
    assert house.files[OWN] == hashlib.sha256(b"own").hexdigest()
    assert index(folder)["extras"] == ["host"]


def test_the_digest_knows_names_and_contents_and_no_order():
    one = wheelhouse.digest_of({"a.whl": "1", "b.whl": "2"})
    assert one == wheelhouse.digest_of({"b.whl": "2", "a.whl": "1"})
    assert one != wheelhouse.digest_of({"a.whl": "2", "b.whl": "1"})
    assert one != wheelhouse.digest_of({"a.whl": "1", "c.whl": "2"})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / PIP).unlink(), f"{PIP} is missing"),
        (lambda f: (f / PIP).write_bytes(b"PIP"), "its content differs"),
        (lambda f: (f / wheelhouse.INDEX).write_text("{"), "no JSON"),
        (lambda f: (f / wheelhouse.INDEX).write_text("[]"), "is not one"),
    ],
)
def test_a_damaged_wheelhouse_is_refused(folder, damage, says):
    damage(folder)
    with pytest.raises(BadWheelhouse, match=says):
        wheelhouse.read(str(folder))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema": 2}, "schema 2"),
        ({"digest": "0" * 64}, "contradicts itself"),
        ({"files": {"../x.whl": "1"}, "digest": wheelhouse.digest_of({"../x.whl": "1"})}, "contradicts itself"),
        ({"files": {PIP: "1"}, "digest": wheelhouse.digest_of({PIP: "1"})}, "no wheel of relight"),
        ({"files": None}, "is not one"),
    ],
)
def test_an_index_that_cannot_be_is_refused(folder, change, says):
    with pytest.raises(BadWheelhouse, match=says):
        wheelhouse.parse({**index(folder), **change})


def test_no_index_is_no_wheelhouse(tmp_path):
    assert wheelhouse.read(str(tmp_path)) is None
    assert wheelhouse.read(str(tmp_path / "missing")) is None


def test_the_controller_says_which_wheelhouse_it_must_be(folder, tmp_path):
    theirs = index(folder)
    other = {**theirs, "files": {OWN: "1"}, "digest": wheelhouse.digest_of({OWN: "1"})}
    assert wheelhouse.choose(str(folder), theirs, False).digest == theirs["digest"]
    assert wheelhouse.choose(str(folder), None, False).digest == theirs["digest"]
    with pytest.raises(BadWheelhouse, match="not the one of the controller"):
        wheelhouse.choose(str(folder), other, False)
    with pytest.raises(BadWheelhouse, match=r"no wheelhouse\.json"):
        wheelhouse.choose(str(tmp_path / "missing"), theirs, False)


def test_in_check_mode_the_index_stands_for_files_to_come(folder, tmp_path):
    theirs = index(folder)
    other = {**theirs, "files": {OWN: "1"}, "digest": wheelhouse.digest_of({OWN: "1"})}
    assert wheelhouse.choose(str(tmp_path / "missing"), theirs, True).digest == theirs["digest"]
    assert wheelhouse.choose(str(folder), other, True).digest == other["digest"]
    with pytest.raises(BadWheelhouse):
        wheelhouse.choose(str(tmp_path / "missing"), None, True)


def test_conditions_are_those_of_the_host_and_not_of_the_controller(tmp_path):
    """pip passes over what only an older Python needs when it collects for one."""

    def wheel(name, *requires):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(
                f"{name}-1.0.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", *(f"Requires-Dist: {r}" for r in requires), ""])
            )

    wheel("relight", "http>=1 ; extra == 'host'", "play; extra == 'controller'")
    wheel("http", "Old_Timer>=4,<6; python_version < '3.11'", "arm-only; platform_machine == 'aarch64'", "socks; extra == 'socks'", "there")
    wheel("there")
    assert unmet(tmp_path, "3.9", "x86_64", ("host",)) == ["Old_Timer<6,>=4"]
    assert unmet(tmp_path, "3.12", "x86_64", ("host",)) == []
    assert unmet(tmp_path, "3.12", "aarch64", ("host",)) == ["arm-only"]
    assert unmet(tmp_path, "3.12", "x86_64", ("host", "controller")) == ["play"]
