"""Recorded figures that are made again: what is listed, drawn, compared and reported."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import count
from pathlib import Path

import pytest

from reproduce import check_claims
from reproduce.check_claims import AGREES, DIFFERS, NO_TIME, SKIPPED, check, compare, draw, main
from reproduce.claims import EXACT, NOT_CHECKED, ROUNDED, TOPICS, Claim, Spread, claims, document
from scripts.docs_site import evidence

PAPERS = {"llm-pq", "exegpt", "larry", "sal", "samullm", "iteration-costs", "multibin"}


@pytest.fixture(scope="module")
def every():
    return claims()


def claim(number=0, **fields):
    defaults = {
        "topic": "fleets", "kind": "fleet", "name": f"number {number}", "seconds": 1.0,
        "path": ("record", "batch"), "compute": lambda _: 64,
    }  # fmt: skip
    return Claim(**(defaults | fields))


def test_every_result_file_has_claims_or_a_reason():
    assert TOPICS.keys() | NOT_CHECKED.keys() == set(evidence.topics()) | {check_claims.TOPIC}
    assert not TOPICS.keys() & NOT_CHECKED.keys()
    assert TOPICS.keys() >= PAPERS
    assert all(NOT_CHECKED.values())


def test_every_topic_has_claims_of_its_own_and_each_leads_to_recorded_figures(every):
    assert {one.topic for one in every} == TOPICS.keys()
    assert len({one.title for one in every}) == len(every)
    documents = {topic: document(topic) for topic in TOPICS}
    for one in every:
        assert check_claims.at(documents[one.topic], one.path) is not None, one.title


def test_a_draw_is_of_the_stated_share_and_the_same_for_the_same_seed(every):
    third = draw(every, 7, Fraction(1, 3))
    assert len(third) == round(len(every) / 3)
    assert [one.title for one in third] == [one.title for one in draw(every, 7, Fraction(1, 3))]
    assert third != draw(every, 8, Fraction(1, 3))
    assert len(draw(every, 0, Fraction(1))) == len(every)


def test_all_claims_take_less_than_three_hours_together(every):
    assert sum(one.seconds for one in every) < 3 * 3600


@pytest.fixture
def copied(tmp_path, monkeypatch, every):
    """Return the copy of a result file, of which one fast claim is drawn."""
    for topic in ("fleets",):
        file = evidence.RESULTS / f"{topic}.json"
        (tmp_path / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    check_claims.recorded_seconds.cache_clear()
    first = next(one for one in every if (one.topic, one.kind) == ("fleets", "fleet"))
    monkeypatch.setattr(check_claims, "claims", lambda: [first])
    yield tmp_path / "fleets.json"
    check_claims.recorded_seconds.cache_clear()


def outcome_of(tmp_path, *words):
    file = tmp_path / "outcome.json"
    status = main(["--share", "1", "--json", str(file), *words])
    (outcome,) = json.loads(file.read_text(encoding="utf-8"))["outcomes"]
    return status, outcome


def test_a_changed_figure_is_reported_and_ends_with_status_1(copied, tmp_path, capsys):
    status, outcome = outcome_of(tmp_path)
    assert (status, outcome["verdict"]) == (0, AGREES)
    record = json.loads(copied.read_text(encoding="utf-8"))
    before = record["record"]["clusters"][0]["fleet"]["requests_per_s"]
    record["record"]["clusters"][0]["fleet"]["requests_per_s"] = 1.01 * before
    copied.write_text(json.dumps(record), encoding="utf-8")
    capsys.readouterr()
    status, outcome = outcome_of(tmp_path)
    assert (status, outcome["verdict"], outcome["where"]) == (1, DIFFERS, "requests_per_s")
    assert outcome["difference"] == pytest.approx(0.01, rel=0.05)
    printed = capsys.readouterr().out
    assert "## Differences" in printed
    assert "| fleets | 1 | 0 | 1 | 0 |" in printed


def test_claims_are_listed_without_being_made(copied, capsys):
    assert main(["--share", "1", "--list"]) == 0
    assert capsys.readouterr().out == "fleets: fleet, cluster 1\n"


def test_a_share_outside_of_0_to_1_is_an_error(capsys):
    with pytest.raises(SystemExit) as error:
        main(["--share", "2"])
    assert error.value.code == 2
    assert "--share: found 2, expected more than 0 and at most 1" in capsys.readouterr().err


def test_what_cannot_be_made_here_is_skipped_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(check_claims, "this_processor", lambda: "AMD EPYC (Zen 4)")
    needs = claim(data=("azure",))
    timed = claim(spread=Spread(factor=2.0, processor="two cores of an AMD EPYC (Zen 5)"))
    here = claim(spread=Spread(factor=2.0, processor="two cores of an AMD EPYC (Zen 4)"))
    found = list(check([needs, timed, here], tmp_path, 60.0))
    assert [one["verdict"] for one in found] == [SKIPPED, SKIPPED, AGREES]
    assert found[0]["reason"] == "needs azure in the folder of --data"
    assert found[1]["reason"] == "measured on Zen 5, this is Zen 4"
    (tmp_path / "azure").mkdir()
    assert [one["verdict"] for one in check([needs], tmp_path, 60.0)] == [AGREES]


def test_no_claim_begins_that_is_expected_to_end_too_late():
    every = [claim(kind="unrecorded", seconds=seconds) for seconds in (1, 1, 50, 1)]
    ticks = count(0.0, 1.0)  # each look at the clock takes a second
    found = list(check(every, None, 10.0, clock=lambda: next(ticks)))
    assert [one["verdict"] for one in found] == [AGREES, AGREES, SKIPPED, AGREES]
    assert found[2]["reason"] == NO_TIME


@pytest.mark.parametrize(
    ("recorded", "now", "spread", "agrees"),
    [
        (1.234567, 1.2345674, EXACT, True),
        (1.234567, 1.23458, EXACT, False),
        (0.0, 1e-12, EXACT, True),
        (28.67, 28.6749, ROUNDED, True),
        (28.67, 28.676, ROUNDED, False),
        (10.0, 19.0, Spread(factor=2.0, processor="any"), True),
        (10.0, 21.0, Spread(factor=2.0, processor="any"), False),
        ([10.0, 8.0, 12.0], 23.0, Spread(factor=2.0, processor="any"), True),
        ([10.0, 8.0, 12.0], 3.9, Spread(factor=2.0, processor="any"), False),
        ([1.0, 2.0], 1.0, EXACT, False),
        ("proven", "proven", EXACT, True),
        ("proven", "not proven", EXACT, False),
        (None, 1.0, EXACT, False),
        (True, 1, EXACT, True),
        ({"a": 1, "unused": 2}, {"a": 1}, EXACT, True),
        ({"a": 1}, {"a": 1, "b": 2}, EXACT, False),
        ([1.0, 2.0], (1.0, 2.0), EXACT, True),
        ([1.0, 2.0], [1.0], EXACT, False),
        ([5, {"a": 1}], {1: {"a": 1}}, EXACT, True),
    ],
)
def test_figures_are_compared_with_their_spread(recorded, now, spread, agrees):
    assert compare(recorded, now, spread).agrees is agrees


def test_the_figure_that_differs_most_is_named():
    recorded = {"a": [1.0, 2.0], "b": {"c": 4.0}}
    found = compare(recorded, {"a": [1.0, 2.2], "b": {"c": 5.0}}, EXACT)
    assert (found.where, found.recorded, found.now) == ("b / c", 4.0, 5.0)
    assert found.share == pytest.approx(0.25)
    assert found.figures == 3


def test_the_last_record_says_how_long_claims_take(tmp_path, monkeypatch):
    outcomes = [
        {"topic": "fleets", "kind": "fleet", "name": "1", "verdict": AGREES, "seconds": 3.0},
        {"topic": "fleets", "kind": "fleet", "name": "2", "verdict": DIFFERS, "seconds": 5.0},
        {"topic": "fleets", "kind": "fleet", "name": "3", "verdict": SKIPPED, "seconds": 0.0},
    ]
    record = {"record": {"outcomes": outcomes}}
    Path(tmp_path / "check-claims.json").write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    check_claims.recorded_seconds.cache_clear()
    assert check_claims.expected_seconds(claim()) == 4.0
    assert check_claims.expected_seconds(claim(kind="seconds", seconds=9.0)) == 9.0
    check_claims.recorded_seconds.cache_clear()
