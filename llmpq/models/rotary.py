"""RotaryTables: cos and sin of the rotary embedding of every layer for one step.

Most families have one table; Gemma 3 has one per attention type. Scalings that depend on the
sequence length (``longrope``, ``dynamic``) are computed row by row, so that a row does not depend
on the other rows of its step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmpq.models.adapter import Skeleton, accepts

Table = tuple[Tensor, Tensor] | Tensor
"""``(cos, sin)``, or rotations as complex numbers (DeepSeek-V2)."""


def build_rotary(config: PreTrainedConfig, skeleton: Skeleton | None = None) -> nn.Module | None:
    """Build the rotary embedding of a model with real buffers; ``None`` if it has none.

    Args:
        config: from :func:`load_config`.
        skeleton: skeleton of the model; by default it is built.
    """
    template = getattr((skeleton or Skeleton.of(config)).decoder, "rotary_emb", None)
    if template is None:
        return None
    rotary: nn.Module = type(template)(config)
    return rotary.eval()


class RotaryTables(nn.Module):
    """The rotary module of transformers, called once per step.

    Attributes:
        depends_on_length: whether a row's table depends on its length.
        switches_after: longest row with the first of the two tables of ``longrope``; ``None``
            elsewhere.

    Args:
        rotary: from ``build_rotary``.
        config: configuration of the whole model.
    """

    def __init__(self, rotary: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__()
        self.rotary = rotary
        layer_types = getattr(config, "layer_types", None)
        self._is_typed = accepts(rotary.forward, "layer_type")
        self._layer_types = list(layer_types or []) if self._is_typed else []
        self._num_layers: int = config.num_hidden_layers
        self.depends_on_length = _depends_on_length(rotary)
        self.switches_after: int | None = None
        if getattr(rotary, "rope_type", "default") == "longrope":
            self.switches_after = config.rope_parameters["original_max_position_embeddings"]

    def forward(self, hidden: Tensor, positions: Tensor, counts: Sequence[int]) -> list[Table]:
        """Return the table of every layer of the model, each of its tensors ``[1, N, ...]``.

        Args:
            hidden: tensor with the dtype and device of the result.
            positions: of the tokens, ``[1, N]`` int64 on the same device.
            counts: tokens of each row.
        """
        if not self._is_typed:
            return [self._table(hidden, positions, counts, None)] * self._num_layers
        kinds = set(self._layer_types)
        tables = {kind: self._table(hidden, positions, counts, kind) for kind in kinds}
        return [tables[kind] for kind in self._layer_types]

    def _table(
        self, hidden: Tensor, positions: Tensor, counts: Sequence[int], kind: str | None
    ) -> Table:
        if not self.depends_on_length:
            return self._call(hidden, positions, kind)
        rows = []
        for row in torch.split(positions, list(counts), dim=1):
            self._reset_length()
            rows.append(self._call(hidden, row, kind))
        return _joined(rows)

    def _reset_length(self) -> None:
        """Reset the state that ``dynamic`` scaling keeps of the longest sequence."""
        if self.rotary.__dict__.get("rope_type") == "dynamic":
            original = self.rotary.get_buffer("original_inv_freq")
            self.rotary.register_buffer("inv_freq", original.clone(), persistent=False)
            self.rotary.max_seq_len_cached = self.rotary.original_max_seq_len

    def _call(self, hidden: Tensor, positions: Tensor, kind: str | None) -> Table:
        arguments = {} if kind is None else {"layer_type": kind}
        table: Table = self.rotary(hidden, positions, **arguments)
        return table


def _joined(rows: Sequence[Table]) -> Table:
    """Join the tables of rows along the tokens."""
    complex_rows = [row for row in rows if isinstance(row, Tensor)]
    if complex_rows:
        return torch.cat(complex_rows, 1)
    pairs = [row for row in rows if not isinstance(row, Tensor)]
    return torch.cat([cos for cos, _ in pairs], 1), torch.cat([sin for _, sin in pairs], 1)


def _depends_on_length(rotary: nn.Module) -> bool:
    kinds = getattr(rotary, "rope_type", "default")
    names = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any("dynamic" in str(name) or name == "longrope" for name in names)
