"""Stand-ins for packages that a peer imports but does not need for a training step."""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _StandIn(MetaPathFinder, Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.names else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _invent  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def _invent(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Exception,), {})


def stand_in(*names: str) -> None:
    """Let these packages, where they are not installed, be imported as modules that hold any class."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        sys.meta_path.append(_StandIn(missing))
