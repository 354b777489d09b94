"""The journal keeps every timing and rejects those of another measurement."""

from __future__ import annotations

import pytest

from llmpq.errors import SpecError
from llmpq.profiler.bench import TimedStep, Timing
from llmpq.profiler.grid import Shape
from llmpq.profiler.journal import Journal, journal_file, read_journal
from llmpq.spec.precision import Phase

WHO = (("model", "tiny"), ("threads", "1"))
TIMINGS = [
    Timing(
        trial=TimedStep(shape=Shape(phase=phase, batch=2, tokens=7), bits=4, layers=3),
        seconds=0.1 + 0.2,
    )
    for phase in Phase
]


@pytest.fixture
def path(tmp_path):
    file = journal_file(tmp_path / "cpu.csv")
    with Journal(file, WHO, resume=False) as journal:
        journal.add(TIMINGS)
    return file


def test_timings_are_read_back(path):
    assert path.name == "cpu.csv.part"
    assert read_journal(path, WHO) == TIMINGS


def test_a_resumed_journal_keeps_old_timings_and_appends_new_ones(path):
    with Journal(path, WHO, resume=True) as journal:
        assert journal.timings == TIMINGS
        journal.add(TIMINGS[:1])
    assert read_journal(path, WHO) == [*TIMINGS, TIMINGS[0]]


def test_without_resume_the_journal_starts_empty(path):
    with Journal(path, WHO, resume=False) as journal:
        assert journal.timings == []
    assert read_journal(path, WHO) == []


def test_an_incomplete_last_line_is_skipped(path):
    path.write_text(path.read_text()[:-4])
    assert read_journal(path, WHO) == TIMINGS[:1]


def test_timings_of_another_measurement_are_rejected(path):
    with pytest.raises(SpecError, match=r"threads.*found '1', expected '2'"):
        Journal(path, (("model", "tiny"), ("threads", "2")), resume=True)


def test_a_malformed_line_is_rejected(path):
    path.write_text(path.read_text() + "decode,4,2,7,3,soon\n")
    with pytest.raises(SpecError, match="soon"):
        read_journal(path, WHO)


def test_a_finished_run_deletes_the_journal(path):
    with Journal(path, WHO, resume=True) as journal:
        journal.remove()
    assert not path.exists()
