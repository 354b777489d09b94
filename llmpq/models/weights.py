"""Checkpoint: the stored tensors of each decoder layer and of the master.

Maps transformers' module names to the names in a checkpoint: with or without the prefix of the
head's model, experts fused or one by one, tied tensors once. Shapes and dtypes are checked before
reading. A checkpoint stores ``experts.7.gate_proj.weight``; in memory all experts of a layer are
one ``experts.gate_up_proj``. Two spellings are in use, Qwen's and Mixtral's.

``QuantizedFiles`` are safetensors of codes and scales under the names of the weights they stand
for: FP8 with block, channel or tensor scales (the layouts of DeepSeek, compressed-tensors and
ModelOpt), the integer formats of compressed-tensors, AWQ's GEMM layout, MXFP4 and NVFP4, and
bitsandbytes' 4 and 8 bits. Layouts are recognised by the names, dtypes and shapes of tensors; the
configuration gives bits and block sizes.

Shape legend: E experts, N output features, K input features, D features of a head.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.models.adapter import TransposedLinear, kv_sources, layer_kv_shape, load_skeleton
from llmpq.models.gguf_files import GgufFiles
from llmpq.models.master import Master
from llmpq.models.tensor_files import (
    FLOATING,
    Awq,
    Bnb4Rows,
    DecodedSource,
    Encoded,
    Fp4Rows,
    ScaledCodes,
    TensorFiles,
    TensorSource,
    parts_of,
)
from llmpq.spec.families import find_mtp, known_families
from llmpq.spec.huggingface.quantization import CodesConfig, codes_config, find_config
from llmpq.spec.model_files.config import config_bytes
from llmpq.spec.model_files.weight_headers import (
    find_gguf,
)

_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_SCALES = ("weight_scale_inv", "weight_scale", "SCB")
_OVERALL = {"weight_scale_2": False, "weight_global_scale": True}
"""The scale of all scales of NVFP4, and whether it divides them."""
_BNB_STATE = re.compile(r"\.quant_state\.bitsandbytes__(?:nf4|fp4)$")
_BNB_LEVELS = 127.0
"""Codes of bitsandbytes' 8 bits are of the row's largest number in 127 levels."""
_PARTS = (
    *(f".{scale}" for scale in (*_SCALES, *_OVERALL)),
    ".absmax",
    ".quant_map",
    ".nested_absmax",
    ".nested_quant_map",
    ".quant_state.bitsandbytes__nf4",
    ".quant_state.bitsandbytes__fp4",
    ".weight_format",
    ".input_global_scale",
    ".weight_packed",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".qweight",
    ".qzeros",
    ".scales",
    ".input_scale",
    ".input_zero_point",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    "_blocks",
    "_scales",
)
"""Endings of tensors that belong to others, or that only 8-bit products would use."""


class QuantizedFiles(TensorFiles):
    """The tensors of a quantized model directory, decoded to float32 when they are read.

    Args:
        model_dir: directory with safetensors.
        quantization: from its ``config.json``.

    Raises:
        SpecError: as ``TensorFiles``, or codes without scales or in an unknown layout.
    """

    def __init__(self, model_dir: Path | str, quantization: CodesConfig) -> None:
        super().__init__(model_dir)
        self._quantization = quantization
        self._decoded: dict[str, tuple[tuple[Encoded, ...], tuple[int, ...]]] = {}
        for name in super().names:
            self._recognise(name)
        plain = [name for name in super().names if not name.endswith(_PARTS)]
        self._visible = list(dict.fromkeys([*plain, *self._decoded]))

    @property
    def names(self) -> Iterable[str]:
        """Every tensor of the model, codes under the name of their weight."""
        return self._visible

    @property
    def decodes(self) -> bool:
        """Whether matrices are decoded to float32 when they are read."""
        return True

    def __contains__(self, name: object) -> bool:
        return name in self._decoded or super().__contains__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Dimensions of a tensor once decoded."""
        return self._decoded[name][1] if name in self._decoded else super().shape(name)

    def where(self, name: str) -> str:
        """File and tensor, for messages."""
        return super().where(self._decoded[name][0][0].name if name in self._decoded else name)

    def source(self, name: str) -> TensorSource:
        """Return the location of a tensor, without reading it; errors as ``TensorFiles``."""
        if name not in self._decoded:
            return super().source(name)
        return DecodedSource.of(*self._decoded[name])

    def _recognise(self, name: str) -> None:
        module, _, part = name.rpartition(".")
        if part == "weight" and super().source(name).dtype in _CODES:
            codes = super().source(name)
            scaled = self._scaled(module, codes, columns=codes.shape[-1], bits=None)
            self._decoded[name] = ((scaled,), scaled.shape)
        elif part == "weight_packed":
            codes = super().source(name)
            is_fp4 = codes.dtype == torch.uint8
            (self._recognise_fp4 if is_fp4 else self._recognise_packed)(module, codes)
        elif part == "qweight":
            codes, zeros, scales = (
                super(QuantizedFiles, self).source(f"{module}.{one}")
                for one in ("qweight", "qzeros", "scales")
            )
            self._check_awq(codes, zeros, scales)
            awq = Awq(codes=codes, zeros=zeros, scales=scales)
            self._decoded[f"{module}.weight"] = ((awq,), awq.shape)
        elif name.endswith("_blocks"):
            self._recognise_mxfp4(name.removesuffix("_blocks"))
        elif part == "weight" and f"{module}.weight_scale_2" in self._file_of:
            self._recognise_fp4(module, super().source(name))
        elif (state := _BNB_STATE.search(name)) is not None:
            self._recognise_bnb4(name[: state.start()], super().source(name))

    def _recognise_packed(self, module: str, codes: TensorSource) -> None:
        bits = self._quantization.bits(module)
        name = f"{module}.weight_packed"
        if codes.dtype != torch.int32 or len(codes.shape) != 2 or bits is None:
            raise SpecError(
                f"{super().where(name)}: found {codes.dtype} {list(codes.shape)}, expected int32 "
                "words of integers whose bits config.json states"
            )
        shape = self.load(super().source(f"{module}.weight_shape")).tolist()
        rows, columns = codes.shape[0], int(shape[-1])
        packed = {-(-columns * bits // 32), -(-columns // (32 // bits))}
        if len(shape) != 2 or shape[0] != rows or codes.shape[1] not in packed:
            raise SpecError(
                f"{super().where(name)}: found shape {list(codes.shape)} for a weight {shape} of "
                f"{bits} bits"
            )
        scaled = self._scaled(module, codes, columns=columns, bits=bits)
        self._decoded[f"{module}.weight"] = ((scaled,), (rows, columns))

    def _recognise_fp4(self, module: str, codes: TensorSource) -> None:
        scales = self._optional(f"{module}.weight_scale")
        is_matrix = codes.dtype == torch.uint8 and len(codes.shape) == 2
        groups = 0 if scales is None or len(scales.shape) != 2 else scales.shape[1]
        if (
            not is_matrix
            or scales is None
            or not groups
            or scales.shape[0] != codes.shape[0]
            or codes.shape[1] % groups
        ):
            raise SpecError(
                f"{super().where(codes.name)}: found {codes.dtype} {list(codes.shape)} with scales "
                f"{None if scales is None else list(scales.shape)}, expected bytes of two codes "
                "with a scale for every group of a row"
            )
        overall = next((name for name in _OVERALL if f"{module}.{name}" in self._file_of), None)
        rows = Fp4Rows(
            codes=codes,
            scales=scales,
            overall=None if overall is None else super().source(f"{module}.{overall}"),
            divides=overall is not None and _OVERALL[overall],
        )
        self._decoded[f"{module}.weight"] = ((rows,), rows.shape)

    def _recognise_bnb4(self, name: str, state: TensorSource) -> None:
        """Recognise 4-bit codes of bitsandbytes; ``state`` is JSON, one byte an element."""
        where = super().where(state.name)
        try:
            fields = json.loads(bytes(self.load(state).tolist()))
            dims = tuple(int(size) for size in fields["shape"])
            block, nested = int(fields["blocksize"]), int(fields.get("nested_blocksize") or 0)
            offset = float(fields.get("nested_offset") or 0.0)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SpecError(f"{where}: found no readable state of codes: {error!r}") from error
        codes = super().source(name)
        scales = super().source(f"{name}.absmax")
        table = super().source(f"{name}.quant_map")
        scale_table = super().source(f"{name}.nested_quant_map") if nested else None
        scale_scales = super().source(f"{name}.nested_absmax") if nested else None
        weights, count = math.prod(dims), math.prod(scales.shape)
        fits = (
            len(dims) == 2
            and min(dims) > 0
            and block > 0
            and codes.nbytes == -(-weights // 2)
            and count == -(-weights // block)
            and (scales.dtype == torch.uint8) == (nested > 0)
            and table.shape == (16,)
            and (scale_table is None or scale_table.shape == (256,))
            and (scale_scales is None or math.prod(scale_scales.shape) == -(-count // nested))
        )
        if not fits:
            raise SpecError(
                f"{super().where(name)}: found {codes.nbytes} bytes with scales "
                f"{list(scales.shape)} of {scales.dtype}, expected two codes a byte of a matrix "
                f"{list(dims)} in blocks of {block}"
            )
        rows = Bnb4Rows(
            codes=replace(codes, dtype=torch.uint8, shape=(codes.nbytes, 1)),
            table=table,
            scales=scales,
            dims=(dims[0], dims[1]),
            block=block,
            scale_table=scale_table,
            scale_scales=scale_scales,
            scale_block=nested or 1,
            offset=offset,
        )
        self._decoded[name] = ((rows,), rows.shape)

    def _scaled(
        self, module: str, codes: TensorSource, *, columns: int, bits: int | None
    ) -> ScaledCodes:
        where = super().where(codes.name)
        found = [
            name for name in _SCALES if super(QuantizedFiles, self).__contains__(f"{module}.{name}")
        ]
        if len(codes.shape) != 2 or not found:
            raise SpecError(f"{where}: found codes without a scale, expected a matrix with one")
        layout = self._optional(f"{module}.weight_format")
        if layout is not None and int(self.load(layout)) != 0:
            raise SpecError(f"{super().where(layout.name)}: expected 0, codes row by row")
        scales = super().source(f"{module}.{found[0]}")
        sizes = scales.shape
        if len(sizes) == 4 and sizes[1] == sizes[3] == 1:  # ModelOpt's, of blocks
            sizes = sizes[::2]
        grid = (*sizes, 1, 1)[:2]
        rows = codes.shape[0]
        block = _block(grid, (rows, columns), self._quantization.block)
        if block is None:
            raise SpecError(
                f"{super().where(scales.name)}: found shape {list(scales.shape)}, expected scales "
                f"of blocks {self._quantization.block} of a weight {[rows, columns]}"
            )
        return ScaledCodes(
            codes=codes,
            scales=scales,
            columns=columns,
            block=block,
            bits=bits,
            zeros=self._optional(f"{module}.weight_zero_point"),
            groups=self._optional(f"{module}.weight_g_idx"),
            levels=_BNB_LEVELS if found[0] == "SCB" else 1.0,
        )

    def _optional(self, name: str) -> TensorSource | None:
        return super().source(name) if super().__contains__(name) else None

    def _check_awq(self, codes: TensorSource, zeros: TensorSource, scales: TensorSource) -> None:
        shapes = [len(one.shape) == 2 for one in (codes, zeros, scales)]
        fits = all(shapes) and (
            zeros.shape == (scales.shape[0], codes.shape[1])
            and scales.shape[1] == codes.shape[1] * 8
            and codes.shape[0] % scales.shape[0] == 0
        )
        if not fits or codes.dtype != torch.int32 or zeros.dtype != torch.int32:
            raise SpecError(
                f"{super().where(codes.name)}: found shapes {list(codes.shape)}, "
                f"{list(zeros.shape)} and {list(scales.shape)}, expected AWQ's layout of 4 bits"
            )

    def _recognise_mxfp4(self, name: str) -> None:
        blocks, scales = super().source(f"{name}_blocks"), super().source(f"{name}_scales")
        shape = blocks.shape
        dtypes = (blocks.dtype, scales.dtype)
        if (
            len(shape) != 4
            or scales.shape != shape[:3]
            or shape[3] != 16
            or set(dtypes) != {torch.uint8}
        ):
            raise SpecError(
                f"{super().where(blocks.name)}: found shape {list(shape)} with scales "
                f"{list(scales.shape)}, expected blocks of 16 bytes with a scale each"
            )
        pairs = zip(blocks.rows(), scales.rows(), strict=True)
        experts = tuple(Fp4Rows(codes=block, scales=scale) for block, scale in pairs)
        self._decoded[name] = (experts, (shape[0], shape[1], shape[2] * 32))


def _block(
    grid: tuple[int, ...], shape: tuple[int, int], stated: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale, 0 for all rows; ``None`` if none fit."""
    rows, columns = shape
    is_stated = stated is not None and grid == (-(-rows // stated[0]), -(-columns // stated[1]))
    if is_stated and grid[0] != rows:
        return stated
    if columns % grid[1] or grid[0] not in (1, rows):
        return None
    return (1 if grid[0] == rows else 0), columns // grid[1]


_logger = get_logger(__name__)

# Constants that older versions of transformers stored with the weights.
_CONSTANTS = (
    *("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "attn.bias"),
    *("attn.slope_rate", "attn.query_decay", "attn.key_decay", "attn.diagonal_decay"),
)
# Weights of keys and values that Gemma 3n and 4 store also for layers that read those of others.
_UNUSED = tuple(f"self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm"))


def open_tensors(model: Path) -> TensorFiles:
    """Open the weights of a model: safetensors, plain or quantized, or a GGUF file.

    Raises:
        SpecError: as the reader of the format.
    """
    gguf = find_gguf(model)
    if gguf is not None:
        return GgufFiles(gguf)
    codes = codes_config(find_config(model), str(model / "config.json"))
    return TensorFiles(model) if codes is None else QuantizedFiles(model, codes)


class Checkpoint:
    """The weights of a model directory, layer by layer, under transformers' own module names.

    Args:
        model_dir: directory with ``config.json`` and safetensors weights, or a GGUF file.

    Attributes:
        config: of the whole model.
        skeleton: the map of its model's parts.
        tensors: the files themselves, for readers of other layouts.

    Raises:
        SpecError: as ``load_config`` and ``TensorFiles``.
    """

    def __init__(self, model_dir: Path | str) -> None:
        self._model = Path(model_dir)
        self.config, self.skeleton = load_skeleton(model_dir)
        self.tensors = open_tensors(self._model)
        self.directory = self.tensors.directory
        self._root = self._find_root()

    @cached_property
    def _renamed(self) -> dict[str, str]:
        """Stored name of every tensor that transformers renames while it loads.

        Few checkpoints need it, and the rules of all families are compiled at once, in 0.2 s.
        """
        return _renamed(self.config.model_type, self.tensors.names)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of most of the stored weights; errors as ``TensorFiles.dtype``."""
        return self.tensors.dtype

    def digest(self) -> str:
        """SHA-256 over ``config.json`` and every file's name, size and header, in hexadecimal.

        Identifies layout and configuration, not the values of the weights.
        """
        state = hashlib.sha256(config_bytes(self._model))
        for name, header in sorted(self.tensors.headers.items()):
            size = (self.directory / name).stat().st_size
            state.update(f"\0{name}\0{size}\0".encode())
            state.update(header.raw)
        return state.hexdigest()

    def empty_layer(self, index: int) -> nn.Module:
        """Build decoder layer ``index`` on the meta device; ``build_layer`` with one skeleton.

        Raises:
            SpecError: ``index`` is not a layer of the model.
        """
        if not 0 <= index < self.config.num_hidden_layers:
            raise SpecError(f"layer {index}: expected one of [0, {self.config.num_hidden_layers})")
        return self.skeleton.build_layer(self.config, index)

    def layer_prefix(self, index: int) -> str:
        """Return the prefix of the stored names of decoder layer ``index``."""
        return f"{self._root}{self.skeleton.layers_name}.{index}."

    def module_name(self, stored: str) -> str:
        """Return the name of a stored tensor in transformers' whole model.

        It differs if the checkpoint was saved without the head's model around the decoder.
        """
        path = self.skeleton.decoder_path
        root = f"{path}." if path else ""
        heads = (self.skeleton.head_path, self.skeleton.family.parts.stored_head or "lm_head")
        is_head = any(stored.startswith(f"{head}.") for head in heads)
        if self._root == root or is_head or not stored.startswith(self._root):
            return stored
        return root + stored.removeprefix(self._root)

    def layer_sources(
        self, index: int, layer: nn.Module | None = None, *, without: Collection[str] = ()
    ) -> dict[str, TensorSource]:
        """Return the sources of decoder layer ``index``, keys relative to the layer.

        Args:
            index: its place in the model.
            layer: result of :meth:`empty_layer`, if the caller has it.
            without: keys to leave out, because they are stored as codes.

        Raises:
            SpecError: a tensor of the layer is missing, or has another shape or kind of dtype.
        """
        layer = layer or self.empty_layer(index)
        state = layer.state_dict()
        prefix = self.layer_prefix(index)
        reads_others = kv_sources(self.config)[index] is not None
        known = _CONSTANTS + (_UNUSED if reads_others else ())
        self._warn_of_others(prefix, state.keys(), without, known)
        transposed = {
            f"{name}.weight"
            for name, module in layer.named_modules()
            if isinstance(module, TransposedLinear)
        } | {
            f"{name}.{key}"
            for name, module in layer.named_modules()
            if getattr(module, "is_stored_transposed", False)
            for key in ("gate_up_proj", "down_proj")
        }
        return {
            key: self._source(prefix + key, value, is_transposed=key in transposed)
            for key, value in state.items()
            if key not in without
        }

    def master_sources(self, *, without: Collection[str] = ()) -> dict[str, TensorSource]:
        """Return the sources of :class:`Master`'s tensors; a tied head is there once.

        ``without`` are keys to leave out, because they are stored as codes.

        Raises:
            SpecError: as :meth:`layer_sources`.
        """
        sources = {}
        master = Master(self.config)
        embedding = f"{master.embedding_name}.weight"
        for key, value in master.state_dict().items():
            if key in without:
                continue
            stored = self._root + key
            if key.startswith("lm_head."):
                stored = self.head_name(key.removeprefix("lm_head."))
            elif key == embedding and master.lm_head is None and not self._is_stored(stored):
                stored = self.head_name("weight")  # a tied matrix that is stored as the head
            sources[key] = self._source(stored, value)
        return sources

    def layer_state_dict(self, index: int) -> dict[str, Tensor]:
        """Read decoder layer ``index``; errors as :meth:`layer_sources`."""
        return self._load(self.layer_sources(index))

    def master_state_dict(self) -> dict[str, Tensor]:
        """Read the tensors of :class:`Master`; errors as :meth:`master_sources`."""
        return self._load(self.master_sources())

    def _load(self, sources: Mapping[str, TensorSource]) -> dict[str, Tensor]:
        return {key: self.tensors.load(source) for key, source in sources.items()}

    def _is_stored(self, name: str) -> bool:
        return find_stored(self.tensors, name) is not None or name in self._renamed

    def _source(self, name: str, wanted: Tensor, *, is_transposed: bool = False) -> TensorSource:
        """Find what goes into ``wanted``, fusing experts stored one by one."""
        stored = find_stored(self.tensors, name) or self._renamed.get(name)
        if stored is None:
            source = fused_source(self.tensors, name, tuple(wanted.shape), self._renamed)
        else:
            source = self.tensors.source(stored)
        if is_transposed:
            source = source.transposed()
        self._check(source, wanted)
        return source

    def _warn_of_others(
        self, prefix: str, keys: Iterable[str], without: Iterable[str], ignored: tuple[str, ...]
    ) -> None:
        """Warn of stored tensors that the layer does not have, except known endings."""
        known = {prefix + key for key in keys}
        known.update(part for key in list(known) for part in _convolutions(key))
        read_by_others = tuple(prefix + key.removesuffix("weight") for key in without)
        for name in self.tensors.names:
            if not name.startswith(prefix) or name in known or name.startswith(read_by_others):
                continue
            if name.endswith(ignored) or is_expert_part(name):
                continue
            if name not in {self._renamed.get(key) for key in known}:
                _logger.warning("%s is not part of the layer, left out", self.tensors.where(name))

    def _check(self, source: TensorSource, wanted: Tensor) -> None:
        """Check shape and kind of dtype; codes are read by ``GptqCheckpoint``."""
        if source.shape != tuple(wanted.shape):
            raise SpecError(
                f"{self.tensors.where(source.name)}: found shape {list(source.shape)}, "
                f"expected {list(wanted.shape)}"
            )
        allowed = FLOATING if wanted.is_floating_point() else (wanted.dtype,)
        if source.dtype not in allowed:
            raise SpecError(
                f"{self.tensors.where(source.name)}: found dtype {source.dtype}, expected "
                f"{' or '.join(map(str, allowed))}"
            )

    def _find_root(self) -> str:
        """Return the prefix of the decoder's tensors.

        Base models lack parts of the path; multimodal models have a part for the language model;
        Mamba's own code has another name.
        """
        parts = [part for part in self.skeleton.decoder_path.split(".") if part]
        roots = ["".join(f"{part}." for part in parts[i:]) for i in range(len(parts) + 1)]
        roots += [f"model.{root}" for root in roots]
        roots += ["model.language_model.", "language_model.model.", "language_model."]
        roots += ["backbone."]
        layers = self.skeleton.layers_name
        for root in roots:
            if any(name.startswith(f"{root}{layers}.") for name in self.tensors.names):
                return root
        raise SpecError(
            f"{self.directory}: found no tensors of '{roots[0]}{layers}', expected the layers of "
            f"a {self.config.model_type} model"
        )

    def head_name(self, suffix: str) -> str:
        """Return the stored name of a tensor of the head, such as its ``weight``.

        It is the library's, a family's, or a wrapped one; the first of them if it is not stored.
        """
        head = self.skeleton.head_path
        names = [f"{start}{head}.{suffix}" for start in ("", "model.", "language_model.")]
        if self.skeleton.family.parts.stored_head is not None:
            names.insert(0, f"{self.skeleton.family.parts.stored_head}.{suffix}")
        return next((name for name in names if name in self.tensors), names[0])


class MtpCheckpoint(Checkpoint):
    """The same weights, of which the last layer with attention is that for multi-token prediction.

    Args:
        model_dir: as for ``Checkpoint``.

    Attributes:
        layer: the number that the layer is read as.

    Raises:
        SpecError: as ``Checkpoint``, or the checkpoint has no such layer.
    """

    def __init__(self, model_dir: Path | str) -> None:
        super().__init__(model_dir)
        names = self.skeleton.family.mtp
        kinds = range(self.config.num_hidden_layers)
        self.layer = max(i for i in kinds if layer_kv_shape(self.config, i).heads)
        if names is None:
            raise SpecError(
                f"{self.directory}: layers for multi-token prediction are not read of family "
                f"{self.skeleton.family.name}; expected one of "
                f"{', '.join(one.name for one in known_families() if one.mtp is not None)}"
            )
        count = self.config.num_hidden_layers
        found = find_mtp(self.skeleton.family, count, self.tensors.names)
        if found is None:
            folder = names.folder or f"{self._root}{self.skeleton.layers_name}.{count}."
            raise SpecError(
                f"{self.tensors.directory}: found no tensor '{folder}{names.projection}.weight', "
                "expected a checkpoint with the layer for multi-token prediction"
            )
        self._folder, self._names = found

    def layer_prefix(self, index: int) -> str:
        """Return the prefix of the stored names of the layer, whose number is ``layer``."""
        assert index == self.layer
        return f"{self._folder}{self._names.layer}"

    def head_sources(self, head: nn.Module) -> dict[str, TensorSource]:
        """Return the sources of what is around the layer; errors as :meth:`layer_sources`.

        Where a layer behind the model's has no final norm, it is the model's, as in llama.cpp.
        """
        sources = {}
        for key, value in head.state_dict().items():
            part, _, name = key.partition(".")
            stored = f"{self._folder}{getattr(self._names, part)}.{name}"
            is_optional = part == "final_norm" and self._names.folder is None
            if is_optional and not self._is_stored(stored):
                stored = f"{self._root}{self.skeleton.family.parts.final_norm}.{name}"
            sources[key] = self._source(stored, value)
        return sources

    def _warn_of_others(
        self, prefix: str, keys: Iterable[str], without: Iterable[str], ignored: tuple[str, ...]
    ) -> None:
        """Warn of nothing: norms and projection, and copies of embedding and head, are beside."""


def _renamed(model_type: str, names: Iterable[str]) -> dict[str, str]:
    """Return the stored name of every tensor that transformers renames while it loads."""
    rules = [
        rule
        for rule in get_checkpoint_conversion_mapping(model_type) or ()  # type: ignore[no-untyped-call]
        if isinstance(rule, WeightRenaming)
    ]
    found = {}
    for stored in names if rules else ():
        name = stored
        for rule in rules:
            name, _ = rule.rename_source_key(name)
        if name != stored:
            found[name] = stored
    return found


# Fused parameter -> the names of its parts, stacked along N, in each spelling.
_OWN_PARTS = {
    "experts.gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "experts.up_proj": (("up_proj",),),
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


def fused_source(
    tensors: TensorFiles, name: str, shape: tuple[int, ...], renamed: Mapping[str, str]
) -> TensorSource:
    """Return the source of the fused parameter ``name``.

    Stacked experts ``[E, parts * N, K]``, or a convolution ``[C, 1, K]`` of three stored ones.

    Args:
        tensors: the checkpoint's files.
        name: full name of the fused parameter.
        shape: expected shape.
        renamed: stored names of tensors that transformers renames.

    Raises:
        SpecError: no spelling is found, or the shapes or dtypes of the parts differ.
    """
    joined = _rows_source(tensors, name, shape) or _convolution_source(tensors, name, renamed)
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
    for suffix, spellings in _OWN_PARTS.items():
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


def _convolutions(name: str) -> tuple[str, ...]:
    """Return the names of the convolutions that one of all channels may be stored as."""
    block, dot, last = name.rpartition("conv1d.weight")
    return tuple(f"{block}{part}_{dot}" for part in "qkv") if dot and not last else ()


def _convolution_source(
    tensors: TensorFiles, name: str, renamed: Mapping[str, str]
) -> TensorSource | None:
    """Return the source of a convolution ``[C, 1, K]`` that is stored as three (Kimi Linear)."""
    names = [renamed.get(one, one) for one in _convolutions(name)]
    if not names or any(one not in tensors for one in names):
        return None
    found = [tensors.source(one) for one in names]
    for source in found:
        if source.shape[1:] != found[0].shape[1:] or source.dtype != found[0].dtype:
            raise SpecError(
                f"{tensors.where(source.name)}: found shape {list(source.shape)} of "
                f"{source.dtype}, expected channels as those of {found[0].name}"
            )
    return replace(
        found[0],
        shape=(sum(source.shape[0] for source in found), *found[0].shape[1:]),
        ranges=tuple(part for source in found for part in source.ranges),
    )


def _find_parts(tensors: TensorFiles, name: str) -> tuple[str, ...] | None:
    """Return the stored name of each part, with ``{}`` for the expert."""
    for spelling in part_spellings(name):
        parts = tuple(f"{part}.weight" for part in spelling)
        if parts[0].format(0) in tensors:
            return parts
    return None
