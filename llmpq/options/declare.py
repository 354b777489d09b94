"""What a command line and a Python keyword are derived from: fields of a dataclass with ``Option``.

``add_options`` makes arguments of them, ``read_options`` the dataclass of parsed arguments, and
``read_keywords`` of keywords. Type, default, limits and explanation stand in the class alone.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from llmpq.errors import SpecError
from llmpq.spec.fields import Rule

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Option(Rule):
    """How a field is given on a command line; its limits are those of its rule in a file, too.

    Attributes:
        help: what it is for, with ``%(default)s`` where the default is shown.
        flags: names without dashes, the field's own by default; those of a switch state the
            opposite of a default that is true.
        short: a letter, which is a flag with one dash.
        aliases: flags without dashes that stand for a value, each with the value.
        metavar: stands for the value in the help.
        above: the number is larger than this.
        unit: the value on the command line is a multiple of this.
        parse: makes the value from a word, ``argparse.ArgumentTypeError`` if it cannot; by default
            the field's type does.
        accept: makes the value of the field from that of an argument or a keyword.
        is_positional: it is given by its place, without a name.
        repeats: it is given once for each item of a list, not once with all of them.
    """

    help: str
    flags: Sequence[str] = ()
    short: str = ""
    aliases: Sequence[tuple[str, Any]] = ()
    metavar: str | tuple[str, ...] | None = None
    above: float = -math.inf
    unit: float = 1
    parse: Callable[[str], Any] | None = None
    accept: Callable[[Any], Any] | None = None
    is_positional: bool = False
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class _Declared:
    """A field with an option: its name, its type without ``None``, its default."""

    name: str
    kind: Any
    option: Option
    default: Any

    @property
    def choices(self) -> Sequence[Any] | None:
        is_literal = get_origin(self.kind) is Literal
        return self.option.choices or (get_args(self.kind) if is_literal else None)

    @property
    def nargs(self) -> int | str | None:
        """Words on a command line: one or more, so many, or one where ``None``."""
        if get_origin(self.kind) is not tuple:
            return None
        items = get_args(self.kind)
        if items[-1] is Ellipsis:
            return "+"
        return len(items) if self.option.parse is None else None

    @property
    def item(self) -> Any:
        """The type of a word."""
        return self.kind if self.nargs is None else get_args(self.kind)[0]

    @property
    def flags(self) -> list[str]:
        if self.option.is_positional:
            return [self.name]
        short = [f"-{self.option.short}"] if self.option.short else []
        return [*(f"--{flag}" for flag in self.option.flags or (self.name,)), *short]

    @property
    def dest(self) -> str:
        return self.flags[0].removeprefix("--").replace("-", "_")


def add_options(
    group: argparse._ActionsContainer,
    kind: type[Any],
    *names: str,
    **changes: Mapping[str, Any],
) -> None:
    """Add options of a class to a parser or a group.

    Args:
        group: gets them.
        kind: the class.
        names: of its fields, in the order of the help; by default all that have an option.
        changes: by field, arguments of ``add_argument`` that differ in this command.
    """
    declared = _declared(kind)
    for name in names or declared:
        one = declared[name]
        group.add_argument(*one.flags, **_arguments(one) | dict(changes.get(name, {})))
        for flag, value in one.option.aliases:
            text = f"name of {one.flags[0]} {value} in the paper"
            group.add_argument(
                f"--{flag}", dest=one.dest, action="store_const", const=value, help=text
            )


def _arguments(one: _Declared) -> dict[str, Any]:
    """Return the arguments of ``add_argument``."""
    setting, kind = one.option, one.item
    given: dict[str, Any] = {"help": setting.help}
    if one.kind is bool:
        return given | {"action": "store_true"}
    given |= _number_of_words(one)
    if (choices := one.choices) is not None:
        given["choices"] = choices
    if setting.metavar is not None:
        given["metavar"] = setting.metavar
    parse = setting.parse or (float if setting.unit != 1 else kind)
    if parse in (int, float) or setting.parse is not None:
        given["type"] = parse
    return given | _default(one)


def _number_of_words(one: _Declared) -> dict[str, Any]:
    if one.option.repeats:
        return {"action": "append"}
    return {} if one.nargs is None else {"nargs": one.nargs}


def _default(one: _Declared) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` that state the default, or that there is none."""
    setting, default = one.option, one.default
    if setting.is_positional:
        return {} if default is MISSING else {"nargs": "?"}
    if default is MISSING:
        return {"required": True}
    if default is None:
        return {}
    if one.nargs is not None:
        return {"default": list(default)}
    return {"default": default if setting.unit == 1 else default / setting.unit}


def read_options(
    kind: type[T], namespace: argparse.Namespace, *, leaves: Collection[str] = (), **given: Any
) -> T:
    """Return a class of options from parsed arguments.

    Fields without an argument in this command keep their default.

    Args:
        kind: the class.
        namespace: the arguments.
        leaves: fields that keep their default whatever the argument is.
        given: fields whose value is not that of their argument.

    Raises:
        SpecError: a value cannot be used; names the argument.
    """
    found, declared = vars(namespace), _declared(kind)
    values = {
        name: _value_of(one, found[one.dest])
        for name, one in declared.items()
        if one.dest in found and name not in given and name not in leaves
    }
    try:
        return kind(**values, **given)
    except SpecError as error:
        name, colon, text = str(error).partition(":")
        if name not in declared:
            raise
        raise SpecError(f"{declared[name].flags[0]}{colon}{text}") from None


def names_of(kind: type[Any], *names: str) -> set[str]:
    """Return the names that arguments of a class have in a namespace, by default all."""
    declared = _declared(kind)
    return {declared[name].dest for name in names or declared}


def values_of(options: Any, kind: type[Any] | None = None) -> dict[str, Any]:
    """Return the fields of options by name, or those of a class that it is derived from."""
    return {one.name: getattr(options, one.name) for one in fields(kind or options)}


def _value_of(one: _Declared, value: Any) -> Any:
    setting, flag = one.option, one.flags[0]
    if value is None:
        return None
    if setting.unit != 1:
        least, most = setting.minimum / setting.unit, setting.maximum / setting.unit
        if not least <= value < most:
            raise SpecError(f"{flag}: found {value:g}, expected at least {least:g}")
        return int(value * setting.unit)
    if one.kind is bool:
        return value is not one.default
    if one.nargs is not None:
        value = tuple(value)
    elif one.kind is Path:
        value = Path(value).resolve()
    if setting.accept is None:
        return value
    try:
        return setting.accept(value)
    except SpecError as error:
        where = f"{one.name}: "
        raise SpecError(f"{flag}: {str(error).removeprefix(where)}") from None


def read_keywords(given: Mapping[str, Any], *kinds: type[Any]) -> list[Any]:
    """Return classes of options from the keywords of a call.

    Args:
        given: the keywords.
        kinds: the classes.

    Raises:
        SpecError: a value cannot be used; names the keyword.
        TypeError: a keyword is not one of theirs.
    """
    known = {one.name for kind in kinds for one in fields(kind)}
    for name in given:
        if name not in known:
            raise TypeError(f"found keyword '{name}', expected one of {', '.join(sorted(known))}")
    return [_from_keywords(kind, given) for kind in kinds]


def _from_keywords(kind: type[Any], given: Mapping[str, Any]) -> Any:
    values, declared = {}, _declared(kind)
    for one in fields(kind):
        if one.name in given:
            accept = declared[one.name].option.accept if one.name in declared else None
            value = given[one.name]
            values[one.name] = value if accept is None else accept(value)
    return kind(**values)


def with_keywords(*kinds: type[Any]) -> Callable[[Function], Function]:
    """Show the fields of options as keywords of a function that takes ``**options``.

    ``help`` and completion have them, with their defaults and their explanations.
    """

    def shown(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        added: list[inspect.Parameter] = []
        lines: list[str] = []
        for kind in kinds:
            hints = get_type_hints(kind)
            parameters = inspect.signature(kind).parameters.items()
            added += [one.replace(annotation=hints[name]) for name, one in parameters]
            lines += [f"    {name}: {text}" for name, text in explained(kind).items()]
        vars(function)["__signature__"] = signature.replace(parameters=[*own, *added])
        function.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Options:", *lines])
        return function

    return shown


def explained(kind: type[Any]) -> dict[str, str]:
    """Return what each option of a class means, as a keyword, without its default."""
    return {
        name: ("where false, " if one.kind is bool and one.default is True else "")
        + re.sub(r" \(default %\(default\)\w\)", "", one.option.help)
        for name, one in _declared(kind).items()
    }


def check_options(value: Any) -> None:
    """Check the fields of options against their limits; for ``__post_init__``.

    Raises:
        SpecError: one is outside; the message begins with its name.
    """
    for name, one in _declared(type(value)).items():
        found = getattr(value, name)
        for item in (found,) if one.nargs is None or found is None else found:
            if (expected := _expected(one, item)) is not None:
                shown = f"{item:g}" if isinstance(item, float) else item
                raise SpecError(f"{name}: found {shown}, expected {expected}")


_TYPES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def _is_a(kind: type[Any], value: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def _expected(one: _Declared, value: Any) -> str | None:
    """Return what was expected where a value cannot be used, else ``None``."""
    setting, kind = one.option, one.item
    if value is not None and kind in _TYPES and not _is_a(kind, value):
        return _TYPES[kind]
    if value is not None and one.choices is not None and value not in one.choices:
        return f"one of {', '.join(map(str, one.choices))}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if value > setting.maximum and setting.maximum < math.inf:
        return f"at most {setting.maximum:g}"
    if value > setting.above and setting.minimum <= value < math.inf:
        return None
    is_open = setting.above >= setting.minimum
    return f"more than {setting.above:g}" if is_open else f"at least {setting.minimum:g}"


def _declared(kind: Any) -> dict[str, _Declared]:
    """Return the fields of a class that have an option."""
    return _declared_once(kind)  # whose argument mypy wants hashable, which it takes no class for


@cache
def _declared_once(kind: type[Any]) -> dict[str, _Declared]:
    hints, found = get_type_hints(kind, include_extras=True), {}
    for one in fields(kind):
        hint, setting = _with_option(hints[one.name])
        if setting is not None:
            found[one.name] = _Declared(one.name, hint, setting, one.default)
    return found


def _with_option(hint: Any, setting: Option | None = None) -> tuple[Any, Option | None]:
    """Return the type of a field without ``None``, and its option."""
    if get_origin(hint) is Annotated:
        inner, *notes = get_args(hint)
        found = next((note for note in notes if isinstance(note, Option)), setting)
        return _with_option(inner, found)
    if get_origin(hint) in (Union, UnionType):
        inner = next(one for one in get_args(hint) if one is not type(None))
        return _with_option(inner, setting)
    return hint, setting
