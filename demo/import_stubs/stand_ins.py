# Copyright: the Relight authors
# SPDX-License-Identifier: Apache-2.0
"""Import stand-ins for packages that SGLang imports at start and that a server on CPUs never calls.

RELIGHT_IMPORT_STAND_INS names them, comma separated; the demo sets `torchvision,sgl_kernel`. A package that is really
installed always wins. A stand-in can be imported, and its names can be passed around; calling one, or making an object of
one of its classes, raises NotImplementedError. `importlib.util.find_spec` says that it is absent, so that a library which
asks what is installed gets the true answer.

The server on CPUs, from the directory of the checkout. Two idle cores: 15 s to ready, 700 prefill tokens a second with the
dump on; a busy machine is several times slower. --sleep-on-idle leaves the cores to others between requests.

    PYTHONPATH=demo/import_stubs RELIGHT_IMPORT_STAND_INS=torchvision,sgl_kernel SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 \
    RELIGHT_DUMP_DIR=/dev/shm/relight RELIGHT_DUMP_LAYERS=1,14,26 \
    python -m sglang.launch_server --model-path MODEL --port PORT --device cpu --dtype float32 --attention-backend torch_native \
      --max-total-tokens 20000 --mem-fraction-static 0.3 --disable-radix-cache --chunked-prefill-size -1 --sleep-on-idle
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

VARIABLE = "RELIGHT_IMPORT_STAND_INS"


def refuse(name: str) -> NoReturn:
    raise NotImplementedError(f"{name} is an import stand-in: the package is not installed here and must not be called")


class StandInType(type):
    """The class of the classes in a stand-in: they can be named and subclassed, never instantiated."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(f"{cls.__module__}.{cls.__qualname__}")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        value = StandIn(f"{cls.__module__}.{cls.__qualname__}.{name}")
        setattr(cls, name, value)
        return value


class StandIn(ModuleType):
    """A module of a stand-in, and each of its functions: any public name is there, and calling it is refused."""

    def __init__(self, name: str) -> None:
        super().__init__(name, __doc__)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"stand-in {self.__name__} has no {name}")
        value: Any = StandInType(name, (), {"__module__": self.__name__}) if name[0].isupper() else StandIn(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse(self.__name__)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last on the meta path: it is asked only for what nothing else has."""

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: the names appear when they are asked for."""


def install() -> None:
    """Put the stand-ins that the environment names in place, once."""
    names = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
    if not names or any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    sys.meta_path.append(Finder(names))
    find_spec = importlib.util.find_spec

    def honest_find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        """importlib.util.find_spec, for which a stand-in is absent, imported or not."""
        spec = find_spec(name, package)
        return None if spec is not None and isinstance(spec.loader, Finder) else spec

    importlib.util.find_spec = honest_find_spec
