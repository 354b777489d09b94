"""Decode attention as ``paged_decode.attend`` computes it, in operators of torch.

It stands in for the kernels where a test is about what surrounds them: Triton's interpreter takes
a tenth of a second for a launch, and captures of tests record operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llmpq.kernels.cpu.paged_attention import PagedHeads
from llmpq.kernels.gpu import paged_decode
from llmpq.kernels.gpu.paged_decode import DecodeRows
from llmpq.models.attention import keys_before

_ATTEND = paged_decode.attend


def attend(
    query: Tensor,
    heads: PagedHeads,
    rows: DecodeRows,
    out: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    rounds_bias: bool = False,
) -> None:
    """Attend with the tokens of the rows; see ``paged_decode.attend``."""
    tables = rows.tables.clamp(0, heads.keys.shape[0] - 1).long()
    groups = query.shape[1] // heads.keys.shape[1]
    keys, values = (
        _gathered(stored, scales, tables).repeat_interleave(groups, 1)
        for stored, scales in (
            (heads.keys, heads.key_scales),
            (heads.values, heads.value_scales),
        )
    )  # [R, H, S, d]
    is_all = rows.tokens is None
    own = query[0] if is_all else query[0].index_select(1, rows.tokens.long())  # [H, R, d]
    scores = torch.einsum("hrd,rhsd->rhs", own.float(), keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(scores.shape[-1], device=query.device)
    if slopes is not None:
        bias = slopes[:, None] * places
        scores = scores + (bias.to(query.dtype).float() if rounds_bias else bias)
    seen = keys_before(rows.positions.long()[:, None], places, window, chunk)  # [R, 1, S]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None].expand(len(tables), -1, 1)], 2)
    weights = scores.softmax(-1)[..., : len(places)]
    values = values.masked_fill(~seen[..., None], 0)  # what is not seen may not be a number
    made = torch.einsum("rhs,rhsd->rhd", weights, values).to(out.dtype)
    if is_all:
        out[0].copy_(made)
    else:
        out[0].index_copy_(0, rows.tokens.long(), made)


def _gathered(stored: Tensor, scales: Tensor | None, tables: Tensor) -> Tensor:
    """Return the blocks of tables ``[R, W]``: float32 ``[R, h, W * B, d]``."""
    found = stored[tables].float()  # [R, W, h, B, d]
    if scales is not None:
        found = found * scales[tables].float()[..., None]
    return found.transpose(1, 2).flatten(2, 3)


def use(monkeypatch: Any) -> None:
    """Let this stand in for the kernels and for the code that launches them."""
    monkeypatch.setattr(paged_decode, "attend", attend)


class Launches:
    """Stands in for a module of kernels; keeps the names of those that are launched."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return _Kernel(lambda: self.names.append(name))


class _Kernel:
    def __init__(self, note: Callable[[], None]) -> None:
        self._note = note

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: self._note()


def use_without_kernels(monkeypatch: Any) -> Launches:
    """Let the code that launches the kernels run, and launch nothing; return what it would."""
    launches = Launches()
    monkeypatch.setattr(paged_decode, "attend", _ATTEND)
    monkeypatch.setattr(paged_decode, "kernels", lambda: launches)
    return launches
