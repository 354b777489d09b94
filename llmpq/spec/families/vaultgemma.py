"""VaultGemma: Gemma 2 with Llama's two norms."""

from __future__ import annotations

from llmpq.spec.families import Family, LayerForm
from llmpq.spec.huggingface import windows
from llmpq.spec.huggingface.sizes import Sizes

FAMILY = Family(
    name="vaultgemma",
    sizes=Sizes(windows=windows.by_period(2)),
    writes_scores=True,
    form=LayerForm(norms=("input_layernorm", None, "pre_feedforward_layernorm", None)),
)
