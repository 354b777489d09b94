"""Append a decoder layer of Llama's structure to a compiled step.

A layer is recognized by the names of its modules, and all of its weights must have a place. That
they are combined as in Llama is not known here: the caller compares both on random numbers
(``llmpq.dist.engine.compiled_steps``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.paged_attention import PagedHeads
from llmpq.kernels.cpu.step import StepProgram, UnsupportedStepError
from llmpq.quant.modules.linear import DenseLinear, QuantLinear
from llmpq.quant.modules.norms import FusedNorm

_NORMS = ("input_layernorm", "post_attention_layernorm")
_LINEARS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerStep:
    """What a layer's step needs beside its weights.

    Attributes:
        hidden: buffer of the hidden states ``[R, H]``, changed in place.
        rotary: buffers of cos and sin ``[R, rotated features]``.
        heads: the layer's keys and values.
        window: tokens a query sees; ``None`` for all.
    """

    hidden: Tensor
    rotary: tuple[Tensor, Tensor]
    heads: PagedHeads
    window: int | None


def append_layer(program: StepProgram, layer: nn.Module, step: LayerStep) -> None:
    """Append the operators of ``layer``.

    Raises:
        UnsupportedStepError: the layer has other weights, or kernels that have no compiled step.
    """
    _check_parts(layer)
    dim = step.heads.keys.shape[-1]
    normed = program.buffer("normed", step.hidden.shape[1])
    projected = program.buffer("projected", step.hidden.shape[1])
    query, key, value = (_output(program, layer, f"self_attn.{name}_proj") for name in "qkv")
    attended = program.buffer("attended", query.shape[1])

    _norm(program, layer, _NORMS[0], step.hidden, normed)
    qkv = [
        (f"self_attn.{name}_proj", y) for name, y in zip("qkv", (query, key, value), strict=True)
    ]
    _products(program, layer, normed, qkv)
    for name, part in zip(_HEAD_NORMS, (query, key), strict=True):
        if _has(layer, name):
            _norm(program, layer, name, part, part)
    for part in (query, key):
        program.rotate(part, dim, *step.rotary)
    scaling = getattr(layer.get_submodule("self_attn"), "scaling", dim**-0.5)
    program.attend((query, key, value, attended), step.heads, scaling, step.window)
    _products(program, layer, attended, [("self_attn.o_proj", projected)])
    program.add(step.hidden, projected)

    _norm(program, layer, _NORMS[1], step.hidden, normed)
    gate, up = (_output(program, layer, f"mlp.{name}_proj") for name in ("gate", "up"))
    _products(program, layer, normed, [("mlp.gate_proj", gate), ("mlp.up_proj", up)])
    program.gate(gate, up, gate, _activation(layer.get_submodule("mlp")))
    _products(program, layer, gate, [("mlp.down_proj", projected)])
    program.add(step.hidden, projected)


def _check_parts(layer: nn.Module) -> None:
    absent = [name for name in (*_NORMS, *_LINEARS) if not _has(layer, name)]
    if absent:
        raise UnsupportedStepError(f"no '{absent[0]}'")
    known = {*_NORMS, *_LINEARS, *_HEAD_NORMS}
    for name, part in layer.named_modules():
        has_weights = isinstance(part, (QuantLinear, DenseLinear)) or any(
            True for _ in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        )
        if has_weights and name not in known:
            raise UnsupportedStepError(f"weights in '{name}'")


def _has(layer: nn.Module, name: str) -> bool:
    try:
        return isinstance(layer.get_submodule(name), nn.Module)
    except AttributeError:
        return False


def _norm(program: StepProgram, layer: nn.Module, name: str, x: Tensor, y: Tensor) -> None:
    norm = layer.get_submodule(name)
    if not isinstance(norm, FusedNorm):
        raise UnsupportedStepError(f"{type(norm).__name__} in '{name}'")
    program.norm(x, y, norm.weight, norm.variance_epsilon)


def _output(program: StepProgram, layer: nn.Module, name: str) -> Tensor:
    """Return the buffer for what a linear operator makes."""
    linear = layer.get_submodule(name)
    if not isinstance(linear, (QuantLinear, DenseLinear, nn.Linear)):
        raise UnsupportedStepError(f"{type(linear).__name__} in '{name}'")
    return program.buffer(name, linear.out_features)


def _products(
    program: StepProgram, layer: nn.Module, x: Tensor, outputs: list[tuple[str, Tensor]]
) -> None:
    """Append the products of ``x`` by operators, by name and with the buffer for the result."""
    parts = []
    for name, y in outputs:
        linear = layer.get_submodule(name)
        bias: Tensor | None = linear.bias  # type: ignore[assignment]
        parts.append((y, _weight(name, linear), bias))
    program.products(x, parts)


def _weight(name: str, linear: nn.Module) -> PreparedWeight | Tensor:
    if isinstance(linear, QuantLinear) and linear.order is not None:
        raise UnsupportedStepError(f"columns out of order in '{name}'")
    if isinstance(linear, (QuantLinear, DenseLinear)):
        return linear.prepared
    if isinstance(linear, nn.Linear):
        return linear.weight.detach()
    raise UnsupportedStepError(f"{type(linear).__name__} in '{name}'")


def _activation(mlp: nn.Module) -> str:
    """Return the name of the activation that computes what the layer's does."""
    act_fn = getattr(mlp, "act_fn", None)
    x = torch.linspace(-8, 8, 257)
    for name, function in _ACTIVATIONS.items():
        if callable(act_fn) and torch.allclose(act_fn(x), function(x), rtol=1e-6, atol=1e-6):
            return name
    raise UnsupportedStepError(f"the activation {type(act_fn).__name__}")
