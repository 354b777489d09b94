"""Write tests/models/fixtures/mxfp4: experts in MXFP4 by triton_kernels, the library of gpt_oss.

Run with a torch that has triton, on a CPU, where vLLM 0.33 is installed, which contains
triton_kernels: python scripts/interop/mxfp4_fixture.py
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.third_party.triton_kernels.numerics_details.mxfp import (
    downcast_to_mxfp_torch,
    upcast_from_mxfp_torch,
)

EXPERTS, ROWS, COLUMNS = 2, 16, 96
OUTPUT = Path(__file__).parents[2] / "tests" / "models" / "fixtures" / "mxfp4"


def main():
    """Write blocks and scales as gpt_oss stores them, and what the library decodes them to."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(EXPERTS, COLUMNS, ROWS, generator=generator)  # [E, K, N]
    weight *= torch.logspace(-6, 2, COLUMNS // 32).repeat_interleave(32)[:, None]
    codes, scales = downcast_to_mxfp_torch(weight, torch.uint8, axis=1)  # [E, K / 2, N]
    expected = upcast_from_mxfp_torch(codes, scales, torch.float32, axis=1)
    blocks = codes.mT.reshape(EXPERTS, ROWS, COLUMNS // 32, 16)
    stored = {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales.mT, "n": torch.ones(2)}
    OUTPUT.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in stored.items()}, OUTPUT / "model.safetensors")
    save_file({"e.down_proj": expected.mT.contiguous()}, OUTPUT / "expected.safetensors")


if __name__ == "__main__":
    main()
