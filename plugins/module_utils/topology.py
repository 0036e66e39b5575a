# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Is the GPU stack whole and as in the baseline? `look` looks, each part within its limit; `judge` is pure."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import bounded, collective, gpu_stack, tmpfs
from ansible_collections.relight.recovery.plugins.module_utils.gate import Gate, Problem, Verdict
from ansible_collections.relight.recovery.plugins.module_utils.gpu_stack import Device, Stack

NAME = "topology_check"
LOOK_SECONDS = 30.0
ACS = 0x000D  # PCI Express extended capability: access control services
ACS_REDIRECT = 0x000C  # request and completion redirect: peer traffic goes up to the root and through the IOMMU
SLOW = 0.7  # of the baseline's bus bandwidth
# What a child asks of the interpreter that serves.
VERSIONS = """
import json, torch
nccl = None
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    pass
print(json.dumps({"torch": torch.__version__, "torch_cuda": torch.version.cuda, "nccl": nccl}))
"""


@dataclass(frozen=True)
class Query:
    """Where to look and what is expected. `baseline` is what adopt recorded of the GPUs; empty where nothing did."""

    gpu_count: int
    baseline: Mapping[str, Any] = field(default_factory=dict)
    python: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    nvml_library: str | None = None
    root: str = "/"
    collective: collective.Plan | None = None
    version_seconds: float = 120.0


@dataclass(frozen=True)
class Host:
    """What of the host matters to GPUs. None says that it could not be read."""

    container: str | None = None
    cgroup: str = "none"  # v1, v2
    allowed: tuple[str, ...] | None = None  # v1: the device allow-list
    memory_limit_bytes: int | None = None
    iommu: bool | None = None
    cmdline: str = ""
    redirecting: tuple[str, ...] | None = None  # PCI bridges whose ACS sends peer traffic up


@dataclass(frozen=True)
class Seen:
    """All that a look found; the errors say what could not be looked at."""

    stack: Stack = field(default_factory=Stack)
    host: Host = field(default_factory=Host)
    versions: Mapping[str, str | None] | None = None
    versions_error: str | None = None
    reduced: collective.Reduced | None = None
    not_reduced: str | None = None


# Looking


def look(query: Query) -> Seen:
    """Look at everything, then reduce where that is asked for and nothing computes."""
    try:
        stack = bounded.call(gpu_stack.read, (query.nvml_library, query.root), LOOK_SECONDS)
    except bounded.TimedOut:
        stack = Stack(error=f"NVML did not answer within {LOOK_SECONDS:g} s")
    except bounded.ChildFailed as error:
        stack = Stack(error=str(error))
    host = bounded.call(_host, (query.root,), LOOK_SECONDS)
    versions, versions_error = _versions(query)
    reduced, why_not = _reduce(query, stack)
    return Seen(stack, host, versions, versions_error, reduced, why_not)


def _reduce(query: Query, stack: Stack) -> tuple[collective.Reduced | None, str | None]:
    if query.collective is None:
        return None, "not asked for"
    if query.gpu_count < 2:
        return None, "one GPU"
    busy = [device.index for device in stack.devices if device.processes]
    if busy and query.collective.backend == "nccl":
        return None, f"{len(busy)} GPUs are in use"
    if query.collective.backend == "nccl" and (stack.error or len(stack.devices) < query.gpu_count):
        return None, "the GPUs are not all there"
    return collective.run(query.collective), None


def _versions(query: Query) -> tuple[Mapping[str, str | None] | None, str | None]:
    """Versions as the interpreter that serves has them, or why they cannot be told."""
    if not query.python:
        return None, None
    try:
        return bounded.call(_ask, (query.python, dict(query.env)), query.version_seconds), None
    except bounded.TimedOut:
        return None, f"it did not answer within {query.version_seconds:g} s"
    except bounded.ChildFailed as error:
        return None, str(error)


def _ask(python: str, env: dict[str, str]) -> dict[str, str | None]:
    kept = {key: value for key, value in os.environ.items() if key in collective.KEPT}
    done = subprocess.run(
        [python, "-B", "-c", VERSIONS],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**kept, **env},
        cwd="/",
        check=False,
    )
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _host(root: str) -> Host:
    version, allowed = _device_list(root)
    iommus = _names(os.path.join(root, "sys/class/iommu"))
    return Host(
        container=_container(root),
        cgroup=version,
        allowed=allowed,
        memory_limit_bytes=tmpfs.memory_limit() if root == "/" else None,
        iommu=None if iommus is None else bool(iommus),
        cmdline=_text(os.path.join(root, "proc/cmdline")).strip(),
        redirecting=_redirecting(root),
    )


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return ""


def _names(path: str) -> list[str] | None:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return None


def _container(root: str) -> str | None:
    """The kind of container, as systemd and the runtimes tell; None on a machine."""
    named = _text(os.path.join(root, "run/systemd/container")).strip()
    if named:
        return named
    for path, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if os.path.exists(os.path.join(root, path)):
            return kind
    match = re.search(r"(?:^|\0)container=([^\0]+)", _text(os.path.join(root, "proc/1/environ")))
    return match.group(1) if match else None


def _device_list(root: str) -> tuple[str, tuple[str, ...] | None]:
    """cgroup v1 shows which devices may be opened; v2 keeps that in a program that nothing shows: there only opening tells."""
    for line in _text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _number, controllers, path = line.split(":", 2)
        if "devices" in controllers.split(","):
            for folder in (path.lstrip("/"), ""):
                text = _text(os.path.join(root, "sys/fs/cgroup/devices", folder, "devices.list"))
                if text:
                    return "v1", tuple(text.split("\n")[:-1])
            return "v1", None
    return ("v2" if os.path.exists(os.path.join(root, "sys/fs/cgroup/cgroup.controllers")) else "none"), None


def _redirecting(root: str) -> tuple[str, ...] | None:
    """Bridges whose ACS redirects peer traffic. None where configuration space cannot be read beyond its first 64 bytes."""
    folder = os.path.join(root, "sys/bus/pci/devices")
    found, read = [], False
    for name in _names(folder) or ():
        if not _text(os.path.join(folder, name, "class")).startswith("0x0604"):
            continue
        try:
            with open(os.path.join(folder, name, "config"), "rb") as handle:
                config = handle.read(4096)
        except OSError:
            continue
        if len(config) <= 256:
            continue
        read = True
        if acs_redirects(config):
            found.append(name)
    return tuple(found) if read else None


def acs_redirects(config: bytes) -> bool:
    """Whether a device's configuration space switches ACS request or completion redirect on."""
    at, steps = 0x100, 0
    while 0x100 <= at <= len(config) - 8 and steps < 64:
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == ACS:
            (control,) = struct.unpack_from("<H", config, at + 6)
            return bool(control & ACS_REDIRECT)
        at, steps = header >> 20, steps + 1
    return False


# Judging


def judge(seen: Seen, query: Query) -> Gate:
    """Compare what was seen with what CUDA, NCCL and the baseline want."""
    if not query.gpu_count:
        return Gate(NAME, {"gpus": "no GPUs", "gpu_count": 0})
    gate = Gate(NAME, evidence(seen, query))
    gate.problems += [
        *_stack_problems(seen.stack, query),
        *_version_problems(seen, query),
        *_node_problems(seen),
        *_baseline_problems(seen, query),
        *_path_problems(seen),
        *(collective.judge(seen.reduced) if seen.reduced else ()),
        *_speed_problems(seen, query),
    ]
    return gate


def evidence(seen: Seen, query: Query) -> dict[str, Any]:
    """What adopt records as the baseline stands here under the same names."""
    stack, host, versions, reduced = seen.stack, seen.host, seen.versions or {}, seen.reduced
    speed = reduced.bus_gb_s if reduced else None
    return {
        "gpu_count": len(stack.devices),
        "driver": stack.driver,
        "kernel_module": stack.module,
        "libraries": stack.libraries,
        "cuda": stack.cuda,
        "nccl": versions.get("nccl") or (reduced.nccl if reduced else None),
        "torch": versions.get("torch") or (reduced.torch if reduced else None),
        "torch_cuda": versions.get("torch_cuda"),
        "gpus": [describe(device) for device in stack.devices],
        "device_files": [node.path for node in stack.nodes if node.exists],
        "container": host.container,
        "cgroup": host.cgroup,
        "device_allow_list": "unknown" if host.allowed is None else list(host.allowed),
        "memory_limit_bytes": host.memory_limit_bytes,
        "iommu": host.iommu,
        "acs_redirecting": None if host.redirecting is None else list(host.redirecting),
        "collective": seen.not_reduced or ("run" if reduced else "not asked for"),
        "collective_seconds": round(reduced.seconds, 2) if reduced else None,
        "bus_gb_s": round(speed, 2) if speed is not None else None,
        "nccl_environment": {name: value for name, value in sorted(query.env.items()) if name.startswith("NCCL_")},
    }


def describe(device: Device) -> dict[str, Any]:
    """A GPU as the evidence and the baseline have it."""
    return {
        "index": device.index,
        "uuid": device.uuid,
        "pci": device.pci,
        "name": device.name,
        "pcie_generation": device.pcie_generation,
        "pcie_width": device.pcie_width,
        "nvlinks": device.nvlinks,
        "numa_node": device.numa_node,
        "persistence": device.persistence,
        "ecc": device.ecc,
        "links": dict(sorted(device.links.items())),
    }


def _stack_problems(stack: Stack, query: Query) -> Iterator[Problem]:
    if stack.mismatch:
        what = f"{stack.error}; the kernel module is {stack.module or 'not loaded'}"
        yield Problem("driver-mismatch", "driver", what, "reboot, or reload the kernel module: an upgrade left two versions")
        return
    if stack.error:
        remedy = "see that the driver is loaded (nvidia-smi -L); after an upgrade, reboot"
        yield Problem("nvml-unreadable", "NVML", stack.error, remedy, Verdict.UNKNOWN)
        return
    for device in stack.devices:
        if device.error:
            yield Problem("gpu-unreadable", f"GPU {device.index}", device.error, "reset the GPU or reboot the host", Verdict.UNKNOWN)
    if len(stack.devices) < query.gpu_count:
        what = f"{len(stack.devices)} GPUs are seen, {query.gpu_count} expected"
        yield Problem("gpu-count", "NVML", what, "look for Xid 79 in the kernel log, or correct relight_gpu_count")


def _version_problems(seen: Seen, query: Query) -> Iterator[Problem]:
    stack = seen.stack
    for name, version in sorted(stack.libraries.items()):
        if version and stack.module and version != stack.module:
            what = f"{name} is {version}, the kernel module {stack.module}"
            remedy = "reboot, or give the container the libraries of the host's driver"
            yield Problem("driver-mismatch", name, what, remedy)
    if seen.versions_error:
        remedy = "set relight_sglang_python to the interpreter that serves; run it by hand"
        yield Problem("torch-unreadable", str(query.python), seen.versions_error, remedy, Verdict.UNKNOWN)
    elif seen.versions is not None and not seen.versions.get("nccl") and query.gpu_count > 1:
        what = f"torch {seen.versions.get('torch')} has no NCCL: several GPUs cannot work together"
        yield Problem("nccl-missing", str(query.python), what, "install the CUDA build of torch")


def _node_problems(seen: Seen) -> Iterator[Problem]:
    if seen.stack.error and not seen.stack.module:
        return  # no driver: told already
    for node in seen.stack.nodes:
        allow = "allow it in the container's configuration (for LXC: lxc.cgroup2.devices.allow, and the bind mount)"
        if not node.exists:
            remedy = "run nvidia-modprobe -u -c=0 on the host; in a container, add the device to its configuration"
            yield Problem("device-missing", node.path, "the device file is missing", remedy)
        elif not node.is_device:
            yield Problem("device-fake", node.path, "it is no device", "remove it and run nvidia-modprobe -u -c=0")
        elif node.major_wanted is not None and node.major != node.major_wanted:
            what = f"its major number is {node.major}, the driver's is {node.major_wanted} since this boot"
            yield Problem("device-major", node.path, what, f"make the device file anew, and {allow}")
        elif node.open_errno == errno.EPERM:
            yield Problem("device-denied", node.path, f"the {seen.host.container or 'control'} group does not let it be opened", allow)
        elif node.open_errno == errno.EACCES:
            what = "this user may not open it"
            yield Problem(
                "device-permission", node.path, what, "set relight_become: true, or mode 0666 as the driver sets it", Verdict.UNKNOWN
            )
        elif node.open_errno is not None and node.open_errno != errno.EBUSY:
            what = f"it cannot be opened: {os.strerror(node.open_errno)}"
            yield Problem("device-dead", node.path, what, "look at the kernel log; reload the driver or reboot")
    for node in seen.stack.nodes:
        if seen.host.allowed is not None and node.major is not None and not _allows(seen.host.allowed, node.major):
            what = f"major {node.major} is not in the container's device list"
            yield Problem("device-denied", node.path, what, "allow it in the container's configuration")


def _allows(lines: tuple[str, ...], major: int) -> bool:
    """Whether a v1 device list lets character devices of this major be read and written."""
    for line in lines:
        kind, _space, rest = line.partition(" ")
        numbers, _space, how = rest.partition(" ")
        if kind in ("a", "c") and numbers.split(":")[0] in ("*", str(major)) and {"r", "w"} <= set(how or "rwm"):
            return True
    return False


# Against the baseline


def _baseline_problems(seen: Seen, query: Query) -> Iterator[Problem]:
    """What differs from the known-good state: lost hardware fails, what was changed warns."""
    known = query.baseline
    if not known or seen.stack.error:
        return
    again = "if it was meant, run adopt.yml again once the host is clear"
    now = evidence(seen, query)
    for name in ("driver", "cuda", "nccl", "torch"):
        if known.get(name) and now[name] and known[name] != now[name]:
            yield Problem("version-differs", name, f"{now[name]}, the baseline says {known[name]}", again, Verdict.WARN)
    yield from _setting_problems(now["nccl_environment"], known.get("nccl_environment"), query)
    limit, before = now["memory_limit_bytes"], known.get("memory_limit_bytes")
    if limit is not None and (before is None or limit < before) and "memory_limit_bytes" in known:
        what = f"the memory limit is {limit} bytes, in the baseline it was {before or 'none'}"
        yield Problem("memory-limit-differs", "container", what, "give the container its memory back", Verdict.WARN)
    yield from _gpu_problems(now["gpus"], known.get("gpus") or [], again)


def _setting_problems(now: dict[str, str], before: Mapping[str, str] | None, query: Query) -> Iterator[Problem]:
    """NCCL's settings of the launch beside those of the server that ran well."""
    if before is None or not query.env:
        return
    changed = [f"{name} {now.get(name, 'unset')}, before {before.get(name, 'unset')}" for name in sorted({*now, *before})]
    changed = [text for text, name in zip(changed, sorted({*now, *before})) if now.get(name) != before.get(name)]
    if changed:
        remedy = "set relight_sglang_env as the server had it, or adopt again once the new settings are proven"
        yield Problem("nccl-settings-differ", "relight_sglang_env", "; ".join(changed), remedy, Verdict.WARN)


def _gpu_problems(now: list[dict[str, Any]], known: list[dict[str, Any]], again: str) -> Iterator[Problem]:
    present = {gpu["uuid"]: gpu for gpu in now}
    lost = [gpu for gpu in known if gpu["uuid"] not in present]
    new = [gpu for gpu in now if gpu["uuid"] and gpu["uuid"] not in {gpu["uuid"] for gpu in known}]
    for gpu in lost[len(new) :]:
        what = f"{gpu['uuid']} at {gpu['pci']} is gone"
        yield Problem("gpu-missing", f"GPU {gpu['index']}", what, "look for Xid 79 in the kernel log; reseat or replace the card")
    for gpu, other in zip(lost, new):
        what = f"{gpu['uuid']} was replaced by {other['uuid']} at {other['pci']}"
        yield Problem("gpu-replaced", f"GPU {other['index']}", what, again, Verdict.WARN)
    for before in known:
        if before["uuid"] in present:
            yield from _one_gpu(present[before["uuid"]], before, again)


def _one_gpu(gpu: dict[str, Any], before: dict[str, Any], again: str) -> Iterator[Problem]:
    where = f"GPU {gpu['index']}"
    if (gpu["nvlinks"] or 0) < (before.get("nvlinks") or 0):
        what = f"{gpu['nvlinks']} NVLinks are up, in the baseline {before['nvlinks']}"
        yield Problem("link-lost", where, what, "look for Xid 74 in the kernel log; reset the GPU, restart fabric manager, or reboot")
    for name, word in (("pcie_width", "lanes"), ("pcie_generation", "generation")):
        if gpu[name] is not None and before.get(name) and gpu[name] < before[name]:
            what = f"PCIe {word} {gpu[name]}, in the baseline {before[name]}"
            yield Problem("pcie-degraded", where, what, "reseat the card or its riser", Verdict.WARN)
    if before.get("pci") and gpu["pci"] != before["pci"]:
        yield Problem("gpu-moved", where, f"it is at {gpu['pci']}, in the baseline at {before['pci']}", again, Verdict.WARN)
        return  # the links are named by address
    changed = [
        f"to {other} {gpu['links'].get(other, 'none')}, before {link}"
        for other, link in sorted((before.get("links") or {}).items())
        if gpu["links"].get(other) != link and other in gpu["links"]
    ]
    if changed:
        remedy = f"NCCL's settings were made for the old topology: measure again. {again}"
        yield Problem("topology-changed", where, "; ".join(changed), remedy, Verdict.WARN)
    for name, word in (("numa_node", "NUMA node"), ("persistence", "persistence mode"), ("ecc", "ECC")):
        if before.get(name) is not None and gpu[name] is not None and gpu[name] != before[name]:
            what = f"{word} is {_word(gpu[name])}, in the baseline {_word(before[name])}"
            yield Problem("gpu-setting-differs", where, what, again, Verdict.WARN)


def _word(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _path_problems(seen: Seen) -> Iterator[Problem]:
    """GPUs that reach each other over PCIe alone suffer from an IOMMU that translates and bridges that redirect."""
    devices = seen.stack.devices
    if len(devices) < 2 or any(device.nvlinks for device in devices):
        return
    words = seen.host.cmdline.split()
    if seen.host.iommu and not {"iommu=pt", "iommu.passthrough=1", "iommu=off", "intel_iommu=off", "amd_iommu=off"} & set(words):
        what = "the IOMMU translates: traffic between GPUs over PCIe may hang or crawl"
        yield Problem("iommu-translates", "kernel command line", what, "boot with iommu=pt, or switch the IOMMU off", Verdict.WARN)
    if seen.host.redirecting:
        some = ", ".join(seen.host.redirecting[:4]) + (", ..." if len(seen.host.redirecting) > 4 else "")
        what = f"ACS on {len(seen.host.redirecting)} PCI bridges ({some}) sends traffic between GPUs through the CPU"
        yield Problem("acs-redirects", "PCI", what, "switch ACS redirection off on these bridges (setpci, or the BIOS)", Verdict.WARN)


def _speed_problems(seen: Seen, query: Query) -> Iterator[Problem]:
    speed = seen.reduced.bus_gb_s if seen.reduced else None
    before = query.baseline.get("bus_gb_s")
    if speed is not None and before and speed < SLOW * before:
        what = f"{speed:.1f} GB/s over the bus, in the baseline {before:.1f}"
        yield Problem("collective-slow", "all-reduce", what, "compare links, NUMA and NCCL settings with the baseline's", Verdict.WARN)
