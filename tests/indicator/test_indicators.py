"""Indicators compared with direct computations on a plain run of the model."""

import weakref

import pytest
import torch
from helpers.tiny_models import load_reference
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmpq.calibration import CalibrationSet, Moments, synthetic_calibration
from llmpq.calibration import Hessian as SecondMoments
from llmpq.errors import SpecError
from llmpq.indicator import (
    INDICATORS,
    IndicatorInput,
    Random,
    Variance,
    sensitivity_table,
)
from llmpq.indicator import divergence as divergence_module
from llmpq.indicator import hessian as hessian_module
from llmpq.indicator.base import monotone, normalise
from llmpq.indicator.divergence import Divergence, cut_probe
from llmpq.indicator.hessian import HessianEigenvalue, UpperGram, top_eigenvalue
from llmpq.indicator.rounding import mean_squared_step, squared_error
from llmpq.indicator.variance import input_spread
from llmpq.models import Checkpoint
from llmpq.quant import quantize
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules.layer import matrices_of
from llmpq.spec.precision import default_precision

torch.set_num_threads(1)

BITS = (3, 4, 8)


def tokens(sequences=4, length=12, seed=0):
    return synthetic_calibration(100, num_sequences=sequences, sequence_tokens=length, seed=seed)


def subject(model_dir, data="default", **options):
    data = tokens() if data == "default" else data
    return IndicatorInput(model_dir=model_dir, calibration=data, **options)


def linear_inputs(model_dir, token_ids):
    """Weights and inputs of every linear operator of every layer of a plain run."""
    model = load_reference(model_dir)
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    seen = [{} for _ in layers]
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(
                    lambda m, x, at=index, key=name: seen[at].update(
                        {key: (m.weight.detach().double(), x[0].flatten(0, -2).double())}
                    )
                )
    with torch.inference_mode():
        model(token_ids)
    return seen


def step_of(weight, bits):
    """Squared steps of the default quantizer's groups, straight from the paper's formula."""
    group = default_precision(bits).effective_group(weight.shape[1])
    rows = weight.reshape(-1, group)
    if bits == 8:
        return rows.abs().amax(1).div(127).square().mean()
    return (rows.amax(1) - rows.amin(1)).div(2**bits - 1).square().mean()


@pytest.mark.parametrize("family", ["llama", "opt", "bloom"])
@pytest.mark.parametrize("rounding", ["deterministic", "stochastic"])
def test_variance_equals_proposition_2(tiny_model, family, rounding):
    model_dir, data = tiny_model(family, seed=1), tokens()
    found = Variance(rounding=rounding).score(subject(model_dir, data))
    for layer, operators in enumerate(linear_inputs(model_dir, data.token_ids)):
        for bits in BITS:
            expected = 0.0
            for weight, x in operators.values():
                if rounding == "deterministic":
                    inputs = x.var(correction=0) / 4
                else:
                    inputs = (x.mean() ** 2 + x.var(correction=0)) / 6
                expected += float(weight.numel() * step_of(weight, bits) * inputs)
            assert found[bits][layer] == pytest.approx(expected, rel=1e-4)


def test_hessian_equals_eigenvalue_times_weight_error(tiny_model):
    model_dir, data = tiny_model("llama", seed=1), tokens()
    found = HessianEigenvalue(tolerance=1e-9, iterations=1000).score(subject(model_dir, data))
    for layer, operators in enumerate(linear_inputs(model_dir, data.token_ids)):
        for bits in BITS:
            expected = 0.0
            for weight, x in operators.values():
                eigenvalue = torch.linalg.eigvalsh(2 * x.T @ x)[-1]
                packed = quantize(weight.float(), default_precision(bits), torch.float32)
                error = (packed.dequantize(torch.float32) - weight).square().sum()
                expected += float(eigenvalue * error)
            assert found[bits][layer] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_hessian_does_not_depend_on_the_number_of_passes(tiny_model, family):
    """With a memory share of 0 every matrix is collected alone."""
    whole, parts = (
        HessianEigenvalue(memory_share=share).score(subject(tiny_model(family, seed=1)))
        for share in (100.0, 0.0)
    )
    for bits in BITS:
        assert parts[bits] == pytest.approx(whole[bits], rel=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_divergence_equals_that_of_a_model_with_one_layer_changed(tiny_model, family):
    model_dir, data = tiny_model(family, seed=1), tokens(sequences=3, length=10)
    found = Divergence(probe_tokens=30).score(subject(model_dir, data))
    model = load_reference(model_dir)
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    with torch.inference_mode():
        whole = torch.log_softmax(model(data.token_ids).logits.double(), -1)
        for index, layer in enumerate(layers):
            plain = {name: value.clone() for name, value in layer.state_dict().items()}
            for bits in BITS:
                layer.load_state_dict(dequantized(plain, model_dir, index, bits))
                changed = torch.log_softmax(model(data.token_ids).logits.double(), -1)
                expected = (whole.exp() * (whole - changed)).sum(-1).mean()
                assert found[bits][index] == pytest.approx(float(expected), rel=0.05, abs=2e-7)
            layer.load_state_dict(plain)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("llama", False), ("opt", True)])
def test_divergence_of_the_head_equals_that_of_a_model_with_its_weight_changed(
    tiny_model, family, tied
):
    model_dir = tiny_model(family, seed=1, tie_word_embeddings=tied)
    data = tokens(sequences=3, length=10)
    found = Divergence(probe_tokens=30).score_head(subject(model_dir, data))
    model = load_reference(model_dir)
    weight = model.get_output_embeddings().weight
    with torch.inference_mode():
        whole = torch.log_softmax(model(data.token_ids).logits.double(), -1)
        plain = weight.clone()
        for bits in BITS:
            weight.copy_(
                quantize(plain, default_precision(bits), plain.dtype).dequantize(plain.dtype)
            )
            changed = torch.log_softmax(model(data.token_ids).logits.double(), -1)
            expected = (whole.exp() * (whole - changed)).sum(-1).mean()
            assert found[bits] == pytest.approx(float(expected), rel=0.05, abs=2e-7)


def test_the_head_has_the_unit_of_the_layers(tiny_model):
    one = subject(tiny_model("llama", seed=1), bits=(4, 8))
    scores = {4: (3.0, 1.0), 8: (0.2, 0.1)}
    table = sensitivity_table(one, "divergence", scores, head={8: 0.5, 4: 0.4})
    assert dict(table.head) == {4: 0.125, 8: 0.125}  # fewer bits never score lower
    assert table.normalised_head(16) == 0.0
    with pytest.raises(SpecError, match="'head': no value for 3 bits"):
        table.normalised_head(3)


def test_a_divergence_states_what_its_unit_is_in_nats(tiny_model):
    one = subject(tiny_model("llama", seed=1), bits=(4, 8))
    scores = {4: (0.03, 0.01), 8: (0.002, 0.001)}
    assert sensitivity_table(one, "divergence", scores).unit_nats == pytest.approx(0.04)
    assert sensitivity_table(one, "variance", scores).unit_nats is None


def dequantized(plain, model_dir, index, bits):
    """The state of a layer whose matrices went through the default quantizer."""
    state = {name: value.clone() for name, value in plain.items()}
    for matrix in matrices_of(Checkpoint(model_dir).empty_layer(index)):
        weight = state[matrix.key] if matrix.expert is None else state[matrix.key][matrix.expert]
        packed = quantize(weight, default_precision(bits), torch.float32)
        weight.copy_(packed.dequantize(torch.float32))
    return state


@pytest.mark.parametrize("name", ["divergence", "variance", "hessian", "random"])
@pytest.mark.parametrize("family", ["llama", "opt", "bloom", "gemma2", "mixtral", "qwen3_moe"])
def test_every_indicator_scores_every_family(tiny_model, family, name):
    model_dir = tiny_model(family, seed=1)
    told = []
    scores = monotone(INDICATORS[name].score(subject(model_dir), lambda *now: told.append(now)))
    found = normalise(scores, "here")
    assert set(found) == set(BITS)
    assert sum(found[4]) == pytest.approx(1)
    for low, middle, high in zip(found[3], found[4], found[8], strict=True):
        assert low >= middle >= high >= 0
        assert low > 0
    assert told[-1][0] == told[-1][1]
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)


@pytest.mark.parametrize(
    "family", ["gemma", "gemma3", "gpt_neox", "mistral", "phi", "phi3", "qwen2", "qwen3"]
)
def test_indicators_score_families_without_special_code(tiny_model, family):
    """All weights away where they can be, all tokens through all layers, all operators found."""
    found = HessianEigenvalue(memory_share=0.0).score(subject(tiny_model(family, seed=1)))
    by_weights = Variance().score(subject(tiny_model(family, seed=1), None))
    for scores in (monotone(found), by_weights):
        assert all(value > 0 for column in scores.values() for value in column)


@pytest.mark.parametrize("name", ["divergence", "variance", "hessian"])
def test_scores_do_not_depend_on_the_order_of_samples(tiny_model, name):
    model_dir, ids = tiny_model("llama", seed=1), tokens().token_ids
    one, other = (
        INDICATORS[name].score(
            subject(model_dir, CalibrationSet(token_ids=ids[order], source="ordered"))
        )
        for order in ([0, 1, 2, 3], [2, 0, 3, 1])
    )
    assert one == other


def scaled_copy(model_dir, output, pick, factor):
    """The model with some tensors multiplied by a power of two."""
    output.mkdir()
    for file in model_dir.iterdir():
        if file.suffix == ".json":
            (output / file.name).write_bytes(file.read_bytes())
    for file in model_dir.glob("*.safetensors"):
        state = load_file(file)
        save_file(
            {name: value * factor if pick(name) else value for name, value in state.items()},
            output / file.name,
            metadata={"format": "pt"},
        )
    return output


@pytest.mark.parametrize("name", ["variance", "hessian"])
@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_scores_grow_with_the_square_of_the_weights(tiny_model, tmp_path, name, factor):
    """``q_proj`` alone is scaled, in a model of one layer: its input stays what it was."""
    model_dir = tiny_model("llama", seed=1, shape={"layers": 1})
    scaled = scaled_copy(model_dir, tmp_path / "scaled", lambda key: "down_proj" in key, factor)
    none = scaled_copy(model_dir, tmp_path / "none", lambda key: "down_proj" in key, 0.0)
    without, plain, more = (
        INDICATORS[name].score(subject(path)) for path in (none, model_dir, scaled)
    )
    for bits in BITS:
        gained = more[bits][0] - without[bits][0]
        assert gained == pytest.approx(factor**2 * (plain[bits][0] - without[bits][0]), rel=1e-3)


@pytest.mark.parametrize("factor", [0.25, 3.0])
@pytest.mark.parametrize("rounding", ["deterministic", "stochastic"])
def test_variance_grows_with_the_square_of_the_activations(factor, rounding):
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(3)) + 0.5
    plain, scaled = Moments(16), Moments(16)
    plain.add(x)
    scaled.add(factor * x)
    assert input_spread(scaled, rounding) == pytest.approx(
        factor**2 * input_spread(plain, rounding), rel=1e-5
    )
    eigenvalue, more = (top_eigenvalue(v.T @ v) for v in (x, factor * x))
    assert more == pytest.approx(factor**2 * eigenvalue, rel=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    power=st.integers(-6, 6),
    seed=st.integers(0, 2**31),
)
def test_rounding_error_falls_with_bits_and_scales_with_the_square(rows, columns, power, seed):
    """A factor of a power of two changes no code, so both sides are equal to the last bits."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    factor = 2.0**power
    for cost in (mean_squared_step, lambda w, bits: squared_error(w, bits, torch.float32)):
        at = {bits: cost(weight, bits) for bits in BITS}
        scaled = {bits: cost(weight * factor, bits) for bits in BITS}
        assert scaled == pytest.approx({bits: factor**2 * v for bits, v in at.items()}, rel=1e-5)
        if columns > 16:  # of a few weights the coarser grid may happen to hit more
            assert at[3] > at[4] > at[8] > 0


@settings(deadline=None, max_examples=40)
@given(
    table=st.lists(
        st.tuples(*[st.floats(0, 1e6, allow_subnormal=False)] * 3), min_size=1, max_size=8
    ).filter(lambda rows: max(row[1] for row in rows) > 1e-3)
)
def test_table_is_monotone_in_bits(table):
    scores = {bits: tuple(row[at] for row in table) for at, bits in enumerate(BITS)}
    found = normalise(monotone(scores), "here")
    assert sum(found[4]) == pytest.approx(1)
    assert all(a >= b >= c for a, b, c in zip(found[3], found[4], found[8], strict=True))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**31), factor=st.floats(0.1, 10))
def test_moments_and_gram_matrices_ignore_order_and_scale_with_the_square(seed, factor):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 9, generator=generator) + 0.3
    shuffled = x[torch.randperm(30, generator=generator)]

    def seen(inputs):
        moments, gram = Moments(9), UpperGram(9)
        for part in torch.split(inputs, 7):
            moments.add(part)
            gram.add(part)
        spreads = [input_spread(moments, rounding) for rounding in ("deterministic", "stochastic")]
        return [*spreads, top_eigenvalue(gram, iterations=2000, tolerance=1e-10)]

    plain = seen(x)
    assert seen(shuffled) == pytest.approx(plain, rel=1e-3)
    assert seen(factor * x) == pytest.approx([factor**2 * v for v in plain], rel=1e-3)


def test_4_bits_are_always_scored(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    assert subject(model_dir, bits=(8,)).bits == (4, 8)
    with pytest.raises(SpecError, match="found \\[16\\]"):
        subject(model_dir, bits=(16,))


def test_variance_without_calibration_uses_the_weights_alone(tiny_model):
    model_dir = tiny_model("mixtral", seed=1)
    found = Variance().score(subject(model_dir, None))
    model = load_reference(model_dir)
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))
    for layer, module in enumerate(layers):
        matrices = [
            value
            for name, value in module.named_parameters()
            if value.dim() > 1 and "gate.weight" not in name
        ]
        stacked = [m for value in matrices for m in (value if value.dim() == 3 else [value])]
        expected = sum(float(m.numel() * step_of(m.detach(), 4)) for m in stacked)
        assert found[4][layer] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["divergence", "hessian"])
def test_indicator_without_its_calibration_text_raises_an_error(tiny_model, name):
    with pytest.raises(SpecError, match="expected a text to calibrate on"):
        INDICATORS[name].score(subject(tiny_model("llama", seed=1), None))


def test_random_depends_on_the_seed_alone(tiny_model):
    model_dir = tiny_model("llama", seed=1)
    one, same, other = (Random(seed=s).score(subject(model_dir, None)) for s in (1, 1, 2))
    assert one == same != other


def test_top_eigenvalue_of_a_matrix_of_zeros_is_zero():
    assert top_eigenvalue(torch.zeros(5, 5)) == 0.0


def test_top_eigenvalue_equals_the_exact_solver():
    x = torch.randn(40, 12, generator=torch.Generator().manual_seed(1))
    expected = float(torch.linalg.eigvalsh(x.T @ x)[-1])
    assert top_eigenvalue(x.T @ x, iterations=500, tolerance=1e-9) == pytest.approx(expected)


@pytest.mark.parametrize("features", [1, 12, hessian_module.PANEL_ROWS, 300, 700])
def test_upper_gram_multiplies_like_the_full_matrix(features):
    generator = torch.Generator().manual_seed(3)
    half, whole = UpperGram(features), SecondMoments(features)
    for rows in (5, 40):
        inputs = torch.randn(rows, features, generator=generator)
        half.add(inputs)
        whole.add(inputs)
    vector = torch.randn(features, generator=generator)
    torch.testing.assert_close(half @ vector, whole.matrix @ vector, rtol=1e-4, atol=1e-3)
    assert half.tokens == 45
    assert len(half) == features
    assert sum(panel.nbytes for panel in half.panels) == UpperGram.bytes_for(features)
    assert top_eigenvalue(half) == pytest.approx(top_eigenvalue(whole.matrix), rel=1e-4)


def test_upper_gram_needs_little_more_than_half_the_memory():
    assert UpperGram.bytes_for(4096) < 0.54 * 4 * 4096**2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(6, 256), (300, 40)])
def test_squared_error_equals_that_of_the_quantizer(bits, shape):
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    packed = quantize(weight, default_precision(bits), torch.float32)
    error = (packed.dequantize(torch.float32) - weight).square().sum()
    assert squared_error(weight, bits, torch.float32) == pytest.approx(float(error), rel=1e-4)
    assert mean_squared_step(weight, bits) == pytest.approx(float(step_of(weight, bits)), rel=1e-5)


@pytest.mark.parametrize(
    ("share", "shape"), [(0, (1, 2)), (5, (1, 5)), (12, (1, 12)), (30, (2, 12)), (999, (4, 12))]
)
def test_probe_has_about_its_share_of_the_tokens(share, shape):
    assert cut_probe(tokens(), share).shape == shape


def test_streams_hold_at_most_the_calibration_set():
    data = synthetic_calibration(100, num_sequences=16, sequence_tokens=32)
    for layers in (2, 12, 80):
        streams = 3 * layers + 1
        probe = cut_probe(data, data.tokens // streams)
        assert probe.numel() * streams <= max(data.tokens, 2 * streams)


def test_divergence_holds_one_layer_at_a_time(tiny_model, monkeypatch):
    """No more than one layer of each kind is alive when the next is loaded."""
    alive = []

    def load(*args, **options):
        assert sum(ref() is not None for ref in alive) <= 1
        stage = load_stage(*args, **options)
        alive.append(weakref.ref(stage))
        return stage

    monkeypatch.setattr(divergence_module, "load_stage", load)
    Divergence().score(subject(tiny_model("llama", seed=1)))
    assert len(alive) >= 8
    assert len(alive) % 4 == 0
