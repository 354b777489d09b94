"""A deferred module is the usual one, executed when it is first used."""

import importlib
import sys

import pytest

from llmpq.dist.deferred_modules import defer_modules


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "some_package"
    (folder / "late").mkdir(parents=True)
    (folder / "__init__.py").write_text("executed = []\n")
    (folder / "late" / "__init__.py").write_text(
        "import some_package\nsome_package.executed.append(__name__)\nvalue = 5\n"
    )
    (folder / "late" / "part.py").write_text("from some_package.late import value\n")
    (folder / "broken.py").write_text("raise ValueError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield importlib.import_module("some_package")
    assert sys.meta_path == finders
    for name in [name for name in sys.modules if name.startswith("some_package")]:
        del sys.modules[name]


def test_imports_execute_nothing_and_the_first_attribute_does(package):
    defer_modules("some_package.late")
    late = importlib.import_module("some_package.late")
    assert importlib.import_module("some_package.late") is late is package.late
    assert not hasattr(late, "__wrapped__")
    assert package.executed == []
    assert late.value == 5
    assert package.executed == ["some_package.late"]
    assert importlib.reload(late) is late


def test_a_part_of_a_deferred_package_uses_it(package):
    defer_modules("some_package.late")
    assert importlib.import_module("some_package.late.part").value == 5
    assert package.executed == ["some_package.late"]


def test_an_error_of_the_code_is_raised_where_it_is_used(package):
    defer_modules("some_package.broken")
    broken = importlib.import_module("some_package.broken")
    with pytest.raises(ValueError, match="broken"):
        broken.value  # noqa: B018


def test_an_imported_module_stays(package):
    defer_modules("some_package")
    assert importlib.import_module("some_package") is package
