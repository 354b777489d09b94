"""The kernel for few rows at 16 bits: exact enough, and only where the order is known."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from helpers.clocks import PATIENCE_S
from hypothesis import given, settings
from hypothesis import strategies as st

from llmpq.dist.launch.process_environment import cpu_environment
from llmpq.kernels.cpu import dense as cpu_dense
from llmpq.kernels.cpu import switch
from llmpq.kernels.cpu.dense import (
    can_prepack,
    few_dense_rows,
    prepack,
    prepacked_linear,
    product_rows,
)
from llmpq.kernels.cpu.native import has_bf16_products, library
from llmpq.kernels.cpu.switch import TRIED_ROWS
from llmpq.kernels.cpu.tiles import dense_product, float_product, panels_of
from llmpq.spec.runtime_constants import PRODUCT_ROWS

torch.set_num_threads(1)

has_kernel = library() is not None and has_bf16_products()
needs_kernel = pytest.mark.skipif(not has_kernel, reason="no bf16 kernels here")


def _drawn(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(torch.bfloat16)


@needs_kernel
@settings(deadline=None, max_examples=60)
@given(
    panels=st.integers(1, 6),
    columns=st.integers(1, 20),
    rows=st.integers(1, 40),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
    product=st.sampled_from([dense_product, float_product]),
    seed=st.integers(0, 2**31),
)
def test_errs_by_the_rounding_of_the_answer_alone(
    panels, columns, rows, has_bias, threads, product, seed
):
    out_features, in_features = 64 * panels, 64 * columns
    plain = _drawn(seed, out_features, in_features, scale=0.05)
    x = _drawn(seed + 1, rows, in_features, scale=3.0)
    bias = _drawn(seed + 2, out_features) if has_bias else None
    weight = prepack(plain)

    y = product(x, weight, bias, threads=threads)

    exact = x.double() @ plain.double().T + (0 if bias is None else bias.double())
    # Half a step of bf16, and what a sum of K products in float32 may lose of their sizes.
    lost = x.double().abs() @ plain.double().abs().T * in_features * 2.0**-24
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-8 + lost).all()


@needs_kernel
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (256, 768), (832, 2048)])
def test_neither_threads_nor_other_rows_change_an_answer(out_features, in_features):
    weight = prepack(_drawn(1, out_features, in_features, scale=0.05))
    x = _drawn(2, 200, in_features)
    alone = torch.cat([dense_product(row[None], weight, None, threads=1) for row in x])
    for rows in (1, 2, 6, 7, 13, 17, 32, 63, 200):
        for threads in (1, 2, 3):
            assert torch.equal(dense_product(x[:rows], weight, None, threads=threads), alone[:rows])


@needs_kernel
def test_one_row_and_many_rows_give_the_same_layer_with_either_kernel():
    plain, bias = _drawn(3, 256, 512, scale=0.05), _drawn(4, 256)
    weight = prepack(plain)
    for shape in ((1, 512), (1, 1, 512), (2, 3, 512), (300, 512), (0, 512)):
        x = _drawn(5, *shape)
        y = prepacked_linear(x, weight, bias)
        right = x.float() @ plain.float().T + bias.float()
        assert y.shape == right.shape
        assert torch.allclose(y.float(), right, rtol=2**-7, atol=1e-3)


@needs_kernel
def test_the_weight_is_held_once():
    plain = _drawn(6, 128, 192)
    weight = prepack(plain)
    assert weight.handle is not None
    assert weight.nbytes == plain.nbytes


@needs_kernel
def test_any_other_order_is_refused():
    plain = _drawn(7, 128, 256)
    layout = prepack(plain).tensors[0]
    address = int(torch.ops.mkldnn.data_ptr(layout))
    assert panels_of(address, plain) is not None
    moved = plain.clone()
    moved[-1, -2:] = moved[-1, -2:].flip(0)
    assert panels_of(address, moved) is None
    assert panels_of(plain.data_ptr(), plain) is None


@needs_kernel
@pytest.mark.parametrize("missing", ["operator", "compiler", "order"])
def test_what_cannot_be_read_is_left_to_onednn(missing, monkeypatch):
    plain, x = _drawn(8, 128, 256), _drawn(9, 2, 256)
    if missing == "compiler":
        monkeypatch.setattr(cpu_dense, "library", lambda: None)
    elif missing == "order":
        monkeypatch.setattr(cpu_dense, "panels_of", lambda *_: None)
    else:
        known = ("_reorder_linear_weight", "_linear_pointwise", "_nbytes")
        operators = {name: getattr(torch.ops.mkldnn, name) for name in known}
        older = type("Older", (), {name: staticmethod(call) for name, call in operators.items()})
        monkeypatch.setattr(torch.ops, "mkldnn", older)

    weight = prepack(plain)

    assert weight.handle is None
    monkeypatch.setattr(cpu_dense, "dense_product", lambda *_, **__: pytest.fail("read anyway"))
    right = x.float() @ plain.float().T
    assert torch.allclose(prepacked_linear(x, weight, None).float(), right, rtol=2**-7, atol=1e-2)


@needs_kernel
@pytest.mark.parametrize("count", [1, 40, 300])
def test_all_rows_are_the_compiled_kernels(monkeypatch, count):
    asked = []
    monkeypatch.setattr(cpu_dense, "dense_product", lambda x, *_, **__: asked.append(len(x)))
    prepacked_linear(_drawn(11, count, 8192), prepack(_drawn(10, 64, 8192)), None)
    assert asked == [count]


@needs_kernel
def test_many_rows_are_multiplied_as_float32_where_that_is_faster(monkeypatch):
    asked = []
    monkeypatch.setattr(cpu_dense, "few_dense_rows", lambda: 4)
    monkeypatch.setattr(cpu_dense, "float_product", lambda x, *_: asked.append(len(x)))
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


@needs_kernel
def test_activations_of_another_type_are_refused_as_before():
    weight = prepack(_drawn(12, 64, 64))
    with pytest.raises(RuntimeError):
        prepacked_linear(torch.ones(1, 64), weight, None)


@needs_kernel
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


@needs_kernel
def test_a_machine_that_never_measured_does_not_wait_for_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(switch, "kernels_path", lambda _: tmp_path / "kernels.so")
    monkeypatch.setattr(cpu_dense, "has_tiles", lambda: False)
    found = []
    measuring = threading.Thread(target=lambda: found.append(MEASURED()), daemon=True)
    measuring.start()
    measuring.join(timeout=PATIENCE_S)
    assert found
    assert found[0] in (None, 1, *TRIED_ROWS)


@needs_kernel
@pytest.mark.parametrize(("slower", "limit"), [("float_product", None), ("dense_product", 1)])
def test_the_faster_kernel_is_found(tmp_path, monkeypatch, slower, limit):
    monkeypatch.setattr(switch, "kernels_path", lambda _: tmp_path / "kernels.so")
    monkeypatch.setattr(cpu_dense, "has_tiles", lambda: False)
    monkeypatch.setattr(cpu_dense, slower, lambda *_: time.sleep(0.01))
    assert MEASURED() == limit


MEASURED = few_dense_rows.__wrapped__

PROGRAM = """
import torch
from llmpq.quant.modules.layer import prepack_

torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(256, 128)).to(torch.bfloat16).requires_grad_(False)
plain = module[0].weight.detach().float().clone(), module[0].bias.detach().float().clone()
prepack_(module)
x = torch.randn(2, 256).to(torch.bfloat16)
y = module(x).float()
right = x.float() @ plain[0].T + plain[1]
print(type(module[0]).__name__, float((y - right).norm() / right.norm()))
"""


@pytest.mark.parametrize("cpu_isa", ["avx512", "avx2"])
def test_older_processors_keep_torchs_product(cpu_isa):
    environment = {**os.environ, **cpu_environment(1, cpu_isa)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    kind, error = done.stdout.split()
    assert kind == "Linear"
    assert float(error) < 0.01


def test_what_would_be_padded_is_refused():
    assert not can_prepack("cpu", torch.bfloat16, 96, 64)
    assert not can_prepack("cpu", torch.bfloat16, 64, 96)
    assert not can_prepack("cpu", torch.float32, 64, 64)


@given(count=st.integers(1, 5000))
def test_rows_are_split_into_few_sizes_and_at_most_15_are_added(count):
    parts = product_rows(count)
    assert set(parts) <= set(PRODUCT_ROWS)
    assert sum(parts[:-1]) < count <= sum(parts)
    assert sum(parts) - count < 16


@pytest.mark.skipif(not has_bf16_products(), reason="no bf16 products here")
def test_products_of_any_number_of_rows_are_compiled_for_few_sizes(monkeypatch):
    plain, bias = _drawn(0, 128, 64, scale=0.05), _drawn(1, 128)
    weight, compiled = prepack(plain), set()
    product = cpu_dense._compiled_product

    def counted(x, *more):
        compiled.add(x.shape[:-1].numel())
        return product(x, *more)

    monkeypatch.setattr(cpu_dense, "_compiled_product", counted)
    for rows in range(1, 1200, 7):
        x = _drawn(rows, 1, rows, 64)
        y = cpu_dense._onednn_product(x, weight, bias)
        expected = torch.nn.functional.linear(x.float(), plain.float(), bias.float())
        torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)
    assert compiled <= set(PRODUCT_ROWS)
