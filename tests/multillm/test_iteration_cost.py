"""Fitted iteration times: exact on exact laws, robust to spikes, and close on measured tables."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.iteration_costs import FORMS, PaperModel, errors, main
from llmpq.costmodel.tables.latency import RegressionLatencyModel
from llmpq.errors import SpecError
from llmpq.multillm.engine.law import COLUMNS, IterationModel, IterationTable, read_iterations
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

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
            yield [1, batch, batch * longest, longest, total if overhead else sum(parts), *parts]
        for tokens, longest in ((batch, 1), (batch * 300, 300), (batch + 299, 300)):
            total, *parts = law_ms(False, batch, tokens, longest)
            yield [0, batch, tokens, longest, total if overhead else sum(parts), *parts]


def table(path, lines):
    warm_up = [[1, 40, 40, 1, 1e5, 1, 1, 1]] * 2
    text = "\n".join(",".join(map(repr, line)) for line in (*warm_up, *lines))
    path.write_text(",".join(COLUMNS) + "\n" + text + "\n")
    return path


def fitted(tmp_path, lines):
    return IterationModel(read_iterations(table(tmp_path / "t.csv", lines)))


def test_a_law_is_found_at_measured_and_unmeasured_batches(tmp_path):
    model = fitted(tmp_path, [line for line in rows() if line[1] not in (7, 8, 23)])
    for phase, batches, lengths in (
        (Phase.PREFILL, (1, 7, 8, 20, 23, 40), (100, 5, 300, 40, 9, 77)),
        (Phase.DECODE, (1, 7, 8, 20, 23, 40), (100, 250, 300, 40, 90, 77)),
    ):
        for batch, length in zip(batches, lengths, strict=True):
            is_prefill = phase is Phase.PREFILL
            wanted_ms = law_ms(is_prefill, batch, batch * length, length)[0]
            found = model.seconds(phase, batch, length)
            assert found == pytest.approx(1e-3 * wanted_ms, rel=0.06)


def test_the_papers_form_recovers_three_parts_that_are_linear_for_each_batch(tmp_path):
    paper = PaperModel(read_iterations(table(tmp_path / "t.csv", rows())))
    for batch in (1, 7, 40):
        for is_prefill, tokens, longest in ((True, batch * 100, 100), (False, batch * 90, 200)):
            _, *parts = law_ms(is_prefill, batch, tokens, longest)
            phase = Phase.PREFILL if is_prefill else Phase.DECODE
            shape = (np.array([float(one)]) for one in (batch, tokens, longest))
            (found,) = paper.seconds(phase, *shape)
            assert found == pytest.approx(1e-3 * sum(parts), rel=1e-6)


def test_uneven_requests_take_the_time_of_the_longest(tmp_path):
    model = fitted(tmp_path, [line for line in rows() if line[1] not in (7, 8, 23)])
    for batch, tokens, longest in ((7, 500, 300), (20, 700, 280), (23, 400, 200), (40, 900, 300)):
        wanted_ms = law_ms(False, batch, tokens, longest)[0]
        found = model.seconds(Phase.DECODE, batch, tokens / batch, longest)
        assert found == pytest.approx(1e-3 * wanted_ms, rel=0.03)
        assert found > model.seconds(Phase.DECODE, batch, tokens / batch)


def test_the_law_of_iterations_is_that_of_layers(tmp_path):
    found = read_iterations(table(tmp_path / "t.csv", rows()))
    own = found.select(found.is_prefill & np.isin(found.batch, (1, 2, 4, 8, 16, 32)))
    decode = found.select(~found.is_prefill)
    both = IterationTable(
        is_prefill=np.concatenate([own.is_prefill, decode.is_prefill]),
        batch=np.concatenate([own.batch, decode.batch]),
        tokens=np.concatenate([own.tokens, decode.tokens]),
        longest=np.concatenate([own.longest, decode.longest]),
        seconds=np.concatenate([own.seconds, decode.seconds]),
        parts=np.concatenate([own.parts, decode.parts], axis=1),
    )
    model = IterationModel(both)
    layers = RegressionLatencyModel(
        LatencyTable(
            samples=tuple(
                LatencySample(
                    phase=Phase.PREFILL, bits=16, batch=int(batch), tokens=int(tokens),
                    seconds=seconds,
                )
                for batch, tokens, seconds in zip(
                    own.batch, own.longest, own.seconds.tolist(), strict=True
                )
            )
        )
    )  # fmt: skip
    for batch, tokens in ((1, 64), (3, 100), (16, 512), (40, 700)):
        expected = layers.seconds(Phase.PREFILL, 16, batch, tokens)
        assert model.seconds(Phase.PREFILL, batch, tokens) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_one_iteration_in_twenty_that_is_slow_or_fast_moves_no_other(tmp_path, factor):
    lines = list(rows())
    clean = fitted(tmp_path, lines)
    chosen = set(np.random.default_rng(3).permutation(len(lines))[: len(lines) // 20].tolist())
    spiked = fitted(
        tmp_path,
        [
            [*line[:4], line[4] * (factor if place in chosen else 1.0), *line[5:]]
            for place, line in enumerate(lines)
        ],
    )
    for phase in Phase:
        errors = [
            abs(spiked.seconds(phase, batch, length) / clean.seconds(phase, batch, length) - 1.0)
            for batch in (1, 3, 7, 12, 19, 20, 21, 33)
            for length in (2, 40, 100, 280)
        ]
        assert np.mean(errors) < 0.02


def test_beyond_the_measured_batches_time_grows_on(tmp_path):
    model = fitted(tmp_path, rows())
    once, twice = (model.seconds(Phase.DECODE, batch, 100) for batch in (40, 80))
    wanted = [law_ms(False, batch, batch * 100, 100)[0] for batch in (40, 80)]
    assert twice / once == pytest.approx(wanted[1] / wanted[0], rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("exec_ms", "exec_s"), "field 'exec_ms'"),
        (lambda text: text + "0,1,1,1,0,1,1,1\n", "field 'iter_ms': found 0.0"),
        (lambda text: text + "0,0,1,1,1,1,1,1\n", "field 'num_seqs': found 0.0"),
        (lambda text: text + "0,1,x,1,1,1,1,1\n", "not of numbers"),
        (lambda text: text + "0,1,nan,1,1,1,1,1\n", "field 'total_tokens'"),
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
        fitted(tmp_path, lines)


def test_a_gzipped_table_is_read(tmp_path):
    path = table(tmp_path / "t.csv", rows())
    packed = tmp_path / "t.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert (read_iterations(packed).seconds == read_iterations(path).seconds).all()


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs SamuLLM's measured iterations")
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_unseen_batches_of_measured_tables_are_close_and_closer_than_the_papers_form(degree):
    means = {form: [] for form in FORMS}
    for file in sorted(SHARED.glob(f"*_tp{degree}.csv.gz")):
        for (_, form), found in errors(file).items():
            means[form].append(found.mean())
    assert np.mean(means["whole"]) <= 0.04
    assert np.mean(means["whole"]) < np.mean(means["paper"])


def test_the_benchmark_names_a_folder_without_tables_and_one_with_too_few_batches(tmp_path, capsys):
    assert main(["--data", str(tmp_path)]) != 0
    assert "found no iterations/*.csv.gz" in capsys.readouterr().err
    folder = tmp_path / "iterations"
    folder.mkdir()
    few = [line for line in rows() if line[1] < 4]
    text = table(tmp_path / "t.csv", few).read_bytes()
    (folder / "few.csv.gz").write_bytes(gzip.compress(text))
    assert main(["--data", str(tmp_path)]) != 0
    assert "few.csv.gz: found 3 batch sizes of both phases" in capsys.readouterr().err
