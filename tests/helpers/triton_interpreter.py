"""Tests that run in Triton's interpreter: it is chosen when triton is imported, by the process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)


def run_interpreted(*scripts: Path) -> None:
    """Run the tests of files in one process that interprets kernels; fail as they do."""
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # those that are installed: seconds
    plugins = ("-p", "no:cacheprovider", "-p", __name__)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *plugins, *map(str, scripts)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def pytest_configure() -> None:
    """Let a launch replace the functions of ``triton.language`` once, in the process of the tests.

    The interpreter replaces hundreds of them by its own at each launch, and puts them back after
    it, but also in each call of a ``triton.jit`` function in a kernel, as ``tl.sum`` is one. Those
    calls find them replaced already.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not hasattr(interpreter, "_LangPatchScope"):  # a name of its own, which others may lack
        return
    replace, modules = interpreter._patch_lang, set[str]()

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc, name-defined]
        def restore(self) -> None:
            super().restore()
            modules.clear()

    def replace_once(function: Any) -> Any:
        if function.__module__ in modules:
            return Scope()
        modules.add(function.__module__)
        return replace(function)

    interpreter._LangPatchScope, interpreter._patch_lang = Scope, replace_once
