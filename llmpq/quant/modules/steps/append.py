"""Append a decoder layer to a compiled step.

That the modules are combined as in its :class:`LayerForm` is not known here: the caller compares
both on random numbers (``llmpq.dist.engine.compiled_steps``).

Shapes: R rows, C hidden size, H heads, h KV heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llmpq.kernels.base import PreparedWeight
from llmpq.kernels.cpu.paged_attention import PagedHeads
from llmpq.kernels.cpu.step import FEW_ROWS, StepProgram, StepScores, UnsupportedStepError
from llmpq.kernels.cpu.step_experts import (
    ClampedActivation,
    ExpertMatrix,
    RowExperts,
    append_experts,
)
from llmpq.models.expert_layouts import ClampedGate
from llmpq.quant.modules.linear import DenseLinear, Gate, QuantExperts, QuantLinear
from llmpq.quant.modules.steps.parts import LayerForm, MixtureParts, MlpParts, parts_of
from llmpq.quant.modules.steps.routers import router_like
from llmpq.quant.modules.steps.values import activation_like, norm_like

_Linear = QuantLinear | DenseLinear | nn.Linear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerStep:
    """What a layer's step needs beside its modules.

    Attributes:
        hidden: buffer of the hidden states ``[R, C]``, changed in place.
        rotary: buffers of cos and sin ``[R, rotated features]``; ``None`` without rotation.
        heads: the layer's keys and values.
        scores: of its attention.
        form: how its modules are combined.
    """

    hidden: Tensor
    rotary: tuple[Tensor, Tensor] | None
    heads: PagedHeads
    scores: StepScores
    form: LayerForm


def append_layer(program: StepProgram, layer: nn.Module, step: LayerStep) -> None:
    """Append the operators of ``layer``.

    Raises:
        UnsupportedStepError: the layer has other weights, or kernels that have no compiled step.
    """
    _Layer(program, layer, step).append()


class _Layer:
    """A layer whose operators are appended to a program."""

    def __init__(self, program: StepProgram, layer: nn.Module, step: LayerStep) -> None:
        self._program = program
        self._layer = layer
        self._step = step
        self._parts = parts_of(layer)

    def append(self) -> None:
        """Append attention, MLP and what adds them to the hidden states."""
        program, parts, hidden = self._program, self._parts, self._step.hidden
        before, after, second, last = parts.norms
        normed = self._normed(before, hidden)
        attended = self._attention(normed)
        self._norm_in_place(after, attended)
        if self._step.form.is_parallel:
            made = self._mlp(normed if second is None else self._normed(second, hidden))
            program.add(made, attended)
        else:
            program.add(hidden, attended, parts.multiplier)
            made = self._mlp(self._normed(second, hidden))
            self._norm_in_place(last, made)
        program.add(hidden, made, parts.multiplier)
        if parts.scalar != 1:
            program.scale(hidden, parts.scalar)

    def _attention(self, x: Tensor) -> Tensor:
        """Append attention on ``x``; return the buffer of its output ``[R, C]``."""
        program, step = self._program, self._step
        query, key, value = self._projected(x)
        if self._parts.head_norms[2] is not None:
            # Elsewhere, as the values may be the keys.
            place = program.buffer("value", value.shape[1] * value.shape[2])
            value = self._head_normed(2, value, place.view(value.shape))
        rotated = [query, key]
        for rotates in (True, False) if step.form.norms_late else (False, True):
            for index, part in enumerate(rotated):
                if not rotates:
                    self._head_normed(index, part, part)
                elif step.form.rotation is not None:
                    assert step.rotary is not None
                    program.rotate(part, *step.rotary, pairs=step.form.rotation == "pairs")
        attended = program.buffer("attended", query.shape[1] * query.shape[2])
        sinks = self._parts.sinks if step.scores.has_sinks else None
        program.attend((query, key, value), attended, step.heads, step.scores, sinks)
        return self._product(self._parts.output, attended, "attention")

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Append the projections; return query ``[R, H, d]``, key and value ``[R, h, d]``."""
        names, (_, kv_heads, _, dim) = self._parts.projections, self._step.heads.keys.shape
        found = self._products(names, x, "qkv"[: len(names)] if len(names) > 1 else ("fused",))
        heads = self._linear(self._parts.output).in_features // dim
        if len(found) > 1:
            query, key = _heads_of(found[0], dim), _heads_of(found[1], dim)
            return query, key, _heads_of(found[-1], dim)
        if found[0].shape[1] != (heads + 2 * kv_heads) * dim:
            raise UnsupportedStepError(f"{found[0].shape[1]} features in '{names[0]}'")
        if not self._step.form.by_heads:
            parts = _heads_of(found[0], dim)
            return parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
        groups = found[0].view(len(found[0]), kv_heads, -1, dim)  # queries, a key and a value
        if kv_heads > 1 and heads > kv_heads:
            raise UnsupportedStepError("keys between the queries of different groups")
        query = groups[:, 0, :-2] if kv_heads == 1 else groups[:, :, 0]
        return query, groups[:, :, -2], groups[:, :, -1]

    def _mlp(self, x: Tensor) -> Tensor:
        """Append the MLP or the mixture on ``x``; return the buffer of its output ``[R, C]``."""
        mlp = self._parts.mlp
        return self._dense(mlp, x, "mlp") if isinstance(mlp, MlpParts) else self._mixture(mlp, x)

    def _dense(self, parts: MlpParts, x: Tensor, made: str) -> Tensor:
        program = self._program
        found = self._products(parts.ups, x, ("gate", "up")[: len(parts.ups)])
        gate, up, y = found[0], None, found[0]
        if len(found) > 1:
            up = found[1]
        elif parts.has_gate:
            gate, up = gate.chunk(2, dim=1)
            y = program.buffer("gated", gate.shape[1])
        activation = self._layer.get_submodule(parts.activation)
        program.gate(gate, up, y, activation_like(activation))
        return self._product(parts.down, y, made)

    def _mixture(self, parts: MixtureParts, x: Tensor) -> Tensor:
        program, layer = self._program, self._layer
        module = layer.get_submodule(parts.experts)
        assert isinstance(module, QuantExperts)
        shared = None if parts.shared is None else self._dense(parts.shared, x, "shared")
        shared_gate = None
        if parts.shared_gate is not None:
            linear = self._linear(parts.shared_gate)
            shared_gate = program.buffer("shared gate", 1)
            weight = _weight(parts.shared_gate, linear)
            program.products(x, [(shared_gate, weight, linear.bias)])
        router = layer.get_submodule(parts.router)
        experts = RowExperts(
            router=router_like(router, x.shape[1], program.dtype, parts.correction),
            ups=self._matrices(f"{parts.experts}.gate_up", module.gate_up),
            downs=self._matrices(f"{parts.experts}.down", module.down),
            activation=_activation(module.gate),
            shared=shared,
            shared_gate=shared_gate,
        )
        y = program.buffer("mlp", x.shape[1])
        append_experts(program, x, y, experts)
        return y

    def _matrices(self, name: str, modules: nn.ModuleList) -> list[ExpertMatrix]:
        names = [f"{name}.{expert}" for expert in range(len(modules))]
        linears = [self._linear(one) for one in names]
        pairs = zip(names, linears, strict=True)
        return [(_weight(one, linear), linear.bias) for one, linear in pairs]

    def _normed(self, name: str | None, x: Tensor) -> Tensor:
        """Append a norm of ``x`` ``[R, C]``; return its buffer."""
        if name is None:
            return x
        y = self._program.buffer("normed", x.shape[1])
        self._norm(name, x[:, None], y[:, None])
        return y

    def _norm_in_place(self, name: str | None, x: Tensor) -> None:
        if name is not None:
            self._norm(name, x[:, None], x[:, None])

    def _head_normed(self, index: int, x: Tensor, y: Tensor) -> Tensor:
        """Append the norm of queries, keys or values ``[R, H, d]``, if any; return ``y``."""
        name = self._parts.head_norms[index]
        if name is None:
            return y
        weight = getattr(self._layer.get_submodule(name), "weight", None)
        if weight is not None and weight.dim() == 1 and weight.numel() == x.shape[1] * x.shape[2]:
            self._norm(name, x.flatten(1)[:, None], y.flatten(1)[:, None])
        else:
            self._norm(name, x, y)
        return y

    def _norm(self, name: str, x: Tensor, y: Tensor) -> None:
        norm = norm_like(self._layer.get_submodule(name), x.shape[2], self._program.dtype)
        self._program.norm(x, y, norm)

    def _product(self, name: str, x: Tensor, made: str) -> Tensor:
        return self._products((name,), x, (made,))[0]

    def _products(self, names: Sequence[str], x: Tensor, made: Sequence[str]) -> list[Tensor]:
        """Append products of ``x`` by linear operators; return the buffers of the results."""
        outputs, parts = [], []
        for name, buffer in zip(names, made, strict=True):
            linear = self._linear(name)
            weight = _weight(name, linear)
            if isinstance(weight, Tensor) and weight.dtype != torch.float32:
                raise UnsupportedStepError(f"a plain weight of {weight.dtype}")
            if isinstance(weight, Tensor):
                self._program.limit(FEW_ROWS)
            y = self._program.buffer(buffer, linear.out_features)
            outputs.append(y)
            parts.append((y, weight, linear.bias))
        self._program.products(x, parts)
        return outputs

    def _linear(self, name: str) -> _Linear:
        linear = self._layer.get_submodule(name)
        if not isinstance(linear, (QuantLinear, DenseLinear, nn.Linear)):
            raise UnsupportedStepError(f"{type(linear).__name__} in '{name}'")
        return linear


def _activation(gate: Callable[[Tensor], Tensor]) -> str | ClampedActivation:
    if isinstance(gate, ClampedGate):
        return ClampedActivation(alpha=gate.alpha, limit=gate.limit)
    if isinstance(gate, Gate):
        return activation_like(gate.act_fn)
    raise UnsupportedStepError(f"the activation {type(gate).__name__}")


def _heads_of(x: Tensor, dim: int) -> Tensor:
    if x.shape[1] % dim:
        raise UnsupportedStepError(f"{x.shape[1]} features in heads of {dim}")
    return x.view(len(x), -1, dim)


def _weight(name: str, linear: _Linear) -> PreparedWeight | Tensor:
    if isinstance(linear, QuantLinear) and linear.order is not None:
        raise UnsupportedStepError(f"columns out of order in '{name}'")
    if isinstance(linear, (QuantLinear, DenseLinear)):
        return linear.prepared
    return linear.weight.detach()
