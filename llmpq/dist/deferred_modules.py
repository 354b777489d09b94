"""Execute modules when they are first used, not when they are imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def defer_modules(*names: str) -> None:
    """Make imports of these modules execute none of their code until an attribute is asked for.

    ``importlib.util.LazyLoader`` executes a module when it is imported again. Does nothing for a
    module that is already imported.
    """
    absent = set(names) - sys.modules.keys()
    if absent:
        sys.meta_path.insert(0, _DeferringFinder(absent))


class _DeferringFinder(MetaPathFinder):
    """Finds the modules to defer, as usual except for their loaders."""

    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module to defer, ``None`` for others."""
        if fullname not in self._names:
            return None
        self._names.remove(fullname)
        if not self._names:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


class _DeferringLoader(Loader):
    """Makes a module that executes its code when it is asked for an attribute."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the module without its code."""
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Note how the module is executed later."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader


class _DeferredModule(ModuleType):
    """A module that was imported and not executed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what imports ask of any module
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]  # before its code, which may ask too
        loader: Any = self.__loader__
        loader.exec_module(self)
        return getattr(self, name)
