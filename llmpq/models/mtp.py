"""Multi-token prediction: the layer that some models ship to propose the token after the next one.

Of the final hidden state of a token and the embedding of the next one, the layer makes a hidden
state that the model's own head turns into the scores of the token after the next one (DeepSeek-V3,
Sec. 2.2). It is used as its own successor for the tokens behind that one, as vLLM does.

Shapes: N tokens, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmpq.models.adapter import Skeleton


class MtpEnds(nn.Module):
    """What is before and after the layer; submodules have the names of ``MtpNames``' fields.

    Args:
        config: of the model.
        skeleton: of the model, whose final norm has the class of the norms.
    """

    def __init__(self, config: PreTrainedConfig, skeleton: Skeleton) -> None:
        super().__init__()
        size = config.hidden_size
        norm = type(skeleton.decoder.get_submodule(skeleton.family.parts.final_norm))
        with torch.device("meta"):
            self.embedding_norm = norm(size, config.rms_norm_eps)
            self.hidden_norm = norm(size, config.rms_norm_eps)
            self.projection = nn.Linear(2 * size, size, bias=False)
            self.final_norm = norm(size, config.rms_norm_eps)
        self.eval().requires_grad_(False)

    @torch.inference_mode()
    def inputs(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return the input of the layer ``[1, N, H]``.

        Args:
            embedded: of the next token of each, ``[1, N, H]``.
            states: of each token, ``[1, N, H]``: after the model's final norm, or of this layer.
        """
        parts = [self.embedding_norm(embedded), self.hidden_norm(states)]
        joined: Tensor = self.projection(torch.cat(parts, -1))
        return joined

    @torch.inference_mode()
    def outputs(self, hidden: Tensor) -> Tensor:
        """Return the states ``[1, N, H]`` that the head multiplies, of the layer's output."""
        states: Tensor = self.final_norm(hidden)
        return states
