"""Master: the modules before the first and after the last decoder layer.

Embeddings, learned positions, projections, the final norm and the LM head of transformers. A head
tied to the embedding is one tensor, stored and loaded once.

Shapes: N tokens of a step, R rows (sequences), H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmpq.models.adapter import Skeleton, fill_constants
from llmpq.models.token_layout import TokenLayout, TokenState, layout_of

_LEAST_SQUARE = 1e-5


def is_tied(config: PreTrainedConfig) -> bool:
    """Whether the LM head is the token embedding."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


class Master(nn.Module):
    """The two ends of a pipeline; built on the meta device, weights from ``Checkpoint``.

    Submodules have their names in the decoder (``embed_tokens``, ``norm``, ...), and ``lm_head``
    exists if the head is not tied, or is quantized.

    Args:
        config: configuration from ``load_config``.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        skeleton = Skeleton.of(config)
        self._family = skeleton.family
        self._layout = layout_of(config)
        for name in skeleton.known_parts:
            part = getattr(skeleton.decoder, name)
            if part is not None:
                fill_constants(part, skeleton.model)
                self.add_module(name, part)
        head = skeleton.model.get_submodule(skeleton.head_path)
        self.lm_head: nn.Module | None = None if is_tied(config) else head
        self.eval().requires_grad_(False)

    @property
    def embedding_name(self) -> str:
        """Name of the token embedding, such as ``embed_tokens``."""
        return self._family.embedding

    @torch.inference_mode()
    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the first layer.

        Args:
            token_ids: ``[1, N]`` int64.
            positions: ``[1, N]`` int64 absolute positions on any device.

        Returns:
            ``[1, N, H]`` in the weights' dtype; ``[1, N, W]`` where a token has a ``TokenLayout``.
        """
        family = self._family
        hidden: Tensor = self.get_submodule(family.embedding)(token_ids)
        if family.embedding_multiplier is not None:
            hidden = hidden * getattr(self.config, family.embedding_multiplier)
        hidden = self._pass(family.project_in, hidden)
        if family.positions is not None:
            module = self.get_submodule(family.positions)
            known = positions.to(token_ids.device)
            hidden = hidden + family.embed_positions(module, known)
        hidden = self._pass(family.embedding_norm, hidden)
        return hidden if self._layout is None else self._message(self._layout, token_ids, hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the next token.

        Args:
            hidden: ``[R, H]`` or ``[R, W]``, one position per row.

        Returns:
            ``[R, V]`` float32.
        """
        family = self._family
        scores = self._head(self.head_inputs(hidden))
        if family.logits_multiplier is not None:
            scores = scores * getattr(self.config, family.logits_multiplier)
        if family.logits_divisor is not None:
            scores = scores / getattr(self.config, family.logits_divisor)
        cap = getattr(self.config, "final_logit_softcapping", None)
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        return scores.float()

    @torch.inference_mode()
    def head_inputs(self, hidden: Tensor) -> Tensor:
        """Return what the head multiplies, ``[R, K]``, for ``hidden`` ``[R, H]`` or ``[R, W]``."""
        if self._layout is not None:
            hidden = self._merged(self._layout.hidden_of(hidden), self._layout)
        hidden = self._pass(self._family.final_norm, hidden)
        return self._pass(self._family.project_out, hidden)

    def _message(self, layout: TokenLayout, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return what travels for each token (Gemma 3n, Gemma 4): ``[R, T, W]``."""
        own = None
        if layout.own:
            table, projection, norm = map(self.get_submodule, self._family.own_embeddings)
            assert isinstance(table, nn.Embedding)
            # Tokens beyond the table have the first row, as in Gemma 3n of transformers.
            known = torch.where(token_ids < table.num_embeddings, token_ids, 0)
            projected = projection(hidden) * layout.hidden_size**-0.5
            size = (*token_ids.shape, layout.layers, layout.own)
            own = (norm(projected.view(size)) + table(known).view(size)) * 2.0**-0.5
        if layout.streams > 1:
            magnitude = hidden.square().mean(-1, keepdim=True) ** 0.5
            made = (_scaled(part(hidden), magnitude) for part in self._streams(0))
            hidden = torch.stack([hidden, *made])
        return layout.join(TokenState(hidden=hidden, own=own, shared={}))

    def _merged(self, hidden: Tensor, layout: TokenLayout) -> Tensor:
        """Return one hidden state ``[R, H]`` of each token's several, ``[S, R, H]``."""
        if layout.streams == 1:
            return hidden
        magnitude = hidden[0].square().mean(-1, keepdim=True) ** 0.5
        parts = zip(self._streams(1), hidden[1:], strict=True)
        merged = [hidden[0], *(_scaled(part(one), magnitude) for part, one in parts)]
        return torch.stack(merged).mean(dim=0)

    def _streams(self, which: int) -> Iterable[nn.Module]:
        return self.get_submodule(self._family.streams[which]).children()

    def _head(self, hidden: Tensor) -> Tensor:
        if self.lm_head is not None:
            scores: Tensor = self.lm_head(hidden)
            return scores
        embedding = self.get_submodule(self._family.embedding)
        assert isinstance(embedding, nn.Embedding)
        return nn.functional.linear(hidden, embedding.weight)

    def _pass(self, name: str | None, hidden: Tensor) -> Tensor:
        part = None if name is None else self._modules.get(name)
        if part is None:
            return hidden
        result: Tensor = part(hidden)
        return result


def _scaled(values: Tensor, magnitude: Tensor) -> Tensor:
    """Scale rows to a root mean square (Gemma 3n)."""
    own = values.square().mean(-1, keepdim=True)
    return values * magnitude / torch.sqrt(own.clamp(min=_LEAST_SQUARE))
