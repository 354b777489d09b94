"""LayerAssembly: fills a decoder layer one tensor at a time, in any order.

``quantize_layer_`` needs the whole 16-bit layer in memory; the loader has one matrix at a time.
``matrices_of`` lists the matrices of a layer under the names that the cache uses, too.

Shape legend: E experts, N output features, K input features, F features of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.kernels.base import KernelBackend
from llmpq.kernels.cpu.compiled_backends import TileBackend
from llmpq.kernels.cpu.tiles import TiledWeight
from llmpq.kernels.packed import PackedWeight
from llmpq.kernels.registry import choose_backend
from llmpq.quant.modules.layer import expert_keys, experts_of, quantizable_names
from llmpq.quant.modules.linear import QuantLinear
from llmpq.spec.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One weight matrix that a plan quantizes.

    Attributes:
        name: of the operator, relative to the layer: ``self_attn.q_proj``, or
            ``mlp.experts.gate_up_proj.3`` for the fourth expert.
        module: of the module it belongs to.
        key: of the parameter that holds it, in the layer's ``state_dict``.
        expert: its index along the parameter's first dimension; ``None`` if the parameter is 2-D.
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
        SpecError: the layer has none, or experts in an unknown layout.
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
    for key in expert_keys(module):
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
    """A decoder layer that is being filled.

    Args:
        layer: on the meta device.
        dtype: of the run.
        backend: kernel backend to prefer; ``None`` leaves it to the registry.

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
        """Put in tensors that are not quantized: norms, biases, routers, 16-bit weights."""
        unknown = self.layer.load_state_dict(dict(state), strict=False, assign=True).unexpected_keys
        if unknown:
            raise SpecError(f"{type(self.layer).__name__}: has no place for '{unknown[0]}'")

    def install(self, matrix: Matrix, weight: PackedWeight | TiledWeight) -> None:
        """Put in one quantized matrix; tiles are used where they lie.

        A bias of its operator must be there already. Experts are replaced once all of their
        matrices are there.
        """
        kernel = self._kernel(matrix, weight.precision, weight.scales.device)
        linear = QuantLinear(weight, None, kernel)
        module = self.layer.get_submodule(matrix.module)
        if matrix.expert is None:
            assert isinstance(module, nn.Linear)
            linear.set_bias(module.bias)
            self.layer.set_submodule(matrix.module, linear)
            return
        keys = expert_keys(module)
        lists = self._experts.setdefault(matrix.module, {key: [] for key in keys})
        own = lists[matrix.key.rpartition(".")[2]]
        assert matrix.expert == len(own)
        own.append(linear)
        if all(len(lists[key]) == len(module.get_parameter(key)) for key in keys):
            for key, linears in lists.items():
                bias = getattr(module, f"{key}_bias", None)  # [E, N]
                for linear, own_bias in zip(linears, () if bias is None else bias, strict=False):
                    linear.set_bias(own_bias)
            self.layer.set_submodule(matrix.module, experts_of(module, lists))
            del self._experts[matrix.module]

    def finish(self) -> nn.Module:
        """Return the layer.

        Raises:
            SpecError: a tensor is missing.
        """
        tensors = (*self.layer.named_parameters(), *self.layer.named_buffers())
        missing = [name for name, tensor in tensors if tensor.is_meta]
        if missing:
            kind = type(self.layer).__name__
            raise SpecError(f"{kind}: tensor '{missing[0]}' is neither stored nor known")
        return self.layer

    def reads_tiles(self, matrix: Matrix, precision: Precision, device: torch.device) -> bool:
        """Return whether the kernel of a matrix reads tiles."""
        return isinstance(self._kernel(matrix, precision, device), TileBackend)

    def _kernel(self, matrix: Matrix, precision: Precision, device: torch.device) -> KernelBackend:
        shape = (matrix.out_features, matrix.in_features)
        return choose_backend(device, precision, self.dtype, *shape, prefer=self._backend)
