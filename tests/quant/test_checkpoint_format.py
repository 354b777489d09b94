"""A weight written in GPTQ's format and read back is the same weight, at every layout."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.errors import SpecError
from llmpq.quant.checkpoint.format import concatenate_rows, from_integers, to_packed
from llmpq.quant.quantizers.gptq import round_integers
from llmpq.spec.precision import Precision

torch.set_num_threads(1)


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(rows, columns, precision, *, shuffled=False, seed=0):
    found = round_integers(gaussian(rows, columns, seed=seed), precision)
    if not shuffled:
        return found
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
    return replace(found, order=order.to(torch.int32))


cases = st.builds(
    integers,
    st.sampled_from([32, 64, 96]),
    st.sampled_from([32, 96, 128]),
    st.builds(
        Precision,
        bits=st.sampled_from([3, 4, 8]),
        method=st.just("gptq"),
        group_size=st.sampled_from([None, 8, 32]),
        symmetric=st.booleans(),
    ),
    shuffled=st.booleans(),
    seed=st.integers(0, 99),
)


def by_the_book(parts, bits, zero_offset):
    """The weight ``[N, K]`` as the format's words say it, one code at a time."""

    def code(words, index):
        bit, value = index * bits, 0
        for i in range(bits):
            word, place = divmod(bit + i, 32)
            value |= ((int(words[word]) >> place) & 1) << i
        return value

    (groups, rows), columns = parts["scales"].shape, len(parts["g_idx"])
    out = torch.empty(rows, columns)
    zeros = [
        [code(parts["qzeros"][g], n) + zero_offset for n in range(rows)] for g in range(groups)
    ]
    for n in range(rows):
        for k in range(columns):
            group = int(parts["g_idx"][k])
            steps = code(parts["qweight"][:, n], k) - zeros[group][n]
            out[n, k] = steps * float(parts["scales"][group, n])
    return out


@settings(max_examples=60)
@given(cases, st.sampled_from([0, 1]))
def test_round_trip(weight, zero_offset):
    parts = from_integers(weight, zero_offset=zero_offset)
    packed = to_packed(
        parts, weight.shape, weight.precision, torch.float32, zero_offset=zero_offset
    )
    assert packed.precision == weight.precision
    torch.testing.assert_close(
        packed.dequantize(torch.float32), weight.dequantize(), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("shuffled", [False, True])
def test_packed_words_follow_the_format(bits, shuffled):
    precision = Precision(bits=bits, method="gptq", group_size=32)
    weight = integers(32, 64, precision, shuffled=shuffled)
    parts = from_integers(weight)
    assert parts["qweight"].shape == (64 * bits // 32, 32)
    assert parts["qzeros"].shape == (2, 32 * bits // 32)
    assert parts["scales"].dtype == torch.float16
    torch.testing.assert_close(by_the_book(parts, bits, 1), weight.dequantize())


def test_file_without_groups_of_inputs_has_consecutive_ones():
    precision = Precision(bits=4, method="gptq", group_size=32)
    weight = integers(32, 64, precision)
    parts = from_integers(weight)
    del parts["g_idx"]
    packed = to_packed(parts, (32, 64), precision, torch.float32, zero_offset=1)
    torch.testing.assert_close(packed.dequantize(torch.float32), weight.dequantize())


def test_symmetric_file_with_other_zero_points_is_read_as_it_is():
    weight = integers(32, 64, Precision(bits=4, method="gptq", group_size=32))
    claimed = replace(weight.precision, symmetric=True)
    packed = to_packed(from_integers(weight), (32, 64), claimed, torch.float32, zero_offset=1)
    assert not packed.precision.symmetric
    torch.testing.assert_close(packed.dequantize(torch.float32), weight.dequantize())


def test_a_symmetric_file_with_zero_points_of_version_2_is_recognised():
    weight = integers(32, 64, Precision(bits=4, method="gptq", group_size=32, symmetric=True))
    parts = from_integers(weight, zero_offset=0)
    packed = to_packed(parts, (32, 64), weight.precision, torch.float32, zero_offset=1)
    assert packed.precision.symmetric
    torch.testing.assert_close(packed.dequantize(torch.float32), weight.dequantize())


@pytest.mark.parametrize(("bits", "ones"), [(4, 0x11111111), (8, 0x01010101)])
def test_zero_points_that_borrowed_from_neighbours_are_restored(bits, ones):
    """gptqmodel subtracts ones from whole words, and zero points of zero then borrow."""
    precision = Precision(bits=bits, method="gptq", group_size=32)
    weight = integers(32, 64, precision)
    weight.zero_points[:, 0] = torch.arange(32) % 3 - torch.arange(32) % 3 % 2
    weight.zero_points[3:9] = 0
    parts = from_integers(weight, zero_offset=0)
    parts["qzeros"] -= ones
    packed = to_packed(parts, (32, 64), precision, torch.float32, zero_offset=1)
    torch.testing.assert_close(packed.dequantize(torch.float32), weight.dequantize())


@pytest.mark.parametrize("shape", [(33, 64), (32, 65)])
def test_shapes_that_do_not_fill_words_are_refused(shape):
    weight = integers(*shape, Precision(bits=3, method="gptq", group_size=None))
    with pytest.raises(SpecError, match="fill words of 32 bits"):
        from_integers(weight)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qweight", lambda t: t[:-1], "qweight: found torch.int32"),
        ("qzeros", lambda t: t.to(torch.int64), "qzeros: found torch.int64"),
        ("scales", lambda t: t.to(torch.int32), "expected numbers"),
        ("scales", lambda t: t * float("nan"), "not finite"),
        ("g_idx", lambda t: t * 0, "2 groups of 32 inputs each"),
        ("g_idx", lambda t: t - 7, "2 groups of 32 inputs each"),
        ("g_idx", lambda t: t[:5], "g_idx: found"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name, change, message):
    precision = Precision(bits=4, method="gptq", group_size=32)
    parts = from_integers(integers(32, 64, precision))
    parts[name] = change(parts[name])
    with pytest.raises(SpecError, match=message):
        to_packed(parts, (32, 64), precision, torch.float32, zero_offset=1)


def test_operators_of_one_input_are_stacked():
    precision = Precision(bits=4, method="gptq", group_size=32)
    weights = [integers(32, 64, precision, shuffled=True), integers(32, 64, precision, seed=1)]
    order = weights[0].order
    parts = [replace(w, order=order).packed(torch.float32) for w in weights]
    whole = concatenate_rows(parts).dequantize(torch.float32)
    assert torch.equal(whole, torch.cat([part.dequantize(torch.float32) for part in parts]))
    with pytest.raises(SpecError, match="different orders"):
        concatenate_rows([parts[0], weights[1].packed(torch.float32)])
