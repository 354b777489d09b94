"""The exception tree: every error a user can meet, each with its exit status.

::

    LlmpqError                      1   our own bug, unless a subclass says otherwise
    ├── SpecError(ValueError)       2   bad input: a file, an option, a prompt
    ├── ProfileMissError(LookupError)  2   a table holds nothing for the shape asked for
    ├── InfeasibleError             3   no plan exists
    ├── CapacityError               3   it does not fit in the memory there is
    ├── SolverError                 1   a solver crashed or answered nonsense
    ├── StageError                  4   a rank of the pipeline failed or timed out
    └── StoppedError              130   asked to stop before everything was done

Messages say what was found, what was expected, and where. Only ``llmpq.cli`` prints and exits.
"""

from __future__ import annotations


class LlmpqError(Exception):
    """Base of every error raised on purpose; ``exit_status`` is the process's answer to it."""

    exit_status = 1


class SpecError(LlmpqError, ValueError):
    """Input that cannot be accepted: names the file, the field, the value and what was expected."""

    exit_status = 2


class ProfileMissError(LlmpqError, LookupError):
    """A measured table has no sample that answers the question."""

    exit_status = 2


class InfeasibleError(LlmpqError):
    """No plan meets the constraints; the message says why and names the smallest fixes."""

    exit_status = 3


class CapacityError(LlmpqError):
    """Something does not fit in the memory or the slots it was given."""

    exit_status = 3


class SolverError(LlmpqError):
    """A solver failed for a reason that is not the user's."""


class StageError(LlmpqError):
    """A rank of the pipeline died, hung or broke the protocol; names stage, rank and host."""

    exit_status = 4


class StoppedError(LlmpqError):
    """A run was told to end (SIGTERM, Ctrl-C) and leaves something undone; says how much."""

    exit_status = 130


def bad_field(where: str, field: str, found: object, expected: str) -> SpecError:
    """Build the one form of message that all readers of files and options use.

    Args:
        where: the file or option group, as the user knows it.
        field: dotted path of the field inside it.
        found: the offending value.
        expected: what would have been accepted, in words.
    """
    text = repr(found)
    if len(text) > 80:
        text = text[:77] + "..."
    return SpecError(f"{where}: field '{field}': found {text}, expected {expected}")
