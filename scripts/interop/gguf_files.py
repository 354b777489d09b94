#!/usr/bin/env python3
"""Show that GGUF files of llama.cpp's own converter are read as they were written.

    scripts/interop/gguf_files.py --folder DIR [FAMILY ...]

Tiny models of every family of which GGUF files are read are converted by llama.cpp's program, whose
sources come with the package ``llama-cpp-python``; sizes and weights must be those of the models.
Ends with status 1 when one differs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from helpers.gguf_families import CONVERSIONS  # noqa: E402
from helpers.tiny_configs import tiny_config  # noqa: E402
from helpers.tiny_models import make_tiny_model_script  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from llmpq.errors import LlmpqError  # noqa: E402
from llmpq.models import Checkpoint  # noqa: E402
from llmpq.spec.huggingface.families import load_model_dir  # noqa: E402

PACKAGE = "llama-cpp-python==0.3.36"
LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
OF_EXPERTS = (
    "num_experts_per_tok", "moe_intermediate_size", "n_routed_experts", "n_group", "topk_group",
    "n_shared_experts", "moe_latent_size", "norm_topk_prob",
)  # fmt: skip
WIDTHS = {"phi": {"intermediate_size": 128}}
"""Four times the hidden size, where the converter does not read it."""
TOLERANCE = 1e-5
"""Of norms that are stored with one added, and of logarithms."""


def main() -> int:
    """Convert and compare; return 1 when a family differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help="default: all")
    parser.add_argument("--folder", type=Path, required=True, help="where the sources are kept")
    options = parser.parse_args()
    sources, failed = fetch(options.folder.absolute()), 0
    for name in options.families or CONVERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            problem = compare(sources, name, Path(folder))
        failed += bool(problem)
        print(f"{name}: {problem or 'the same'}", flush=True)
    return int(failed > 0)


def fetch(folder: Path) -> Path:
    """Return llama.cpp's sources, downloaded once."""
    if not list(folder.glob("llama_cpp_python-*/vendor")):
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--no-binary", ":all:", "-d", str(folder), PACKAGE], check=True)
        with tarfile.open(next(folder.glob("llama_cpp_python*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    return next(folder.glob("llama_cpp_python-*/")) / "vendor" / "llama.cpp"


def compare(sources: Path, name: str, folder: Path) -> str:
    """Return how a converted model differs from the model; nothing if it does not."""
    model_type, script, file = name.split()[0], make_tiny_model_script(), folder / "model.gguf"
    config = tiny_config(model_type, **CONVERSIONS[name].config, **WIDTHS.get(model_type, {}))
    script.save_model(script.make_model(config, seed=1), folder, dtype=torch.float32)
    if model_type == "kimi_linear":  # whose dense layers have another name than its experts
        weights = folder / "model.safetensors"
        tensors = load_file(weights)
        dense = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
        save_file({dense.sub(r"mlp.\1_proj", one): tensors[one] for one in tensors}, weights)
    path = folder / "config.json"
    stored = path.read_text()
    fields = as_published(model_type, json.loads(stored))
    path.write_text(json.dumps(fields))
    # Gemma's embeddings are cut to the tokens of a file.
    words = {str(token): token for token in range(fields["vocab_size"])}
    tokenizer = {"model": {"vocab": words}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = ["--no-mtp"] if model_type.startswith(("qwen3_5", "qwen3_next")) else []
    program = [sys.executable, str(ROOT / "scripts" / "interop" / "converter.py"), str(sources)]
    done = subprocess.run(
        [*program, str(folder), str(file), *options], capture_output=True, text=True, check=False
    )
    path.write_text(stored)
    if done.returncode:
        return f"the converter ended with status {done.returncode}: {done.stderr.strip()[-300:]}"
    try:
        return "; ".join(differences(name, folder, file))
    except LlmpqError as error:
        return str(error)


def differences(family: str, model_dir: Path, file: Path) -> Iterator[str]:
    """Yield what differs between a model and its GGUF file."""
    folded, config = CONVERSIONS[family].folded, json.loads((model_dir / "config.json").read_text())
    expected, found = load_model_dir(model_dir), load_model_dir(file)
    if (found.layer_types, found.parameters) != (expected.layer_types, expected.parameters):
        yield f"found {found.parameters} parameters, expected {expected.parameters}"
    pairs = zip(states_of(Checkpoint(model_dir)), states_of(Checkpoint(file)), strict=True)
    for place, (own, other) in enumerate(pairs):
        for name, value in own.items():
            stored = folded(name, value, config)
            if name not in other or not torch.allclose(stored, other[name], 1e-4, TOLERANCE):
                yield f"part {place}: '{name}' differs"


def states_of(checkpoint: Checkpoint) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of each layer, then those around them."""
    layers = range(checkpoint.config.num_hidden_layers)
    return [*map(checkpoint.layer_state_dict, layers), checkpoint.master_state_dict()]


def as_published(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration as the repositories have them, not transformers 5."""
    found = dict(fields)
    if model_type == "bamba":
        size = found["hidden_size"] // found["num_attention_heads"]
        found["attn_rotary_emb"] = size // 2
    if model_type == "granitemoehybrid":
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        found["layer_types"] = [names[kind] for kind in fields["layer_types"]]
    if model_type == "nemotron_h":
        pattern = "".join(LETTERS[kind] for kind in found.pop("layers_block_type"))
        found |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        if "E" not in pattern:
            found = {name: value for name, value in found.items() if name not in OF_EXPERTS}
    if model_type == "kimi_linear":
        layers = range(1, 1 + len(found["layer_types"]))
        kinds = {
            kind: [i for i in layers if found["layer_types"][i - 1] == kind] for kind in LETTERS
        }
        found["linear_attn_config"] = {
            "full_attn_layers": kinds["full_attention"],
            "kda_layers": kinds["linear_attention"],
            "head_dim": found.pop("linear_head_dim"),
            "num_heads": found.pop("linear_num_heads"),
            "short_conv_kernel_size": found.pop("linear_conv_kernel_dim"),
        }
        found["first_k_dense_replace"] = found.pop("mlp_layer_types").count("dense")
        found["moe_router_activation_func"] = "sigmoid"
    if model_type in ("deepseek_v3", "minimax_m2"):
        found["scoring_func"] = "sigmoid"
    if model_type == "minimax_m2":
        found["rotary_dim"] = fields["head_dim"]
    if model_type == "cohere2":
        found["rotary_pct"] = 1.0
    return found


if __name__ == "__main__":
    sys.exit(main())
