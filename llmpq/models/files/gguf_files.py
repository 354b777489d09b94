"""GgufFiles: the tensors of a GGUF model under the names of transformers.

llama.cpp stores matrices by rows, in a number format of its own for each tensor, experts of a
layer as one tensor, and the queries and keys of Llama with the halves of every head interleaved.
The ``gguf`` package (extra ``gguf``) decodes the number formats.

Shape legend: E experts, N output features, K input features, D features of a head.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.models.files.decoded import (
    Decode,
    DecodedSource,
    Encoded,
    PlainRows,
    Read,
    SomeRows,
    StoredRows,
    WrappedRows,
)
from llmpq.models.files.sources import ByteRange, FileStamp, TensorSource, opened
from llmpq.models.files.tensor_files import TensorFiles
from llmpq.spec.gguf.config import config_of
from llmpq.spec.gguf.header import GgufHeader, GgufTensor, read_header
from llmpq.spec.safetensors.headers import Header

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_qkv.weight": "self_attn.qkv_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.bias": "self_attn.o_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate.bias": "mlp.gate_proj.bias",
    "ffn_up.bias": "mlp.up_proj.bias",
    "ffn_down.bias": "mlp.down_proj.bias",
    "ffn_gate_inp.weight": "mlp.gate.weight",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_FOUR_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_OF_FAMILY = {
    "gemma2": _FOUR_NORMS,
    "gemma3_text": _FOUR_NORMS,
    "phi3": {"ffn_up.weight": "mlp.gate_up_proj.weight"},
}
_OTHER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_CONFIG = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_INTERLEAVED = {"llama", "mixtral"}  # models whose queries and keys the converter reorders
_SHIFTED_NORMS = {"gemma", "gemma2", "gemma3_text"}  # norms that multiply by 1 + weight


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
        self._header = read_header(path)
        config = config_of(self._header)
        self.headers: dict[str, Header] = {}
        self._stamps = {}
        for file in self._header.files:
            with opened(file) as descriptor:
                self._stamps[file.name] = FileStamp.of(descriptor)
            self.headers[file.name] = Header(raw=_header_bytes(self._header, file), entries={})
        self._parts = _parts(self._header, config)
        self._dtype: torch.dtype = getattr(torch, config["dtype"])

    @property
    def names(self) -> Iterable[str]:
        """Every tensor, by its name in transformers."""
        return self._parts.keys()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype to run in: that of plain weights, bfloat16 for quantized ones."""
        return self._dtype

    @property
    def decodes(self) -> bool:
        """Whether tensors are decoded to float32."""
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor."""
        return self._parts[name].shape

    def where(self, name: str) -> str:
        """File and tensor, for messages."""
        part = self._parts.get(name)
        stored = name if part is None else part.name
        file = part.ranges[0].file if part is not None else self._header.path.name
        return f"{self.directory / file}: tensor '{stored}'"

    def source(self, name: str) -> TensorSource:
        """Return the location of a tensor, without reading it.

        Raises:
            SpecError: a tensor that does not exist.
        """
        if name not in self._parts:
            raise SpecError(f"{self._header.path}: found no tensor for '{name}'")
        part = self._parts[name]
        return DecodedSource.of((part,), part.shape)


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


def _header_bytes(header: GgufHeader, file: Path) -> bytes:
    """Return the bytes of a file up to its first tensor, for digests."""
    begins = [tensor.begin for tensor in header.tensors.values() if tensor.file == file]
    with file.open("rb") as stream:
        return stream.read(min(begins, default=0))


def _parts(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Encoded]:
    """Return every tensor by its name in transformers.

    Raises:
        SpecError: a tensor has no place.
    """
    family = str(config["model_type"])
    layer_names = _LAYER | _OF_FAMILY.get(family, {})
    found: dict[str, Encoded] = {}
    for stored, tensor in header.tensors.items():
        block, _, rest = stored.removeprefix("blk.").partition(".")
        expert = _EXPERTS.get(rest.removesuffix(".weight"))
        if stored in _OTHER:
            found[_OTHER[stored]] = _encoded(stored, tensor)
        elif stored.startswith("blk.") and rest in layer_names:
            found[f"model.layers.{block}.{layer_names[rest]}"] = _encoded(stored, tensor)
        elif stored.startswith("blk.") and expert and len(tensor.shape) == 3:
            prefix = f"model.layers.{block}.mlp.experts"
            count, rows = tensor.shape[:2]
            whole = _encoded(stored, tensor)
            for index in range(count):
                part = SomeRows(stored=whole, first=index * rows, end=(index + 1) * rows)
                found[f"{prefix}.{index}.{expert}.weight"] = part
        elif stored not in _IN_CONFIG:
            raise SpecError(f"{tensor.file}: tensor '{stored}': has no place in a {family} model")
    return {name: _adapted(name, part, family, config) for name, part in found.items()}


def _adapted(name: str, part: Encoded, family: str, config: Mapping[str, Any]) -> Encoded:
    """Undo what llama.cpp's converter does to some tensors of a family."""
    module = name.rpartition(".")[0]
    if family in _INTERLEAVED and module.endswith(("self_attn.q_proj", "self_attn.k_proj")):
        is_query = module.endswith("q_proj")
        heads = config["num_attention_heads" if is_query else "num_key_value_heads"]
        if part.shape[0] % (2 * heads):
            raise SpecError(
                f"tensor '{part.name}': found {part.shape[0]} rows, expected {heads} heads"
            )
        return InterleavedRows(stored=part, heads=heads)
    if family in _SHIFTED_NORMS and module.endswith("norm"):
        return ShiftedRows(stored=part)
    return part


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
