"""The nibble shuffle gives the very bytes of torch's own packer."""

import pytest
import torch

from llmpq.kernels.cpu.int4_layout import layout_is_known, repack_int4
from llmpq.kernels.packed import pack_codes

torch.set_num_threads(1)


@pytest.mark.skipif(not layout_is_known(), reason="this CPU packs int4 in another layout")
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (64, 256), (192, 96)])
def test_repacked_codes_are_what_torch_packs(rows, columns):
    seeded = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(0, 16, (rows, columns), generator=seeded)
    expected = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    found = repack_int4(pack_codes(codes.to(torch.uint8), 4))
    assert torch.equal(found, expected.view(rows, -1))
