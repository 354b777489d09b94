"""GPTQ is never worse than rounding on the calibration outputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.errors import SpecError
from llmpq.quant.quantizers.gptq import GptqOptions, gptq, round_integers
from llmpq.quant.quantizers.integer import fit_integer_grid
from llmpq.spec.precision import Precision

torch.set_num_threads(1)

ORDERS = ("none", "static", "full")
shapes = st.tuples(st.integers(1, 12), st.sampled_from([8, 32, 48, 160]))
precisions = st.builds(
    Precision,
    bits=st.sampled_from([3, 4, 8]),
    method=st.just("gptq"),
    group_size=st.sampled_from([None, 8, 16, 32]),
    symmetric=st.booleans(),
)


def correlated(tokens, features, seed):
    """Correlated inputs, like real ones."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(features, features, generator=generator) * 0.3 + torch.eye(features)
    return torch.randn(tokens, features, generator=generator) @ mixing


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def output_error(weight, quantized, inputs):
    return float((inputs @ (quantized.dequantize() - weight).T).square().sum())


@settings(max_examples=60)
@given(shapes, precisions, st.sampled_from(ORDERS), st.booleans(), st.integers(0, 9))
def test_never_worse_than_rounding_on_the_calibrated_outputs(shape, precision, order, search, seed):
    weight, inputs = gaussian(*shape, seed=seed), correlated(40, shape[1], seed)
    matrix = inputs.T @ inputs
    options = GptqOptions(order=order, search=search)
    found = gptq(weight, matrix, precision, options)
    importance = matrix.diagonal() + options.damping * matrix.diagonal().mean()
    columns = matrix.diagonal().argsort(descending=True, stable=True)
    if order == "full":  # groups of equally important inputs: round in the same groups
        assert torch.equal(found.order.long(), columns)
        stored = round_integers(
            weight[:, columns], precision, importance[columns] if search else None
        )
        rounded = torch.empty_like(weight)
        rounded[:, columns] = stored.dequantize()
        least = float((inputs @ (rounded - weight).T).square().sum())
    else:
        assert found.order is None
        rounded = round_integers(weight, precision, importance if search else None)
        least = output_error(weight, rounded, inputs)
    assert output_error(weight, found, inputs) <= least * (1 + 1e-3) + 1e-4


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bits", [3, 4])
def test_clearly_better_than_rounding_on_correlated_inputs(order, bits):
    weight, inputs = gaussian(64, 256), correlated(1024, 256, 1)
    precision = Precision(bits=bits, method="gptq", group_size=64)
    found = gptq(weight, inputs.T @ inputs, precision, GptqOptions(order=order))
    rounded = round_integers(weight, precision)
    assert output_error(weight, found, inputs) < 0.5 * output_error(weight, rounded, inputs)


@settings(max_examples=40)
@given(shapes, precisions, st.sampled_from(["none", "static"]), st.booleans())
def test_uninformative_inputs_give_plain_rounding(shape, precision, order, search):
    weight = gaussian(*shape)
    for matrix in (torch.eye(shape[1]) * 3, torch.zeros(shape[1], shape[1])):
        found = gptq(weight, matrix, precision, GptqOptions(order=order, search=search))
        importance = torch.ones(shape[1]) if search and bool(matrix.any()) else None
        if search and importance is None:
            continue  # nothing to weigh errors with
        rounded = round_integers(weight, precision, importance)
        assert torch.equal(found.codes, rounded.codes)
        assert torch.equal(found.scales, rounded.scales)


def test_inputs_that_never_occur_are_rounded_and_change_nothing_else():
    weight, inputs = gaussian(16, 64), correlated(200, 64, 0)
    inputs[:, 5] = 0
    precision = Precision(bits=4, method="gptq", group_size=None, symmetric=True)
    options = GptqOptions(search=False)  # a grid that clips may clip what is never seen
    found = gptq(weight, inputs.T @ inputs, precision, options)
    changed = weight.clone()
    changed[:, 5] *= -0.5
    other = gptq(changed, inputs.T @ inputs, precision, options)
    restored, kept = found.dequantize(), torch.arange(64) != 5
    assert torch.equal(restored[:, kept], other.dequantize()[:, kept])
    assert ((restored - weight)[:, 5].abs() <= found.scales[:, 0] / 2 + 1e-6).all()


def test_fewer_tokens_than_inputs_are_enough():
    weight, inputs = gaussian(16, 64), correlated(3, 64, 0)
    precision = Precision(bits=3, method="gptq", group_size=32)
    found = gptq(weight, inputs.T @ inputs, precision)
    rounded = round_integers(weight, precision)
    assert output_error(weight, found, inputs) < output_error(weight, rounded, inputs)


def test_stacked_rows_are_quantized_independently():
    weight, inputs = gaussian(24, 96), correlated(300, 96, 0)
    precision = Precision(bits=4, method="gptq", group_size=32)
    options = GptqOptions(order="full")
    whole = gptq(weight, inputs.T @ inputs, precision, options)
    part = gptq(weight[8:16], inputs.T @ inputs, precision, options)
    torch.testing.assert_close(whole.rows(slice(8, 16)).dequantize(), part.dequantize())


def test_batches_do_not_change_the_result():
    """Groups of 24 end inside no batch of 128; the columns are more than three batches."""
    weight, inputs = gaussian(4, 408), correlated(500, 408, 0)
    matrix = inputs.T @ inputs
    precision = Precision(bits=4, method="gptq", group_size=24, symmetric=True)
    found = gptq(weight, matrix, precision, GptqOptions(search=False)).dequantize()
    expected = column_by_column(weight, matrix, precision)
    same = (found - expected).abs().amax(1) < 1e-4
    assert same.sum() >= 3  # a tie in one code of a row changes those after it


def column_by_column(weight, matrix, precision):
    """Algorithm 1 without batches, in float64, from the inverse itself."""
    matrix = matrix.double()
    matrix += 0.01 * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.float64)
    factor = torch.linalg.cholesky(torch.linalg.inv(matrix), upper=True)
    columns, out = weight.double().clone(), torch.empty_like(weight)
    for k in range(weight.shape[1]):
        if k % precision.group_size == 0:
            group = columns[:, k : k + precision.group_size].T.float()
            scale, _ = fit_integer_grid(group, precision, None)
        half = 1 << (precision.bits - 1)
        code = (columns[:, k] / scale).round().clamp(-half, half - 1)
        out[:, k] = code * scale
        error = (columns[:, k] - out[:, k]) / factor[k, k]
        columns[:, k + 1 :] -= error[:, None] * factor[k, k + 1 :]
    return out


@settings(max_examples=60)
@given(shapes, precisions, st.floats(1e-6, 1e4))
def test_grids_are_exact_in_every_dtype(shape, precision, size):
    found = round_integers(gaussian(*shape) * size, precision)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(found.scales.to(dtype).float(), found.scales)
    low = 1 if not precision.symmetric else 1 << (precision.bits - 1)
    assert int(found.zero_points.min()) >= low
    assert int(found.zero_points.max()) < 1 << precision.bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_packed_form_is_the_same_weight(dtype):
    weight, inputs = gaussian(32, 128), correlated(300, 128, 0)
    for symmetric in (True, False):
        precision = Precision(bits=4, method="gptq", group_size=32, symmetric=symmetric)
        found = gptq(weight, inputs.T @ inputs, precision, GptqOptions(order="full"))
        packed = found.packed(dtype)
        assert packed.precision == precision
        difference = packed.dequantize(torch.float32) - found.dequantize()
        assert difference.abs().max() < 1e-3 * weight.abs().max()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad):
    precision = Precision(bits=4, method="gptq")
    weight, matrix = gaussian(4, 8), torch.eye(8)
    weight[1, 2] = bad
    with pytest.raises(SpecError, match="weight: found values that are not finite"):
        gptq(weight, matrix, precision)
    matrix[0, 0] = bad
    with pytest.raises(SpecError, match="inputs that are not finite"):
        gptq(gaussian(4, 8), matrix, precision)


def test_a_matrix_of_another_size_and_an_invalid_damping_are_refused():
    with pytest.raises(SpecError, match=r"found a matrix \[9, 9\] for a weight \[4, 8\]"):
        gptq(gaussian(4, 8), torch.eye(9), Precision(bits=4, method="gptq"))
    with pytest.raises(SpecError, match="damping 0"):
        GptqOptions(damping=0)
