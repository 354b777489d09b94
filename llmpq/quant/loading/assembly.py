"""A decoder layer put together from its parts, in whatever order and from wherever they come.

``quantize_layer_`` needs the whole 16-bit layer in memory; the loader has one matrix of it at a
time, and some of them packed already. Here is the list of a layer's matrices, under names that
also GPTQ checkpoints and the store use, and the place where each goes.

Shape legend: E experts, N output features, K input features, F features of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.kernels.base import KernelBackend
from llmpq.kernels.cpu.compiled import TileBackend
from llmpq.kernels.cpu.tiled import TiledWeight
from llmpq.kernels.packed import PackedWeight
from llmpq.kernels.registry import choose_backend
from llmpq.quant.modules.layer import quantizable_names
from llmpq.quant.modules.linear import QuantExperts, QuantLinear
from llmpq.spec.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One weight matrix that a plan quantizes.

    Attributes:
        name: of the operator, relative to the layer: ``self_attn.q_proj``, or
            ``mlp.experts.gate_up_proj.3`` for the fourth expert.
        module: of the module it belongs to.
        key: of the parameter that holds it, in the layer's ``state_dict``.
        expert: its place along the parameter's first dimension, ``None`` when it is all of it.
        out_features: N.
        in_features: K.
    """

    name: str
    module: str
    key: str
    expert: int | None
    out_features: int
    in_features: int


def matrices_of(layer: nn.Module) -> list[Matrix]:
    """List the matrices of a layer, which may be on the meta device.

    Raises:
        SpecError: the layer has none, or experts in a layout nobody taught ``quant.layer``.
    """
    found = [
        matrix
        for name in quantizable_names(layer)
        for matrix in _of_module(name, layer.get_submodule(name))
    ]
    if not found:
        raise SpecError(f"{type(layer).__name__}: found no linear operator to quantize")
    return found


def _of_module(name: str, module: nn.Module) -> Iterator[Matrix]:
    if isinstance(module, nn.Linear):
        rows, columns = module.weight.shape
        yield Matrix(
            name=name,
            module=name,
            key=f"{name}.weight",
            expert=None,
            out_features=rows,
            in_features=columns,
        )
        return
    for key in ("gate_up_proj", "down_proj"):
        experts, rows, columns = module.get_parameter(key).shape  # [E, N, K]
        for expert in range(experts):
            yield Matrix(
                name=f"{name}.{key}.{expert}",
                module=name,
                key=f"{name}.{key}",
                expert=expert,
                out_features=rows,
                in_features=columns,
            )


class LayerAssembly:
    """A layer that is being filled.

    Args:
        layer: on the meta device.
        dtype: of the run.
        backend: kernel backend to use wherever it can run; ``None`` leaves it to the registry.

    Attributes:
        layer: itself.
        dtype: of the run.
    """

    def __init__(self, layer: nn.Module, dtype: torch.dtype, backend: str | None) -> None:
        self.layer = layer.requires_grad_(False).eval()
        self.dtype = dtype
        self._backend = backend
        self._experts: dict[str, dict[str, list[QuantLinear]]] = {}

    def fill(self, state: Mapping[str, Tensor]) -> None:
        """Put in what stays as it is: norms, biases, routers, unquantized weights."""
        unknown = self.layer.load_state_dict(dict(state), strict=False, assign=True).unexpected_keys
        if unknown:
            raise SpecError(f"{type(self.layer).__name__}: has no place for '{unknown[0]}'")

    def install(self, matrix: Matrix, packed: PackedWeight | QuantLinear) -> None:
        """Put in one quantized matrix, or what ``linear`` or ``adopt`` made of it.

        A bias of its operator must be there already. Experts are replaced when the last of their
        matrices has come.
        """
        linear = packed if isinstance(packed, QuantLinear) else self.linear(packed)
        module = self.layer.get_submodule(matrix.module)
        if matrix.expert is None:
            assert isinstance(module, nn.Linear)
            linear.set_bias(module.bias)
            self.layer.set_submodule(matrix.module, linear)
            return
        lists = self._experts.setdefault(matrix.module, {"gate_up_proj": [], "down_proj": []})
        own = lists[matrix.key.rpartition(".")[2]]
        assert matrix.expert == len(own)
        own.append(linear)
        gate_up, down = lists["gate_up_proj"], lists["down_proj"]
        if len(gate_up) == len(down) == module.get_parameter("down_proj").shape[0]:
            experts = QuantExperts(gate_up, down, module.get_submodule("act_fn"))
            self.layer.set_submodule(matrix.module, experts)
            del self._experts[matrix.module]

    def finish(self) -> nn.Module:
        """Return the layer.

        Raises:
            SpecError: something of it was never put in.
        """
        tensors = (*self.layer.named_parameters(), *self.layer.named_buffers())
        missing = [name for name, tensor in tensors if tensor.is_meta]
        if missing:
            kind = type(self.layer).__name__
            raise SpecError(f"{kind}: tensor '{missing[0]}' is neither stored nor known")
        return self.layer

    def linear(self, packed: PackedWeight | TiledWeight) -> QuantLinear:
        """Bring a matrix into its kernel's layout; it gets its bias when it is installed.

        Tiles are copied as they are where ``keeps_tiles`` says so. Touches nothing of the layer:
        any thread may do it.
        """
        kernel = self._kernel(
            packed.scales.device.type, packed.precision, packed.out_features, packed.in_features
        )
        if isinstance(packed, TiledWeight):
            packed = packed.clone() if isinstance(kernel, TileBackend) else packed.packed()
        return QuantLinear(packed, None, kernel)

    def adopt(self, tiled: TiledWeight) -> QuantLinear:
        """Take tiles that may stay where they are, where ``keeps_tiles`` says so."""
        shape = (tiled.out_features, tiled.in_features)
        return QuantLinear(
            tiled, None, self._kernel(tiled.tiles.device.type, tiled.precision, *shape)
        )

    def keeps_tiles(self, matrix: Matrix, precision: Precision, device_type: str) -> bool:
        """Return whether the kernel of a matrix reads tiles."""
        shape = (matrix.out_features, matrix.in_features)
        return isinstance(self._kernel(device_type, precision, *shape), TileBackend)

    def _kernel(
        self, device_type: str, precision: Precision, out_features: int, in_features: int
    ) -> KernelBackend:
        return choose_backend(
            device_type, precision, self.dtype, out_features, in_features, prefer=self._backend
        )
