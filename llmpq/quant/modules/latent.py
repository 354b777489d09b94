"""Latent attention that reads the latent vectors of the context as they are.

The layers of transformers make keys and values of all tokens so far from the latent vectors in the
cache, in every step. A query can be taken to the latent space instead ("absorbed", DeepSeek-V2,
Sec. 2.1.2): a score is ``q K c = (K' q) c``, and the values are made of the weighted sum of latent
vectors. A step of few tokens is then one of a single head of keys that all query heads share.

Shapes: N tokens of the step, H heads, S tokens of a sequence so far, L features of a latent vector,
r of the rotated part of a key, n of the rest, v of a value.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from llmpq.kernels.cpu.dense import can_prepack, is_whole
from llmpq.kernels.cpu.paged_attention import can_attend
from llmpq.logging import get_logger
from llmpq.models.attention import LATENT, ScoreOptions, StepAttention, attend_last
from llmpq.quant.modules.layer import DenseLinear
from llmpq.spec.model import most_absorbed
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE

_logger = get_logger(__name__)
EXPANDING = "expand_kv"
"""Method of transformers' modules of latent attention that makes keys and values."""
_PARTS = ("kv_b_proj", EXPANDING, "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PROOF_TOKENS = 3
_PROOF_ERROR = 0.05
"""Largest error of a proof over the size of the output: formats of 16 bits round on the way."""


def absorb_latents_(stage: nn.Module, dtype: torch.dtype) -> bool:
    """Let the latent attention of a stage on a CPU read latent vectors as they are.

    Returns whether all of it does, of a stage that has any.

    Args:
        stage: loaded, and quantized.
        dtype: of hidden states.
    """
    parts = [one for one in stage.modules() if all(hasattr(one, name) for name in _PARTS)]
    modules = [one for one in parts if can_absorb(one, dtype)]
    if len(modules) < len(parts):
        return False
    made = [AbsorbedLatents(module, dtype) for module in modules]
    if not made or not all(one.is_proven(dtype) for one in made):
        return False
    for module, one in zip(modules, made, strict=True):
        module.add_module(LATENT, one)
        cast("Any", module).expand_kv = lambda latents, rotated: (latents, rotated)
    return True


def can_absorb(attention: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether the kernel reads the latent vectors of a module of transformers."""
    module: Any = attention
    width = module.kv_b_proj.in_features + module.qk_rope_head_dim
    return can_attend(dtype, dtype, width, KV_BLOCK_SIZE)


class AbsorbedLatents(nn.Module):
    """The two halves of what makes keys and values of latent vectors, for each head.

    It takes ``H (n + v) L`` weights of the run's number format besides the quantized operator,
    which keys and values of long rows are still made with.

    Args:
        attention: of transformers.
        dtype: of hidden states.
    """

    def __init__(self, attention: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        module: Any = attention
        self._expand = module.expand_kv
        self._plain, self._width = module.qk_nope_head_dim, module.v_head_dim
        self._rotated, latent = module.qk_rope_head_dim, module.kv_b_proj.in_features
        heads = module.kv_b_proj.out_features // (self._plain + self._width)
        with torch.inference_mode():
            # The rows of a unit matrix have the same products at every bitwidth.
            columns = module.kv_b_proj(torch.eye(latent, dtype=dtype)[None])[0]
        weights = columns.T.reshape(heads, self._plain + self._width, latent)
        self.keys = nn.ModuleList(_linear(one[: self._plain].T) for one in weights)
        self.values = nn.ModuleList(_linear(one[self._plain :]) for one in weights)
        self._latent = latent
        self._most_tokens = most_absorbed(latent, self._rotated, self._plain, self._width)

    def forward(
        self,
        query: Tensor,
        latents: Tensor,
        rotated: Tensor,
        step: StepAttention,
        options: ScoreOptions,
    ) -> Tensor:
        """Return ``[1, N, H, v]`` from queries ``[1, H, N, n + r]``.

        Args:
            query: of the tokens of the step.
            latents: what the cache returned, ``[1, 1, N, L]``, or of all tokens so far.
            rotated: likewise, ``[1, 1, N, r]``.
            step: computes the attention.
            options: of the scores.
        """
        view = step.paged_view
        if view is None:
            key, value = self._expand(latents, rotated)
            return step.attend(query, key, value, options)
        batch = step.batch
        whole = [row for row in range(batch.rows) if batch.counts[row] > self._most_tokens]
        if not whole:
            return self._values(view.attend(self.absorbed(query), options))
        out = query.new_empty(1, batch.tokens, query.shape[1], self._width)
        spans = [slice(at, at + n) for at, n in zip(batch.offsets, batch.counts, strict=True)]
        few = [row for row in range(batch.rows) if row not in whole]
        if few:
            own = torch.cat([query[:, :, spans[row]] for row in few], dim=2)
            made = self._values(view.attend(self.absorbed(own), options, few))
            parts = torch.split(made, [batch.counts[row] for row in few], dim=1)
            for row, part in zip(few, parts, strict=True):
                out[:, spans[row]] = part
        for row in whole:
            key, value = self._expand(*view.read(row))
            made = attend_last(query[:, :, spans[row]], key, value, options)
            out[:, spans[row]] = made.transpose(1, 2)
        return out

    def absorbed(self, query: Tensor) -> Tensor:
        """Return queries of latent vectors, ``[1, H, N, L + r]``, from ``[1, H, N, n + r]``."""
        plain = query[0, ..., : self._plain].contiguous()
        made = [project(one) for project, one in zip(self.keys, plain, strict=True)]
        return torch.cat((torch.stack(made), query[0, ..., self._plain :]), dim=-1)[None]

    def _values(self, summed: Tensor) -> Tensor:
        """Return ``[1, N, H, v]`` from weighted sums of what is cached, ``[1, N, H, L + r]``."""
        latents = summed[0, ..., : self._latent].transpose(0, 1).contiguous()
        made = [project(one) for project, one in zip(self.values, latents, strict=True)]
        return torch.stack(made, dim=1)[None]

    def is_proven(self, dtype: torch.dtype) -> bool:
        """Return whether keys and values are what the module's own code makes; log if not."""
        generator = torch.Generator().manual_seed(0)
        heads, width = len(self.keys), self._plain + self._rotated
        query = torch.randn(1, heads, _PROOF_TOKENS, width, generator=generator).to(dtype)
        sizes = [self._latent, self._rotated]
        cached = torch.randn(1, 1, _PROOF_TOKENS, sum(sizes), generator=generator).to(dtype)
        with torch.inference_mode():
            key, value = self._expand(*torch.split(cached, sizes, dim=-1))
            scores = (
                query.float() @ key.float().mT,
                self.absorbed(query).float() @ cached.float().mT,
            )
            summed = cached.transpose(1, 2).expand(-1, -1, heads, -1)
            values = value.transpose(1, 2).float(), self._values(summed).float()
        is_proven = all(
            bool((found - expected).norm() <= _PROOF_ERROR * expected.norm())
            for expected, found in (scores, values)
        )
        if not is_proven:
            _logger.warning("keys and values are not those of latent vectors: they are made of all")
        return is_proven


def _linear(weight: Tensor) -> nn.Module:
    """Return an operator of a weight ``[N, K]``, in the layout of a kernel where there is one."""
    weight = weight.contiguous()
    if can_prepack(weight) and is_whole(weight):
        return DenseLinear(weight, None)
    rows, columns = weight.shape
    found = nn.Linear(columns, rows, bias=False, device="meta")
    found.weight = nn.Parameter(weight, requires_grad=False)
    return found
