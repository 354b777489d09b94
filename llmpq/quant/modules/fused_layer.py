"""FusedLayer: a decoder layer of transformers in few kernels, on a GPU.

It is recognised as compiled steps of CPUs recognise one (``step_compiler``), and keeps the layer's
linear operators. Between them run the kernels of ``llmpq.kernels.gpu.rows``: eleven launches for a
decode step of most families once operators with one input are joined. What it does not know keeps
the code of transformers; that it computes the same is the caller's to try
(``llmpq.dist.engine.compiled_steps``).

Shapes: N tokens, C hidden size, H heads, h KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from llmpq.kernels.base import ProductParts
from llmpq.kernels.cpu.paged_attention import PagedHeads
from llmpq.kernels.cpu.step import RowNorm, UnsupportedStepError
from llmpq.kernels.gpu import rows
from llmpq.models.attention import LayerAttention, RowsView, ScoreOptions
from llmpq.quant.modules.experts import Linear, activation_like
from llmpq.quant.modules.layer import DenseLinear, QuantLinear
from llmpq.quant.modules.step_compiler import LayerParts, MlpParts, norm_like

_CACHES = ("past_key_values", "layer_past")
"""Names of the argument of a layer with its keys and values."""


class TokenPlaces(Protocol):
    """Where tokens lie in the blocks of a layer."""

    @property
    def block(self) -> Tensor:
        """Of each token, int64 ``[N]``."""
        ...

    @property
    def offset(self) -> Tensor:
        """Of each token in its block, int64 ``[N]``."""
        ...


class StoringView(RowsView, Protocol):
    """A view of keys and values whose new tokens a kernel stores."""

    def index(self) -> TokenPlaces:
        """Return where the new tokens lie in the blocks of the selected layer."""
        ...


class FusedLayer(nn.Module):
    """A decoder layer in few kernels; replaces that of transformers, and is called as it is.

    Args:
        layer: of transformers, loaded, quantized or not; its linear operators are used.
        parts: its modules.
        options: how its scores become weights.
        heads: its keys and values in blocks.
        layer_idx: its number in the model.
        dtype: of hidden states.

    Attributes:
        heads: its keys and values in blocks.

    Raises:
        UnsupportedStepError: the layer has a module that no kernel computes.
    """

    def __init__(
        self,
        layer: nn.Module,
        parts: LayerParts,
        options: ScoreOptions,
        heads: PagedHeads,
        *,
        layer_idx: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        mlp = _checked(parts)
        self._options = options
        self.heads = heads
        self._layer_idx = layer_idx
        self._dtype = dtype
        self._form = parts.form
        self._factor = parts.multiplier
        self._projections = Products([_linear(layer, name) for name in parts.projections])
        self._output = Products([_linear(layer, parts.output)])
        self._ups = Products([_linear(layer, name) for name in mlp.ups])
        self._down = Products([_linear(layer, mlp.down)])
        self._has_gate = mlp.has_gate
        self._activation = mlp.function or activation_like(layer.get_submodule(str(mlp.activation)))
        columns = self._down.widths[0]
        self._norms = [_norm(layer, name, columns, dtype) for name in parts.norms]
        key_dim = heads.keys.shape[-1]
        self._head_norms = [_norm(layer, name, key_dim, dtype, of_heads=True)
                            for name in (*parts.head_norms, None, None)[:2]]  # fmt: skip

    def join(self) -> None:
        """Join linear operators that read the same rows, where their kernels allow it."""
        self._projections.join()
        self._ups.join()

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        """Return ``[1, N, C]`` from ``[1, N, C]``; ``arguments`` are those of a layer."""
        before, after, second, last = self._norms
        x, factor = hidden[0].contiguous(), self._factor
        _, normed = rows.add_norm(x, None, norm=before)
        attended = self._output(self._attention(normed, arguments))[0]
        if self._form.is_parallel:  # the MLP reads the input of the layer
            normed = normed if second is None else rows.add_norm(x, None, norm=second)[1]
            x, _ = rows.add_norm(x, attended, inner=after, factor=factor)
        else:
            x, normed = rows.add_norm(x, attended, inner=after, factor=factor, norm=second)
        made = self._down(self._gated(normed))[0]
        x, _ = rows.add_norm(x, made, inner=last, factor=factor)
        return x[None]

    def _attention(self, x: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return ``[N, H d]``, before the last projection."""
        mask = cast("LayerAttention", arguments["attention_mask"])
        found = [arguments[name] for name in _CACHES if arguments.get(name) is not None]
        tokens = None
        if found:
            view = cast("StoringView", found[0])
            view.select(self._layer_idx)
            places = view.index()
            tokens = rows.NewTokens(heads=self.heads, block=places.block, offset=places.offset)
        rotation = self._rotation(arguments.get("position_embeddings"))
        query, key, value = rows.rotate_store(self._projected(x), rotation, tokens, self._dtype)
        attended = mask.step.attend(query, key, value, self._options)  # [1, N, H, d]
        return attended.reshape(len(x), -1)

    def _rotation(self, table: tuple[Tensor, Tensor] | None) -> rows.Rotation:
        cos, sin, turned = None, None, 0
        if self._form.rotation is not None:
            if not isinstance(table, tuple):
                raise UnsupportedStepError("no rotary embedding of cosines and sines")
            cos, sin = (part[0].contiguous() for part in table)
            turned = cos.shape[-1] * (2 if self._form.rotation == "short" else 1)
        query_norm, key_norm = self._head_norms
        return rows.Rotation(
            query_norm=query_norm,
            key_norm=key_norm,
            is_late=self._form.norms_late,
            cos=cos,
            sin=sin,
            turned=turned,
        )

    def _projected(self, x: Tensor) -> tuple[ProductParts, ProductParts, ProductParts]:
        """Return queries ``[P, N, H, d]``, keys ``[P, N, h, d]`` and values of ``x``."""
        _, kv_heads, _, dim = self.heads.keys.shape
        found = self._projections(x)
        if len(found) > 1:
            query, key = (_heads_of(one, dim) for one in found[:2])
            # The values may be the keys.
            return query, key, _heads_of(found[-1], self.heads.values.shape[-1])
        heads = found[0].values.shape[-1] // dim - 2 * kv_heads
        if not self._form.by_heads:
            ends = [0, heads * dim, (heads + kv_heads) * dim, (heads + 2 * kv_heads) * dim]
            query, key, value = (
                _heads_of(_columns(found[0], *span), dim) for span in pairwise(ends)
            )
            return query, key, value
        groups = found[0].viewed(lambda part: _unflattened(part, kv_heads, -1, dim))
        if kv_heads == 1:
            query = groups.viewed(lambda part: part[..., 0, :-2, :])
        elif heads == kv_heads:
            query = groups.viewed(lambda part: part[..., 0, :])
        else:
            raise UnsupportedStepError("keys between the queries of different groups")
        key = groups.viewed(lambda part: part[..., -2, :])
        return query, key, groups.viewed(lambda part: part[..., -1, :])

    def _gated(self, x: Tensor) -> Tensor:
        """Return what the last product of the MLP reads."""
        first, *rest = self._ups(x)
        second = rest[0] if rest else None
        if self._has_gate:
            half = first.values.shape[-1] // 2
            first, second = _columns(first, 0, half), _columns(first, half, 2 * half)
        return rows.gate(first, second, self._activation, self._dtype)


class Products(nn.Module):
    """Linear operators that read the same rows.

    Args:
        linears: quantized or not.

    Attributes:
        widths: outputs of each.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        super().__init__()
        self.widths = [linear.out_features for linear in linears]
        self._linears = nn.ModuleList(linears)

    def join(self) -> None:
        """Make one operator of several, where their kernels allow it."""
        linears = list(self._linears)
        if len(linears) < 2:
            return
        made: nn.Module | None = None
        if all(isinstance(one, QuantLinear) for one in linears):
            made = QuantLinear.joined(cast("list[QuantLinear]", linears))
        elif all(type(one) is nn.Linear for one in linears):
            made = _joined(cast("list[nn.Linear]", linears))
        if made is not None:
            self._linears = nn.ModuleList([made])

    def forward(self, x: Tensor) -> list[ProductParts]:
        """Return the parts of every product of ``x`` ``[N, K]``."""
        made = [
            linear.parts(x)
            if isinstance(linear, QuantLinear)
            else ProductParts(values=linear(x)[None])
            for linear in self._linears
        ]
        if len(made) == len(self.widths):
            return made
        return [_columns(made[0], *span) for span in pairwise([0, *accumulate(self.widths)])]


def _checked(parts: LayerParts) -> MlpParts:
    """Return the MLP of a layer all of whose modules kernels compute."""
    form = parts.form
    reasons = {
        "a layer with a state": parts.mixer is not None,
        "experts": not isinstance(parts.mlp, MlpParts),
        "rotation of neighbours": form.rotation == "pairs",
        "a gate of attention": parts.is_gated,
        "a factor of the output": parts.scalar != 1,
        "a norm of values": any(parts.head_norms[2:]),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedStepError(reason)
    return cast("MlpParts", parts.mlp)


def _linear(layer: nn.Module, name: str) -> Linear:
    linear = layer.get_submodule(name)
    if not isinstance(linear, (QuantLinear, DenseLinear)) and type(linear) is not nn.Linear:
        raise UnsupportedStepError(f"{type(linear).__name__} in '{name}'")
    return linear


def _norm(
    layer: nn.Module, name: str | None, columns: int, dtype: torch.dtype, *, of_heads: bool = False
) -> RowNorm | None:
    if name is None:
        return None
    norm = norm_like(layer.get_submodule(name), columns, dtype)
    rows.check_norm(norm, columns, of_heads=of_heads)
    return norm


def _columns(parts: ProductParts, first: int, end: int) -> ProductParts:
    return parts.viewed(lambda part: part[..., first:end])


def _heads_of(parts: ProductParts, dim: int) -> ProductParts:
    return parts.viewed(lambda part: _unflattened(part, -1, dim))


def _unflattened(x: Tensor, *sizes: int) -> Tensor:
    return x.view(*x.shape[:-1], *sizes)


def _joined(linears: Sequence[nn.Linear]) -> nn.Linear | None:
    """Return one operator with the outputs of several, ``None`` if only some have a bias."""
    biases = [bias for one in linears if (bias := one._parameters["bias"]) is not None]
    if len(biases) not in (0, len(linears)):
        return None
    made = nn.Linear(linears[0].in_features, 1, bias=bool(biases), device="meta")
    made.out_features = sum(one.out_features for one in linears)
    weight = torch.cat([one.weight.detach() for one in linears])
    made.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined = torch.cat([one.detach() for one in biases])
        made.bias = nn.Parameter(joined, requires_grad=False)
    return made
