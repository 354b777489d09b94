"""Modules that replace linear operators, experts and the head, with weights in a kernel's layout.

They are for inference and cannot be moved to another device or cast once built.

Shape legend: T tokens, K inputs, N outputs, H hidden, F features of an expert, k experts a token,
R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.kernels.base import KernelBackend, PreparedWeight
from llmpq.kernels.cpu.compiled_backends import TileBackend
from llmpq.kernels.cpu.dense import prepack, prepacked_linear
from llmpq.kernels.cpu.tiles import TiledWeight, rows_of_tiles
from llmpq.kernels.packed import PackedWeight
from llmpq.models.expert_layouts import ClampedGate
from llmpq.spec.runtime_constants import ROW_BLOCK


class QuantLinear(nn.Module):
    """A linear operator with a quantized weight; replaces ``nn.Linear``.

    Attributes:
        in_features: K.
        out_features: N.
        precision: how the weight is stored.
        bias: ``[N]`` in the run's dtype, or ``None``.
        order: int32 ``[K]``, the input feature of every stored column; ``None`` if unchanged.
    """

    bias: Tensor | None
    order: Tensor | None

    def __init__(
        self, packed: PackedWeight | TiledWeight, bias: Tensor | None, backend: KernelBackend
    ) -> None:
        """Prepare ``packed`` for ``backend``; only the prepared form is kept.

        Tiles are used without a copy; the backend must read tiles.

        Raises:
            SpecError: the backend cannot run this weight, or the bias does not fit it.
        """
        super().__init__()
        self.in_features = packed.in_features
        self.out_features = packed.out_features
        self.precision = packed.precision
        self._backend = backend
        if isinstance(packed, TiledWeight):
            assert isinstance(backend, TileBackend)
            self._weight, order = backend.wrap(packed), None
        else:
            self._weight, order = backend.prepare(packed.in_stored_order()), packed.order
        self._dtype = packed.dtype
        self.register_buffer("order", order)
        self.set_bias(bias)

    def set_bias(self, bias: Tensor | None) -> None:
        """Set the bias ``[N]``; ``None`` removes it.

        Raises:
            SpecError: it has another shape.
        """
        if bias is not None and tuple(bias.shape) != (self.out_features,):
            raise SpecError(
                f"quantized linear: found a bias {list(bias.shape)}, expected [{self.out_features}]"
            )
        self.register_buffer("bias", None if bias is None else bias.detach().to(self._dtype))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight in its backend's layout, without the bias."""
        return self._weight.nbytes

    @property
    def prepared(self) -> PreparedWeight:
        """The weight in its backend's layout."""
        return self._weight

    @property
    def backend_name(self) -> str:
        """Name of the backend that multiplies."""
        return self._backend.name

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the run that the weight was quantized for."""
        return self._dtype

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows ``ids`` ``[...]`` of the weight, dequantized: ``[..., K]``.

        The backend must read rows, and the columns must be in their own order.
        """
        assert self.order is None
        return self._backend.rows(self._weight, ids, self._dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x`` ``[..., K]``: ``[..., N]`` in x's dtype."""
        if self.order is not None:
            # Backends read the columns in stored order.
            x = x.index_select(-1, self.order)
        return self._backend.linear(x, self._weight, self.bias)

    def extra_repr(self) -> str:
        """Return what ``print(module)`` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, precision={self.precision}, "
            f"backend={self.backend_name}"
        )


class DenseLinear(nn.Module):
    """A 16-bit linear operator whose weight is ordered for this CPU's kernels.

    Replaces ``nn.Linear`` where ``llmpq.kernels.cpu.dense`` has a kernel for it.

    Attributes:
        in_features: K.
        out_features: N.
        dtype: bfloat16 or float16, of the weight.
        bias: ``[N]`` in that dtype, or ``None``.
    """

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, *, reuse: bool = False) -> None:
        """Order ``weight`` ``[N, K]``, in its own memory with ``reuse``; the caller drops it."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._weight = prepack(weight, reuse=reuse)
        self.register_buffer("bias", None if bias is None else bias.detach().to(weight.dtype))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight, without the bias."""
        return self._weight.nbytes

    @property
    def prepared(self) -> PreparedWeight:
        """The weight in its kernel's layout."""
        return self._weight

    @property
    def backend_name(self) -> str:
        """Name of the kernel that multiplies."""
        return self._weight.backend

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows ``ids`` ``[...]`` of the weight: ``[..., K]``."""
        return rows_of_tiles(self._weight, ids, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` for ``x`` ``[..., K]``: ``[..., N]``."""
        return prepacked_linear(x, self._weight, self.bias)

    def extra_repr(self) -> str:
        """Return what ``print(module)`` shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, backend={self.backend_name}"
        )


class GatedActivation(nn.Module):
    """Multiplies the second half of the features by the activated first half.

    Args:
        act_fn: applied to the first half.
    """

    def __init__(self, act_fn: nn.Module) -> None:
        super().__init__()
        self.act_fn = act_fn

    def forward(self, gate_up: Tensor) -> Tensor:
        """Return ``[..., F]`` from ``[..., 2F]``."""
        gate, up = gate_up.chunk(2, dim=-1)
        activated: Tensor = self.act_fn(gate)
        return activated.mul_(up)


def gate_of(experts: nn.Module) -> nn.Module:
    """Return what a stack of experts applies between its two matrices."""
    act_fn = experts.get_submodule("act_fn")
    return act_fn if isinstance(act_fn, ClampedGate) else GatedActivation(act_fn)


class QuantStack(nn.Module):
    """Experts of one matrix each; replaces that of JetMoE, which holds ``weight`` ``[E, N, K]``."""

    def __init__(self, matrices: Sequence[nn.Module]) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(matrices)

    def forward(self, inputs: Tensor, expert_size: Sequence[int]) -> Tensor:
        """Return ``[T, N]`` from ``[T, K]``, which has so many rows of each expert in turn."""
        parts = torch.split(inputs, list(expert_size))
        pairs = zip(self.matrices, parts, strict=True)
        return torch.cat([matrix(part) for matrix, part in pairs if len(part)])


class QuantExperts(nn.Module):
    """The experts of a mixture, two matrices each.

    Replaces transformers' fused modules, which hold ``gate_up_proj`` ``[E, 2F, H]`` and
    ``down_proj`` ``[E, H, F]``. Experts run one after the other, each on the tokens routed to it,
    on a CPU ``ROW_BLOCK`` of them at a time.
    """

    def __init__(
        self,
        gate_up: Sequence[nn.Module],
        down: Sequence[nn.Module],
        gate: Callable[[Tensor], Tensor],
    ) -> None:
        """Build from the linear operators of every expert in order, quantized or not.

        Args:
            gate_up: from H to 2F features each.
            down: from F to H features each.
            gate: makes F features of 2F; from ``gate_of``.
        """
        super().__init__()
        assert len(gate_up) == len(down)
        self.num_experts = len(gate_up)
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)
        self.gate = gate

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices as their backends keep them."""
        held = (QuantLinear, DenseLinear)
        return sum(m.weight_bytes for m in self.modules() if isinstance(m, held))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: expert of each choice, ``[T, k]``; ``num_experts`` means none.
            top_k_weights: its weight, ``[T, k]``.
        """
        output = torch.zeros_like(hidden_states)  # [T, H]
        for expert in torch.unique(top_k_index).tolist():
            if expert == self.num_experts:
                continue
            token, choice = torch.where(top_k_index == expert)
            weights = top_k_weights[token, choice, None]
            block = ROW_BLOCK if output.device.type == "cpu" else max(1, len(token))
            parts = zip(torch.split(token, block), torch.split(weights, block), strict=True)
            for part, own in parts:
                made = self._made_by(expert, hidden_states[part]) * own
                output.index_add_(0, part, made.to(output.dtype))
                del made  # before the next one
        return output

    def _made_by(self, expert: int, rows: Tensor) -> Tensor:
        """Return what an expert makes of rows ``[T, H]``: the same shape."""
        made: Tensor = self.down[expert](self.gate(self.gate_up[expert](rows)))
        return made


class QuantHead(nn.Module):
    """An LM head whose weight is quantized and has rows filled up to a kernel's multiple.

    Attributes:
        linear: from H to V features or a few more.
        vocab_size: V.
    """

    def __init__(self, linear: QuantLinear, vocab_size: int) -> None:
        super().__init__()
        self.linear = linear
        self.vocab_size = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scores ``[R, V]`` of ``hidden`` ``[R, H]``."""
        scores: Tensor = self.linear(hidden)
        return scores[..., : self.vocab_size]


class TiedEmbedding(nn.Module):
    """A token embedding that reads rows of the head, the only copy of the weight.

    Attributes:
        linear: of the head.
        embed_scale: factor of the embeddings in the run's dtype, ``None`` for 1.
    """

    embed_scale: Tensor | None

    def __init__(self, linear: QuantLinear | DenseLinear, replaced: nn.Module) -> None:
        """Take the place of ``replaced``.

        Raises:
            SpecError: an embedding that computes more than rows times a factor.
        """
        super().__init__()
        if not is_lookup(replaced):
            raise SpecError(
                f"{type(replaced).__name__}: found an embedding that is not rows of its weight, "
                "expected a head of 16 bits with it"
            )
        scale = getattr(replaced, "embed_scale", None)
        self.linear = linear
        factor = None if scale is None else torch.as_tensor(scale).to(linear.dtype)
        self.register_buffer("embed_scale", factor, persistent=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings ``[..., N, H]`` of ``token_ids`` ``[..., N]``."""
        rows = self.linear.rows(token_ids)
        return rows if self.embed_scale is None else rows * self.embed_scale


def is_lookup(embedding: nn.Module) -> bool:
    """Return whether an embedding is rows of its weight, or these times a factor."""
    return type(embedding) is nn.Embedding or getattr(embedding, "embed_scale", None) is not None
