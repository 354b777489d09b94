"""What flows through the loader: tensors, matrices and ends of layers, each of one layer's job.

A piece says what it is and how many bytes of the budget it holds. This module refuses to decide
where pieces come from (``quant.layer_source``) and what is done with them (``quant.loader``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llmpq.kernels.cpu.tiled import TiledWeight
from llmpq.kernels.packed import PackedWeight
from llmpq.quant.loading.assembly import LayerAssembly, Matrix
from llmpq.quant.loading.entry_file import EntryWriter
from llmpq.quant.loading.transfer import Sent
from llmpq.quant.modules.linear import QuantLinear
from llmpq.spec.precision import Precision


@dataclass(slots=True, kw_only=True, eq=False)
class LayerJob:
    """One layer on its way.

    Attributes:
        index: its place in the model.
        precision: of its matrices.
        assembly: where its pieces go.
        origin: words for a progress line, when it was not quantized here.
        begin_entry: opens its entry in the store, when it is to be quantized for the first time.
        repair: opens it when it was found damaged, once all of the layer is there.
        made: its operators from the store, by the names of the matrices.
    """

    index: int
    precision: Precision
    assembly: LayerAssembly
    origin: str = ""
    begin_entry: Callable[[], EntryWriter | None] | None = None
    repair: Callable[[], EntryWriter | None] | None = None
    made: dict[str, QuantLinear] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plain:
    """A tensor that only has to be cast and placed."""

    job: LayerJob
    key: str
    sent: Sent
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Raw:
    """A matrix that has to be quantized, or some of its rows.

    Attributes:
        job: its layer.
        matrix: which.
        first_row: of the block of rows; ``None`` when this is all of it, for a kernel of no tiles.
        sent: the weights.
        where: names the matrix in messages.
        held_bytes: to be given back.
    """

    job: LayerJob
    matrix: Matrix
    first_row: int | None
    sent: Sent
    where: str
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ready:
    """A quantized matrix.

    Attributes:
        job: its layer.
        matrix: which.
        packed: its codes; in borrowed memory unless ``is_lasting``.
        held_bytes: to be given back.
        is_lasting: it is in tiles which may stay where they are.
    """

    job: LayerJob
    matrix: Matrix
    packed: PackedWeight | TiledWeight
    held_bytes: int
    is_lasting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MissingEntry:
    """A matrix that its entry in the store has no more.

    Attributes:
        job: its layer.
        read: reads its weights instead: for one thread, one after the other, as no budget knows.
        held_bytes: to be given back.
    """

    job: LayerJob
    read: Callable[[], Raw]
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mapped:
    """All matrices of a layer at once, where they lie in its entry of the store.

    Attributes:
        matrices: each of them, or how to read what its entry has no more.
        held_bytes: none, as no memory is the loader's own.
    """

    matrices: list[Ready | MissingEntry]
    held_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerEnd:
    """Follows the last piece of a layer.

    Attributes:
        job: the layer.
        held_bytes: to be given back.
        keep: asked once all of it has been read: whether the store may keep what was made.
    """

    job: LayerJob
    held_bytes: int = 0
    keep: Callable[[], bool] = bool


Piece = Plain | Raw | Ready | MissingEntry | Mapped | LayerEnd
Reading = Callable[[], Piece]
"""Reads a piece whose bytes the budget has given; any thread may run it."""
