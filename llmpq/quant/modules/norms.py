"""Replace norms by a compiled kernel that computes the same.

Only classes whose ``forward`` has the same bytecode as Llama's are replaced: Gemma, for example,
adds one to the weight, and Olmo rounds at another place.
"""

from __future__ import annotations

import inspect
from types import CodeType

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llmpq.kernels.cpu.norm import can_norm, rms_norm


class FusedNorm(nn.Module):
    """Replaces a root mean square norm that computes what Llama's does.

    Args:
        norm: to replace; its weight is shared.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight = norm.get_parameter("weight")
        self.variance_epsilon = float(norm.variance_epsilon)  # type: ignore[arg-type]

    def forward(self, hidden: Tensor) -> Tensor:
        """Norm each row of ``[..., H]``."""
        if hidden.dtype != self.weight.dtype:
            return LlamaRMSNorm.forward(self, hidden)  # type: ignore[arg-type]
        return rms_norm(hidden, self.weight, self.variance_epsilon)


def fuse_norms_(module: nn.Module) -> None:
    """Replace the norms below ``module`` that the kernel can compute."""
    for name, part in list(module.named_modules()):
        if name and _is_like_llama(part) and can_norm(part.get_parameter("weight")):
            module.set_submodule(name, FusedNorm(part))


def _is_like_llama(part: nn.Module) -> bool:
    found, expected = _code_of(type(part)), _code_of(LlamaRMSNorm)
    if found is None or expected is None or not hasattr(part, "variance_epsilon"):
        return False
    is_same = (found.co_code, found.co_names) == (expected.co_code, expected.co_names)
    return is_same and _numbers(found) == _numbers(expected)


def _code_of(kind: type[nn.Module]) -> CodeType | None:
    return getattr(inspect.unwrap(kind.forward), "__code__", None)


def _numbers(code: CodeType) -> list[object]:
    return [constant for constant in code.co_consts if not isinstance(constant, str)]
