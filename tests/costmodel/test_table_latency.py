import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.costmodel.tables.latency import TableLatencyModel
from llmpq.errors import ProfileMissError
from llmpq.spec import catalog
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencySample, LatencyTable

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
ANALYTIC = RooflineLatencyModel(
    model=catalog.model("google/gemma-2-2b"), device=catalog.device("A100-40G"),
    dtype="bfloat16", kv_bits=16,
)  # fmt: skip


def sample(phase, bits, batch, tokens, seconds):
    return LatencySample(phase=phase, bits=bits, batch=batch, tokens=tokens, seconds=seconds)


def table_model(samples, **options):
    return TableLatencyModel(
        table=LatencyTable(samples=tuple(samples)), analytic=ANALYTIC, **options
    )


def prefill_law(batch, tokens):
    return 1e-4 + 2e-6 * batch * tokens + 1e-10 * batch * tokens**2


def decode_law(batch, tokens):
    return 3e-4 + 1e-5 * batch + 2e-9 * batch * tokens


GRID = [(batch, tokens) for batch in (1, 4, 16) for tokens in (64, 256, 1024)]
MEASURED = table_model(
    [sample(PREFILL, 16, batch, tokens, prefill_law(batch, tokens)) for batch, tokens in GRID]
    + [sample(DECODE, 16, batch, tokens, decode_law(batch, tokens)) for batch, tokens in GRID]
)

shapes = st.tuples(st.integers(1, 64), st.integers(1, 4096))


@settings(max_examples=30, deadline=None)
@given(
    points=st.dictionaries(shapes, st.floats(1e-7, 1e3), min_size=1, max_size=8),
    phase=st.sampled_from(Phase),
    asked=st.tuples(st.integers(1, 1000), st.floats(1, 1e5)),
)
def test_measured_points_in_order_are_exact_and_the_rest_is_positive(points, phase, asked):
    model = table_model(
        sample(phase, 4, batch, tokens, seconds) for (batch, tokens), seconds in points.items()
    )
    in_order = all(
        mine <= its
        for (batch, tokens), mine in points.items()
        for (more, longer), its in points.items()
        if batch <= more and tokens <= longer
    )
    for (batch, tokens), seconds in points.items():
        found = model.layer_s(phase, 4, batch, tokens, 0)
        assert found == seconds or not in_order
        # A contradiction is settled somewhere between the samples.
        assert min(points.values()) * 0.999 <= found <= max(points.values()) * 1.001
    assert model.layer_s(phase, 4, *asked, 0) > 0


@given(batch=st.integers(1, 16), tokens=st.floats(64, 1024))
def test_inside_the_grid_the_answer_lies_between_its_neighbours(batch, tokens):
    found = MEASURED.layer_s(DECODE, 16, batch, tokens, 0)
    assert found == pytest.approx(decode_law(batch, tokens), rel=3e-3)


def test_prefill_inside_the_grid_recovers_a_convex_law():
    found = MEASURED.layer_s(PREFILL, 16, 4, 640, 0)
    assert found == pytest.approx(prefill_law(4, 640), rel=1e-9)


@pytest.mark.parametrize(("batch", "tokens"), [(64, 2048), (32, 512), (8, 4096), (1, 16)])
def test_outside_the_grid_the_fitted_law_carries_on(batch, tokens):
    found = MEASURED.layer_s(PREFILL, 16, batch, tokens, 0)
    assert found == pytest.approx(prefill_law(batch, tokens), rel=0.02)
    found = MEASURED.layer_s(DECODE, 16, batch, tokens, 0)
    assert found == pytest.approx(decode_law(batch, tokens), rel=0.02)


def test_answers_are_continuous_at_the_edge_of_the_grid():
    inside = MEASURED.layer_s(DECODE, 16, 16, 1024, 0)
    assert MEASURED.layer_s(DECODE, 16, 16, 1024.001, 0) == pytest.approx(inside, rel=1e-5)


def test_different_lengths_by_batch_are_interpolated():
    model = table_model(
        sample(DECODE, 8, *shape) for shape in ((1, 100, 1.0), (1, 200, 2.0), (8, 100, 8.0))
    )
    assert 1.0 <= model.layer_s(DECODE, 8, 1, 150, 0) <= 2.0
    assert 1.0 <= model.layer_s(DECODE, 8, 4, 100, 0) <= 8.0
    assert model.layer_s(DECODE, 8, 4, 150, 0) >= model.layer_s(DECODE, 8, 4, 100, 0)


def test_repeated_measurements_count_by_their_median():
    model = table_model(sample(DECODE, 8, 1, 100, seconds) for seconds in (1.0, 9.0, 2.0))
    assert model.layer_s(DECODE, 8, 1, 100, 0) == 2.0


def test_a_bitwidth_without_samples_is_a_miss():
    with pytest.raises(ProfileMissError, match=r"no prefill samples at 3 bits, only at \[16\]"):
        MEASURED.layer_s(PREFILL, 3, 1, 64, 0)


def test_a_phase_without_samples_is_a_miss():
    model = table_model([sample(PREFILL, 16, 1, 64, 1.0)])
    with pytest.raises(
        ProfileMissError, match=r"t\.csv.*no decode samples at 16 bits, only at \[\]"
    ):
        table_model([sample(PREFILL, 16, 1, 64, 1.0)], file="t.csv").layer_s(DECODE, 16, 1, 64, 0)
    assert model.source == "table in memory"


def test_rows_of_negative_bits_are_the_masters_work_with_a_quantized_head():
    model = table_model(
        [sample(DECODE, 0, 4, 1, 0.25), sample(DECODE, -8, 4, 1, 0.15)]
        + [sample(PREFILL, 0, 4, tokens, 1e-3 * tokens) for tokens in (100, 450)]
    )
    assert model.master_s(DECODE, 4, 1, 8) == 0.15
    # A prefill scores as many positions as a decode step, and takes at least as long.
    assert model.master_s(PREFILL, 4, 450, 8) == pytest.approx(0.35)
    assert model.master_s(PREFILL, 4, 100, 8) == 0.15
    ratio = ANALYTIC.master_s(DECODE, 4, 1, 4) / ANALYTIC.master_s(DECODE, 4, 1)
    assert model.master_s(DECODE, 4, 1, 4) == pytest.approx(0.25 * ratio)


def test_rows_of_zero_bits_are_the_masters_work():
    model = table_model([sample(DECODE, 0, 4, 100, 0.25), sample(DECODE, 16, 4, 100, 1.0)])
    assert model.master_s(DECODE, 4, 100) == 0.25
    assert model.master_s(PREFILL, 4, 100) == ANALYTIC.master_s(PREFILL, 4, 100)


def test_other_kinds_of_layer_scale_by_the_analytic_ratio():
    model = catalog.model("Qwen/Qwen3-30B-A3B")
    dense = catalog.model("Qwen/Qwen3-0.6B").layer_types[0]
    mixed = type(model)(
        **{
            **{name: getattr(model, name) for name in model.__dataclass_fields__},
            "layer_types": (model.layer_types[0], dense),
        }
    )
    analytic = RooflineLatencyModel(
        model=mixed, device=catalog.device("L4"), dtype="bfloat16", kv_bits=16
    )
    samples = (sample(DECODE, 16, 4, 100, 1.0),)
    table = TableLatencyModel(table=LatencyTable(samples=samples), analytic=analytic)
    ratio = analytic.layer_s(DECODE, 16, 4, 100, 1) / analytic.layer_s(DECODE, 16, 4, 100, 0)
    assert table.layer_s(DECODE, 16, 4, 100, 0) == 1.0
    assert table.layer_s(DECODE, 16, 4, 100, 1) == pytest.approx(ratio)
    assert ratio < 0.5


def test_the_fit_alone_answers_at_measured_points_too():
    noisy = [
        sample(DECODE, 16, batch, tokens, decode_law(batch, tokens) * factor)
        for (batch, tokens), factor in zip(GRID, (0.9, 1.0, 1.1) * 3, strict=True)
    ]
    table, fit = table_model(noisy), table_model(noisy, fitted_only=True)
    measured = [table.layer_s(DECODE, 16, batch, tokens, 0) for batch, tokens in GRID]
    fitted = [fit.layer_s(DECODE, 16, batch, tokens, 0) for batch, tokens in GRID]
    assert measured == [item.seconds for item in noisy]
    assert all(a != b for a, b in zip(measured, fitted, strict=True))
    laws = [decode_law(batch, tokens) for batch, tokens in GRID]
    assert fitted == pytest.approx(laws, rel=0.12)
    assert fit.source == "fit of table in memory"
    # Far outside, the table is carried on from its edge by the same fit.
    assert fit.layer_s(DECODE, 16, 64, 4096, 0) == pytest.approx(
        table.layer_s(DECODE, 16, 64, 4096, 0), rel=0.15
    )
