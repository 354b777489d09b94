"""The layer profiler times every point it was asked for, on the runtime's own stages."""

from __future__ import annotations

import pytest
import torch

from llmpq.errors import SpecError
from llmpq.profiler.layer import MASTER_BITS, LayerGrid, LayerJob, profile_layer
from llmpq.spec.precision import Phase

GRID = LayerGrid(batches=(1, 3), prompt_tokens=(4, 9), context_tokens=(5,), max_prefill_tokens=20)


@pytest.fixture(scope="module")
def job(tiny_model):
    torch.set_num_threads(1)
    return LayerJob(
        model_dir=tiny_model("llama"),
        bits=(16, 4),
        grid=GRID,
        dtype=torch.float32,
        device=torch.device("cpu"),
        layers=2,
        budget_s=0.05,
    )


def test_grid_leaves_out_prefill_points_beyond_its_limit():
    assert (Phase.PREFILL, 3, 9) not in GRID.points()
    assert (Phase.PREFILL, 1, 9) in GRID.points()
    assert GRID.max_tokens == 9


def test_profile_layer_times_every_point_at_every_bitwidth_and_the_master(job):
    done = []
    table = profile_layer(job, lambda rounds, planned: done.append((rounds, planned)))
    measured = {(s.phase, s.bits, s.batch, s.tokens) for s in table.samples}
    expected = {
        (phase, bits, batch, tokens)
        for phase, batch, tokens in GRID.points()
        for bits in (16, 4, MASTER_BITS)
    }
    assert measured == expected
    assert all(sample.seconds > 0 for sample in table.samples)
    assert len(done) >= 3
    assert all(rounds <= planned for rounds, planned in done)


def test_profile_layer_tells_dtype_noise_and_rounds(job):
    provenance = dict(profile_layer(job).provenance)
    assert provenance["dtype"] == "float32"
    assert int(provenance["rounds"]) >= 3
    assert provenance["noise"].endswith("median interquartile range over median")


def test_profile_layer_refuses_more_tokens_than_the_model_has_positions(job, tiny_model):
    too_long = LayerJob(
        model_dir=tiny_model("opt"),
        bits=(16,),
        grid=LayerGrid(batches=(1,), prompt_tokens=(100_000,), context_tokens=(4,)),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with pytest.raises(SpecError, match="positions"):
        profile_layer(too_long)
