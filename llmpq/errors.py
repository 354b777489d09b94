"""The exception tree: every error a user can meet, each with its exit status.

::

    LlmpqError                      1   a bug of llmpq, unless a subclass says otherwise
    ├── SpecError(ValueError)       2   bad input: a file, an option, a prompt
    ├── ProfileMissError(LookupError)  2   a table has no entry for a shape
    ├── InfeasibleError             3   no plan exists
    ├── CapacityError               3   not enough memory
    ├── SolverError                 1   a solver crashed or returned an invalid result
    ├── StageError                  4   a rank of the pipeline failed or timed out
    └── StoppedError              130   stopped before all requests were done

Messages say what was found, what was expected, and where. Only ``llmpq.cli`` prints them and
exits.
"""

from __future__ import annotations


class LlmpqError(Exception):
    """Base class of all errors of llmpq.

    Attributes:
        exit_status: of a command that ends with it.
        is_permanent: whether starting the ranks of a run again would give the same error.
    """

    exit_status = 1
    is_permanent = True


class SpecError(LlmpqError, ValueError):
    """Invalid input; names the file, the field, the value found and what was expected."""

    exit_status = 2


class ProfileMissError(LlmpqError, LookupError):
    """A measured table has no sample for a shape."""

    exit_status = 2


class InfeasibleError(LlmpqError):
    """No plan meets the constraints; the message says why and names the smallest fixes.

    Attributes:
        short: the same in a few words, for a row of a table.
    """

    exit_status = 3

    def __init__(self, message: str, *, short: str | None = None) -> None:
        super().__init__(message)
        self.short = message if short is None else short


class CapacityError(LlmpqError):
    """Something does not fit in its memory or slots."""

    exit_status = 3


class SolverError(LlmpqError):
    """A solver failed, through no fault of the input."""


class StageError(LlmpqError):
    """A rank of the pipeline died, hung or broke the protocol; names stage, rank and host."""

    exit_status = 4

    def __init__(self, message: str, *, is_permanent: bool = False) -> None:
        super().__init__(message)
        self.is_permanent = is_permanent


class StoppedError(LlmpqError):
    """A run was stopped (SIGTERM, Ctrl-C) with requests left; the message says how many."""

    exit_status = 130


def missing_field(where: str, field: str, expected: str = "") -> SpecError:
    """Build the error of a required field that a file or an option lacks.

    Args:
        where: name of the file or option group.
        field: dotted path of the field inside it.
        expected: what else would have been accepted, in words.
    """
    return SpecError(f"{where}: field '{field}' is missing" + (expected and f"; {expected}"))


def bad_field(where: str, field: str, found: object, expected: str) -> SpecError:
    """Build the error of a field in a file or an option.

    Args:
        where: name of the file or option group.
        field: dotted path of the field inside it.
        found: the offending value.
        expected: what would have been accepted, in words.
    """
    text = repr(found)
    if len(text) > 80:
        text = text[:77] + "..."
    return SpecError(f"{where}: field '{field}': found {text}, expected {expected}")
