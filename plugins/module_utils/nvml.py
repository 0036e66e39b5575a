# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's management library read through ctypes: memory and holders of every GPU. Run it in `bounded.call`: it may hang."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
MIB = 1 << 20
NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
NOT_SUPPORTED, FUNCTION_NOT_FOUND, INSUFFICIENT_SIZE = 3, 13, 7
LISTS = {  # kind of holder to the functions that list it, newest first; those before _v2 return a smaller structure
    "compute": ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    "graphics": ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
    "mps": ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2"),
}


class NvmlError(Exception):
    """The library is missing or refuses; the message says which function and why."""


@dataclass(frozen=True)
class Held:
    """What one process holds of a GPU. `mib` is None where the driver does not say."""

    pid: int
    mib: int | None
    kind: str


@dataclass(frozen=True)
class Gpu:
    """One GPU. `used_mib` is without the driver's own reserve where `reserved_mib` is known; `error` says why it cannot be read."""

    index: int
    uuid: str = ""
    total_mib: int = 0
    used_mib: int = 0
    reserved_mib: int | None = None
    held: tuple[Held, ...] = ()
    error: str | None = None


class _MemoryV2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _MemoryV1(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Library:
    """The loaded library; `call` raises NvmlError for any answer but success."""

    def __init__(self, path: str | None) -> None:
        try:
            self.library = ctypes.CDLL(path or LIBRARY)
        except OSError as error:
            raise NvmlError(f"NVML cannot be loaded: {error}") from None
        self.library.nvmlErrorString.restype = ctypes.c_char_p

    def has(self, name: str) -> bool:
        return hasattr(self.library, name)

    def raw(self, name: str, *args: Any) -> int:
        return int(getattr(self.library, name)(*args)) if self.has(name) else FUNCTION_NOT_FOUND

    def call(self, name: str, *args: Any) -> None:
        self.check(name, self.raw(name, *args))

    def says(self, code: int) -> str:
        said: bytes = self.library.nvmlErrorString(code) or b"unknown error"
        return f"{said.decode(errors='replace')} ({code})"

    def check(self, name: str, code: int) -> None:
        if code:
            raise NvmlError(f"{name}: {self.says(code)}")


def read(path: str | None = None) -> tuple[Gpu, ...]:
    """All GPUs with what holds them. A GPU that cannot be read is returned with its error. Raises NvmlError."""
    nvml = Library(path)
    nvml.call("nvmlInit_v2")
    try:
        count = ctypes.c_uint()
        nvml.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return tuple(_gpu(nvml, index) for index in range(count.value))
    finally:
        nvml.raw("nvmlShutdown")


def _gpu(nvml: Library, index: int) -> Gpu:
    handle = ctypes.c_void_p()
    try:
        nvml.call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle))
        name = ctypes.create_string_buffer(96)
        nvml.call("nvmlDeviceGetUUID", handle, name, ctypes.c_uint(len(name)))
        total, used, reserved = _memory(nvml, handle)
        held = tuple(found for kind in LISTS for found in holders(nvml, handle, kind))
    except NvmlError as error:
        return Gpu(index, error=str(error))
    return Gpu(index, name.value.decode(errors="replace"), total // MIB, used // MIB, reserved, held)


def _memory(nvml: Library, handle: ctypes.c_void_p) -> tuple[int, int, int | None]:
    """Total and used bytes, and reserved MiB; the first version of the call counts the driver's reserve as used."""
    if nvml.has("nvmlDeviceGetMemoryInfo_v2"):
        now = _MemoryV2(version=ctypes.sizeof(_MemoryV2) | 2 << 24)
        nvml.call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(now))
        return now.total, now.used, now.reserved // MIB
    old = _MemoryV1()
    nvml.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(old))
    return old.total, old.used, None


def holders(nvml: Library, handle: ctypes.c_void_p, kind: str) -> list[Held]:
    """One of the three lists of holders. Where the GPU has no such list it is empty; where it cannot be read, NvmlError."""
    name = next((name for name in LISTS[kind] if nvml.has(name)), None)
    if name is None:
        if kind == "mps":
            return []
        raise NvmlError(f"this driver's NVML has no {LISTS[kind][0]}")
    room = 64
    while True:
        count, found = ctypes.c_uint(room), (_Process * room)()
        code = nvml.raw(name, handle, ctypes.byref(count), found)
        if code == NOT_SUPPORTED:
            return []
        if code != INSUFFICIENT_SIZE:
            break
        room = max(count.value, room) * 2
    nvml.check(name, code)
    listed = [found[number] for number in range(count.value)]
    return [Held(one.pid, None if one.used == NOT_AVAILABLE else one.used // MIB, kind) for one in listed]
