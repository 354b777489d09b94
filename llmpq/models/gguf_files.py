"""The tensors of a GGUF model under the names of transformers.

llama.cpp stores matrices by rows, in a number format of its own for each tensor, and experts of a
layer as one tensor. Its converter changes some tensors: the record of a family says which and how
(``GgufForm``), and here the changes are undone, row by row as tensors are read. The ``gguf``
package (extra ``gguf``) decodes the number formats.

Shape legend: E experts, N output features, K input features, D features of a head.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.models.tensor_files import (
    ByteRange,
    Decode,
    DecodedSource,
    Encoded,
    FileStamp,
    PlainRows,
    Read,
    RowSlice,
    StoredRows,
    TensorFiles,
    TensorSource,
    WrappedRows,
    opened,
)
from llmpq.spec.families import family_of
from llmpq.spec.model_files.config import config_of
from llmpq.spec.model_files.gguf_form import (
    EXPERT_NAMES,
    IN_CONFIG,
    Change,
    GgufForm,
    Join,
    Joining,
)
from llmpq.spec.model_files.weight_headers import (
    GgufHeader,
    GgufTensor,
    SafetensorsHeader,
    read_gguf_header,
)

_MTP_NAMES = {
    "nextn.eh_proj.weight": "eh_proj.weight",
    "nextn.enorm.weight": "enorm.weight",
    "nextn.hnorm.weight": "hnorm.weight",
    "nextn.shared_head_norm.weight": "shared_head.norm.weight",
}
"""What is around the layer for multi-token prediction, which follows the others in all families.
Copies of embedding and head are left out: those of the model are used."""
_FACTORS = ("scale", "input_scale")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufFiles(TensorFiles):
    """The tensors of a GGUF model, decoded to float32 when they are read.

    Args:
        path: of the model's only or first file.

    Raises:
        SpecError: the file is damaged, of an unknown architecture, or holds a tensor without a
            place in the model.
    """

    def __init__(self, path: Path) -> None:
        self.directory = path.parent
        self._header = read_gguf_header(path)
        config = config_of(self._header)
        self.headers: dict[str, SafetensorsHeader] = {}
        self._stamps = {}
        for file in self._header.files:
            with opened(file) as descriptor:
                self._stamps[file.name] = FileStamp.of(descriptor)
            self.headers[file.name] = SafetensorsHeader(
                raw=_header_bytes(self._header, file), entries={}
            )
        self._sources = _Sources(self._header, config).found
        self._dtype: torch.dtype = getattr(torch, config["dtype"])

    @property
    def names(self) -> Iterable[str]:
        """Every tensor, by its name in transformers."""
        return self._sources.keys()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype to run in: that of plain weights, bfloat16 for quantized ones."""
        return self._dtype

    @property
    def decodes(self) -> bool:
        """Whether tensors are decoded to float32."""
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor."""
        return self._sources[name].shape

    def where(self, name: str) -> str:
        """File and tensor, for messages."""
        found = self._sources.get(name)
        stored = name if found is None else found.name
        file = found.ranges[0].file if found is not None else self._header.path.name
        return f"{self.directory / file}: tensor '{stored}'"

    def source(self, name: str) -> TensorSource:
        """Return the location of a tensor, without reading it.

        Raises:
            SpecError: a tensor that does not exist.
        """
        if name not in self._sources:
            raise SpecError(f"{self._header.path}: found no tensor for '{name}'")
        return self._sources[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class GgmlRows(StoredRows):
    """A matrix in a quantized format of ggml; ``source`` is uint8 ``[N, bytes of a row]``.

    Attributes:
        columns: K.
        type: name of the number format.
    """

    columns: int
    type: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape once decoded."""
        return (self.source.shape[0], self.columns)

    def open(self, read: Read) -> Decode:
        """Return a function that decodes rows with the ``gguf`` package."""
        package = _gguf()
        kind = package.GGMLQuantizationType[self.type]

        def decode(first: int, end: int) -> Tensor:
            stored = read(self.source.block(first, end)).numpy()
            return torch.from_numpy(package.dequantize(stored, kind))

        return decode


@dataclass(frozen=True, slots=True, kw_only=True)
class InterleavedRows(WrappedRows):
    """Queries or keys of Llama, whose heads llama.cpp stores with interleaved halves.

    Attributes:
        heads: of the matrix or vector.
    """

    heads: int

    def open(self, read: Read) -> Decode:
        """Return a function that decodes whole heads and returns rows in transformers' order."""
        decode, size = self.stored.open(read), self.shape[0] // self.heads  # size is D

        def rows(first: int, end: int) -> Tensor:
            begin, last = first // size * size, -(-end // size) * size
            found = decode(begin, last)
            halves = found.view(-1, size // 2, 2, *found.shape[1:]).transpose(1, 2)
            return halves.reshape(found.shape)[first - begin : end - begin]

        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedRows(WrappedRows):
    """A norm whose stored weights are larger by one."""

    def open(self, read: Read) -> Decode:
        """Return a function that reads and subtracts one."""
        decode = self.stored.open(read)
        return lambda first, end: decode(first, end) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRows(WrappedRows):
    """Logarithms whose stored weights are their negative exponentials."""

    def open(self, read: Read) -> Decode:
        """Return a function that reads and takes logarithms."""
        decode = self.stored.open(read)
        return lambda first, end: decode(first, end).neg().log()


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleRow(WrappedRows):
    """A matrix of one row ``[1, K]`` that is stored as a vector."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as a matrix."""
        return (1, *self.stored.shape)

    def open(self, read: Read) -> Decode:
        """Return a function that reads the vector."""
        decode = self.stored.open(read)
        return lambda first, end: decode(0, self.stored.shape[0]).unsqueeze(0)[first:end]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatRows(WrappedRows):
    """A vector that is stored as a matrix."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as a vector."""
        return (prod(self.stored.shape),)

    def open(self, read: Read) -> Decode:
        """Return a function that reads the matrix."""
        decode = self.stored.open(read)
        return lambda first, end: decode(0, self.stored.shape[0]).flatten()[first:end]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledHeads(WrappedRows):
    """Rows or columns of the value heads of linear attention.

    transformers has the heads of one key after those of another; llama.cpp the first head of every
    key, then the second.

    Attributes:
        keys: key heads.
        values: value heads.
        first: row or column of the first value head.
        by_columns: whether columns are heads, not rows.
    """

    keys: int
    values: int
    first: int
    by_columns: bool = False

    def open(self, read: Read) -> Decode:
        """Return a function that decodes rows and returns them in transformers' order."""
        decode = self.stored.open(read)
        places = self._places()
        if self.by_columns:
            return lambda first, end: decode(first, end)[:, places]

        def rows(first: int, end: int) -> Tensor:
            wanted = places[first:end]
            cuts = (wanted.diff() != 1).nonzero().flatten().add(1).tolist()
            runs = wanted.tensor_split(cuts)
            return torch.cat([decode(int(run[0]), int(run[-1]) + 1) for run in runs])

        return rows

    def _places(self) -> Tensor:
        """Return where every row or column is stored."""
        count = self.shape[-1 if self.by_columns else 0]
        stored = torch.arange(self.first, count).view(self.values // self.keys, self.keys, -1)
        return torch.cat((torch.arange(self.first), stored.transpose(0, 1).reshape(-1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedRows(Encoded):
    """Rows made from those of two encoded tensors.

    Attributes:
        one: the first tensor.
        other: the second.
    """

    one: Encoded
    other: Encoded

    @property
    def name(self) -> str:
        """Name of the first tensor."""
        return self.one.name

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape once joined."""

    @property
    def ranges(self) -> tuple[ByteRange, ...]:
        """Bytes of both."""
        return (*self.one.ranges, *self.other.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRows(JoinedRows):
    """Rows whose factors are in another tensor: one for all, or one for each expert."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scaled tensor."""
        return self.one.shape

    def open(self, read: Read) -> Decode:
        """Return a function that decodes rows and multiplies them by their factor."""
        decode, count = self.one.open(read), self.other.shape[0]
        factors = self.other.open(read)(0, count)
        size = self.shape[0] // count

        def rows(first: int, end: int) -> Tensor:
            return decode(first, end) * factors[torch.arange(first, end) // size, None]

        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AlternatingRows(JoinedRows):
    """A row, or a column, of one tensor after each of another.

    Attributes:
        by_columns: whether columns alternate.
    """

    by_columns: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of both."""
        rows, columns = self.one.shape
        return (rows, 2 * columns) if self.by_columns else (2 * rows, columns)

    def open(self, read: Read) -> Decode:
        """Return a function that decodes rows of both."""
        one, other = self.one.open(read), self.other.open(read)

        def columns(first: int, end: int) -> Tensor:
            return torch.stack((one(first, end), other(first, end)), dim=-1).flatten(1)

        def rows(first: int, end: int) -> Tensor:
            begin, last = first // 2, -(-end // 2)
            both = torch.stack((one(begin, last), other(begin, last)), dim=1).flatten(0, 1)
            return both[first - 2 * begin : end - 2 * begin]

        return columns if self.by_columns else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRows(JoinedRows):
    """Keys of every head of latent attention, stored with rows as columns, then its values.

    Attributes:
        heads: of both tensors.
    """

    heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape ``[N, K]`` with K features of the latent."""
        return (self.heads * self.one.shape[1] + self.other.shape[0], self.other.shape[1])

    def open(self, read: Read) -> Decode:
        """Return a function that decodes whole heads."""
        keys, values = self.one.open(read), self.other.open(read)
        rank, width = self.one.shape[0] // self.heads, self.other.shape[0] // self.heads
        size = self.shape[0] // self.heads

        def rows(first: int, end: int) -> Tensor:
            begin, last = first // size, -(-end // size)
            parts = [
                part
                for head in range(begin, last)
                for part in (
                    keys(head * rank, (head + 1) * rank).T,
                    values(head * width, (head + 1) * width),
                )
            ]
            return torch.cat(parts)[first - begin * size : end - begin * size]

        return rows


def _header_bytes(header: GgufHeader, file: Path) -> bytes:
    """Return the bytes of a file up to its first tensor, for digests."""
    begins = [tensor.begin for tensor in header.tensors.values() if tensor.file == file]
    with file.open("rb") as stream:
        return stream.read(min(begins, default=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A stored tensor: its rows, one expert after the other, and its dimensions."""

    rows: Encoded
    shape: tuple[int, ...]

    def source(self) -> DecodedSource:
        """Return the source of the whole tensor."""
        return DecodedSource.of((self.rows,), self.shape)


class _Sources:
    """The tensors of a file by their names in transformers.

    Args:
        header: of the file.
        config: of the model.

    Attributes:
        found: source of every tensor.

    Raises:
        SpecError: a tensor has no place, two have the same, or a part of one is missing.
    """

    def __init__(self, header: GgufHeader, config: Mapping[str, Any]) -> None:
        family = family_of(str(config["model_type"]))
        assert family.gguf is not None
        self._family, self._form, self._config = family.name, family.gguf, config
        self._layer_names, self._outer_names = self._form.layer_names(), self._form.outer_names()
        self._joined = {part for join in self._form.joins for part in join.parts}
        self._parts: dict[str, dict[str, _Part]] = {}  # of tensors stored as several, by layer
        self.found: dict[str, DecodedSource] = {}
        self._tensors = header.tensors
        for stored, tensor in header.tensors.items():
            if self._scaled_by(stored) is not None:
                continue
            if stored.startswith("blk."):
                self._add_of_layer(stored, tensor)
            elif stored in self._outer_names:
                self._add(self._outer_names[stored], stored, tensor)
            elif stored not in IN_CONFIG:
                raise self._misplaced(stored, tensor)
        for layer, parts in self._parts.items():
            where = f"{header.path}: layer {layer}"
            for join in self._form.joins:
                if any(name in parts for name in join.parts):
                    name = f"model.layers.{layer}.{join.name}"
                    self.found[name] = _join(join, parts, config, where=where)

    def _scaled_by(self, stored: str) -> str | None:
        """Return the matrix that a tensor has factors of, ``None`` for a tensor of the model.

        llama.cpp's converter writes them beside matrices in NVFP4: ``scale`` of the weights, and
        ``input_scale`` of quantized activations, which are not used.
        """
        base, _, kind = stored.rpartition(".")
        if kind not in _FACTORS or self._is_known(stored):
            return None
        matrix = f"{base.removesuffix('.weight')}.weight"
        return matrix if matrix in self._tensors else None

    def _is_known(self, stored: str) -> bool:
        rest = stored.split(".", 2)[-1] if stored.startswith("blk.") else stored
        return rest in self._layer_names or rest in self._joined or stored in self._outer_names

    def _rows(self, stored: str, tensor: GgufTensor) -> Encoded:
        """Return the rows of a tensor, with their factors.

        Raises:
            SpecError: it is not one factor for all or for each expert.
        """
        rows, base = _encoded(stored, tensor), stored.removesuffix(".weight")
        names = (f"{base}.scale", f"{stored}.scale")
        given = (one for one in names if one in self._tensors)
        found = next((one for one in given if self._scaled_by(one) == stored), None)
        if found is None:
            return rows
        factors, experts = self._tensors[found], tensor.shape[0] if len(tensor.shape) > 2 else 1
        if factors.shape not in ((1,), (experts,)):
            raise SpecError(
                f"{factors.file}: tensor '{found}': found shape {list(factors.shape)}, expected "
                f"[{experts}]"
            )
        return ScaledRows(one=rows, other=_encoded(found, factors))

    def _add_of_layer(self, stored: str, tensor: GgufTensor) -> None:
        layer, _, rest = stored.removeprefix("blk.").partition(".")
        prefix, expert = f"model.layers.{layer}", EXPERT_NAMES.get(rest.removesuffix(".weight"))
        if layer.isdecimal() and int(layer) >= self._config["num_hidden_layers"]:
            if family_of(self._family).mtp is None:
                return
            if rest in _MTP_NAMES:
                self._add(f"{prefix}.{_MTP_NAMES[rest]}", stored, tensor)
                return
            is_known = rest in self._layer_names or rest in self._joined or expert
            if not is_known:  # of drafts of another kind
                return
        if rest in self._joined:
            part = _Part(rows=self._rows(stored, tensor), shape=tensor.shape)
            self._parts.setdefault(layer, {})[rest] = part
        elif rest in self._layer_names:
            self._add(f"{prefix}.{self._layer_names[rest]}", stored, tensor)
        elif expert and len(tensor.shape) == 3:
            module = f"{prefix}.{self._form.experts}"
            self.found |= _expert_sources(module, expert, self._rows(stored, tensor), tensor)
        else:
            raise self._misplaced(stored, tensor)

    def _add(self, name: str, stored: str, tensor: GgufTensor) -> None:
        if name in self.found:
            raise SpecError(
                f"{tensor.file}: tensor '{stored}': found '{self.found[name].name}' in its place"
            )
        rows = self._rows(stored, tensor)
        self.found[name] = _changed(name, rows, tensor.shape, self._form, self._config)

    def _misplaced(self, stored: str, tensor: GgufTensor) -> SpecError:
        return SpecError(
            f"{tensor.file}: tensor '{stored}': has no place in a {self._family} model"
        )


def _expert_sources(
    module: str, matrix: str, whole: Encoded, tensor: GgufTensor
) -> Iterable[tuple[str, DecodedSource]]:
    """Yield name and source of a matrix of every expert."""
    count, rows, columns = tensor.shape
    for index in range(count):
        part = RowSlice(stored=whole, first=index * rows, end=(index + 1) * rows)
        yield f"{module}.{index}.{matrix}.weight", DecodedSource.of((part,), (rows, columns))


def _join(
    join: Join, parts: Mapping[str, _Part], config: Mapping[str, Any], *, where: str
) -> DecodedSource:
    """Return the source of a tensor that is stored as several."""
    missing = next((name for name in join.parts if name not in parts), None)
    if missing is not None:
        raise SpecError(f"{where}: found no tensor '{missing}', expected it beside its other parts")
    return _JOININGS[join.how]([parts[name] for name in join.parts], config)


def _by_key_heads(parts: list[_Part], config: Mapping[str, Any]) -> DecodedSource:
    """Return queries, keys, values and gates of each key head of linear attention in turn."""
    inputs, gates = parts
    heads, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    width = gates.shape[0] // heads
    places = [(inputs, 0, size), (inputs, heads * size, size), (inputs, 2 * heads * size, width)]
    slices = tuple(
        RowSlice(stored=part.rows, first=first + head * count, end=first + (head + 1) * count)
        for head in range(heads)
        for part, first, count in [*places, (gates, 0, width)]
    )
    return DecodedSource.of(slices, (inputs.shape[0] + gates.shape[0], inputs.shape[1]))


def _alternating(parts: list[_Part], config: Mapping[str, Any]) -> DecodedSource:
    """Return the outputs of gate and up of all experts in turn, or their biases."""
    del config
    one, other = parts
    experts, outputs, *inputs = one.shape
    rows = AlternatingRows(one=one.rows, other=other.rows, by_columns=not inputs)
    return DecodedSource.of((rows,), (experts, 2 * outputs, *inputs))


def _latent(parts: list[_Part], config: Mapping[str, Any]) -> DecodedSource:
    """Return what makes keys and values from the latent of latent attention."""
    keys, values = parts
    rows = LatentRows(one=keys.rows, other=values.rows, heads=config["num_attention_heads"])
    return DecodedSource.of((rows,), rows.shape)


def _in_turn(parts: list[_Part], config: Mapping[str, Any]) -> DecodedSource:
    """Return the rows of a tensor behind those of another."""
    del config
    rows = tuple(one.rows for one in parts)
    return DecodedSource.of(rows, (sum(one.shape[0] for one in rows), rows[0].shape[1]))


def _channels(parts: list[_Part], config: Mapping[str, Any]) -> DecodedSource:
    """Return the channels of a convolution ``[C, 1, K]`` behind those of another."""
    joined = _in_turn(parts, config)
    return replace(joined, shape=(joined.shape[0], 1, joined.shape[1]))


_JOININGS: dict[Joining, Callable[[list[_Part], Mapping[str, Any]], DecodedSource]] = {
    "key_heads": _by_key_heads,
    "alternating": _alternating,
    "latent": _latent,
    "in_turn": _in_turn,
    "channels": _channels,
}


def _changed(
    name: str, rows: Encoded, shape: tuple[int, ...], form: GgufForm, config: Mapping[str, Any]
) -> DecodedSource:
    """Return a tensor with what llama.cpp's converter changed undone.

    Raises:
        SpecError: its rows are not those of whole heads.
    """
    for change in reversed(form.changes_of(name)):
        if change == "single_channels":
            shape = (shape[0], 1, *shape[1:]) if len(shape) == 2 else shape
        elif change == "single_heads":
            shape = (1, 1, rows.shape[0], 1)
        elif change == "flat":
            rows = FlatRows(stored=rows)
            shape = rows.shape
        elif change == "single_row":
            if len(shape) == 1:
                rows, shape = SingleRow(stored=rows), (1, *shape)
        else:
            rows = _undone(change, rows, config)
    return DecodedSource.of((rows,), shape)


def _undone(change: Change, rows: Encoded, config: Mapping[str, Any]) -> Encoded:
    """Return rows with a change of their numbers or of their order undone."""
    if change == "one_added":
        return ShiftedRows(stored=rows)
    if change == "negative_exp":
        return LoggedRows(stored=rows)
    if change in ("interleaved_queries", "interleaved_keys"):
        is_query = change == "interleaved_queries"
        heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
        _check_heads(rows, rows.shape[0], 2 * heads)
        return InterleavedRows(stored=rows, heads=heads)
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    by_columns = change == "tiled_columns"
    count = rows.shape[-1 if by_columns else 0]
    first = 2 * keys * config["linear_key_head_dim"] if change == "tiled_values_last" else 0
    _check_heads(rows, count - first, values)
    return TiledHeads(stored=rows, keys=keys, values=values, first=first, by_columns=by_columns)


def _check_heads(rows: Encoded, count: int, parts: int) -> None:
    if count <= 0 or count % parts:
        raise SpecError(
            f"tensor '{rows.name}': found shape {list(rows.shape)}, expected whole heads"
        )


def _encoded(name: str, tensor: GgufTensor) -> Encoded:
    """Return a tensor as a matrix of rows (experts one after the other) or a vector."""
    ranges = (ByteRange(file=tensor.file.name, begin=tensor.begin, nbytes=tensor.nbytes),)
    columns = tensor.shape[-1]
    shape = tensor.shape
    if len(shape) > 1:
        count = tensor.nbytes * tensor.type.weights // (columns * tensor.type.nbytes)
        shape = (count, columns)
    if tensor.type.name in _PLAIN:
        dtype = _PLAIN[tensor.type.name]
        return PlainRows(source=TensorSource(name=name, dtype=dtype, shape=shape, ranges=ranges))
    if len(shape) == 1:
        raise SpecError(f"{tensor.file}: tensor '{name}': expected a vector of plain numbers")
    stored = (shape[0], tensor.nbytes // shape[0])
    source = TensorSource(name=name, dtype=torch.uint8, shape=stored, ranges=ranges)
    return GgmlRows(source=source, columns=columns, type=tensor.type.name)


def _gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise SpecError(
            "GGUF: reading quantized tensors needs the 'gguf' package; install it with "
            "pip install 'llmpq[gguf]'"
        ) from None
