"""Random layers for multi-token prediction: added to a tiny model, and computed by transformers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from helpers.tiny_models import load_reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer

from llmpq.spec.families import family_of


class MtpOracle:
    """The layer on whole texts.

    Args:
        model_dir: of the model.
        output: a copy of it, to whose file the layer's tensors are added.
        seed: of its numbers.
    """

    def __init__(self, model_dir: Path, output: Path, seed: int = 0) -> None:
        shutil.copytree(model_dir, output)
        self.model = load_reference(model_dir)
        decoder, config = self.model.model, self.model.config
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
        index = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
        like = decoder.layers[index]
        self.layer = MtpLayer(config, type(like), type(decoder.norm), index).eval()
        chance = torch.Generator().manual_seed(seed)
        own, known = self.layer.state_dict(), like.state_dict()
        for name, value in own.items():
            # Sizes as in the model: norms are not near zero in all families.
            shape_of = known.get(name.removeprefix("mtp_block."), decoder.norm.weight)
            spread = 0.1 * torch.randn(value.shape, generator=chance)
            value.copy_(spread + (shape_of if value.dim() == 1 else 0.0))
        names, count = family_of(config.model_type).mtp, len(decoder.layers)
        assert names is not None
        folder = f"model.layers.{count}." if names.folder is None else names.folder
        parts = {
            "enorm": names.embedding_norm,
            "hnorm": names.hidden_norm,
            "eh_proj": names.projection,
            "post_norm": names.final_norm,
        }
        stored = load_file(model_dir / "model.safetensors")
        for name, value in own.items():
            part, _, rest = name.partition(".")
            place = names.layer + rest if part == "mtp_block" else f"{parts[part]}.{rest}"
            stored[folder + place] = value.contiguous()
        save_file(stored, output / "model.safetensors", {"format": "pt"})

    @torch.inference_mode()
    def states(self, tokens: Sequence[int]) -> Tensor:
        """The model's final hidden states ``[N, H]``."""
        found: Tensor = self.model.model(torch.tensor([list(tokens)])).last_hidden_state[0]
        return found

    @torch.inference_mode()
    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """The tokens that the layer proposes after ``tokens``."""
        states, ids = self.states(tokens)[:-1], list(tokens[1:])
        drafts: list[int] = []
        for _ in range(count):
            size = len(ids)
            embedded = self.model.get_input_embeddings()(torch.tensor([ids]))
            positions = torch.arange(size)[None]
            turned = self.model.model.rotary_emb
            # In time, height and width: transformers before 5.23 does not repeat them itself.
            is_spatial = hasattr(turned, "mrope_section")
            rotary = turned(embedded, positions.expand(3, 1, -1) if is_spatial else positions)
            mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
            made = self.layer(embedded, states[None], rotary, mask, positions, None)[0]
            drafts.append(int(self.model.lm_head(made[-1]).argmax()))
            states, ids = torch.cat([states, made[-1:]]), [*ids, drafts[-1]]
        return drafts
