"""Checkpoint: the stored tensors of each decoder layer and of the master.

Maps transformers' module names to the names in a checkpoint: with or without the prefix of the
head's model, experts fused or one by one, tied tensors once. Shapes and dtypes are checked before
reading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.models.adapter import TransposedLinear
from llmpq.models.config import kv_sources, load_skeleton
from llmpq.models.experts import find_stored, fused_source, is_expert_part
from llmpq.models.files.gguf_files import GgufFiles
from llmpq.models.files.quantized_files import QuantizedFiles
from llmpq.models.files.sources import TensorSource
from llmpq.models.files.tensor_files import FLOATING, TensorFiles
from llmpq.models.master import Master
from llmpq.spec.gguf.config import config_bytes
from llmpq.spec.gguf.header import find_gguf
from llmpq.spec.huggingface.gptq import find_config
from llmpq.spec.huggingface.quantization import codes_config

_logger = get_logger(__name__)

# Constants that older versions of transformers stored with the weights.
_CONSTANTS = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "attn.bias")
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
        heads = (self.skeleton.head_path, self.skeleton.family.stored_head or "lm_head")
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
            source = fused_source(self.tensors, name, tuple(wanted.shape))
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

        Base models lack parts of the path; multimodal models have a part for the language model.
        """
        parts = [part for part in self.skeleton.decoder_path.split(".") if part]
        roots = ["".join(f"{part}." for part in parts[i:]) for i in range(len(parts) + 1)]
        roots += [f"model.{root}" for root in roots]
        roots += ["model.language_model.", "language_model.model.", "language_model."]
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
        if self.skeleton.family.stored_head is not None:
            names.insert(0, f"{self.skeleton.family.stored_head}.{suffix}")
        return next((name for name in names if name in self.tensors), names[0])


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
