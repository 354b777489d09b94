"""How every command fails: one line, the right exit status."""

from __future__ import annotations

import argparse
import importlib
import tomllib
from pathlib import Path

import pytest

from llmpq.cli.common import bar_format, make_parser, require, run_command
from llmpq.errors import InfeasibleError, LlmpqError, SpecError, StageError


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
