"""Arguments, keywords and checks are those of the class that declares the options."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from llmpq.errors import SpecError
from llmpq.options.declare import (
    Option,
    add_options,
    check_options,
    read_keywords,
    read_options,
    values_of,
    with_keywords,
)
from llmpq.spec.fields import Fields, from_json, to_json


def words_of(value: object) -> tuple[str, ...]:
    return tuple(value.split(",")) if isinstance(value, str) else tuple(value)


def halves(text: str) -> tuple[int, int]:
    first, second = text.split(":")
    return int(first), int(second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One field of every kind."""

    rows: Annotated[int, Option(minimum=1, help="rows of a step (default %(default)s)")] = 4
    share: Annotated[float | None, Option(above=0, maximum=1, metavar="S", help="a share")] = None
    mode: Annotated[Literal["fast", "exact"], Option(help="how")] = "fast"
    order: Annotated[str, Option(choices=("first", "last"), help="which")] = "first"
    caching: Annotated[bool, Option(flags=("no_caching", "cold"), help="keep nothing")] = True
    quiet: Annotated[bool, Option(help="say nothing")] = False
    limit_bytes: Annotated[int, Option(flags=("limit",), unit=1024, help="size")] = 2048
    scales: Annotated[tuple[float, ...], Option(help="scales")] = (1.0,)
    folder: Annotated[Path | None, Option(help="where")] = None
    names: Annotated[tuple[str, ...], Option(accept=words_of, help="names")] = ()
    unseen: int = 7

    def __post_init__(self) -> None:
        check_options(self)
        if self.rows == 13:
            raise SpecError("rows: found 13, expected luck")


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """Two options."""

    rows: Annotated[int, Option(help="rows of a step (default %(default)s)")] = 4
    caching: Annotated[bool, Option(help="keep nothing")] = True


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, Example, *SHOWN)
    return parser.parse_args(words)


SHOWN = ("rows", "share", "mode", "order", "caching", "quiet", "limit_bytes", "scales", "folder")


def test_no_arguments_are_the_defaults_of_the_class():
    assert read_options(Example, parsed()) == Example()


def test_arguments_become_fields():
    found = read_options(
        Example,
        parsed(
            *("--rows", "9", "--share", "0.5", "--mode", "exact", "--order", "last", "--cold"),
            *("--quiet", "--limit", "0.5", "--scales", "2", "3", "--folder", "a"),
        ),
    )
    assert found == Example(
        rows=9, share=0.5, mode="exact", order="last", caching=False, quiet=True, limit_bytes=512,
        scales=(2.0, 3.0), folder=Path("a").resolve(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--rows", "0"), "--rows: found 0, expected at least 1"),
        (("--rows", "13"), "--rows: found 13, expected luck"),
        (("--share", "0"), "--share: found 0, expected more than 0"),
        (("--share", "nan"), "--share: found nan, expected more than 0"),
        (("--share", "2"), "--share: found 2, expected at most 1"),
        (("--limit", "-1"), "--limit: found -1, expected at least 0"),
        (("--limit", "inf"), "--limit: found inf, expected at least 0"),
        (("--scales", "1", "-2"), "--scales: found -2, expected at least 0"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(words, message):
    with pytest.raises(SpecError) as error:
        read_options(Example, parsed(*words))
    assert str(error.value) == message


def test_fields_may_be_given_or_left():
    found = read_options(Example, parsed("--rows", "9", "--quiet"), leaves=["rows"], quiet=False)
    assert found == Example()


def test_the_help_shows_the_default_and_what_the_command_changes():
    parser = argparse.ArgumentParser()
    add_options(parser, Example, "rows", "order", order={"choices": ("first", "any")})
    text = parser.format_help()
    assert "rows of a step (default 4)" in text
    assert "{first,any}" in text


def test_keywords_are_checked_and_named():
    (found,) = read_keywords({"rows": 2, "names": ["a", "b"]}, Example)
    assert found == Example(rows=2, names=("a", "b"))
    assert values_of(found)["names"] == ("a", "b")
    with pytest.raises(SpecError, match=r"^rows: found 0, expected at least 1$"):
        read_keywords({"rows": 0}, Example)
    with pytest.raises(SpecError, match=r"^order: found x, expected one of first, last$"):
        read_keywords({"order": "x"}, Example)
    with pytest.raises(TypeError, match="found keyword 'row', expected one of caching, rows"):
        read_keywords({"row": 2}, Few)


def test_a_function_shows_the_keywords_that_it_takes():
    @with_keywords(Few)
    def run(path: str, **options: object) -> object:
        """Run."""
        return options, path

    signature = inspect.signature(run)
    assert list(signature.parameters) == ["path", "rows", "caching"]
    assert signature.parameters["rows"].default == 4
    assert signature.parameters["rows"].annotation is int
    assert run.__doc__ is not None
    assert run.__doc__.endswith("    rows: rows of a step\n    caching: where false, keep nothing")


def test_a_file_has_the_same_limits():
    fields = to_json(Example(rows=3))
    assert from_json(Example, Fields(dict(fields), "x.json")) == Example(rows=3)
    with pytest.raises(
        SpecError, match=r"x\.json: field 'rows': found 0, expected a whole number in \[1, "
    ):
        from_json(Example, Fields(fields | {"rows": 0}, "x.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Fields that differ in the number of their words."""

    file: Annotated[str | None, Option(is_positional=True, help="which")] = None
    sizes: Annotated[tuple[int, int], Option(minimum=1, help="two numbers")] = (4, 8)
    pair: Annotated[tuple[int, int] | None, Option(parse=halves, help="one word")] = None
    paths: Annotated[tuple[Path, ...], Option(parse=Path, help="several")] = ()
    model: Annotated[tuple[str, ...], Option(repeats=True, help="one at a time")] = ()
    bits: Annotated[int, Option(choices=(4, 8), help="some numbers only")] = 8

    def __post_init__(self) -> None:
        check_options(self)


def words(*given: str) -> Words:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, Words)
    return read_options(Words, parser.parse_args(given))


def test_a_field_takes_as_many_words_as_its_type_has():
    found = words(
        *("one.json", "--sizes", "1", "2", "--pair", "3:4", "--paths", "a", "b"),
        *("--model", "x", "--model", "y", "--bits", "4"),
    )
    assert found == Words(
        file="one.json",
        sizes=(1, 2),
        pair=(3, 4),
        paths=(Path("a"), Path("b")),
        model=("x", "y"),
        bits=4,
    )
    assert words() == Words()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sizes": (0, 2)}, "sizes: found 0, expected at least 1"),
        ({"bits": 5}, "bits: found 5, expected one of 4, 8"),
    ],
)
def test_every_number_of_a_field_is_checked(given, expected):
    with pytest.raises(SpecError, match=expected):
        Words(**given)


@pytest.mark.parametrize("given", [["--sizes", "1"], ["--bits", "5"], ["--pair", "3"]])
def test_other_numbers_of_words_are_refused(given):
    with pytest.raises((argparse.ArgumentError, SystemExit)):
        words(*given)
