"""Map expert weights that are stored one by one to the fused 3-D parameters of transformers.

A checkpoint stores ``experts.7.gate_proj.weight``; in memory all experts of a layer are one
``experts.gate_up_proj``. Two spellings are in use, Qwen's and Mixtral's.

Shapes: E experts, N output features of a part, K input features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from llmpq.errors import SpecError
from llmpq.models.files.sources import TensorSource
from llmpq.models.files.tensor_files import TensorFiles
from llmpq.models.files.tensor_formats import DecodedSource, parts_of

# Fused parameter -> the names of its parts, stacked along N, in each spelling.
_PARTS = {
    "experts.gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "experts.down_proj": (("down_proj",), ("w2",)),
}
# Checkpoints of Mixtral use an older name of the block.
_RENAMED = (".mlp.", ".block_sparse_moe.")


def is_expert_part(name: str) -> bool:
    """Whether a stored name belongs to a block of experts."""
    return ".experts." in name or _RENAMED[1] in name


def stored_spellings(name: str) -> tuple[str, ...]:
    """Return the names under which a parameter may be stored, that of transformers first."""
    return tuple(dict.fromkeys((name, name.replace(*_RENAMED))))


def find_stored(tensors: TensorFiles, name: str) -> str | None:
    """Return the name under which the whole parameter is stored; ``None`` if it is not."""
    return next((spelling for spelling in stored_spellings(name) if spelling in tensors), None)


def fused_source(tensors: TensorFiles, name: str, shape: tuple[int, ...]) -> TensorSource:
    """Return the source of the fused parameter ``name`` ``[E, parts * N, K]``.

    Args:
        tensors: the checkpoint's files.
        name: full name of the fused parameter.
        shape: expected shape.

    Raises:
        SpecError: no spelling is found, or the shapes or dtypes of the parts differ.
    """
    joined = _rows_source(tensors, name, shape)
    if joined is not None:
        return joined
    parts = _find_parts(tensors, name)
    if parts is None or len(shape) != 3:
        raise SpecError(f"{tensors.directory}: found no tensor '{name}', expected {list(shape)}")
    rows = shape[1] // len(parts)
    sources = [tensors.source(part.format(expert)) for expert in range(shape[0]) for part in parts]
    for source in sources:
        if source.shape != (rows, shape[2]) or source.dtype != sources[0].dtype:
            raise SpecError(
                f"{tensors.where(source.name)}: found shape {list(source.shape)} of "
                f"{source.dtype}, expected {[rows, shape[2]]} of {sources[0].dtype}"
            )
    if tensors.decodes:
        encoded = tuple(one for source in sources for one in parts_of(source))
        return DecodedSource.of(encoded, tuple(shape))
    ranges = tuple(part for source in sources for part in source.ranges)
    return TensorSource(
        name=sources[0].name, dtype=sources[0].dtype, shape=tuple(shape), ranges=ranges
    )


def part_spellings(name: str) -> Iterator[tuple[str, ...]]:
    """Yield the spellings of the modules that a fused parameter is stored as, stacked along N.

    Args:
        name: name of the fused parameter with any prefix, such as ``mlp.experts.gate_up_proj``.

    Yields:
        Names with ``{}`` for the expert, such as ``mlp.experts.{}.gate_proj`` and ``...up_proj``;
        Qwen's spelling first.
    """
    for suffix, spellings in _PARTS.items():
        if not name.endswith(suffix):
            continue
        block = name.removesuffix(suffix.partition(".")[2])
        for base in (block, block.replace(*_RENAMED)):
            for spelling in spellings:
                yield tuple(f"{base}{{}}.{part}" for part in spelling)


def _rows_source(tensors: TensorFiles, name: str, shape: tuple[int, ...]) -> TensorSource | None:
    """Return the source of a fused parameter that is stored as DBRX does; ``None`` if it is not.

    ``w1`` and ``v1``, gate and up, have the outputs of all experts as rows ``[E * F, H]``; ``w2``
    has their inputs as rows.
    """
    base, _, last = name.rpartition(".")
    stored = {"gate_up_proj": ("w1", "v1"), "down_proj": ("w2",)}.get(last, ())
    names = [f"{base}.mlp.{part}" for part in stored]
    if not names or names[0] not in tensors:
        return None
    experts, rows, columns = shape
    features, hidden = (rows // 2, columns) if len(names) == 2 else (columns, rows)
    found = [tensors.source(one) for one in names]
    for source in found:
        if source.shape != (experts * features, hidden) or source.dtype != found[0].dtype:
            raise SpecError(
                f"{tensors.where(source.name)}: found shape {list(source.shape)} of "
                f"{source.dtype}, expected {[experts * features, hidden]} of {found[0].dtype}"
            )
    if len(names) == 1:
        return replace(found[0], shape=(experts, features, hidden)).transposed()
    blocks = [
        source.block(expert * features, (expert + 1) * features)
        for expert in range(experts)
        for source in found
    ]
    ranges = tuple(part for block in blocks for part in block.ranges)
    return replace(found[0], shape=tuple(shape), ranges=ranges)


def _find_parts(tensors: TensorFiles, name: str) -> tuple[str, ...] | None:
    """Return the stored name of each part, with ``{}`` for the expert."""
    for spelling in part_spellings(name):
        parts = tuple(f"{part}.weight" for part in spelling)
        if parts[0].format(0) in tensors:
            return parts
    return None
