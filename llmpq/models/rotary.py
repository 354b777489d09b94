"""RotaryTables: cos and sin of the rotary embedding of every layer for one step.

Most families have one table; Gemma 3 has one per attention type. Scalings that depend on the
sequence length (``longrope``, ``dynamic``) are computed row by row, so that a row does not depend
on the other rows of its step. The length is that of the whole sequence, not of the tokens so far:
the tokens of a prompt have the same angles in one chunk and in several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmpq.models.adapter import Skeleton, accepts
from llmpq.models.attention import PackedBatch
from llmpq.spec.facts.length_scaling import LengthScaling, read_length_scaling

Table = tuple[Tensor, Tensor] | Tensor
"""``(cos, sin)``, or rotations as complex numbers (DeepSeek-V2)."""
Span = tuple[int, int | None]
"""Number of consecutive tokens of a row whose angles are for one length, and that length; ``None``
for the length up to the last of them."""


def length_scaling(config: PreTrainedConfig) -> LengthScaling:
    """Return how the rotary angles of a model depend on the length of a sequence."""
    names = ("rope_parameters", "original_max_position_embeddings", "max_position_embeddings")
    return read_length_scaling({name: getattr(config, name, None) for name in names})


def spans_of(batch: PackedBatch) -> Iterator[Span]:
    """Yield the spans of the rows of a step."""
    lengths = batch.rope_lengths or batch.lengths
    for start, count, length in zip(batch.starts, batch.counts, lengths, strict=True):
        together = min(count, max(0, length - start))
        if together:
            yield together, length if length > start + together else None
        # Tokens of an answer beyond the length have the angles that they had when they were made.
        yield from [(1, None)] * (count - together)


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
        self.switches_after = length_scaling(config).switches_after

    def forward(self, hidden: Tensor, positions: Tensor, spans: Sequence[Span]) -> list[Table]:
        """Return the table of every layer of the model, each of its tensors ``[1, N, ...]``.

        Args:
            hidden: tensor with the dtype and device of the result.
            positions: of the tokens, ``[1, N]`` int64 on the same device.
            spans: of all rows.
        """
        if not self._is_typed:
            return [self._table(hidden, positions, spans, None)] * self._num_layers
        kinds = set(self._layer_types)
        tables = {kind: self._table(hidden, positions, spans, kind) for kind in kinds}
        return [tables[kind] for kind in self._layer_types]

    def _table(
        self, hidden: Tensor, positions: Tensor, spans: Sequence[Span], kind: str | None
    ) -> Table:
        if not self.depends_on_length:
            return self._call(hidden, positions, kind)
        parts = torch.split(positions, [count for count, _ in spans], dim=1)
        made = []
        for part, (count, length) in zip(parts, spans, strict=True):
            self._reset_length()
            if length is None:
                made.append(self._call(hidden, part, kind))
                continue
            # The modules of transformers take the largest position for the length.
            last = part.new_full((1, 1), length - 1)
            made.append(_first(self._call(hidden, torch.cat([part, last], 1), kind), count))
        return _joined(made)

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


def _first(table: Table, count: int) -> Table:
    """Return the table of the first ``count`` tokens."""
    if isinstance(table, Tensor):
        return table[:, :count]
    return table[0][:, :count], table[1][:, :count]


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
