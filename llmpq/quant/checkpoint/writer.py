"""CheckpointWriter: writes a model directory of safetensors shards, tensor by tensor.

Tensors are held until a shard is full. The directory gets its name when everything is written; a
run that fails leaves nothing behind. Existing directories are never overwritten.

Files of compressed-tensors have the format ``pack-quantized``: ``weight_packed`` int32
``[N, K b / 32]``, codes as one little-endian bit stream along every row; ``weight_scale``
``[N, G]``; ``weight_shape``; and, where codes are not symmetric, ``weight_zero_point`` int32
``[N b / 32, G]``, zero points as a stream down every column. It holds 3 bits, which vLLM does not
read in GPTQ's format.

Shape legend: N output features, K input features, G groups, b bits.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.kernels.base import pack_codes
from llmpq.quant.quantizers.integer import IntegerWeight
from llmpq.spec.fields import dump_json
from llmpq.spec.model_files.weight_headers import INDEX_FILE, SINGLE_FILE
from llmpq.spec.precision import Precision

SHARD_BYTES = 1 << 30

# Files of a model directory that are copied with it.
_COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "NOTICE",
)


class CheckpointWriter:
    """Writes a model directory; a context manager that deletes unfinished files on an error.

    Args:
        output: the directory to make.
        shard_bytes: maximum size of a shard.

    Attributes:
        total_bytes: of all tensors added so far.

    Raises:
        SpecError: ``output`` exists, or its parent cannot be written to.
    """

    def __init__(self, output: Path | str, shard_bytes: int = SHARD_BYTES) -> None:
        self.output = Path(output)
        if self.output.exists():
            raise SpecError(f"{self.output}: exists already, expected a new directory")
        self._shard_bytes = shard_bytes
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self.total_bytes = 0
        self._shards: list[list[str]] = []
        self._known: set[str] = set()
        parent = self.output.absolute().parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=f".{self.output.name}.", suffix=".partial", dir=parent)
        except OSError as error:
            raise SpecError(f"{parent}: cannot be written to: {error.strerror}") from None
        self._partial = Path(made)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; it is held until its shard is full."""
        assert name not in self._known, name
        self._known.add(name)
        if self._held and self._held_bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._held[name] = tensor.detach().cpu().contiguous()
        self._held_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def commit(self, config: dict[str, Any], source: Path) -> None:
        """Write the rest, the configuration and copies of ``source``'s other files; then rename.

        Raises:
            SpecError: the directory exists by now, or cannot be written.
        """
        try:
            self._flush()
            self._name_shards()
            (self._partial / "config.json").write_text(dump_json(config), encoding="utf-8")
            for name in _COPIED_FILES:
                if (source / name).is_file():
                    shutil.copyfile(source / name, self._partial / name)
            self._open_to_readers()
            os.rename(self._partial, self.output)  # noqa: PTH104  Path.rename takes over files
        except OSError as error:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise SpecError(f"{self.output}: cannot be written: {error.strerror}") from None

    def _open_to_readers(self) -> None:
        """Set the default permissions of new files; temporary ones are private."""
        mask = _umask()
        self._partial.chmod(0o777 & ~mask)
        for path in self._partial.iterdir():
            path.chmod(0o666 & ~mask)

    def _flush(self) -> None:
        if not self._held:
            return
        path = self._partial / _shard_name(len(self._shards))
        # 'format' is what transformers looks for in the metadata.
        save_file(self._held, path, metadata={"format": "pt"})
        self._shards.append(list(self._held))
        self._held = {}
        self._held_bytes = 0

    def _name_shards(self) -> None:
        """Give the shards their final names, which contain their number."""
        count = len(self._shards)
        if count == 1:
            (self._partial / _shard_name(0)).rename(self._partial / SINGLE_FILE)
            return
        weight_map = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self._partial / _shard_name(index)).rename(self._partial / file)
            weight_map.update(dict.fromkeys(names, file))
        content = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (self._partial / INDEX_FILE).write_text(text, encoding="utf-8")


def _shard_name(index: int) -> str:
    return f"shard-{index}.partial"


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


_WORD_BITS = 32
_ROUTERS = r"re:.*\.(gate|router|shared_expert_gate)$"


def compressed_parts(weight: IntegerWeight) -> dict[str, Tensor]:
    """Turn a quantized matrix into the tensors of a file.

    Raises:
        SpecError: its columns are reordered, or its shape does not fill whole words.
    """
    bits, (rows, columns) = weight.precision.bits, weight.shape
    if weight.order is not None:
        raise SpecError("compressed-tensors file: found reordered columns, expected none")
    if rows * bits % _WORD_BITS or columns * bits % _WORD_BITS:
        raise SpecError(
            f"compressed-tensors file: found a weight [{rows}, {columns}] of {bits} bits, expected "
            f"features that fill words of {_WORD_BITS} bits"
        )
    parts = {
        "weight_packed": pack_codes(weight.codes, bits).view(torch.int32),
        "weight_scale": weight.scales.to(torch.bfloat16),  # exact: scales have few bits
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not weight.precision.symmetric:
        zeros = weight.zero_points.T.to(torch.uint8).contiguous()  # [G, N]
        parts["weight_zero_point"] = pack_codes(zeros, bits).view(torch.int32).T.contiguous()
    return parts


def compressed_config(
    precisions: Sequence[Precision],
    layers_name: str,
    meta: Mapping[str, Any],
    head: tuple[str, Precision] | None = None,
) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model whose layers have these precisions.

    Every precision is a group of its own, with a pattern of its layers' names.

    Args:
        precisions: of every layer; layers of 16 bits are not quantized.
        layers_name: what the list of layers is called, such as ``layers``.
        meta: provenance of the file.
        head: name and precision of the LM head if it is quantized, too.

    Raises:
        SpecError: no layer is quantized.
    """
    layers: dict[Precision, list[int]] = {}
    for index, precision in enumerate(precisions):
        layers.setdefault(precision, []).append(index)
    plain = [index for one, found in layers.items() if one.bits == 16 for index in found]
    quantized = {one: found for one, found in layers.items() if one.bits != 16}
    if not quantized:
        raise SpecError(
            "compressed-tensors file: found only layers of 16 bits, expected some to be quantized"
        )
    targets = {one: [_pattern(layers_name, found)] for one, found in quantized.items()}
    if head is not None:
        targets.setdefault(head[1], []).append(head[0])
    groups = {
        f"group_{number}": {
            "targets": own,
            "weights": _weights(precision),
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
        for number, (precision, own) in enumerate(targets.items())
    }
    left = [] if head is not None else ["lm_head"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*left, _ROUTERS, *([_pattern(layers_name, plain)] if plain else [])],
        "kv_cache_scheme": None,
        "meta": dict(meta),
    }


def _pattern(layers_name: str, indices: Sequence[int]) -> str:
    numbers = "|".join(map(str, indices))
    return rf"re:.*\.{re.escape(layers_name)}\.({numbers})\..*"


def _weights(precision: Precision) -> dict[str, Any]:
    is_grouped = precision.group_size is not None
    return {
        "num_bits": precision.bits,
        "type": "int",
        "symmetric": precision.symmetric,
        "strategy": "group" if is_grouped else "channel",
        "group_size": precision.group_size,
        "dynamic": False,
    }
