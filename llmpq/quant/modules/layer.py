"""Quantize a decoder layer in place: which operators, and the modules that replace them.

Linear operators and the experts of mixtures are quantized; norms, biases and routers are not.
Operators are found by the type of module, not by the model family. ``matrices_of`` lists their
matrices under the names that checkpoints in GPTQ's format and the cache of the loader use, too.

Norms are replaced by a compiled kernel that computes the same in one pass over the rows, where
torch needs seven. Only classes whose ``forward`` has the same bytecode as Llama's are replaced:
Gemma, for example, adds one to the weight, and Olmo rounds at another place.

The modules that replace linear operators, experts and the head have their weights in a kernel's
layout. They are for inference and cannot be moved to another device or cast once built.

Shape legend: T tokens, E experts, k experts a token, K inputs, N outputs, H hidden, F features of
an expert, R rows, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from llmpq.errors import SpecError
from llmpq.kernels.base import KernelBackend, PackedWeight, PreparedWeight, ProductParts
from llmpq.kernels.cpu.dense import (
    can_prepack,
    is_whole,
    prepack,
    prepacked_linear,
    wrap_panels,
)
from llmpq.kernels.cpu.native import TYPES, Norm, TiledWeight, library, rows_of_tiles
from llmpq.kernels.registry import TileBackend, choose_backend
from llmpq.models.adapter import BiasedExperts, ClampedGate, accepts, default_norm
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.precision import LayerExperts, Precision, default_precision
from llmpq.spec.runtime_constants import ROW_BLOCK


class FusedNorm(nn.Module):
    """Replaces a root mean square norm that computes what Llama's does.

    Args:
        norm: to replace; its weight is shared.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.get_parameter("weight")
        self._replaced = type(norm).forward
        self.variance_epsilon = float(norm.variance_epsilon)  # type: ignore[arg-type]

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm each row of ``[..., H]``."""
        if hidden.dtype != self.weight.dtype:
            made: Tensor = self._replaced(self, hidden)
            return made
        return rms_norm(hidden, self.weight, self.variance_epsilon)


def fuse_norms_(module: nn.Module) -> None:
    """Replace the norms below ``module`` that the kernel can compute."""
    for name, part in list(module.named_modules()):
        if name and _is_default_norm(part) and can_norm(part.get_parameter("weight")):
            module.set_submodule(name, FusedNorm(part))


def can_norm(weight: Tensor) -> bool:
    """Return whether rows of ``weight``'s length, type and place can be normed here."""
    fits = weight.dim() == 1 and weight.numel() % _NORM_LANES == 0 and weight.dtype in TYPES
    return fits and weight.device.type == "cpu" and library() is not None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return ``weight * (x / sqrt(mean(x^2) + epsilon))`` of each row ``[..., K]``, in x's dtype.

    ``x`` has the dtype of ``weight``; the mean is float32, and the row is rounded to its dtype
    before the weight multiplies it, as in transformers' Llama.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    columns = weight.numel()
    call = Norm(
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        y=y.data_ptr(),
        rows=x.numel() // columns,
        columns=columns,
        epsilon=epsilon,
        type=TYPES[x.dtype],
        weight_type=TYPES[weight.dtype],
        rounds=True,
        threads=torch.get_num_threads(),
    )
    loaded = library()
    assert loaded is not None
    loaded.kernels_norm(byref(call))
    return y


def _is_default_norm(part: nn.Module) -> bool:
    if not hasattr(part, "variance_epsilon"):
        return False
    found, expected = _code_of(type(part)), _code_of(default_norm())
    if found is None or expected is None:
        return False
    is_same = (found.co_code, found.co_names) == (expected.co_code, expected.co_names)
    return is_same and _numbers(found) == _numbers(expected)


def _code_of(kind: type[nn.Module]) -> CodeType | None:
    return getattr(inspect.unwrap(kind.forward), "__code__", None)


def _numbers(code: CodeType) -> list[object]:
    return [constant for constant in code.co_consts if not isinstance(constant, str)]


_NORM_LANES = 16
_ROUTER_NAMES = frozenset(
    {
        *("gate", "router", "shared_expert_gate"),
        *("modality_router", "correction_coefs", "prediction_coefs"),  # AltUp of Gemma 3n
    }
)
_EXPERT_WEIGHTS = ("gate_up_proj", "down_proj")
_UNGATED_WEIGHTS = ("up_proj", "down_proj")
# Flags that transformers' decorator of expert modules sets, and their values for a plain layout.
_PLAIN_EXPERTS = {
    "is_transposed": False,
    "is_concatenated": True,
    "has_bias": False,
    "has_post_expert_norm": False,
}


def quantize_layer_(
    layer: nn.Module,
    bits: int,
    dtype: torch.dtype,
    *,
    backend: str | None = None,
    resident: Mapping[int, torch.device] | None = None,
) -> None:
    """Cast ``layer`` to ``dtype`` and quantize its linear weights, freeing them one by one.

    Args:
        layer: one decoder layer with its weights on the device they will run on.
        bits: 3, 4, 8 or 16, meaning ``spec.precision.default_precision``; 16 casts, and
            on a CPU reorders bf16 weights for its matmul.
        dtype: dtype of the run: of what stays unquantized, and of the scales.
        backend: kernel backend to prefer; ``None`` leaves it to the registry.
        resident: devices of experts of 16 bits that are not where their stack is.

    Raises:
        SpecError: the layer has no operator to quantize, or experts in an unknown layout, which
            would take more memory than the plan counts.
    """
    precision = default_precision(bits)
    layer.to(dtype).requires_grad_(False).eval()
    if bits == 16:
        prepack_(layer)
        _unstack_experts_(layer, resident or {})
        return
    names = list(quantizable_names(layer))
    if not names:
        raise SpecError(f"{type(layer).__name__}: found no linear operator to quantize")
    for name in names:
        replacement = _replacement(layer.get_submodule(name), precision, backend)
        layer.set_submodule(name, replacement)


def stored_bytes(module: nn.Module) -> int:
    """Return the bytes that the weights and buffers of ``module`` occupy, quantized or not."""
    plain = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    held = (QuantLinear, DenseLinear)
    return plain + sum(m.weight_bytes for m in module.modules() if isinstance(m, held))


def prepack_(module: nn.Module) -> None:
    """Order 16-bit weights of linear operators for this CPU's kernels."""
    linears = (name for name, child in module.named_modules() if isinstance(child, nn.Linear))
    # Routers of some families read the weight of their linear operator.
    names = [name for name in linears if not is_router(name)]
    for name in names:  # by name, so that each weight is freed before the next is copied
        linear = module.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        weight = linear.weight
        if can_prepack(weight) and is_whole(weight):
            module.set_submodule(name, DenseLinear(weight, linear.bias))


def _unstack_experts_(layer: nn.Module, resident: Mapping[int, torch.device]) -> None:
    """Make a CPU run stacked experts one by one, on views of their weights.

    transformers gathers the rows of all experts at once, which takes several times the memory.
    """
    stacks = [(name, module) for name, module in layer.named_modules() if has_plain_experts(module)]
    for name, module in stacks:
        weights = [module.get_parameter(key) for key in expert_keys(module)]
        if all(weight.device.type == "cpu" and weight.dim() == 3 for weight in weights):
            views = {
                key: _ordered(expert_views(module, key), resident) for key in expert_keys(module)
            }
            layer.set_submodule(name, experts_of(module, views))


def _ordered(views: Sequence[nn.Linear], resident: Mapping[int, torch.device]) -> list[nn.Module]:
    """Order views of a stack for this CPU's kernels, in its memory where they are whole panels.

    Resident ones are copied to their device.
    """
    found: list[nn.Module] = []
    for expert, view in enumerate(views):
        if expert in resident:
            found.append(view.to(resident[expert]))
        elif can_prepack(view.weight) and is_whole(view.weight):
            found.append(DenseLinear(view.weight.detach(), view.bias, reuse=True))
        else:
            found.append(view)
    return found


def dense_linear(weight: Tensor, *, is_ordered: bool) -> DenseLinear | nn.Linear:
    """Return the operator of a weight ``[N, K]`` that is not quantized, without a bias or a copy.

    Args:
        weight: in the order of this CPU's kernels, or in its own.
        is_ordered: which of them.
    """
    if is_ordered:
        return DenseLinear.of_panels(weight)
    out_features, in_features = weight.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear


def set_bias_(linear: nn.Module, bias: Tensor | None) -> None:
    """Give an operator without a bias one, ``[N]``."""
    if isinstance(linear, QuantLinear):
        linear.set_bias(bias)
    elif bias is not None and isinstance(linear, nn.Linear):
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    elif bias is not None and isinstance(linear, DenseLinear):
        linear.bias = bias.detach().to(linear.dtype)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVariant:
    """How a layer is stored.

    Attributes:
        precision: of its dense part.
        experts: of its routed experts.
        resident: routed experts on the device; ``None`` for all.
    """

    precision: Precision
    experts: Precision
    resident: tuple[int, ...] | None

    @classmethod
    def of(cls, bits: int, experts: LayerExperts | None) -> LayerVariant:
        """Return the variant of a layer of some bits whose experts a strategy may name."""
        other = bits if experts is None or experts.bits is None else experts.bits
        return cls(
            precision=default_precision(bits),
            experts=default_precision(other),
            resident=None if experts is None else experts.resident,
        )

    @property
    def is_plain(self) -> bool:
        """Whether all of the layer is unquantized and on its device."""
        return set(self.widths) == {16} and self.resident is None

    @property
    def widths(self) -> tuple[int, int]:
        """Bits of both parts."""
        return self.precision.bits, self.experts.bits

    @property
    def text(self) -> str:
        """What the progress line says."""
        apart = "" if self.precision == self.experts else f", experts at {self.experts}"
        return f"{self.precision}{apart}"

    def precision_of(self, expert: int | None) -> Precision:
        """Return the precision of a matrix of an expert, or of the dense part."""
        return self.precision if expert is None else self.experts

    def is_on_host(self, expert: int | None) -> bool:
        """Return whether a matrix of an expert, or of the dense part, is in the host's memory."""
        return self.resident is not None and expert not in (None, *self.resident)

    def check(self, index: int, matrices: Sequence[Matrix]) -> None:
        """Check that layer ``index`` with these matrices can have this variant.

        Raises:
            SpecError: it has no such experts.
        """
        resident, routed = self.resident, [one for one in matrices if one.expert is not None]
        if resident is None and self.precision == self.experts:
            return
        if not routed:
            raise SpecError(
                f"layer {index}: found no routed experts, expected some in a layer of "
                "'experts.layers'"
            )
        if resident is None:
            return
        if any(one.key.endswith(".weight") for one in routed):
            raise SpecError(
                f"layer {index}: its experts have one matrix each and stay with their layer; "
                "leave it out of 'experts.layers', or give bits only"
            )
        count = 1 + max(one.expert for one in routed if one.expert is not None)
        if resident and resident[-1] >= count:
            raise SpecError(
                f"layer {index}: field 'resident': found expert {resident[-1]}, expected numbers "
                f"below {count}"
            )


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


def has_common_layout(layer: nn.Module) -> bool:
    """Return whether other libraries store the experts of a layer, if any, one by one."""
    return all(
        getattr(part, "has_common_layout", True) and not _is_single(part)
        for part in layer.modules()
    )


def _is_single(experts: nn.Module) -> bool:
    """Return whether a module is experts of one matrix each, which get rows of each in turn."""
    held = [(key, value.dim()) for key, value in experts.named_parameters(recurse=False)]
    return held == [("weight", 3)] and accepts(experts.forward, "expert_size")


def expert_keys(experts: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that stack the matrices of experts."""
    if _is_single(experts):
        return ("weight",)
    return _EXPERT_WEIGHTS if getattr(experts, "has_gate", True) else _UNGATED_WEIGHTS


def experts_of(
    module: nn.Module, linears: Mapping[str, Sequence[nn.Module]]
) -> QuantStack | QuantExperts:
    """Return what replaces a stack of experts.

    Args:
        module: the stack; its weights are not used.
        linears: the operators of every expert, by ``expert_keys``.
    """
    if "weight" in linears:
        return QuantStack(linears["weight"])
    first, down = (linears[key] for key in expert_keys(module))
    return QuantExperts(first, down, gate_of(module))


def operator_of(layer: nn.Module, matrix: Matrix) -> nn.Module:
    """Return the operator that has a matrix, once experts are operators of their own."""
    module = layer.get_submodule(matrix.module)
    if matrix.expert is None:
        return module
    if isinstance(module, QuantStack):
        return module.matrices[matrix.expert]
    assert isinstance(module, QuantExperts)
    own = module.down if matrix.key.endswith(_EXPERT_WEIGHTS[1]) else module.gate_up
    return own[matrix.expert]


def dense_weight(linear: nn.Module) -> Tensor:
    """Return the weight of an operator that is not quantized, ``[N, K]``, in panels or not."""
    if isinstance(linear, DenseLinear):
        return linear.prepared.tensors[0]
    assert isinstance(linear, nn.Linear)
    return linear.weight.detach()


def expert_views(experts: nn.Module, key: str) -> list[nn.Linear]:
    """Return a linear operator over each matrix of a stack ``[E, N, K]``, without a copy."""
    views, biases = [], _biases(experts, key)
    for weight, bias in zip(experts.get_parameter(key), biases, strict=True):
        out_features, in_features = weight.shape
        linear = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
        views.append(linear)
    return views


def _biases(experts: nn.Module, key: str) -> Sequence[Tensor | None]:
    """Return the bias ``[N]`` of each matrix of a stack."""
    stacked: Tensor | None = getattr(experts, f"{key}_bias", None)
    return [None] * len(experts.get_parameter(key)) if stacked is None else list(stacked)


def quantizable_names(layer: nn.Module) -> Iterator[str]:
    """Yield the names of a layer's linear operators and stacked experts, in the layer's order.

    Raises:
        SpecError: experts in an unknown layout.
    """
    for name, module in layer.named_modules():
        is_linear = isinstance(module, nn.Linear)
        if is_linear and not is_router(name):
            yield name
        elif isinstance(module, nn.Conv1d):
            continue  # of a layer with a recurrent state; it is small
        elif any(parameter.dim() == 3 for parameter in module.parameters(recurse=False)):
            _check_experts(name, module)
            yield name


def _check_experts(name: str, experts: nn.Module) -> None:
    held, odd = _expert_layout(experts)
    if not has_plain_experts(experts):
        raise SpecError(
            f"{name} ({type(experts).__name__}): found parameters {sorted(held)} and {odd}, "
            f"expected experts with exactly {sorted(expert_keys(experts))}"
        )


def is_router(name: str) -> bool:
    """Return whether a module is a router or part of one, by its name; it stays as it is."""
    return not _ROUTER_NAMES.isdisjoint(name.split("."))


def has_plain_experts(module: nn.Module) -> bool:
    """Return whether a module is a stack of experts that can be quantized."""
    if _is_single(module):
        return True
    held, odd = _expert_layout(module)
    return held == set(expert_keys(module)) and not odd


def _expert_layout(experts: nn.Module) -> tuple[set[str], list[str]]:
    """Return the names of stacked experts' parameters, and the flags that are not plain."""
    held = {key for key, _ in experts.named_parameters(recurse=False)}
    if isinstance(experts, BiasedExperts):
        return held - {f"{key}_bias" for key in _EXPERT_WEIGHTS}, []
    odd = [flag for flag, plain in _PLAIN_EXPERTS.items() if getattr(experts, flag, plain) != plain]
    if not accepts(experts.forward, "top_k_index"):  # some run them all
        odd.append("forward")
    # The decorator gives every class a gate function; a class's own does more than activate.
    gate = getattr(type(experts), "_apply_gate", None)
    if gate is not None and not gate.__module__.startswith("transformers.integrations"):
        odd.append("_apply_gate")
    return held, odd


def _replacement(
    module: nn.Module, precision: Precision, backend: str | None
) -> QuantLinear | QuantStack | QuantExperts:
    if isinstance(module, nn.Linear):
        return _pack(module.weight, module.bias, precision, backend)
    packed: dict[str, list[QuantLinear]] = {}
    for key in expert_keys(module):
        stacked = module.get_parameter(key)  # [E, N, K]
        biases = _biases(module, key)
        packed[key] = [
            _pack(weight, bias, precision, backend)
            for weight, bias in zip(stacked, biases, strict=True)
        ]
        delattr(module, key)  # frees the 16-bit copy of one before the other is quantized
    return experts_of(module, packed)


def _pack(
    weight: Tensor, bias: Tensor | None, precision: Precision, backend: str | None
) -> QuantLinear:
    out_features, in_features = weight.shape
    kernel = choose_backend(
        weight.device, precision, weight.dtype, out_features, in_features, prefer=backend
    )
    return QuantLinear(quantize(weight, precision, weight.dtype), bias, kernel)


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

    @classmethod
    def joined(cls, linears: Sequence[QuantLinear]) -> QuantLinear | None:
        """Return one operator with the outputs of several of the same inputs, in their order.

        ``None`` where these are in another order, or formats, kernels or biases do not allow it.
        """
        first, weights = linears[0], [one._weight for one in linears]
        kinds = {
            (one.backend_name, one.precision, one.in_features, one.dtype, one.bias is None)
            for one in linears
        }
        if len(kinds) > 1 or any(one.order is not None for one in linears):
            return None
        weight = first._backend.joined(weights)
        if weight is None:
            return None
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = weight.in_features, weight.out_features
        made.precision, made._backend = first.precision, first._backend
        made._weight, made._dtype = weight, first.dtype
        made.register_buffer("order", None)
        biases = [one.bias for one in linears if one.bias is not None]
        made.set_bias(torch.cat(biases) if biases else None)
        return made

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
        return self._backend.linear(self._in_order(x), self._weight, self.bias)

    def parts(self, x: Tensor) -> ProductParts:
        """Return the same for ``x`` ``[M, K]`` to a kernel that sums parts as it reads them."""
        return self._backend.parts(self._in_order(x), self._weight, self.bias)

    def _in_order(self, x: Tensor) -> Tensor:
        """Return the columns in the order in which backends read them."""
        return x if self.order is None else x.index_select(-1, self.order)

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
        self._set(prepack(weight, reuse=reuse), weight.dtype, bias)

    @classmethod
    def of_panels(cls, panels: Tensor) -> DenseLinear:
        """Return the operator of a weight ``[N, K]`` that is ordered, without a bias or a copy."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._set(wrap_panels(panels), panels.dtype, None)
        return made

    def _set(self, weight: PreparedWeight, dtype: torch.dtype, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.dtype = dtype
        self._weight = weight
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype))

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

    def __init__(self, act_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act_fn = act_fn

    def forward(self, gate_up: Tensor) -> Tensor:
        """Return ``[..., F]`` from ``[..., 2F]``."""
        gate, up = gate_up.chunk(2, dim=-1)
        activated: Tensor = self.act_fn(gate)
        return activated.mul_(up)


def gate_of(experts: Any) -> Callable[[Tensor], Tensor]:
    """Return what a stack of experts applies between its two matrices."""
    act_fn: Callable[[Tensor], Tensor] = experts.act_fn
    is_whole = isinstance(act_fn, ClampedGate) or not getattr(experts, "has_gate", True)
    return act_fn if is_whole else GatedActivation(act_fn)


class QuantStack(nn.Module):
    """Experts of one matrix each, of a module that holds ``weight`` ``[E, N, K]``."""

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

    Replaces transformers' fused modules, which hold ``gate_up_proj`` ``[E, 2F, H]``, or ``up_proj``
    ``[E, F, H]`` where there is no gate, and ``down_proj`` ``[E, H, F]``. Experts run one after the
    other, each on the tokens routed to it, on a CPU ``ROW_BLOCK`` of them at a time.
    """

    def __init__(
        self,
        gate_up: Sequence[nn.Module],
        down: Sequence[nn.Module],
        gate: Callable[[Tensor], Tensor],
    ) -> None:
        """Build from the linear operators of every expert in order, quantized or not.

        Args:
            gate_up: from H to 2F features each, F without a gate.
            down: from F to H features each.
            gate: makes F features of theirs; from ``gate_of``.
        """
        super().__init__()
        assert len(gate_up) == len(down)
        self.num_experts = len(gate_up)
        self.gate_up = nn.ModuleList(gate_up)
        self.down = nn.ModuleList(down)
        self.gate = gate

    @property
    def on_device(self) -> list[bool]:
        """Whether each expert is on the device of its layer."""
        return [True] * self.num_experts

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
