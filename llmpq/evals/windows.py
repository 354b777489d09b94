"""Windows: a text cut into the rows of tokens on which a model is scored.

The text is tokenized as a whole and cut into windows without overlap; the first token of a window
is context only. The remainder is a shorter window if it has at least two tokens. Rows are never
padded.

Shapes: N tokens of the text, R windows of a micro-batch, T tokens of a window but its last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llmpq.dist.io.model_files import load_tokenizer
from llmpq.errors import SpecError
from llmpq.models import load_config
from llmpq.spec.fields import read_text
from llmpq.spec.model_files.tokenizer import missing_tokenizer

DEFAULT_WINDOW = 512
DEFAULT_ROWS = 8
MAX_TEXT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowBatch:
    """Windows of one length that are scored together.

    Attributes:
        inputs: ``[R, T]`` int64.
        targets: ``[R, T]`` int64, the next token of each input.
    """

    inputs: Tensor
    targets: Tensor

    @property
    def positions(self) -> Tensor:
        """Positions of the inputs, ``[R, T]``."""
        return torch.arange(self.inputs.shape[1]).expand(self.inputs.shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """A text cut into windows, grouped into micro-batches.

    Attributes:
        token_ids: ``[N]`` int64.
        window: tokens of a window, at least 2.
        rows: windows of a micro-batch, at least 1.

    Raises:
        SpecError: the text has less than two tokens, or a size is too small.
    """

    token_ids: Tensor
    window: int = DEFAULT_WINDOW
    rows: int = DEFAULT_ROWS

    def __post_init__(self) -> None:
        if self.window < 2 or self.rows < 1:
            raise SpecError(
                f"windows: found {self.rows} rows of {self.window} tokens, "
                "expected at least 1 row of 2 tokens"
            )
        if self.token_ids.numel() < 2:
            raise SpecError(
                f"text: found {self.token_ids.numel()} tokens, expected at least 2: "
                "one of context and one to predict"
            )

    @classmethod
    def cut(
        cls, token_ids: Sequence[int], *, window: int = DEFAULT_WINDOW, rows: int = DEFAULT_ROWS
    ) -> Windows:
        """Cut a list of tokens."""
        ids = torch.tensor(list(token_ids), dtype=torch.int64)
        return cls(token_ids=ids, window=window, rows=rows)

    @property
    def tokens(self) -> int:
        """Number of predicted tokens."""
        return sum(batch.targets.numel() for batch in self.batches())

    @property
    def longest(self) -> int:
        """Largest number of tokens in a row, ``T``."""
        return min(self.window, self.token_ids.numel()) - 1

    @property
    def num_batches(self) -> int:
        """Number of micro-batches."""
        return sum(1 for _ in self.batches())

    def batches(self) -> Iterator[WindowBatch]:
        """Yield the windows in order of the text, ``rows`` at a time."""
        whole = self.token_ids.numel() // self.window
        grid = self.token_ids[: whole * self.window].view(whole, self.window)
        for rows in torch.split(grid, self.rows) if whole else ():
            yield WindowBatch(inputs=rows[:, :-1], targets=rows[:, 1:])
        rest = self.token_ids[whole * self.window :]
        if rest.numel() > 1:
            yield WindowBatch(inputs=rest[None, :-1], targets=rest[None, 1:])


def read_windows(
    model_dir: Path | str,
    text: Path | str,
    *,
    window: int = DEFAULT_WINDOW,
    rows: int = DEFAULT_ROWS,
    max_tokens: int | None = None,
) -> Windows:
    """Tokenize a text file with the tokenizer of the model and cut it into windows.

    Args:
        model_dir: directory with the tokenizer and ``config.json``.
        text: UTF-8 text file.
        window: tokens of a window.
        rows: windows of a micro-batch.
        max_tokens: maximum tokens of the text; ``None`` for all.

    Raises:
        SpecError: the text cannot be read or is too short, there is no tokenizer, or a window is
            longer than the positions of the model.
    """
    tokenizer = load_tokenizer(Path(model_dir))
    if tokenizer is None:
        raise SpecError(
            f"{model_dir}: found no tokenizer, expected one next to the weights: "
            f"{missing_tokenizer(Path(model_dir))}"
        )
    positions = getattr(load_config(model_dir), "max_position_embeddings", None)
    if positions is not None and window - 1 > positions:
        raise SpecError(f"window: found {window} tokens, the model knows {positions} positions")
    ids = tokenizer.encode(_read_text(Path(text)))[:max_tokens]
    return Windows.cut(ids, window=window, rows=rows)


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_TEXT_BYTES:
            raise SpecError(f"{path}: found {size} bytes, expected at most {MAX_TEXT_BYTES}")
        return read_text(path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read as text: {error}") from error
