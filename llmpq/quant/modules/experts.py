"""Experts as compiled code computes them, and experts in the memory of a device's host.

Shapes: T tokens, E experts, k experts of a token, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from ctypes import addressof

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.experts import (
    ClampedActivation,
    ExpertMatrix,
    HostLayer,
    HostPool,
    RowExperts,
)
from llmpq.kernels.cpu.step import UnsupportedStepError
from llmpq.logging import get_logger
from llmpq.models import DecoderStage
from llmpq.models.adapter import ClampedGate
from llmpq.quant.modules.host_link import HostLink, Rows, link_of
from llmpq.quant.modules.layer import (
    DenseLinear,
    GatedActivation,
    QuantExperts,
    QuantLinear,
    stored_bytes,
)

_logger = get_logger(__name__)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
_LARGE = (12.0, 50.0, 1000.0)
"""Where activations with a bound differ from those without."""
Linear = QuantLinear | DenseLinear | nn.Linear


class HostExperts(QuantExperts):
    """Experts of a mixture, of which some are in the host's memory.

    The threads of a pool compute them while the device computes the others. Where the compiled
    kernels cannot, the calling thread does, with a logged reason.

    Args:
        experts: all of them, each where it is computed.
        resident: those on the device, by their number.
        pool: computes the others; ``None`` leaves them to the calling thread.
        link: from the device to the host; ``None`` where the device is the host's CPU.

    Attributes:
        resident: those on the device.
    """

    def __init__(
        self,
        experts: QuantExperts,
        resident: Collection[int],
        pool: HostPool | None,
        link: HostLink | None = None,
    ) -> None:
        super().__init__([*experts.gate_up], [*experts.down], experts.gate)
        self.resident = frozenset(resident)
        self._pool = pool
        self._link = link
        self._layers: dict[tuple[torch.dtype, int], HostLayer] = {}
        # The last place is for the number that means none.
        self._is_resident = torch.tensor([*self.on_device, False])

    @property
    def on_device(self) -> list[bool]:
        """Whether each expert is on the device."""
        return [expert in self.resident for expert in range(self.num_experts)]

    @property
    def host_bytes(self) -> int:
        """Bytes of the weights in the host's memory."""
        return sum(
            stored_bytes(linear)
            for own in (self.gate_up, self.down)
            for expert, linear in enumerate(own)
            if expert not in self.resident
        )

    def host_layer(self, dtype: torch.dtype, hidden_size: int, choices: int) -> tuple[int, int]:
        """Return the addresses of the pool and of its experts.

        Args:
            dtype: of the rows.
            hidden_size: H.
            choices: k.

        Raises:
            UnsupportedStepError: there is no pool, or it cannot compute them.
        """
        layer = self._layer(dtype, hidden_size, choices)
        assert self._pool is not None
        return self._pool.handle, addressof(layer)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; as ``QuantExperts.forward``."""
        rows = (hidden_states, top_k_index, top_k_weights)
        collect = self._begin(rows)
        own = None
        if self.resident:
            own = super().forward(hidden_states, self._only(top_k_index, own=True), top_k_weights)
        apart = collect()
        return apart if own is None else own.add_(apart)

    def _only(self, index: Tensor, *, own: bool) -> Tensor:
        """Return experts with those elsewhere replaced by none."""
        self._is_resident = self._is_resident.to(index.device)  # kept there
        is_own = self._is_resident[index]
        return index.masked_fill(is_own != own, self.num_experts)

    def _begin(self, rows: Rows) -> Callable[[], Tensor]:
        """Begin the host's part; return what waits for its sum."""
        hidden, index, _ = rows
        try:
            layer = self._layer(hidden.dtype, hidden.shape[1], index.shape[1])
        except UnsupportedStepError as error:
            if self._pool is not None:
                _logger.info("experts run without threads of their own: %s", error)
                self._pool = None
            made = self._by_caller(rows)
            return lambda: made
        pool = self._pool
        assert pool is not None
        if self._link is None:
            x, index, weights = rows
            own = (x.contiguous(), index.int().contiguous(), weights.float().contiguous())
            y = torch.empty_like(own[0])
            wait = pool.submit(layer, own, y)

            def collect() -> Tensor:
                wait()
                return y

            return collect
        link = self._link
        slot, sent, total = link.send(rows)

        def cross() -> Tensor:
            slot.sent.synchronize()  # what was queued since goes on
            pool.submit(layer, sent, total)()
            return link.receive(slot, total, hidden.device)

        return cross

    def _by_caller(self, rows: Rows) -> Tensor:
        """Return the host's part, computed by this thread."""
        hidden, index, weights = (one.cpu() for one in rows)
        made = super().forward(hidden, self._only(index, own=False), weights)
        return made.to(rows[0].device)

    def _layer(self, dtype: torch.dtype, hidden_size: int, choices: int) -> HostLayer:
        if self._pool is None:
            raise UnsupportedStepError("experts without threads of their own")
        if (dtype, choices) not in self._layers:
            is_here = [not is_own for is_own in self.on_device]
            experts = row_experts(self, is_here)
            layer = self._pool.layer(dtype, hidden_size, choices, experts)
            self._layers[dtype, choices] = layer
        return self._layers[dtype, choices]


def use_host_(
    stage: DecoderStage,
    resident: Sequence[Collection[int] | None],
    device: torch.device,
    pool: HostPool | None,
) -> None:
    """Leave experts of a stage to its host, and move everything else to the device.

    Args:
        stage: its experts are where they are computed.
        resident: experts on the device, for each layer; ``None`` for all.
        device: of the stage.
        pool: computes the others; ``None`` leaves them to the calling thread.
    """
    link = link_of(device)
    for layer, own in zip(stage.layers, resident, strict=True):
        for name, stack in list(layer.named_modules()):
            if isinstance(stack, QuantExperts) and own is not None and len(own) < stack.num_experts:
                layer.set_submodule(name, HostExperts(stack, own, pool, link))
    move_(stage, device)


def move_(module: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to a device, but for experts in the host's memory."""
    kept = {
        id(part)
        for one in module.modules()
        if isinstance(one, HostExperts)
        for own in (one.gate_up, one.down)
        for expert, linear in enumerate(own)
        if expert not in one.resident
        for part in linear.modules()
    }
    for part in module.modules():
        if id(part) not in kept:
            part._apply(lambda one: one.to(device), recurse=False)  # type: ignore[no-untyped-call]


def host_expert_bytes(module: nn.Module) -> int:
    """Return the bytes of the weights below ``module`` that are in the host's memory."""
    return sum(one.host_bytes for one in module.modules() if isinstance(one, HostExperts))


def row_experts(module: QuantExperts, is_here: Sequence[bool]) -> RowExperts:
    """Return experts as compiled code computes them.

    Args:
        module: the experts.
        is_here: which of them are computed there.

    Raises:
        UnsupportedStepError: their activation or a weight has no compiled kernel.
    """
    activation, has_gate = _activation(module.gate)
    return RowExperts(
        ups=_matrices("gate_up", module.gate_up, is_here),
        downs=_matrices("down", module.down, is_here),
        activation=activation,
        has_gate=has_gate,
    )


def _matrices(
    name: str, modules: nn.ModuleList, is_here: Sequence[bool]
) -> list[ExpertMatrix | None]:
    found: list[ExpertMatrix | None] = []
    for expert, (linear, own) in enumerate(zip(modules, is_here, strict=True)):
        if not own:
            found.append(None)
            continue
        if not isinstance(linear, (QuantLinear, DenseLinear, nn.Linear)):
            raise UnsupportedStepError(f"{type(linear).__name__} in '{name}.{expert}'")
        found.append((weight_of(f"{name}.{expert}", linear), linear.bias))
    return found


def _activation(
    gate: Callable[[Tensor], Tensor],
) -> tuple[str | ClampedActivation, bool]:
    """Return the activation of experts, and whether it has a gate."""
    if isinstance(gate, ClampedGate):
        return ClampedActivation(alpha=gate.alpha, limit=gate.limit), True
    if isinstance(gate, GatedActivation):
        return activation_like(gate.act_fn), True
    return activation_like(gate), False


def activation_like(module: Callable[[Tensor], Tensor]) -> str:
    """Return the name of the activation that computes what a module or function does.

    Raises:
        UnsupportedStepError: there is none.
    """
    x = torch.cat((torch.linspace(-8, 8, 257), torch.tensor(_LARGE), -torch.tensor(_LARGE)))
    expected = module(x.clone())
    for name, function in _ACTIVATIONS.items():
        if torch.allclose(expected, function(x), rtol=1e-6, atol=1e-6):
            return name
    raise UnsupportedStepError(f"the activation {type(module).__name__}")


def weight_of(name: str, linear: Linear) -> PreparedWeight | Tensor:
    """Return the weight of a linear operator as compiled code reads it.

    Raises:
        UnsupportedStepError: its columns are in another order.
    """
    if isinstance(linear, QuantLinear) and linear.order is not None:
        raise UnsupportedStepError(f"columns out of order in '{name}'")
    if isinstance(linear, (QuantLinear, DenseLinear)):
        return linear.prepared
    return linear.weight.detach()
