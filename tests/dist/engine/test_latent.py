"""Latent attention that reads latent vectors as they are: no token changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.ranks import make_plan, serve_script
from helpers.scripted_channel import Script
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import generate_alone, load_reference, make_tiny_model_script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmpq.costmodel.memory import absorbed_bytes
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.kernels.cpu.native import library
from llmpq.models.attention import LATENT
from llmpq.options.engine import EngineOptions
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules import latent
from llmpq.quant.modules.latent import AbsorbedLatents
from llmpq.quant.modules.layer import stored_bytes
from llmpq.spec.catalog import resolve_model
from llmpq.spec.model import most_absorbed

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")

FAMILIES = (
    "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "minicpm3", "youtu",
)  # fmt: skip
SIZES = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
"""Of vectors that the kernel reads: 48 numbers side by side."""
CUTS = {1: (0, 3), 2: (0, 1, 3)}
PROMPTS = [[(7 * number) % 90 + 3 for number in range(35)], [3, 4], [50] * 18, [61]]
NEW_TOKENS = 8
FREE = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)


def _save(folder, family, dtype=torch.float32):
    script = make_tiny_model_script()
    config = tiny_config(family, **SIZES)
    model = script.make_model(config, seed=1)
    for parameter in model.parameters():
        if not parameter.any():  # a router that chooses among equals
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return script.save_model(model, folder, dtype=dtype)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a function that makes a model once, with the answers of ``generate``."""
    made = {}

    def model(family):
        if family not in made:
            path = _save(tmp_path_factory.mktemp(family), family)
            reference = load_reference(path)
            reference.generation_config.eos_token_id = None
            answers = [generate_alone(reference, one, NEW_TOKENS)[0][len(one) :] for one in PROMPTS]
            made[family] = path, answers
        return made[family]

    return model


def _served(model_dir, layers, num_stages, **options):
    cuts = (*CUTS[num_stages][:-1], layers)
    plan = make_plan(cuts, batch=4, prompt_tokens=48, new_tokens=16, prefill=2)
    script = Script()
    for number, prompt in enumerate(PROMPTS):
        item = GenerationRequest(id=str(number), prompt_token_ids=tuple(prompt), sampling=FREE)
        script.add(1 + 3 * number, item)
    serve_script(replace(plan, kv_bits=32), model_dir, script, EngineOptions(**options))
    assert not script.refused
    return [script.tokens(str(number)) for number in range(len(PROMPTS))]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_latent_vectors_absorbs_them(models, family):
    model_dir, _ = models(family)
    layers = resolve_model(model_dir)[0].num_layers
    stage = load_stage(model_dir, 0, layers, None, dtype=torch.float32, device="cpu")
    assert stage.absorbs_latents
    attentions = [one for one in stage.modules() if hasattr(one, "kv_b_proj")]
    assert attentions
    assert all(isinstance(getattr(one, LATENT), AbsorbedLatents) for one in attentions)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    family=st.sampled_from(FAMILIES),
    num_stages=st.sampled_from([1, 2]),
    token_budget=st.integers(1, 60),
    num_blocks=st.integers(4, 12),
    most=st.sampled_from([1, 3, 20, 1000]),
)
def test_tokens_are_those_of_generate(models, family, num_stages, token_budget, num_blocks, most):
    """Rows are absorbed up to ``most`` tokens in a step, others beside them are not."""
    model_dir, expected = models(family)
    layers = resolve_model(model_dir)[0].num_layers
    absorbed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent, "most_absorbed", lambda *_: most)
        inner = AbsorbedLatents.absorbed

        def counted(self, query):
            absorbed.append(query.shape[2])
            return inner(self, query)

        patch.setattr(AbsorbedLatents, "absorbed", counted)
        limits = {"token_budget": token_budget, "num_blocks": num_blocks}
        assert _served(model_dir, layers, num_stages, **limits) == expected
    assert min(absorbed) == 1


@pytest.mark.parametrize("bits", [16, 8, 4, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absorbed_weights_are_those_of_the_quantized_operator(tmp_path, bits, dtype):
    path = _save(tmp_path, "deepseek_v3", dtype)
    stage = load_stage(path, 0, 1, [bits], dtype=dtype, device="cpu")
    (attention,) = [one for one in stage.modules() if hasattr(one, "kv_b_proj")]
    made = getattr(attention, LATENT)
    generator = torch.Generator().manual_seed(2)
    vectors = torch.randn(1, 1, 5, 32, generator=generator).to(dtype)
    rotated = torch.randn(1, 1, 5, 16, generator=generator).to(dtype)
    key, value = made._expand(vectors, rotated)
    query = torch.randn(1, len(made.keys), 5, 32, generator=generator).to(dtype)
    scores = query.float() @ key.float().mT
    cached = torch.cat((vectors, rotated), dim=-1).float()
    found = made.absorbed(query).float() @ cached.mT
    limit = {torch.float32: 0.02 if bits < 16 else 1e-5, torch.bfloat16: 0.03}[dtype]
    assert (found - scores).norm() <= limit * scores.norm()
    summed = cached.to(dtype).transpose(1, 2).expand(-1, -1, len(made.keys), -1)
    values = value.transpose(1, 2).float()
    assert (made._values(summed).float() - values).norm() <= limit * values.norm()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_plan_counts_both_copies(tmp_path, monkeypatch, dtype):
    path = _save(tmp_path, "deepseek_v3", getattr(torch, dtype))
    spec, _ = resolve_model(path)

    def held():
        layers = spec.num_layers
        stage = load_stage(path, 0, layers, [4] * layers, dtype=getattr(torch, dtype), device="cpu")
        return stored_bytes(stage.layers)

    both = held()
    monkeypatch.setattr(latent, "can_absorb", lambda *_: False)
    assert both - held() == sum(absorbed_bytes(spec, kind, dtype) for kind in spec.layer_kinds) > 0


def test_absorbing_takes_less_arithmetic_for_few_tokens():
    def products(tokens, seen, latent, rotated, plain, width, *, absorbs):
        if absorbs:
            return tokens * seen * 2 * (latent + rotated)
        return seen * (plain + width) * latent + tokens * seen * (plain + rotated + width)

    for sizes in ((512, 64, 192, 256), (512, 64, 128, 128), (256, 32, 64, 64)):
        most = most_absorbed(*sizes)
        for tokens, is_less in ((most, True), (most + 1, False)):
            absorbed, made = (products(tokens, 4096, *sizes, absorbs=one) for one in (True, False))
            assert (absorbed <= made) == is_less
