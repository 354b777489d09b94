"""How every command fails: one line, the right exit status."""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest

from llmpq.cli.common import bar_format, make_parser, require, run_command
from llmpq.errors import InfeasibleError, LlmpqError, SpecError, StageError
from llmpq.options.run import host_name


def commands() -> dict[str, str]:
    """Return the entry point of every command."""
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    return dict(tomllib.loads(file.read_text(encoding="utf-8"))["project"]["scripts"])


def run(error: BaseException) -> int:
    def body(options: argparse.Namespace) -> int:
        raise error

    return run_command(make_parser("llmpq-test", "A test."), body, [])


@pytest.mark.parametrize(
    ("error", "status"),
    [(SpecError("a"), 2), (InfeasibleError("b"), 3), (StageError("c"), 4), (LlmpqError("d"), 1)],
)
def test_errors_become_one_line_and_their_exit_status(error, status, capsys):
    assert run(error) == status
    assert capsys.readouterr().err == f"llmpq-test: error: {error}\n"


def test_a_missing_extra_is_named(capsys):
    assert run(ModuleNotFoundError("No module named 'torch'", name="torch.nn")) == 2
    assert "install llmpq[runtime]" in capsys.readouterr().err


def test_any_other_missing_module_is_our_own_bug():
    with pytest.raises(ModuleNotFoundError):
        run(ModuleNotFoundError("No module named 'llmpq.nothing'", name="llmpq.nothing"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written_is_one_line(number, capsys):
    assert run(OSError(number, os.strerror(number), "folder/file")) == 2
    problem = f"folder/file: cannot be written: {os.strerror(number)}"
    assert capsys.readouterr().err == f"llmpq-test: error: {problem}\n"


def test_a_container_without_a_temporary_folder_is_one_line(tmp_path, monkeypatch, capsys):
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path / "missing"))
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(FileNotFoundError) as found:
        tempfile.gettempdir()
    assert run(found.value) == 2
    assert "set TMPDIR to a folder that can be written" in capsys.readouterr().err


def test_another_error_of_files_is_our_own_bug():
    with pytest.raises(FileNotFoundError):
        run(FileNotFoundError(errno.ENOENT, "No such file or directory", "file"))


@pytest.mark.parametrize("text", ["[::1]", "::1"])
def test_ipv6_has_brackets_or_not(text):
    assert host_name(text) == "::1"


@pytest.mark.parametrize("text", ["node-0", "10.0.0.1", "fe80::1%eth0", "a.b_c.svc", "localhost"])
def test_names_and_addresses_are_hosts(text):
    assert host_name(text) == text


@pytest.mark.parametrize(
    "text", ["tcp://10.0.0.1", "10.0.0.1:29500", "[::1]:29500", "[::1", "", "a b", "a/b", "u@h"]
)
def test_what_is_more_than_a_host_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="without scheme and port"):
        host_name(text)


def test_a_locale_without_a_letter_ends_no_command():
    code = (
        "from llmpq.cli.common import make_parser, run_command\n"
        "run_command(make_parser('a', 'A.'), lambda _: print('mod\\xe8le') or 0, [])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "mod\\xe8le\n")


def test_an_unknown_option_is_bad_input(capsys):
    parser = make_parser("llmpq-test", "A test.")
    assert run_command(parser, lambda _: 0, ["--no-such-option"]) == 2
    assert capsys.readouterr().err == (
        "llmpq-test: error: unrecognized arguments: --no-such-option; see llmpq-test --help\n"
    )


def test_an_error_of_usage_is_one_line_in_every_command(capsys):
    for name, target in commands().items():
        parser = importlib.import_module(target.partition(":")[0])._parser()
        with pytest.raises(SystemExit) as stopped:
            parser.parse_args(["--no_such_option"])
        assert stopped.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith(f"{name}: error: ")
        assert lines[0].endswith(f"; see {name} --help")


def test_a_misspelt_option_gets_the_nearest_one(capsys):
    parser = make_parser("llmpq-test", "A test.")
    parser.add_argument("--quality_budget", type=float)
    assert run_command(parser, lambda _: 0, ["--qualty_budget=3"]) == 2
    assert "(did you mean --quality_budget?)" in capsys.readouterr().err


def test_an_error_of_a_verb_names_its_own_help(capsys):
    parser = make_parser("llmpq-test", "A test.")
    verb = parser.add_subparsers(required=True).add_parser("go")
    verb.add_argument("--count", type=int)
    assert run_command(parser, lambda _: 0, ["go", "--count", "many"]) == 2
    error = "argument --count: invalid int value: 'many'; see llmpq-test go --help"
    assert capsys.readouterr().err == f"llmpq-test go: error: {error}\n"


def test_require_names_the_first_package_that_is_missing():
    require("json", "argparse")
    with pytest.raises(ModuleNotFoundError) as caught:
        require("json", "no_such_package")
    assert caught.value.name == "no_such_package"


def test_progress_shows_the_remaining_time_once_work_has_begun():
    assert "{remaining}" not in bar_format(0.0)
    assert "{elapsed}, {remaining} left" in bar_format(0.5)
