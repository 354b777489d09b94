"""Write a model directory a few tensors at a time: shards, their index, all or nothing.

Tensors are kept until a shard is full and then leave memory. The directory gets its name when the
last byte is written; a run that fails leaves nothing behind. This module refuses to overwrite, and
to know what the tensors mean.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors.torch import save_file
from torch import Tensor

from llmpq.errors import SpecError
from llmpq.models.files.tensor_files import INDEX_FILE, SINGLE_FILE
from llmpq.spec.fields import dump_json

SHARD_BYTES = 1 << 30

# What a model directory holds besides weights and its configuration, and what readers look for.
_COMPANIONS = (
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
    """A model directory being written; a context manager that commits when no error leaves it.

    Args:
        output: the directory to make.
        shard_bytes: size at which a shard is closed.

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
        self._total_bytes = 0
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors added so far."""
        return self._total_bytes

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; the writer's reference to it lasts until its shard is full."""
        assert name not in self._known, name
        self._known.add(name)
        if self._held and self._held_bytes + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._held[name] = tensor.detach().cpu().contiguous()
        self._held_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def commit(self, config: dict[str, Any], source: Path) -> None:
        """Write the rest, the configuration and a copy of ``source``'s other files; then appear.

        Raises:
            SpecError: the directory came into being in the meantime, or cannot be written.
        """
        try:
            self._flush()
            self._name_shards()
            (self._partial / "config.json").write_text(dump_json(config), encoding="utf-8")
            for name in _COMPANIONS:
                if (source / name).is_file():
                    shutil.copyfile(source / name, self._partial / name)
            self._open_to_readers()
            os.rename(self._partial, self.output)  # noqa: PTH104  Path.rename takes over files
        except OSError as error:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise SpecError(f"{self.output}: cannot be written: {error.strerror}") from None

    def _open_to_readers(self) -> None:
        """Give directory and files the permissions that new ones have; theirs are private."""
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
        """Give the shards the names the library looks for, now that their number is known."""
        count = len(self._shards)
        if count == 1:
            (self._partial / _shard_name(0)).rename(self._partial / SINGLE_FILE)
            return
        weight_map = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            (self._partial / _shard_name(index)).rename(self._partial / file)
            weight_map.update(dict.fromkeys(names, file))
        content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        (self._partial / INDEX_FILE).write_text(text, encoding="utf-8")


def _shard_name(index: int) -> str:
    return f"shard-{index}.partial"


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
