"""The switch is measured once a machine, kept, and never trusted blindly."""

import json
from pathlib import Path

import pytest
import torch

from llmpq.kernels.cpu import kernel_choice
from llmpq.kernels.cpu.native import (
    bf16_product,
    has_bf16_products,
    library,
    prepared_tiles,
    to_tiles,
)
from llmpq.quant import quantize
from llmpq.spec.precision import Precision

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(
    library() is None or not has_bf16_products(), reason="no bf16 kernels here"
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own for what is measured."""
    monkeypatch.setattr(kernel_choice, "kernels_path", lambda _: tmp_path / "kernels.so")
    kernel_choice.gemv_max_rows.cache_clear()
    yield tmp_path / "kernels.json"
    kernel_choice.gemv_max_rows.cache_clear()


@pytest.mark.parametrize("bits", [3, 4])
def test_the_switch_is_one_of_the_counts_tried(kept, bits):
    assert kernel_choice.gemv_max_rows(bits) in (1, *kernel_choice.TRIED_ROWS)


def test_what_was_measured_is_kept_for_the_next_process(kept, monkeypatch):
    monkeypatch.setattr(kernel_choice, "_measure", lambda _: 12)
    assert kernel_choice.gemv_max_rows(4) == 12
    kernel_choice.gemv_max_rows.cache_clear()
    monkeypatch.setattr(kernel_choice, "_measure", lambda _: pytest.fail("measured again"))
    assert kernel_choice.gemv_max_rows(4) == 12
    assert [key.rpartition(", ")[2] for key in json.loads(kept.read_text())] == ["4 bits"]


def test_what_another_process_measured_meanwhile_counts(kept, monkeypatch):
    read = kernel_choice._read

    def look_too_early(path: Path) -> dict[str, int]:
        found = read(path)
        path.write_text(json.dumps({f"{kernel_choice._processor()}, 4 bits": 20}))
        return found

    monkeypatch.setattr(kernel_choice, "_read", look_too_early)
    monkeypatch.setattr(kernel_choice, "_measure", lambda _: pytest.fail("measured again"))
    assert kernel_choice.gemv_max_rows(4) == 20


@pytest.mark.parametrize(
    "found", ["", "[1]", '{"other": 4, "worse": "x"}', '{"a": -1, "b": 10000}']
)
def test_a_file_that_is_not_ours_is_measured_anew(kept, found, monkeypatch):
    kept.write_text(found)
    monkeypatch.setattr(kernel_choice, "_measure", lambda _: 8)
    assert kernel_choice.gemv_max_rows(3) == 8
    known = json.loads(kept.read_text())
    assert all(value in (4, 8) for value in known.values())


def test_whether_float32_is_faster_is_kept(kept, monkeypatch):
    monkeypatch.setattr(kernel_choice, "_measure_float", lambda: 1)
    kernel_choice.is_float_faster.cache_clear()
    assert kernel_choice.is_float_faster()
    kernel_choice.is_float_faster.cache_clear()
    monkeypatch.setattr(kernel_choice, "_measure_float", lambda: pytest.fail("measured again"))
    assert kernel_choice.is_float_faster()
    kernel_choice.is_float_faster.cache_clear()
    assert list(json.loads(kept.read_text()).values()) == [1]


def test_eight_bits_are_always_decoded_first(kept):
    assert kernel_choice.gemv_max_rows(8) == 0
    assert not kept.exists()


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(48, 256, 32), (208, 1152, 128), (64, 4096, 64)]
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_both_ways_give_the_same_bits(bits, rows, columns, group, symmetric):
    drawn = torch.Generator().manual_seed(bits)
    weight = torch.randn(rows, columns, generator=drawn) * 0.02
    precision = Precision(bits=bits, group_size=group, symmetric=symmetric)
    packed = quantize(weight, precision, torch.bfloat16)
    tiles = prepared_tiles(to_tiles(packed), "cpu_packed")
    for count in (1, 2, 3, 5, 8, 13, 32):
        x = (torch.randn(count, columns, generator=drawn) * 3).to(torch.bfloat16)
        few, many = (bf16_product(x, tiles, None, limit) for limit in (count, 0))
        assert torch.equal(few, many)
