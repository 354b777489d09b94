"""Import transformers without the list of everything that its models export.

transformers finds the names that it exports by reading the source of each of its models, some 3,000
files, and does so three times while model code is imported: 1 s. A rank runs one family, which it
finds through the auto classes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

_LISTING = "transformers.utils.import_utils"
_PREFIXES = {"transformers": "models", "transformers.models": None}
"""Packages that list all models, and what stands before the names of the models in each list."""
_LISTED = "auto"
"""The only models that are listed at first: the auto classes."""

Names = dict[frozenset[str], dict[str, set[str]]]
"""Exported names by what they require and by their module."""


class _List(Protocol):
    """``define_import_structure`` of transformers."""

    def __call__(self, module_path: str, prefix: str | None = None) -> Names:
        """Return the names that the models in a folder export."""
        ...


def list_models_when_asked() -> None:
    """Make transformers list its auto classes only, when it is imported after this.

    A package of it that is asked for another name then lists everything, as usual. For a process
    that uses few names; does nothing where transformers is already imported.
    """
    sys.meta_path.insert(0, _ListingFinder())


class _ListingFinder(MetaPathFinder):
    """Finds the module of transformers that lists names, as usual except for its loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of that module, ``None`` for others."""
        if fullname != _LISTING:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ListingLoader(spec.loader)
        return spec


class _ListingLoader(Loader):
    """Loads the module as usual, then replaces what lists names."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as usual."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as usual, then replace its function and its class of packages."""
        self._loader.exec_module(module)
        found = vars(module)
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        if {"define_import_structure", "_LazyModule"} <= found.keys():
            list_all = found["define_import_structure"]
            found["define_import_structure"] = _shortened(list_all)
            found["_LazyModule"] = _listing_when_asked(found["_LazyModule"], list_all)


def _shortened(list_all: _List) -> _List:
    """Return a function that lists the auto classes where ``list_all`` lists all models."""

    def list_names(module_path: str, prefix: str | None = None) -> Names:
        path = Path(module_path)
        folder = path.parent if path.is_file() else path
        if not (folder / _LISTED).is_dir():  # one model
            return list_all(module_path, prefix)
        names = list_all(str(folder / _LISTED), f"{prefix}.{_LISTED}" if prefix else _LISTED)
        names.setdefault(frozenset(), {})  # transformers adds names that require nothing
        return names

    return list_names


def _listing_when_asked(usual: Any, list_all: _List) -> type[ModuleType]:
    """Return a class of packages that list everything when asked for a name they do not know."""

    class ShortList(usual):  # type: ignore[misc]  # known at run time only
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("_") or self.__name__ not in _PREFIXES:
                    raise
            if importlib.util.find_spec(f"{self.__name__}.{name}") is not None:
                return importlib.import_module(f"{self.__name__}.{name}")
            prefix = _PREFIXES[self.__name__]
            names = list_all(str(Path(self.__file__).parent / (prefix or "")), prefix)
            listed = {key: set(found) for key, found in self._import_structure.items()}
            names.setdefault(frozenset(), {}).update(listed)
            self.__class__ = usual
            arguments = (self.__name__, self.__file__, names, self.__spec__)
            usual.__init__(self, *arguments, extra_objects=self._objects)
            return getattr(self, name)

    return ShortList
