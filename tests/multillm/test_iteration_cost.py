"""Fitted iteration times: exact on exact laws, robust to spikes, and close on measured tables."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from llmpq.errors import SpecError
from llmpq.multillm.cost import COLUMNS, IterationModel, read_iterations
from llmpq.spec.precision import Phase

SHARED = (
    Path(os.environ.get("LLMPQ_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared/data"))
    / "samullm"
    / "iterations"
)


def law_ms(is_prefill, batch, tokens, longest):
    """Whole iterations, and their parts: computation, sampling, preparation."""
    padded = batch * longest
    compute = 20 + batch / 8 + (padded / 10 if is_prefill else tokens / 1000)
    sample, prepare = 1 + tokens / 4000, 0.5 + padded / 5000
    return compute + sample + prepare + 0.25 * batch, compute, sample, prepare


def rows(overhead=True):
    for batch in range(1, 41):
        for longest in (1, 64, 512):
            total, *parts = law_ms(True, batch, batch * longest, longest)
            work = batch * longest / 1000
            yield [
                1,
                batch,
                batch * longest,
                longest,
                work,
                total if overhead else sum(parts),
                *parts,
            ]
        for tokens, longest in ((batch, 1), (batch * 300, 300), (batch + 299, 300)):
            total, *parts = law_ms(False, batch, tokens, longest)
            yield [0, batch, tokens, longest, batch, total if overhead else sum(parts), *parts]


def table(path, lines):
    warm_up = [[1, 40, 40, 1, 1, 1e5, 1, 1, 1]] * 2
    text = "\n".join(",".join(map(repr, line)) for line in (*warm_up, *lines))
    path.write_text(",".join(COLUMNS) + "\n" + text + "\n")
    return path


@pytest.mark.parametrize("form", ["paper", "whole"])
def test_an_exact_law_is_found_at_measured_and_unmeasured_batches(tmp_path, form):
    lines = [line for line in rows(overhead=form == "whole") if line[1] not in (7, 8, 23)]
    model = IterationModel(read_iterations(table(tmp_path / "t.csv", lines)), form)
    for is_prefill, phase in ((True, Phase.PREFILL), (False, Phase.DECODE)):
        batch, longest = np.array([1, 7, 8, 20, 23, 40]), np.array([100, 5, 300, 40, 9, 77])
        tokens = (
            batch * longest
            if is_prefill
            else np.where(batch == 1, longest, batch * (longest + 1) // 2)
        )
        found = model.seconds(phase, batch, tokens, longest)
        wanted = [law_ms(is_prefill, *shape) for shape in zip(batch, tokens, longest, strict=True)]
        seconds = [1e-3 * (one[0] if form == "whole" else sum(one[1:])) for one in wanted]
        assert found == pytest.approx(seconds, rel=1e-6)


def test_the_whole_form_counts_the_overhead_that_the_parts_leave_out(tmp_path):
    found = read_iterations(table(tmp_path / "t.csv", rows()))
    whole, paper = IterationModel(found), IterationModel(found, "paper")
    shape = (Phase.DECODE, 20, 2000, 100)
    assert whole.seconds(*shape) - paper.seconds(*shape) == pytest.approx(0.25e-3 * 20, rel=1e-6)


def test_a_spike_moves_no_batch_but_the_first_and_the_last(tmp_path):
    lines = list(rows())
    clean = IterationModel(read_iterations(table(tmp_path / "t.csv", lines)))
    spiked = [
        [*line[:5], line[5] * 5, *line[6:]] if line[1] == 20 and line[3] == 300 else line
        for line in lines
    ]
    model = IterationModel(read_iterations(table(tmp_path / "t.csv", spiked)))
    for batch in (19, 20, 21):
        shape = (Phase.DECODE, batch, batch * 50, 100)
        assert model.seconds(*shape) == pytest.approx(clean.seconds(*shape), rel=0.02)


def test_beyond_the_measured_batches_time_grows_in_proportion(tmp_path):
    model = IterationModel(read_iterations(table(tmp_path / "t.csv", rows())))
    once, twice = model.seconds(Phase.DECODE, [40, 80], [4000, 4000], [0, 0])
    assert twice == pytest.approx(2 * once)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("tflop", "flops"), "field 'tflop'"),
        (lambda text: text + "0,1,1,1,0,0,1,1,1\n", "field 'iter_ms': found 0.0"),
        (lambda text: text + "0,0,1,1,0,1,1,1,1\n", "field 'num_seqs': found 0.0"),
        (lambda text: text + "0,1,x,1,0,1,1,1,1\n", "not of numbers"),
        (lambda text: text + "0,1,nan,1,0,1,1,1,1\n", "field 'total_tokens'"),
    ],
)
def test_every_bad_table_is_one_error_with_file_and_column(tmp_path, change, message):
    path = table(tmp_path / "t.csv", rows())
    path.write_text(change(path.read_text()))
    with pytest.raises(SpecError, match=r"t\.csv") as caught:
        read_iterations(path)
    assert message in str(caught.value)


def test_a_missing_file_and_a_missing_phase_are_errors(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        read_iterations(tmp_path / "none.csv")
    lines = [line for line in rows() if line[0]]
    with pytest.raises(SpecError, match="no decode iterations"):
        IterationModel(read_iterations(table(tmp_path / "t.csv", lines)))


def test_a_gzipped_table_is_read(tmp_path):
    path = table(tmp_path / "t.csv", rows())
    packed = tmp_path / "t.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert (read_iterations(packed).seconds == read_iterations(path).seconds).all()


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs SamuLLM's measured iterations")
def test_unseen_batches_of_a_measured_table_are_close_and_closer_than_the_papers_form():
    found = read_iterations(SHARED / "vicuna-13b-v1.5_tp1.csv.gz")
    batches = np.unique(found.batch)[1:-1]
    unseen = np.random.default_rng(0).choice(batches, len(batches) * 3 // 10, replace=False)
    is_unseen = np.isin(found.batch, unseen)
    for phase in Phase:
        held = found.select(is_unseen & (found.is_prefill == (phase is Phase.PREFILL)))
        errors = {}
        for form in ("paper", "whole"):
            model = IterationModel(found.select(~is_unseen), form)
            seconds = model.seconds(phase, held.batch, held.tokens, held.longest)
            errors[form] = np.abs(seconds / held.seconds - 1.0)
        assert errors["whole"].mean() <= 0.035
        assert np.quantile(errors["whole"], 0.95) <= 0.12
        assert errors["whole"].mean() < errors["paper"].mean()
