"""Write tests/models/fixtures/compressed-tensors: matrices compressed by the format's own library.

Run with compressed-tensors 0.20 installed: python scripts/interop/compressed_tensors_fixture.py
"""

import json
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

ROWS, COLUMNS = 16, 128
OUTPUT = Path(__file__).parents[2] / "tests" / "models" / "fixtures" / "compressed-tensors"
GROUP32 = {"strategy": "group", "group_size": 32}
CASES = {
    "pack4": ("pack-quantized", {"num_bits": 4, "symmetric": True, **GROUP32}),
    "pack4_asymmetric": ("pack-quantized", {"num_bits": 4, "symmetric": False, **GROUP32}),
    "pack3": ("pack-quantized", {"num_bits": 3, "symmetric": True, **GROUP32}),
    "pack8": ("pack-quantized", {"num_bits": 8, "symmetric": True, "strategy": "channel"}),
    "int8": ("int-quantized", {"num_bits": 8, "symmetric": True, "strategy": "channel"}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8_block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 32]},
    ),
}


def ranges(weight, args):
    """The weights that share a scale, along the last dimension, in the shape of the scales."""
    if args.strategy == "group":
        return weight.view(ROWS, -1, args.group_size)
    if args.strategy == "channel":
        return weight.view(ROWS, 1, COLUMNS)
    if args.strategy == "tensor":
        return weight.view(1, -1)
    height, width = args.block_structure
    return weight.view(ROWS // height, height, COLUMNS // width, width).transpose(1, 2).flatten(2)


def main():
    """Write stored tensors, what the library decompresses them to, and the configuration."""
    generator = torch.Generator().manual_seed(0)
    stored, expected, groups = {}, {}, {}
    for name, (kind, fields) in CASES.items():
        weight = torch.randn(ROWS, COLUMNS, generator=generator)
        args = QuantizationArgs(**fields)
        scheme = QuantizationScheme(targets=[f"re:.*{name}$"], weights=args, format=kind)
        shared = ranges(weight, args)
        scale, zero = calculate_qparams(shared.amin(-1), shared.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        if args.symmetric:
            del state["weight_zero_point"]
        compressor = BaseCompressor.get_value_from_registry(kind)
        made = compressor.compress(state, scheme)
        stored |= {f"m.{name}.{key}": value.contiguous() for key, value in made.items()}
        expected[f"m.{name}.weight"] = compressor.decompress(made, scheme)["weight"].half()
        groups[name] = json.loads(scheme.model_dump_json(exclude_none=True))
    OUTPUT.mkdir(parents=True, exist_ok=True)
    stored["embedding"] = torch.zeros(4, 4)
    save_file(stored, OUTPUT / "model.safetensors")
    save_file(expected, OUTPUT / "expected.safetensors")
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    text = json.dumps(config | {"config_groups": groups}, indent=1, sort_keys=True)
    (OUTPUT / "quantization.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
