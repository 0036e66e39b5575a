# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""systemd through systemctl, each call bounded, and through the control groups that its processes are in."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import durable, procs
from ansible_collections.relight.recovery.plugins.module_utils.services import CLEAN_EXITS, ManagerError, Unit, UnitSpec, wait_state

UNITS = "/etc/systemd/system"
VENDOR = ("/usr/lib/systemd/", "/lib/systemd/", "/run/systemd/generator")
PROPERTIES = ("Id", "LoadState", "ActiveState", "SubState", "MainPID", "FragmentPath", "UnitFileState", "Restart", "RestartUSec")
STATES = {"active": "running", "reloading": "running", "activating": "starting", "deactivating": "stopping", "failed": "failed"}
KEPT = ("enabled", "enabled-runtime", "generated", "static", "indirect", "alias", "linked")
CALL_SECONDS = 20.0


def parse(shown: str) -> list[dict[str, str]]:
    """The blocks of `systemctl show`, one a unit. Pure."""
    blocks = (block for block in re.split(r"\n\s*\n", shown) if block.strip())
    return [dict(line.split("=", 1) for line in block.splitlines() if "=" in line) for block in blocks]


def unit(properties: Mapping[str, str]) -> Unit:
    """A unit from its properties. Pure."""
    file_state = properties.get("UnitFileState", "")
    state = STATES.get(properties.get("ActiveState", ""), "stopped")
    restart = properties.get("Restart", "no")
    if state in ("stopped", "failed") and file_state in ("disabled", "masked", "masked-runtime"):
        state = "disabled"
    fragment = properties.get("FragmentPath", "")
    return Unit(
        name=properties["Id"],
        state=state,
        pid=int(properties.get("MainPID", "0")) or None,
        file=fragment or None,
        kept=file_state in KEPT or (restart != "no" and state in ("running", "starting")),
        vendor=fragment.startswith(VENDOR),
        detail=f"{properties.get('SubState', '')}, {file_state or 'no unit file'}, Restart={restart}",
    )


def unit_of_cgroup(cgroup: str) -> str | None:
    """The system service that a control group belongs to; None for sessions, containers and users' own managers. Pure."""
    parts = [part for part in cgroup.split("/") if part]
    if not parts or parts[0] in ("user.slice", "machine.slice") or any(part.endswith(".scope") for part in parts):
        return None
    services = [part for part in parts if part.endswith(".service")]
    return services[0] if services else None


def quote(value: str) -> str:
    """One word of a unit file, taken literally. Raises ManagerError for a line break."""
    if "\n" in value or "\r" in value:
        raise ManagerError("a value holds a line break, which a unit file cannot say")
    value = value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{value}"'


class Systemd:
    """The system's own manager."""

    kind = "systemd"

    def _run(self, *words: str, fine: Sequence[int] = (0,), seconds: float = CALL_SECONDS) -> str:
        """systemctl's output. Raises ManagerError."""
        try:
            done = subprocess.run(
                ["systemctl", *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
                env={**os.environ, "LC_ALL": "C", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"},
            )
        except FileNotFoundError:
            raise ManagerError("systemctl is not installed here") from None
        except subprocess.TimeoutExpired:
            raise ManagerError(f"systemctl {' '.join(words)} did not answer within {seconds:g} s") from None
        if done.returncode not in fine:
            raise ManagerError(f"systemctl {' '.join(words)}: {done.stderr.strip() or f'exit {done.returncode}'}")
        return done.stdout

    def canonical(self, name: str) -> str:
        return name if re.search(r"\.(service|socket|timer|path|target|mount|scope|slice)$", name) else f"{name}.service"

    def units(self) -> dict[str, Unit]:
        """The loaded services. One that is neither loaded nor running holds nothing."""
        shown = self._run("show", "--all", f"--property={','.join(PROPERTIES)}", "*.service")
        found = [block for block in parse(shown) if block.get("Id") and block.get("LoadState") != "not-found"]
        return {block["Id"]: unit(block) for block in found}

    def _info(self, name: str) -> Unit:
        block = parse(self._run("show", f"--property={','.join(PROPERTIES)}", self.canonical(name)))[0]
        if block.get("LoadState") == "not-found":
            raise ManagerError(f"systemd knows no {self.canonical(name)}")
        return unit(block)

    # Ours

    def unit_file(self, name: str) -> str:
        return os.path.join(UNITS, self.canonical(name))

    def render(self, spec: UnitSpec) -> str:
        """Without [Install]: at boot the gates come first, and recovery starts what they let through."""
        lines = [
            f"# Written by Relight. Changes are overwritten. Configuration {spec.hash}.",
            "[Unit]",
            f"Description=Relight: {spec.name}",
            "StartLimitIntervalSec=600",
            "StartLimitBurst=3",
            *(f"RequiresMountsFor={quote(path)}" for path in spec.requires_mounts),
            "",
            "[Service]",
            "Type=exec",
            "ExecStart=:" + " ".join(quote(word) for word in spec.command),
            f"WorkingDirectory={spec.directory.replace('%', '%%')}",
            *(f"Environment={quote(f'{key}={value}')}" for key, value in sorted(spec.variables.items())),
            f"Restart={'on-failure' if spec.restart else 'no'}",
            "RestartSec=5",
            f"RestartPreventExitStatus={' '.join(str(code) for code in CLEAN_EXITS if code)}",
            "KillMode=control-group",
            f"TimeoutStopSec={spec.stop_seconds}",
            "LimitMEMLOCK=infinity",
            "LimitNOFILE=1048576",
        ]
        if spec.stdout:
            lines += [f"StandardOutput=append:{spec.stdout.replace('%', '%%')}", "StandardError=inherit"]
        if spec.user:
            lines.append(f"User={spec.user}")
        return "\n".join(lines) + "\n"

    def install(self, name: str, spec: UnitSpec) -> bool:
        path, text = self.unit_file(name), self.render(spec)
        try:
            with open(path, encoding="utf-8") as handle:
                if handle.read() == text:
                    return False
        except FileNotFoundError:
            pass
        with durable.replacing(path, 0o640) as handle:
            handle.write(text.encode())
        self._run("daemon-reload")
        self.stop(name, spec.stop_seconds + 5)
        return True

    def remove(self, name: str) -> bool:
        path = self.unit_file(name)
        there = os.path.exists(path)
        if there:
            self.stop(name, CALL_SECONDS)
            os.unlink(path)
            durable.fsync_directory(os.path.dirname(path))
            self._run("daemon-reload")
        return there

    def start(self, name: str, seconds: float) -> Unit:
        self._run("reset-failed", self.canonical(name), fine=(0, 1, 5))
        self._run("start", "--no-block", self.canonical(name))
        return wait_state(lambda: self._info(name), ("running", "failed"), seconds)

    def stop(self, name: str, seconds: float) -> Unit:
        name = self.canonical(name)
        self._run("stop", "--no-block", name)
        found = wait_state(lambda: self._info(name), ("stopped", "failed", "disabled"), seconds)
        if found.state in ("running", "starting", "stopping"):
            self._run("kill", f"--signal={signal.SIGKILL.value}", name, fine=(0, 1))
            found = wait_state(lambda: self._info(name), ("stopped", "failed", "disabled"), 10)
        return found

    # Foreign ones

    def plan_disable(self, name: str, mask: bool = False) -> dict[str, Any]:
        name = self.canonical(name)
        block = parse(self._run("show", f"--property={','.join(PROPERTIES)}", name))[0]
        state = block.get("UnitFileState", "")
        must_mask = mask or state in ("static", "indirect", "generated", "transient")
        return {
            "unit": name,
            "manager": self.kind,
            "file": block.get("FragmentPath"),
            "how": "masked" if must_mask else "disabled",
            "was": state,
        }

    def is_disabled(self, plan: Mapping[str, Any]) -> bool:
        block = parse(self._run("show", f"--property={','.join(PROPERTIES)}", plan["unit"]))[0]
        down = ("masked", "masked-runtime") if plan["how"] == "masked" else ("disabled", "masked", "masked-runtime", "")
        return not unit(block).up and block.get("UnitFileState", "") in down

    def disable(self, plan: Mapping[str, Any], seconds: float) -> None:
        """A unit that only others start (static, generated) can be kept down by a mask alone."""
        name = plan["unit"]
        self._run("disable", "--no-reload", name, fine=(0, 1))
        if plan["how"] == "masked":
            self._run("mask", "--runtime" if plan["was"] == "transient" else "--no-reload", name)
        self._run("daemon-reload")
        self.stop(name, seconds)

    def enable(self, plan: Mapping[str, Any]) -> bool:
        name = plan["unit"]
        if plan["how"] == "masked":
            self._run("unmask", name)
        if str(plan["was"]).startswith("enabled"):
            self._run("enable", name)
        return True

    # Whose process is it?

    def owners(self, pids: Iterable[int], processes: Mapping[int, procs.Process]) -> dict[int, str]:
        """A control group cannot be left by re-parenting, so it tells of orphans too."""
        found = {pid: unit_of_cgroup(processes[pid].cgroup) for pid in pids if pid in processes}
        return {pid: name for pid, name in found.items() if name}
