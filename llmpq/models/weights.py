"""Checkpoint: which stored tensors make a decoder layer, and which the master.

It maps transformers' module names to the names in a checkpoint: with or without the prefix of the
head's model, experts fused or one by one, tied tensors once. Shapes are checked before reading.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.models.adapter import Skeleton, build_layer
from llmpq.models.config import load_config
from llmpq.models.experts import find_stored, fuse_experts, is_expert_part
from llmpq.models.master import Master
from llmpq.models.tensor_files import TensorFiles

_logger = get_logger(__name__)

# Constants that older versions of transformers stored with the weights.
_CONSTANTS = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "attn.bias")

_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class Checkpoint:
    """The weights of a model directory, layer by layer, under transformers' own module names.

    Args:
        model_dir: directory with ``config.json`` and safetensors weights.

    Attributes:
        config: of the whole model.
        tensors: the files themselves, for readers of other layouts.

    Raises:
        SpecError: as ``load_config`` and ``TensorFiles``.
    """

    def __init__(self, model_dir: Path | str) -> None:
        self.directory = Path(model_dir)
        self.config = load_config(self.directory)
        self.tensors = TensorFiles(self.directory)
        self._skeleton = Skeleton.of(self.config)
        self._root = self._find_root()

    @property
    def dtype(self) -> torch.dtype:
        """Number format of most of the stored weights, by bytes.

        Raises:
            SpecError: no tensor holds floating-point numbers.
        """
        stored: Counter[str] = Counter()
        for header in self.tensors.headers.values():
            for entry in header.entries.values():
                if entry.dtype in _TORCH_DTYPES:
                    stored[entry.dtype] += entry.end - entry.begin
        if not stored:
            raise SpecError(f"{self.directory}: found no floating-point weights")
        return _TORCH_DTYPES[stored.most_common(1)[0][0]]

    def digest(self) -> str:
        """SHA-256 over ``config.json`` and every file's name, size and header, in hexadecimal.

        Cheap and stable: it tells layouts and configurations apart, not two sets of weights of
        one layout. Weights are hashed by whoever publishes them.
        """
        state = hashlib.sha256((self.directory / "config.json").read_bytes())
        for name, header in sorted(self.tensors.headers.items()):
            size = (self.directory / name).stat().st_size
            state.update(f"\0{name}\0{size}\0".encode())
            state.update(header.raw)
        return state.hexdigest()

    def layer_state_dict(self, index: int) -> dict[str, Tensor]:
        """Read decoder layer ``index``, keys relative to transformers' layer module.

        Raises:
            SpecError: a tensor of the layer is missing or has another shape.
        """
        state = build_layer(self.config, index).state_dict()
        prefix = f"{self._root}{self._skeleton.layers_name}.{index}."
        self._remark_on_others(prefix, state.keys())
        return self._read({prefix + k: (k, tuple(v.shape)) for k, v in state.items()})

    def master_state_dict(self) -> dict[str, Tensor]:
        """Read what :class:`Master` holds, under its names; a tied head is read once.

        Raises:
            SpecError: as :meth:`layer_state_dict`.
        """
        wanted = {}
        for key, value in Master(self.config).state_dict().items():
            stored = self._root + key
            if key.startswith("lm_head."):
                stored = self._find_head(key.removeprefix("lm_head."))
            wanted[stored] = (key, tuple(value.shape))
        return self._read(wanted)

    def _read(self, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
        """Read ``{stored name: (key, expected shape)}``, fusing experts stored one by one."""
        plain: dict[str, str] = {}
        state: dict[str, Tensor] = {}
        for name, (key, shape) in wanted.items():
            stored = find_stored(self.tensors, name)
            if stored is None:
                state[key] = fuse_experts(self.tensors, name, shape)
            else:
                self._check_shape(stored, shape)
                plain[stored] = key
        for stored, tensor in self.tensors.read(plain):
            state[plain[stored]] = tensor
        return state

    def _remark_on_others(self, prefix: str, keys: Iterable[str]) -> None:
        """Say which stored tensors the layer has no place for; old checkpoints keep constants."""
        known = {prefix + key for key in keys}
        for name in self.tensors.names:
            is_other = name.startswith(prefix) and name not in known
            if is_other and not name.endswith(_CONSTANTS) and not is_expert_part(name):
                _logger.warning("%s is not part of the layer, left out", self.tensors.where(name))

    def _check_shape(self, stored: str, shape: tuple[int, ...]) -> None:
        found = self.tensors.shape(stored)
        if found != shape:
            where = self.tensors.where(stored)
            raise SpecError(f"{where}: found shape {list(found)}, expected {list(shape)}")

    def _find_root(self) -> str:
        """Prefix of the decoder's tensors: checkpoints of base models lack some of the path."""
        parts = [part for part in self._skeleton.decoder_path.split(".") if part]
        roots = ["".join(f"{part}." for part in parts[i:]) for i in range(len(parts) + 1)]
        roots += [f"model.{root}" for root in roots]
        layers = self._skeleton.layers_name
        for root in roots:
            if any(name.startswith(f"{root}{layers}.") for name in self.tensors.names):
                return root
        raise SpecError(
            f"{self.directory}: found no tensors of '{roots[0]}{layers}', expected the layers of "
            f"a {self.config.model_type} model"
        )

    def _find_head(self, suffix: str) -> str:
        """Name of the head's tensor: the library's own, a family's other one, or a wrapped one."""
        head = self._skeleton.head_path
        names = [f"{head}.{suffix}", f"model.{head}.{suffix}"]
        if self._skeleton.family.stored_head is not None:
            names.insert(0, f"{self._skeleton.family.stored_head}.{suffix}")
        return next((name for name in names if name in self.tensors), names[0])
