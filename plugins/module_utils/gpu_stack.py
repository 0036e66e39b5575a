# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""The GPU stack as driver, NVML, sysfs and /dev tell it: versions, links, settings, device nodes. Run `read` in `bounded.call`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import stat
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.relight.recovery.plugins.module_utils import nvml

VERSION_MISMATCH = 18  # NVML: user library and kernel module are of two versions
LINKS = 18  # NVML_NVLINK_MAX_LINKS
# How near two GPUs of one host are, by NVML's numbers, in the words of `nvidia-smi topo -m`.
ANCESTORS = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
CONTROL = ("nvidiactl", "nvidia-uvm")
MODULE_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
FILE_VERSION = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)*)$")


@dataclass(frozen=True)
class Device:
    """One GPU. `links` says how it reaches each other GPU, by PCI address: NV<n> for n NVLinks, else the nearest common ancestor."""

    index: int
    uuid: str = ""
    pci: str = ""
    name: str = ""
    minor: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    nvlinks: int = 0
    numa_node: int | None = None
    persistence: bool | None = None
    ecc: bool | None = None
    processes: int = 0
    links: dict[str, str] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Node:
    """A device file. `major_wanted` is the driver's present one by /proc/devices; `open_errno` is None where it opens."""

    path: str
    exists: bool = True
    is_device: bool = True
    major: int | None = None
    major_wanted: int | None = None
    open_errno: int | None = None


@dataclass(frozen=True)
class Stack:
    """What was found; the errors say what could not be read. `libraries` are versions of user libraries, by name."""

    driver: str | None = None
    module: str | None = None
    cuda: str | None = None
    libraries: dict[str, str | None] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    nodes: tuple[Node, ...] = ()
    error: str | None = None
    mismatch: bool = False


class _Pci(ctypes.Structure):
    _fields_ = [
        ("legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("id", ctypes.c_uint),
        ("subsystem", ctypes.c_uint),
        ("address", ctypes.c_char * 32),
    ]


def read(library: str | None, root: str = "/") -> Stack:
    """Everything but collectives. `root` is where /dev, /proc and /sys are looked for."""
    module = _module_version(root)
    try:
        found = nvml.Library(library)
    except nvml.NvmlError as error:
        return Stack(module=module, nodes=_nodes(root, ()), error=str(error))
    libraries = _library_versions(library)
    code = found.raw("nvmlInit_v2")
    if code:
        said = f"nvmlInit_v2: {found.says(code)}"
        return Stack(module=module, libraries=libraries, nodes=_nodes(root, ()), error=said, mismatch=code == VERSION_MISMATCH)
    try:
        devices = _devices(found, root)
        return Stack(
            driver=_text(found, "nvmlSystemGetDriverVersion"),
            module=module,
            cuda=_cuda(found),
            libraries=libraries,
            devices=devices,
            nodes=_nodes(root, devices),
        )
    except nvml.NvmlError as error:
        return Stack(module=module, libraries=libraries, nodes=_nodes(root, ()), error=str(error))
    finally:
        found.raw("nvmlShutdown")


# Versions


def _module_version(root: str) -> str | None:
    """The loaded kernel module's version; None where no module is loaded."""
    text = _read(os.path.join(root, "proc/driver/nvidia/version"))
    match = MODULE_VERSION.search(text or "")
    return match.group(1) if match else None


def _library_versions(library: str | None) -> dict[str, str | None]:
    """The versions in the names of the files that the loader takes; None where a name tells none."""
    with contextlib.suppress(OSError):  # a host without CUDA's own library is told by what needs it
        ctypes.CDLL("libcuda.so.1")
    found: dict[str, str | None] = {}
    wanted = {os.path.basename(library or nvml.LIBRARY): "libnvidia-ml", "libcuda.so.1": "libcuda"}
    for line in (_read("/proc/self/maps") or "").splitlines():
        path = line.split(None, 5)[5] if line.count(" ") >= 5 and "/" in line else ""
        real = os.path.realpath(path)
        name = next((name for start, name in (("libnvidia-ml.so", "libnvidia-ml"), ("libcuda.so", "libcuda")) if _of(path, start)), None)
        name = name or wanted.get(os.path.basename(path))
        if name:
            match = FILE_VERSION.search(real)
            found[name] = match.group(1) if match else found.get(name)
    return found


def _of(path: str, start: str) -> bool:
    return os.path.basename(path).startswith(start)


def _text(library: nvml.Library, name: str, *handle: Any) -> str | None:
    buffer = ctypes.create_string_buffer(96)
    code = library.raw(name, *handle, buffer, ctypes.c_uint(len(buffer)))
    return None if code else buffer.value.decode(errors="replace")


def _number(library: nvml.Library, name: str, handle: Any) -> int | None:
    value = ctypes.c_int()
    return None if library.raw(name, handle, ctypes.byref(value)) else value.value


def _cuda(library: nvml.Library) -> str | None:
    value = ctypes.c_int()
    if library.raw("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(value)):
        return None
    return f"{value.value // 1000}.{value.value % 1000 // 10}"


# GPUs


def _devices(library: nvml.Library, root: str) -> tuple[Device, ...]:
    count = ctypes.c_uint()
    library.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    handles: dict[int, ctypes.c_void_p] = {}
    lost: list[Device] = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        code = library.raw("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        if code:
            lost.append(Device(index, error=f"nvmlDeviceGetHandleByIndex_v2: {library.says(code)}"))
        else:
            handles[index] = handle
    pci = {index: _pci(library, handle) for index, handle in handles.items()}
    found = [_device(library, index, handles, pci, root) for index in handles]
    return tuple(sorted([*found, *lost], key=lambda device: device.index))


def _device(library: nvml.Library, index: int, handles: dict[int, ctypes.c_void_p], pci: dict[int, str], root: str) -> Device:
    handle = handles[index]
    peers = _nvlinks(library, handle)
    minor, persistence, ecc, pending = (
        ctypes.c_uint(),
        _number(library, "nvmlDeviceGetPersistenceMode", handle),
        ctypes.c_int(),
        ctypes.c_int(),
    )
    has_minor = not library.raw("nvmlDeviceGetMinorNumber", handle, ctypes.byref(minor))
    has_ecc = not library.raw("nvmlDeviceGetEccMode", handle, ctypes.byref(ecc), ctypes.byref(pending))
    return Device(
        index=index,
        uuid=_text(library, "nvmlDeviceGetUUID", handle) or "",
        pci=pci[index],
        name=_text(library, "nvmlDeviceGetName", handle) or "",
        minor=minor.value if has_minor else None,
        pcie_generation=_number(library, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
        pcie_width=_number(library, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        nvlinks=len(peers),
        numa_node=_numa(root, pci[index]),
        persistence=None if persistence is None else bool(persistence),
        ecc=bool(ecc.value) if has_ecc else None,
        processes=_processes(library, handle),
        links={pci[other]: _link(library, handle, handles[other], peers.count(pci[other])) for other in handles if other != index},
    )


def _pci(library: nvml.Library, handle: ctypes.c_void_p) -> str:
    """The address as sysfs writes it: 0000:1a:00.0."""
    value = _Pci()
    if library.raw("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(value)):
        return ""
    return _address(value.address.decode(errors="replace"))


def _address(text: str) -> str:
    domain, _colon, rest = text.strip().lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else text.lower()


def _nvlinks(library: nvml.Library, handle: ctypes.c_void_p) -> list[str]:
    """For each active NVLink where it leads: a GPU's address, or that of a switch."""
    found = []
    for link in range(LINKS):
        active = ctypes.c_int()
        if library.raw("nvmlDeviceGetNvLinkState", handle, ctypes.c_uint(link), ctypes.byref(active)) or not active.value:
            continue
        remote = _Pci()
        code = library.raw("nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, ctypes.c_uint(link), ctypes.byref(remote))
        found.append("" if code else _address(remote.address.decode(errors="replace")))
    return found


def _link(library: nvml.Library, one: ctypes.c_void_p, other: ctypes.c_void_p, direct: int) -> str:
    if direct:
        return f"NV{direct}"
    level = ctypes.c_int()
    if library.raw("nvmlDeviceGetTopologyCommonAncestor", one, other, ctypes.byref(level)):
        return "unknown"
    return ANCESTORS.get(level.value, str(level.value))


def _processes(library: nvml.Library, handle: ctypes.c_void_p) -> int:
    """How many processes compute on it. Where that cannot be read it counts as in use."""
    try:
        return len(nvml.holders(library, handle, "compute"))
    except nvml.NvmlError:
        return 1


def _numa(root: str, pci: str) -> int | None:
    text = _read(os.path.join(root, "sys/bus/pci/devices", pci, "numa_node")) if pci else None
    return int(text) if text and text.strip().lstrip("-").isdigit() else None


# Device nodes


def _nodes(root: str, devices: tuple[Device, ...]) -> tuple[Node, ...]:
    """The device files that a CUDA program opens; those of the GPUs by their minor numbers."""
    majors = _majors(root)
    names = [*CONTROL, *(f"nvidia{device.minor}" for device in devices if device.minor is not None)]
    return tuple(_node(os.path.join(root, "dev", name), majors.get("nvidia-uvm" if name == "nvidia-uvm" else "nvidia")) for name in names)


def _majors(root: str) -> dict[str, int]:
    """Which major numbers the drivers have now. The frontend's name differs by driver."""
    found = {}
    for line in (_read(os.path.join(root, "proc/devices")) or "").splitlines():
        number, _space, name = line.strip().partition(" ")
        if number.isdigit() and name.startswith("nvidia"):
            found["nvidia" if name in ("nvidia", "nvidia-frontend", "nvidiactl") else name] = int(number)
    return found


def _node(path: str, major_wanted: int | None) -> Node:
    try:
        status = os.stat(path)
    except OSError:
        return Node(path, exists=False, major_wanted=major_wanted)
    if not stat.S_ISCHR(status.st_mode):
        return Node(path, is_device=False, major_wanted=major_wanted)
    failed = None
    try:
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        failed = error.errno
    return Node(path, major=os.major(status.st_rdev), major_wanted=major_wanted, open_errno=failed)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return handle.read()
    except OSError:
        return None
