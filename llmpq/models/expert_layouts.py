"""Modules of experts in one layout, for families whose own modules have another.

Most families keep the experts of a layer as ``gate_up_proj`` ``[E, 2F, H]`` and ``down_proj``
``[E, H, F]``, outputs first, and get the experts of each token as arguments. The modules of
gpt_oss, Llama 4 and DBRX are replaced by modules of that layout, which are quantized like others.

Shapes: T tokens, E experts, k experts of a token, H hidden, F features of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import use_experts_implementation
from transformers.models.dbrx.modeling_dbrx import DbrxFFN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts


@use_experts_implementation
class StackedExperts(nn.Module):
    """Experts on the meta device; transformers' implementation runs them.

    Attributes:
        is_stored_transposed: whether files have inputs before outputs.

    Args:
        config: of the model, from which transformers reads the implementation.
        sizes: E, F and H.
        dtype: of the weights.
        act_fn: applied to the gate.
    """

    is_stored_transposed = False

    def __init__(
        self,
        config: PreTrainedConfig,
        sizes: tuple[int, int, int],
        dtype: torch.dtype,
        act_fn: nn.Module,
    ) -> None:
        del config  # read by the decorator
        super().__init__()
        self.gate_up_proj, self.down_proj = _stacks(*sizes, dtype)
        self.num_experts, self.act_fn = sizes[0], act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, ``[T, H]``.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: expert of each choice, ``[T, k]``.
            top_k_weights: its weight, ``[T, k]``.
        """
        return _run_one_by_one(self, hidden_states, top_k_index, top_k_weights)


@use_experts_implementation(has_bias=True, is_concatenated=False)
class BiasedExperts(nn.Module):
    """Experts of gpt_oss: biases, and the outputs of gate and up in turn.

    Attributes:
        is_stored_transposed: as in ``StackedExperts``.

    Args:
        config: of the model.
        experts: the module of transformers.
    """

    is_stored_transposed = True
    _apply_gate = GptOssExperts._apply_gate

    def __init__(self, config: PreTrainedConfig, experts: Any) -> None:
        del config  # read by the decorator
        super().__init__()
        count, features, hidden = experts.down_proj.shape
        self.gate_up_proj, self.down_proj = _stacks(
            count, features, hidden, experts.down_proj.dtype
        )
        self.gate_up_proj_bias: nn.Parameter = experts.gate_up_proj_bias
        self.down_proj_bias: nn.Parameter = experts.down_proj_bias
        self.num_experts = count
        self.act_fn = ClampedGate(experts.alpha, experts.limit)
        self.alpha, self.limit = experts.alpha, experts.limit

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; as ``StackedExperts.forward``."""
        return _run_one_by_one(self, hidden_states, top_k_index, top_k_weights)


class ClampedGate(nn.Module):
    """The gate of gpt_oss, applied to both outputs of the first matrix.

    Args:
        alpha: factor inside the sigmoid.
        limit: largest magnitude of either output.
    """

    def __init__(self, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate_up: Tensor) -> Tensor:
        """Return ``[..., F]`` from ``[..., 2F]``, whose features are of gate and up in turn."""
        apply: Callable[[Any, Tensor], Tensor] = GptOssExperts._apply_gate
        return apply(self, gate_up)


class Llama4Mixture(nn.Module):
    """The feed-forward of Llama 4 with experts: scores weigh the inputs of a token's experts.

    transformers runs every token through every expert, most of them on zeros.

    Args:
        config: of the model.
        mixture: the module of transformers.
    """

    def __init__(self, config: PreTrainedConfig, mixture: Any) -> None:
        super().__init__()
        own = mixture.experts
        count, features, hidden = own.down_proj.shape
        self.experts = StackedExperts(
            config, (count, features, hidden), own.down_proj.dtype, own.act_fn
        )
        self.experts.is_stored_transposed = True
        self.router = mixture.router
        self.shared_expert = mixture.shared_expert

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[T, H]`` from ``[..., H]``, and the scores of the router ``[T, E]``."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(tokens)
        weights, experts = scores.topk(self.router.top_k, dim=1)  # [T, k]
        inputs = (tokens[:, None] * weights[..., None]).flatten(0, 1)  # [T * k, H]
        index = experts.reshape(-1, 1)
        routed: Tensor = self.experts(inputs, index, torch.ones_like(index, dtype=inputs.dtype))
        shared: Tensor = self.shared_expert(tokens)
        return shared + routed.view(*experts.shape, -1).sum(1), logits


class DbrxMixture(nn.Module):
    """The feed-forward of DBRX: a router, and experts in the usual layout.

    Args:
        config: of the model.
        mixture: the module of transformers.
    """

    def __init__(self, config: PreTrainedConfig, mixture: Any) -> None:
        super().__init__()
        own = mixture.experts
        sizes = own.num_experts, own.ffn_hidden_size, own.hidden_size
        self.experts = StackedExperts(config, sizes, own.mlp.w1.dtype, own.mlp.activation_fn)
        self.router = mixture.router
        self.top_k: int = mixture.top_k
        self.moe_normalize_expert_weights = mixture.moe_normalize_expert_weights

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the output of the experts, in the shape of ``hidden_states`` ``[..., H]``."""
        choose: Callable[[Any, Tensor], tuple[Tensor, Tensor]] = DbrxFFN.route_tokens_to_experts
        weights, experts = choose(self, self.router(hidden_states))
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        output: Tensor = self.experts(tokens, experts, weights)
        return output.view(hidden_states.shape)


_REPLACED: dict[str, Callable[[PreTrainedConfig, Any], nn.Module]] = {
    "DbrxFFN": DbrxMixture,
    "GptOssExperts": BiasedExperts,
    "Llama4TextMoe": Llama4Mixture,
}


def use_stacked_experts(layer: nn.Module, config: PreTrainedConfig) -> None:
    """Replace the experts of a layer on the meta device by modules of the usual layout."""
    for name, module in list(layer.named_modules()):
        make = _REPLACED.get(type(module).__name__)
        if make is not None:
            layer.set_submodule(name, make(config, module))


def _stacks(
    count: int, features: int, hidden: int, dtype: torch.dtype
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return ``[E, 2F, H]`` and ``[E, H, F]`` without memory."""
    return (
        nn.Parameter(torch.empty(count, 2 * features, hidden, dtype=dtype, device="meta")),
        nn.Parameter(torch.empty(count, hidden, features, dtype=dtype, device="meta")),
    )


def _run_one_by_one(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Run experts one after the other, as transformers does without another implementation."""
    output = torch.zeros_like(hidden)
    for expert in range(experts.num_experts):
        token, choice = torch.where(index == expert)
        biases = [getattr(experts, f"{name}_bias", None) for name in ("gate_up_proj", "down_proj")]
        first, last = (None if bias is None else bias[expert] for bias in biases)
        values = nn.functional.linear(hidden[token], experts.gate_up_proj[expert], first)
        values = nn.functional.linear(experts._apply_gate(values), experts.down_proj[expert], last)
        output.index_add_(0, token, (values * weights[token, choice, None]).to(output.dtype))
    return output
