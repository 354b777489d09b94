"""RotaryRows: cosines and sines of the tokens of a compiled step.

Shapes: R rows (tokens), P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmpq.kernels.cpu.step import StepProgram, UnsupportedStepError
from llmpq.models import DecoderStage, PackedBatch
from llmpq.models.rotary import RotaryTables
from llmpq.quant.modules.steps.parts import parts_of

_FEWEST_POSITIONS = 1024


class RotaryRows:
    """cos and sin of the rows of a step, from tables of all positions so far.

    Args:
        layers: of the stage.
        program: of the step.
        like: has dtype and device of the tables.
        is_short: whether the rotary embedding makes each angle once, not for both features.

    Attributes:
        buffers: of cos and sin of every layer of the model; empty without rotation.

    Raises:
        UnsupportedStepError: the angles depend on more than a token's position.
    """

    def __init__(
        self, layers: DecoderStage, program: StepProgram, like: Tensor, *, is_short: bool
    ) -> None:
        self._rotary: RotaryTables | None = layers.rotary
        self._is_short = is_short
        self._like = like
        self._tables: list[Tensor] = []
        self._length = 0
        self.buffers: list[tuple[Tensor, Tensor]] = []
        kinds: list[int] = []
        if layers.rotary is not None:
            if layers.rotary.depends_on_length and layers.rotary.switches_after is None:
                raise UnsupportedStepError("its rotary embedding depends on the length of a row")
            kinds = self._grow(layers.rotary, 1)
        elif (own := parts_of(layers.layers[0]).positions) is not None:
            sin, cos = own.to(like.dtype).chunk(2, dim=1)
            self._tables = [torch.cat((part, part), dim=1) for part in (cos, sin)]
            kinds = [0] * layers.config.num_hidden_layers
        self._places = [
            program.buffer(f"rotary {i}", table.shape[1], table.dtype)
            for i, table in enumerate(self._tables)
        ]
        self.buffers = [(self._places[2 * kind], self._places[2 * kind + 1]) for kind in kinds]

    def is_alone(self, batch: PackedBatch) -> bool:
        """Whether the angles of each token follow from its position."""
        switch = None if self._rotary is None else self._rotary.switches_after
        if switch is None:
            return True
        lengths = list(batch.rope_lengths or batch.lengths)
        return max(lengths) <= switch or (batch.is_decode and lengths == batch.lengths)

    def fill(self, positions: Tensor, longest: int) -> None:
        """Copy the rows at ``positions`` ``[R]`` into the buffers."""
        if self._rotary is not None and longest > self._length:
            self._grow(self._rotary, longest)
        for table, place in zip(self._tables, self._places, strict=True):
            torch.index_select(table, 0, positions, out=place[: len(positions)])

    def _grow(self, rotary: RotaryTables, longest: int) -> list[int]:
        """Compute the tables of at least ``longest`` positions; return each layer's kind."""
        length = max(_FEWEST_POSITIONS, 2 * self._length)
        length = max(length, longest)
        spans, switch = [(length, None)], rotary.switches_after
        if switch is not None and length > switch:
            spans = [(switch, None), (length - switch, None)]
        made = rotary(self._like, torch.arange(length)[None], spans)
        kinds: dict[int, int] = {}
        tables: list[Tensor] = []
        for table in made:
            if isinstance(table, Tensor):
                raise UnsupportedStepError("its rotary embedding has complex numbers")
            if id(table) not in kinds:
                kinds[id(table)] = len(kinds)
                tables += [self._by_halves(part[0]) for part in table]
        self._tables, self._length = tables, length
        return [kinds[id(table)] for table in made]

    def _by_halves(self, table: Tensor) -> Tensor:
        """Return a table ``[P, features]`` with the number of each pair once in either half."""
        if self._is_short:
            return torch.cat((table, table), dim=1)
        even, odd = table[:, ::2], table[:, 1::2]
        return torch.cat((even, odd), dim=1) if torch.equal(even, odd) else table.contiguous()
