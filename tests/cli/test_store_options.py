"""Where the store is: the option, the variable, the user's cache, nowhere."""

import pytest

from llmpq.cli.run_options import store_directory, store_limit_bytes
from llmpq.errors import SpecError


def test_the_option_goes_before_the_variable(tmp_path):
    environ = {"LLMPQ_STORE": str(tmp_path / "b"), "XDG_CACHE_HOME": str(tmp_path)}
    assert store_directory(str(tmp_path / "a"), environ) == tmp_path / "a"
    assert store_directory(None, environ) == tmp_path / "b"
    assert store_directory("off", environ) is None
    assert store_directory(None, environ | {"LLMPQ_STORE": "off"}) is None


def test_the_default_is_in_the_users_cache(tmp_path):
    in_home = tmp_path / ".cache" / "llmpq" / "store"
    assert store_directory(None, {"HOME": str(tmp_path)}) == in_home
    assert in_home.stat().st_mode & 0o777 == 0o700
    assert store_directory(None, {"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "llmpq" / "store"
    assert store_directory(None, {}) is None


def test_a_cache_that_cannot_be_made_means_no_store(tmp_path):
    (tmp_path / "file").touch()
    assert store_directory(None, {"XDG_CACHE_HOME": str(tmp_path / "file")}) is None


def test_limits_are_gibibytes():
    assert store_limit_bytes(1.5) == 3 * 2**29
    for senseless in (-1.0, float("nan"), float("inf")):
        with pytest.raises(SpecError, match="--store_limit"):
            store_limit_bytes(senseless)
