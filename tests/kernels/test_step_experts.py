"""Routing and experts of a decode step, against the routers of transformers and QuantExperts."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_configs import tiny_config
from torch import nn
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from llmpq.kernels.cpu.experts import (
    ClampedActivation,
    RowExperts,
    append_experts,
    append_route,
)
from llmpq.kernels.cpu.native import has_steps, instruction_set, library
from llmpq.kernels.cpu.paged_attention import PagedTokens
from llmpq.kernels.cpu.step import StepProgram, UnsupportedStepError
from llmpq.kernels.registry import choose_backend
from llmpq.models.adapter import ClampedGate
from llmpq.quant.modules.layer import GatedActivation, QuantExperts, QuantLinear
from llmpq.quant.modules.step_compiler import MixtureParts, routed, router_of
from llmpq.quant.quantizers.rtn import quantize
from llmpq.spec.families import family_of
from llmpq.spec.precision import default_precision

HAS_STEPS = library() is not None and has_steps(instruction_set())
pytestmark = pytest.mark.skipif(not HAS_STEPS, reason="needs AVX2 and a C compiler")

HIDDEN, FEATURES = 64, 32
DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Largest difference, relative to what is expected (norms)."""
COUNTS = {"num_experts": 44, "num_local_experts": 44, "n_routed_experts": 44}
"""No multiple of a vector or of the rows in a part."""
ROUTERS = {
    "normalized": ("qwen3_moe", Qwen3MoeTopKRouter, {"norm_topk_prob": True}),
    "not normalized": ("qwen3_moe", Qwen3MoeTopKRouter, {"norm_topk_prob": False}),
    "float32 weights": ("mixtral", MixtralTopKRouter, {}),
    "softmax of the chosen": ("granitemoe", GraniteMoeTopKRouter, {}),
    "sparse mixer": ("phimoe", PhimoeTopKRouter, {"router_jitter_noise": 0.2}),
    "sigmoid with correction": ("minimax_m2", MiniMaxM2TopKRouter, {}),
    "scaled": ("glm4_moe", Glm4MoeTopkRouter, {"routed_scaling_factor": 2.5}),
    "softmax with correction": ("ernie4_5_moe", Ernie4_5_MoeTopKRouter, {}),
}
"""Model type, class and fields of the configuration."""
KERNELS = [(bits, "cpu_packed_int8") for bits in (3, 4)] + [(8, "cpu_llm_int8")]
KERNELS += [(3, "cpu_packed"), (8, "cpu_packed")]


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _config(kind):
    model_type, _, fields = ROUTERS[kind]
    config = tiny_config(model_type, {"hidden_size": HIDDEN, "num_experts_per_tok": 5, **COUNTS})
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def _parts(correction=None, score="softmax", normalizes=True):
    return MixtureParts(
        router="gate",
        score=score,
        normalizes=normalizes,
        experts="experts",
        shared=None,
        shared_gate=None,
        correction=correction,
    )


def _kind(kind):
    """The kind of router in the record of the family."""
    found = family_of(ROUTERS[kind][0]).feed_forward.kind
    return {"score": found.score, "normalizes": found.normalizes_in(_config(kind))}


def _router(kind, dtype):
    """A router with random weights, and its correction."""
    router_class = ROUTERS[kind][1]
    router, correction = router_class(_config(kind)), None
    for name, tensor in (*router.named_parameters(), *router.named_buffers()):
        is_correction = "e_score_correction" in name
        tensor.data = _random(*tensor.shape, seed=1) * (0.02 if is_correction else 0.2)
        correction = tensor.data.flatten() if is_correction else correction
    if router_class is MiniMaxM2TopKRouter:
        correction = 0.02 * _random(44, seed=1)
    router = router.to(dtype).requires_grad_(False).eval()
    return router, None if correction is None else correction.to(dtype).float()


def _linear(rows, columns, seed, dtype, bits=16, kernel=None, bias=False):
    linear = nn.Linear(columns, rows, bias=bias).requires_grad_(False)
    linear.weight.data = _random(rows, columns, seed=seed) / columns**0.5
    linear = linear.to(dtype)
    if bits == 16:
        return linear
    precision = default_precision(bits)
    backend = choose_backend("cpu", precision, dtype, rows, columns, prefer=kernel)
    assert backend.name == kernel
    return QuantLinear(quantize(linear.weight, precision, dtype), linear.bias, backend)


def _experts(count, dtype, **kind):
    ups = [_linear(2 * FEATURES, HIDDEN, 2 * i, dtype, **kind) for i in range(count)]
    downs = [_linear(HIDDEN, FEATURES, 2 * i + 1, dtype, **kind) for i in range(count)]
    return QuantExperts(ups, downs, GatedActivation(nn.SiLU()))


def _matrices(linears):
    return [(one.prepared if isinstance(one, QuantLinear) else one.weight, one.bias)
            for one in linears]  # fmt: skip


def _compare(router, correction, experts, rows, dtype, *, activation="silu", kind=None, **shared):
    """Compare the rows whose experts are clear; return how many there are."""
    program = StepProgram(dtype)
    x, y = program.buffer("x", HIDDEN), program.buffer("y", HIDDEN)
    x.copy_(_random(*x.shape, seed=7))
    found = RowExperts(
        ups=_matrices(experts.gate_up),
        downs=_matrices(experts.down),
        activation=activation,
        **shared,
    )
    route = append_route(
        program, x, router_of(router, HIDDEN, dtype, _parts(correction, **(kind or {})))
    )
    append_experts(program, x, y, route, found)
    program.run(PagedTokens([[0]] * rows, [0] * rows, [1] * rows))

    _, weights, chosen = routed(router, x[:rows], correction)
    expected = experts(x[:rows], chosen, weights).float()
    if shared:
        gate = shared["shared_gate"]
        expected += shared["shared"][:rows] * (1 if gate is None else gate[:rows].sigmoid())
    clear = program.margins[0](rows) > CLOSE[dtype]
    y, expected = y[:rows][clear].float(), expected[clear]
    assert (y - expected).norm() <= CLOSE[dtype] * expected.norm()
    return len(y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ROUTERS)
def test_router_is_of_the_kind_in_the_record_of_its_family(kind, dtype):
    router, correction = _router(kind, dtype)
    experts = _experts(44, dtype)
    assert _compare(router, correction, experts, 32, dtype, kind=_kind(kind)) > 12


@pytest.mark.parametrize("kind", ROUTERS)
def test_router_of_another_kind_than_the_record_says_is_an_error(kind):
    found = _kind(kind)
    wrong = [found | {"score": "softmax" if found["score"] == "sigmoid" else "sigmoid"}]
    if found["score"] != "sparse mixer":
        wrong.append(found | {"normalizes": not found["normalizes"]})
    router, correction = _router(kind, torch.float32)
    for other in wrong:
        with pytest.raises(UnsupportedStepError, match=f"the router {type(router).__name__}"):
            router_of(router, HIDDEN, torch.float32, _parts(correction, **other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "kernel"), [(16, None), *KERNELS])
def test_experts_of_few_and_many_rows(bits, kernel, dtype):
    router, correction = _router("normalized", dtype)
    experts = _experts(44, dtype, bits=bits, kernel=kernel)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compared = [
            _compare(router, correction, experts, rows, dtype) for rows in (1, 2, 3, 5, 8, 32)
        ]
    finally:
        torch.set_num_threads(before)
    assert sum(compared) > 25


def test_a_row_alone_has_the_numbers_it_has_among_others():
    router, _ = _router("normalized", torch.bfloat16)
    experts, found = _experts(44, torch.bfloat16, bits=4, kernel="cpu_packed_int8"), []
    for rows in (1, 32):
        program = StepProgram(torch.bfloat16)
        x, y = program.buffer("x", HIDDEN), program.buffer("y", HIDDEN)
        x.copy_(_random(*x.shape, seed=7))
        row = RowExperts(
            ups=_matrices(experts.gate_up),
            downs=_matrices(experts.down),
            activation="silu",
        )
        route = append_route(program, x, router_of(router, HIDDEN, torch.bfloat16, _parts()))
        append_experts(program, x, y, route, row)
        program.run(PagedTokens([[0]] * rows, [0] * rows, [1] * rows))
        found.append(y[0].clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_gate", [False, True])
def test_shared_expert_is_added(dtype, has_gate):
    router, _ = _router("normalized", dtype)
    shared = _random(32, HIDDEN, seed=8).to(dtype)
    gate = _random(32, 1, seed=9).to(dtype) if has_gate else None
    found = {"shared": shared, "shared_gate": gate}
    assert _compare(router, None, _experts(44, dtype), 32, dtype, **found) > 12


@pytest.mark.parametrize("dtype", DTYPES)
def test_clamped_activation_of_gate_and_up_in_turn(dtype):
    router, _ = _router("normalized", dtype)
    experts = _experts(44, dtype)
    experts.gate = ClampedGate(1.702, 0.8)
    activation = ClampedActivation(alpha=1.702, limit=0.8)
    assert _compare(router, None, experts, 32, dtype, activation=activation) > 12


def test_experts_with_biases():
    router, _ = _router("normalized", torch.float32)
    experts = _experts(44, torch.float32, bias=True)
    assert _compare(router, None, experts, 5, torch.float32) == 5


def test_rows_that_are_no_numbers_have_experts():
    router, _ = _router("normalized", torch.float32)
    program = StepProgram(torch.float32)
    x, y = program.buffer("x", HIDDEN), program.buffer("y", HIDDEN)
    x.fill_(torch.nan)
    experts = _experts(44, torch.float32)
    row = RowExperts(
        ups=_matrices(experts.gate_up),
        downs=_matrices(experts.down),
        activation="silu",
    )
    route = append_route(program, x, router_of(router, HIDDEN, torch.float32, _parts()))
    append_experts(program, x, y, route, row)
    program.run(PagedTokens([[0]] * 3, [0] * 3, [1] * 3))
    assert y[:3].isnan().all()


class _OtherRouter(Qwen3MoeTopKRouter):
    def forward(self, hidden_states):
        logits, weights, chosen = super().forward(hidden_states)
        return logits, weights.sqrt(), chosen


def test_router_of_another_kind_is_an_error():
    router = _OtherRouter(tiny_config("qwen3_moe", {"hidden_size": HIDDEN, **COUNTS}))
    router.weight.data = _random(44, HIDDEN)
    with pytest.raises(UnsupportedStepError, match="the router _OtherRouter"):
        router_of(router, HIDDEN, torch.float32, _parts())


def test_groups_of_experts_are_another_kind():
    fields = {"hidden_size": HIDDEN, "n_group": 4, "topk_group": 1, **COUNTS}
    router = Glm4MoeTopkRouter(tiny_config("glm4_moe", fields)).requires_grad_(False)
    router.weight.data = _random(44, HIDDEN)
    with pytest.raises(UnsupportedStepError, match="the router Glm4MoeTopkRouter"):
        router_of(router, HIDDEN, torch.float32, _parts(torch.zeros(44), **_kind("scaled")))
