"""The third step: the last checkpoint to a model directory with texts, scores and a card."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.demo_model.card import model_card
from scripts.demo_model.checkpoint import load_weights
from scripts.demo_model.network import demo_config
from scripts.demo_model.records import loss_curve, public_command, write_json
from scripts.demo_model.scoring import held_out_scores


def export(work: Path, run: str, out: Path) -> None:
    """Write the model of the last checkpoint, its texts, its scores and its card to `--out`."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    model = LlamaForCausalLM(demo_config(len(tokenizer))).eval()
    load_weights(work / run / "checkpoint", model)
    progress = json.loads((work / run / "checkpoint" / "progress.json").read_text("utf-8"))
    recipe = json.loads((work / run / "recipe.json").read_text("utf-8"))
    for name in ("heldout.txt", "calibration.txt"):
        shutil.copyfile(work / "text" / name, out / name)
    text = (out / "heldout.txt").read_text("utf-8")
    ids = tokenizer(text)["input_ids"]
    train_tokens = np.load(work / "train_tokens.npy")
    record = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": public_command(recipe["command"]),
        "recipe": recipe["recipe"],
        "parameters": model.num_parameters(),
        "steps": progress["step"],
        "tokens_seen": progress["tokens"],
        "minutes": round(progress["elapsed_s"] / 60, 1),
        "loss_curve": loss_curve(progress["losses"]),
        "held_out": held_out_scores(model, ids, train_tokens, len(text.encode())),
        "data": json.loads((work / "sources.json").read_text("utf-8"))
        | {"train_tokens_sha256": hashlib.sha256(train_tokens.tobytes()).hexdigest()},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        },
    }
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.to(torch.bfloat16).save_pretrained(out)
    for key in ("is_local", "local_files_only"):  # how this copy was loaded: not part of the model
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    names = ["model.safetensors", "tokenizer.json", "heldout.txt", "calibration.txt"]
    record["sha256"] = {n: hashlib.sha256((out / n).read_bytes()).hexdigest() for n in names}
    write_json(out / "pretraining.json", record)
    (out / "README.md").write_text(model_card(record), "utf-8")
    print(json.dumps(record["held_out"], indent=2))
