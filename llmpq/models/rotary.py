"""RotaryTables: cos and sin of every layer's rotary embedding for one micro-batch.

Most families have one table; Gemma 3 has one for each kind of attention. Scalings that follow the
sequence's length (``longrope``, ``dynamic``) are computed row by row, so that a row's numbers
never depend on its neighbours in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmpq.models.adapter import takes

Table = tuple[Tensor, Tensor]


class RotaryTables(nn.Module):
    """transformers' rotary module behind one call per micro-batch.

    Attributes:
        follows_length: whether a row's table depends on how long the row is.

    Args:
        rotary: from ``build_rotary``.
        config: of the whole model.
    """

    def __init__(self, rotary: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__()
        self.rotary = rotary
        layer_types = getattr(config, "layer_types", None)
        self._is_typed = takes(rotary.forward, "layer_type")
        self._layer_types = list(layer_types or []) if self._is_typed else []
        self._num_layers: int = config.num_hidden_layers
        self.follows_length = _follows_length(rotary)

    def forward(self, hidden: Tensor, positions: Tensor) -> list[Table]:
        """The table of every layer of the model: ``(cos, sin)``, each ``[R, T, rotary_dim]``.

        Args:
            hidden: tells the dtype and the device.
            positions: of every query, ``[R, T]`` int64 on the same device.
        """
        if not self._is_typed:
            return [self._table(hidden, positions, None)] * self._num_layers
        kinds = set(self._layer_types)
        tables = {kind: self._table(hidden, positions, kind) for kind in kinds}
        return [tables[kind] for kind in self._layer_types]

    def _table(self, hidden: Tensor, positions: Tensor, kind: str | None) -> Table:
        if not self.follows_length:
            return self._call(hidden, positions, kind)
        rows = []
        for row in positions:
            self._forget_length()
            rows.append(self._call(hidden, row[None], kind))
        return torch.cat([cos for cos, _ in rows]), torch.cat([sin for _, sin in rows])

    def _forget_length(self) -> None:
        """Undo what ``dynamic`` scaling keeps of the longest sequence it has met."""
        if self.rotary.__dict__.get("rope_type") == "dynamic":
            original = self.rotary.get_buffer("original_inv_freq")
            self.rotary.register_buffer("inv_freq", original.clone(), persistent=False)
            self.rotary.max_seq_len_cached = self.rotary.original_max_seq_len

    def _call(self, hidden: Tensor, positions: Tensor, kind: str | None) -> Table:
        arguments = {} if kind is None else {"layer_type": kind}
        cos, sin = self.rotary(hidden, positions, **arguments)
        return cos, sin


def _follows_length(rotary: nn.Module) -> bool:
    kinds = getattr(rotary, "rope_type", "default")
    names = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any("dynamic" in str(name) or name == "longrope" for name in names)
