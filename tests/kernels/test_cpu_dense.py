"""16-bit weights in panels: exact enough, the same bits in any company, held once."""

import threading
import time

import pytest
import torch
from helpers.clocks import PATIENCE_S
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.kernels.cpu import dense as cpu_dense
from llmpq.kernels.cpu import kernel_choice
from llmpq.kernels.cpu.dense import (
    can_prepack,
    few_dense_rows,
    multiplies_pairs,
    prepack,
    prepacked_linear,
)
from llmpq.kernels.cpu.kernel_choice import TRIED_ROWS
from llmpq.kernels.cpu.native import (
    dense_product,
    float_product,
    has_bf16_products,
    library,
    rows_of_tiles,
)
from llmpq.spec.runtime_constants import PANEL_ROWS

torch.set_num_threads(1)

needs_kernel = pytest.mark.skipif(library() is None, reason="no C compiler here")
needs_pairs = pytest.mark.skipif(
    library() is None or not has_bf16_products(), reason="no products of bf16 pairs here"
)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = sorted(ROUNDING, key=str)


def _drawn(
    seed: int, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(dtype)


@needs_kernel
@settings(deadline=None, max_examples=80)
@given(
    out_features=st.integers(1, 200),
    columns=st.integers(1, 40),
    rows=st.integers(1, 40),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
    in_pairs=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_errs_by_the_rounding_of_the_answer_alone(
    out_features, columns, rows, has_bias, threads, in_pairs, dtype, seed
):
    in_features = 32 * columns
    plain = _drawn(seed, out_features, in_features, scale=0.05, dtype=dtype)
    x = _drawn(seed + 1, rows, in_features, scale=3.0, dtype=dtype)
    bias = _drawn(seed + 2, out_features, dtype=dtype) if has_bias else None
    weight = prepack(plain)
    product = dense_product if in_pairs and multiplies_pairs(dtype) else float_product

    y = product(x, weight, bias, threads=threads)

    exact = x.double() @ plain.double().T + (0 if bias is None else bias.double())
    # Half a step of the dtype (its smallest, below the normal numbers), and what a sum of K
    # products in float32 may lose of their sizes.
    lost = x.double().abs() @ plain.double().abs().T * in_features * 2.0**-24
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= exact.abs() * ROUNDING[dtype] + 2.0**-25 + lost).all()


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 64), (250, 768), (832, 2080)])
def test_neither_threads_nor_other_rows_change_an_answer(shape, dtype):
    weight = prepack(_drawn(1, *shape, scale=0.05, dtype=dtype))
    x = _drawn(2, 200, shape[1], dtype=dtype)
    product = dense_product if multiplies_pairs(dtype) else float_product
    alone = torch.cat([product(row[None], weight, None, threads=1) for row in x])
    for rows in (1, 2, 6, 7, 13, 17, 24, 25, 32, 63, 200):
        for threads in (1, 2, 3):
            assert torch.equal(product(x[:rows], weight, None, threads=threads), alone[:rows])


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_shape_of_rows_gives_the_same_layer(dtype):
    plain, bias = _drawn(3, 256, 512, scale=0.05, dtype=dtype), _drawn(4, 256, dtype=dtype)
    weight = prepack(plain)
    for shape in ((1, 512), (1, 1, 512), (2, 3, 512), (300, 512), (0, 512)):
        x = _drawn(5, *shape, dtype=dtype)
        y = prepacked_linear(x, weight, bias)
        right = x.float() @ plain.float().T + bias.float()
        assert y.shape == right.shape
        assert torch.allclose(y.float(), right, rtol=2**-7, atol=1e-3)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reuse", [False, True])
def test_the_weight_is_held_once(dtype, reuse):
    plain = _drawn(6, 2 * PANEL_ROWS, 192, dtype=dtype)
    kept, address = plain.clone(), plain.data_ptr()
    weight = prepack(plain, reuse=reuse)
    assert weight.nbytes == kept.nbytes
    assert (weight.tensors[0].data_ptr() == address) == reuse
    assert torch.equal(plain, kept) != reuse  # its content is lost with its order
    every = torch.arange(len(kept))
    assert torch.equal(rows_of_tiles(weight, every, dtype), kept)


@needs_kernel
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 15, 33, 127])
def test_missing_rows_of_the_last_panel_are_zeros(dtype, rows):
    plain = _drawn(7, rows, 64, dtype=dtype)
    weight = prepack(plain, reuse=True)
    (panels,) = weight.tensors
    assert len(panels) % 16 == 0
    assert panels.abs().sum(dtype=torch.float64) == plain.abs().sum(dtype=torch.float64)
    ids = torch.tensor([[rows - 1, 0], [0, rows // 2]])
    assert torch.equal(rows_of_tiles(weight, ids, dtype), plain[ids])
    with pytest.raises(IndexError):
        rows_of_tiles(weight, torch.tensor([rows]), dtype)


@needs_pairs
@pytest.mark.parametrize("count", [1, 40, 300])
def test_all_rows_are_the_compiled_kernels(monkeypatch, count):
    asked = []
    monkeypatch.setattr(cpu_dense, "dense_product", lambda x, *_, **__: asked.append(len(x)))
    prepacked_linear(_drawn(11, count, 8192), prepack(_drawn(10, 64, 8192)), None)
    assert asked == [count]


@needs_pairs
def test_many_rows_are_multiplied_as_float32_where_that_is_faster(monkeypatch):
    asked = []
    monkeypatch.setattr(cpu_dense, "few_dense_rows", lambda: 4)
    monkeypatch.setattr(cpu_dense, "float_product", lambda x, *_, **__: asked.append(len(x)))
    weight = prepack(_drawn(14, 64, 128))
    for rows in (1, 4, 5, 300):
        prepacked_linear(_drawn(15, rows, 128), weight, None)
    assert asked == [5, 300]


@needs_kernel
@pytest.mark.parametrize("shape", [(64, 64), (128, 4160), (64, 6144)])
@pytest.mark.parametrize("count", [1, 6, 7, 191, 200, 400])
def test_a_row_has_the_same_bits_in_any_number_of_rows(shape, count):
    weight, x = prepack(_drawn(16, *shape, scale=0.05)), _drawn(17, 400, shape[1])
    y = prepacked_linear(x, weight, None)
    assert torch.equal(prepacked_linear(x[:count], weight, None), y[:count])


@needs_pairs
def test_a_thread_is_woken_for_a_mebibyte(monkeypatch):
    asked = []
    monkeypatch.setattr(cpu_dense, "has_tiles", lambda: False)
    monkeypatch.setattr(cpu_dense, "dense_product", lambda *_, threads: asked.append(threads))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for features in (64, 1024):  # 0.125 and 2 MiB
        weight = prepack(_drawn(13, features, 1024))
        for rows in (1, 6, 7, 32):
            prepacked_linear(_drawn(14, rows, 1024), weight, None)
    assert asked == [1, 1, 1, 1, 2, 2, 4, 4]


@needs_pairs
def test_a_machine_that_never_measured_does_not_wait_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_choice, "kernels_path", lambda _: tmp_path / "kernels.so")
    monkeypatch.setattr(cpu_dense, "has_tiles", lambda: False)
    found = []
    measuring = threading.Thread(target=lambda: found.append(MEASURED()), daemon=True)
    measuring.start()
    measuring.join(timeout=PATIENCE_S)
    assert found
    assert found[0] in (None, 1, *TRIED_ROWS)


@needs_pairs
@pytest.mark.parametrize(("slower", "limit"), [("float_product", None), ("dense_product", 1)])
def test_the_faster_kernel_is_found(tmp_path, monkeypatch, slower, limit):
    monkeypatch.setattr(kernel_choice, "kernels_path", lambda _: tmp_path / "kernels.so")
    monkeypatch.setattr(cpu_dense, "has_tiles", lambda: False)
    monkeypatch.setattr(cpu_dense, slower, lambda *_: time.sleep(0.01))
    assert MEASURED() == limit


MEASURED = few_dense_rows.__wrapped__


@needs_kernel
def test_what_has_panels():
    assert can_prepack(torch.empty(5, 96, dtype=torch.bfloat16))
    assert not can_prepack(torch.empty(64, 80, dtype=torch.bfloat16))
    assert not can_prepack(torch.empty(64, 64))
    assert not can_prepack(torch.empty(64, 64, dtype=torch.bfloat16, device="meta"))


def test_without_a_compiler_weights_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(cpu_dense, "library", lambda: None)
    assert not can_prepack(torch.empty(64, 64, dtype=torch.bfloat16))
