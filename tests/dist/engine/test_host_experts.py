"""Routed experts in the host's memory: the tokens of generate, whatever is where."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from helpers.decode_steps import HAS_STEPS, cache_of, generate, random_prompts
from helpers.online_runs import request
from helpers.ranks import cpu_cluster, make_plan, make_split_plan, run_threads, serve_script
from helpers.scripted_channel import Script
from helpers.tiny_configs import GEMMA4_EXPERTS, tiny_config
from helpers.tiny_models import (
    generate_alone,
    load_reference,
    make_tiny_model_script,
    save_tiny_model,
)

from llmpq.assigner import planner
from llmpq.assigner.constraints.resolve import Overrides
from llmpq.assigner.request import PlanRequest
from llmpq.calibration import synthetic_calibration
from llmpq.calibration.quantize import QuantizeJob, quantize_checkpoint
from llmpq.costmodel import build_costs
from llmpq.dist.engine import compiled_steps
from llmpq.dist.engine.compiled_steps import CompiledSteps, step_runner_of
from llmpq.dist.io.prompts import Request
from llmpq.errors import SpecError
from llmpq.kernels.cpu.experts import HostPool
from llmpq.models import load_config
from llmpq.options.engine import EngineOptions
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.modules.experts import HostExperts, host_expert_bytes
from llmpq.quant.modules.layer import QuantExperts, stored_bytes
from llmpq.quant.quantizers.gptq import GptqOptions
from llmpq.spec.cluster import Cluster, DeviceGroup, DeviceHost, Node
from llmpq.spec.devices.figures import DeviceEntry
from llmpq.spec.fields import Fields, from_json, to_json
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.plan import MicroBatching, Plan, default_schedule, read_plan, write_plan
from llmpq.spec.precision import LayerExperts, Precision, StageExperts, Variant
from llmpq.spec.workload import Workload

WIDE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "max_position_embeddings": 4352,
    "num_experts": 10,
    "num_local_experts": 10,
    "n_routed_experts": 10,
    "moe_num_experts": 10,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
FAMILIES = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_next": {"linear_num_value_heads": 4},
    "qwen3_5_moe_text": {},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "deepseek_v2": {},
    "deepseek_v3": {"routed_scaling_factor": 1.5},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "dots1": {"n_routed_experts": 10, "num_experts_per_tok": 3},
    "olmoe": {},
    "flex_olmo": {},
    "granitemoe": {},
    "granitemoehybrid": {},
    "phimoe": {"router_jitter_noise": 0.2},
    "minimax_m2": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_moe": {},
    "mellum": {},
    "solar_open": {},
    "lfm2_moe": {"block_multiple_of": 32},
    "afmoe": {},
    "exaone_moe": {},
    "hy_v3": {},
    "kimi_linear": {},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
    "nemotron_h": {},
    "dbrx": {},
    "gemma4_text": {**GEMMA4_EXPERTS, "moe_intermediate_size": 32},
}
"""Model type and fields of the configuration."""
SHARES = {0: 1.0, 0.3: 0.7, 1: 0.0}
"""Share of the experts in the host's memory, and of those on the device."""


def _save(folder, family):
    script = make_tiny_model_script()
    model = script.make_model(tiny_config(family, WIDE, **FAMILIES[family]), seed=1)
    for parameter in model.parameters():
        if not parameter.any():  # a router that chooses among equals
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return script.save_model(model, folder, dtype=torch.float32)


def _stage(path, bits=16, dtype=torch.float32, **options):
    layers = load_config(path).num_hidden_layers
    return load_stage(path, 0, layers, [bits] * layers, dtype=dtype, device="cpu", **options)


def _experts_in(stage):
    """Number of experts of each layer that has some."""
    found = {}
    for index, layer in enumerate(stage.layers):
        for part in layer.modules():
            if isinstance(part, QuantExperts):
                found[index] = part.num_experts
    return found


def _apart(counts, share, bits=None):
    """The first experts of every layer are resident."""
    return StageExperts(
        layers=tuple(
            LayerExperts(layer=layer, bits=bits, resident=tuple(range(round(kept * count))))
            for layer, count in counts.items()
            for kept in (SHARES[share],)
        )
    )


@pytest.fixture
def pool():
    if not HAS_STEPS:
        pytest.skip("needs AVX2 and a C compiler")
    made = HostPool(2)
    yield made
    made.close()


class _Modules:
    """A stage operator by operator."""

    def __init__(self, stage):
        self._stage, self._cache = stage, cache_of(stage)

    def forward(self, hidden, batch):
        return self._stage(hidden, batch, self._cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family, tmp_path, pool):
    path = _save(tmp_path, family)
    counts, reference = _experts_in(_stage(path)), load_reference(path)
    assert counts
    prompts = random_prompts((21, 3, 1, 16))
    expected = [generate_alone(reference, prompt, 5)[0] for prompt in prompts]
    for share in SHARES:
        stage = _stage(path, experts=_apart(counts, share), host=pool)
        hosted = [part for part in stage.modules() if isinstance(part, HostExperts)]
        assert len(hosted) == (len(counts) if share else 0)
        runners = [_Modules(stage), step_runner_of(stage, cache_of(stage))]
        for runner in runners[: 1 + (runners[1] is not None)]:
            before = pool.busy[1]
            assert generate(path, runner, prompts, 5) == expected
            assert (pool.busy[1] > before) == bool(share)


def test_experts_of_one_matrix_each_stay_with_their_layer(tmp_path, pool):
    path = save_tiny_model("llama", tmp_path / "dense")
    experts = StageExperts(layers=(LayerExperts(layer=1, resident=()),))
    with pytest.raises(SpecError, match="layer 1: found no routed experts"):
        _stage(path, experts=experts, host=pool)
    script = make_tiny_model_script()
    model = script.make_model(tiny_config("jetmoe"), seed=1)
    path = script.save_model(model, tmp_path / "jetmoe", dtype=torch.float32)
    with pytest.raises(SpecError, match="layer 1: its experts have one matrix each"):
        _stage(path, experts=experts, host=pool)


def test_an_expert_that_is_not_there_is_an_error(tmp_path, pool):
    path = _save(tmp_path, "mixtral")
    experts = StageExperts(layers=(LayerExperts(layer=1, resident=(3, 10)),))
    with pytest.raises(SpecError, match="found expert 10, expected numbers below 10"):
        _stage(path, experts=experts, host=pool)


WIDTHS = [(dense, routed) for dense in (16, 8, 4, 3) for routed in (16, 8, 4, 3)]


@pytest.mark.parametrize(("dense", "routed"), WIDTHS)
@pytest.mark.parametrize("share", [0, 0.3, 1])
def test_bits_of_experts_are_their_own(dense, routed, share, tmp_path, pool):
    """Numbers are those of two stages whose layers have one width each."""
    path = _save(tmp_path, "qwen2_moe")
    counts = _experts_in(_stage(path))
    stage = _stage(path, dense, experts=_apart(counts, share, routed), host=pool)
    expected, donor = _stage(path, dense), _stage(path, routed)
    for layer, other in zip(expected.layers, donor.layers, strict=True):
        layer.mlp.experts = other.mlp.experts
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 7, 64, generator=generator)
    found, made = (one.run_whole(hidden) for one in (stage, expected))
    assert (found - made).norm() <= 1e-5 * made.norm()
    steps = step_runner_of(stage, cache_of(stage))
    assert isinstance(steps, CompiledSteps)
    prompts = random_prompts((9, 2))
    assert generate(path, steps, prompts, 4) == generate(path, _Modules(expected), prompts, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.3, 1])
def test_16_bit_numbers_are_those_of_whole_layers(dtype, share, tmp_path, pool):
    path = _save(tmp_path, "qwen3_moe")
    counts = _experts_in(_stage(path))
    whole, apart = (
        _stage(path, dtype=dtype),
        _stage(path, dtype=dtype, experts=_apart(counts, share), host=pool),
    )
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 7, 64, generator=generator).to(dtype)
    expected, found = (one.run_whole(hidden).float() for one in (whole, apart))
    assert (found - expected).norm() <= 0.02 * expected.norm()


def _with_experts(plan, counts, share, bits=None, threads=1):
    """The plan with experts of its layers in the memory of their hosts."""
    stages = []
    for stage in plan.stages:
        own = {n: c for n, c in counts.items() if stage.first_layer <= n < stage.end_layer}
        experts = replace(_apart(own, share, bits), threads=threads) if own else None
        stages.append(replace(stage, experts=experts))
    return replace(plan, stages=tuple(stages))


PROMPTS = [
    [1, 2, 3, 4, 5], [7, 8], [9, 10, 11, 50], [61], [33, 34, 35, 36], [90, 3], [15, 16, 17],
    [70, 71, 72, 73, 74, 75, 76], [5], [44, 45],
]  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return _save(tmp_path_factory.mktemp("apart"), "qwen2_moe")


@pytest.fixture(scope="module")
def counts(model_dir):
    return _experts_in(_stage(model_dir))


@pytest.fixture(scope="module")
def expected(model_dir):
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    return [generate_alone(model, prompt, 6)[0][len(prompt) :] for prompt in PROMPTS]


def _requests():
    return [
        Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=6)
        for number, prompt in enumerate(PROMPTS)
    ]


def _tokens(answers):
    return [list(answers[number][0]) for number in range(len(PROMPTS))]


@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3), (0, 1, 2, 3)], ids=len)
@pytest.mark.parametrize("policy", ["hybrid", "static", "iteration", "rra", "multibin"])
def test_every_policy_and_number_of_stages(policy, cuts, model_dir, counts, expected):
    plan = _with_experts(make_plan(cuts, prefill=2, decode=2), counts, 0.3)
    plan = replace(plan, schedule=default_schedule(policy, 4))
    answers, measured = run_threads(plan, model_dir, _requests())
    assert _tokens(answers) == expected
    if HAS_STEPS:
        assert all(stage.host_busy_s for stage in measured.stages)
    whole, _ = run_threads(replace(plan, stages=make_plan(cuts).stages), model_dir, _requests())
    assert whole == answers
    assert all(stage.held.host > 0 for stage in measured.stages)


def test_prefill_and_decode_on_stages_of_their_own(model_dir, counts, expected):
    plan = _with_experts(make_split_plan((0, 2, 3), (0, 3)), counts, 1)
    answers, _ = run_threads(plan, model_dir, _requests())
    assert _tokens(answers) == expected


@pytest.mark.parametrize("share", [0.3, 1])
def test_requests_that_arrive_while_others_run(share, model_dir, counts, expected):
    plan = _with_experts(make_plan((0, 2, 3)), counts, share)
    script = Script()
    for number, prompt in enumerate(PROMPTS):
        script.add(2 * number + 1, request(number, prompt))
    serve_script(plan, model_dir, script, EngineOptions())
    assert [script.tokens(f"r{number}") for number in range(len(PROMPTS))] == expected


def test_memory_of_host_and_device_is_counted_apart(model_dir, counts):
    plan = make_plan((0, 3))
    found = []
    for share in SHARES:
        own = _with_experts(plan, counts, share)
        _, measured = run_threads(own, model_dir, _requests()[:1])
        found.append(measured.stages[0].held)
    routed = 3 * 10 * 3 * 64 * 32 * 4
    buffers = [one.host - round(share * routed) for share, one in zip(SHARES, found, strict=True)]
    assert found[0].host == 0
    assert buffers[1] == buffers[2] or not HAS_STEPS
    for share, one in zip(SHARES, found, strict=True):
        assert one.weights == found[0].weights - round(share * routed)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("tokens", [1, 300, 1500, 4096])
def test_long_prompts(tokens, batch, model_dir, counts):
    if tokens > 300 and batch > 1:
        tokens //= 8
    model = load_reference(model_dir)
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(tokens)
    prompts = torch.randint(1, 100, (batch, tokens), generator=generator).tolist()
    plan = make_plan((0, 3), prefill=batch, decode=batch, batch=batch, prompt_tokens=tokens)
    requests = [
        Request(id=number, prompt_token_ids=tuple(prompt), max_new_tokens=3)
        for number, prompt in enumerate(prompts)
    ]
    for share in (0.3, 1):
        answers, _ = run_threads(_with_experts(plan, counts, share), model_dir, requests)
        for number in {0, batch - 1}:
            expected = generate_alone(model, prompts[number], 3)[0][tokens:]
            assert list(answers[number][0]) == expected


def test_without_kernels_the_calling_thread_computes(model_dir, counts, expected, monkeypatch):
    monkeypatch.setattr("llmpq.kernels.cpu.experts.library", lambda: None)
    plan = _with_experts(make_plan((0, 2, 3)), counts, 1)
    answers, measured = run_threads(plan, model_dir, _requests())
    assert _tokens(answers) == expected
    assert measured.stages[0].host_busy_s is None


def test_a_strategy_file_has_the_experts(tmp_path, counts):
    plan = _with_experts(make_plan((0, 1, 3)), counts, 0.3, bits=4, threads=2)
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan
    fields = json.loads((tmp_path / "plan.json").read_text())
    assert fields["stages"][0]["experts"] == {
        "threads": 2,
        "layers": [{"layer": 0, "bits": 4, "resident": [0, 1, 2, 3, 4, 5, 6]}],
    }
    assert fields["schema"] == 2
    assert plan.stages[1].variants == (Variant(16, 4, 7),) * 2
    assert plan.stages[1].host_threads == 2
    assert "experts" not in to_json(make_plan((0, 3)))["stages"][0]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"layer": 0, "bits": 4}], r"layers\[0\].layer': found 0, expected a layer in \[1, 3\)"),
        ([{"layer": 2, "bits": 4}, {"layer": 1, "bits": 4}], r"layers\[1\].layer': found 1"),
        ([{"layer": 1, "bits": 5}], r"layers\[0\].bits': found 5, expected one of"),
        ([{"layer": 1}], r"layers\[0\]': found neither bits nor resident experts"),
        ([{"layer": 1, "resident": [2, 2]}], r"resident': found \[2, 2\], expected rising"),
        ([{"layer": 1, "resident": [-1]}], "resident"),
        ([], "layers"),
    ],
)
def test_experts_that_cannot_be_are_errors(layers, message):
    plan = make_plan((0, 1, 3))
    fields = to_json(plan)
    fields["stages"][1]["experts"] = {"layers": layers}
    with pytest.raises(SpecError, match=message):
        from_json(Plan, Fields(fields, "plan.json"))


def test_one_bitwidth_a_layer_is_what_some_commands_need(counts):
    plan = make_plan((0, 1, 3), bits=[8, 4, 4])
    assert _with_experts(plan, counts, 1).whole_bits == (8, 4, 4)
    with pytest.raises(SpecError, match=r"stages\[0\].experts': found experts of other bits"):
        assert _with_experts(plan, counts, 1, bits=4).whole_bits


def test_two_copies_of_a_layer_have_equal_experts(counts):
    plan = _with_experts(make_split_plan((0, 3), (0, 3)), counts, 1)
    stages = (plan.stages[0], replace(plan.stages[1], experts=_apart(counts, 1, 4)))
    with pytest.raises(SpecError, match="other bits for prefill than for decode"):
        replace(plan, stages=stages)


@pytest.mark.parametrize(("dense", "routed"), [(16, 16), (8, 4), (4, 16), (3, 8)])
@pytest.mark.parametrize("share", [0, 0.3, 1])
def test_bytes_are_those_of_the_cost_models(dense, routed, share, model_dir, counts):
    stage = _stage(model_dir, dense, experts=_apart(counts, share, routed))
    model = load_model_dir(model_dir)
    cluster = cpu_cluster(1)
    costs = build_costs(model, cluster, dtype="float32", kv_bits=32)
    variant = Variant(dense, routed, round(SHARES[share] * 10))
    places = [costs.variant_bytes(cluster.devices[0], kind, variant) for kind in model.layer_kinds]
    apart = host_expert_bytes(stage.layers)
    assert stored_bytes(stage.layers) - apart == sum(own for own, _ in places)
    assert apart == sum(host for _, host in places)


@pytest.mark.parametrize("order", ["none", "full"])
@pytest.mark.parametrize("share", [0.3, 1])
def test_experts_of_a_gptq_checkpoint(order, share, model_dir, counts, pool, tmp_path):
    """With columns out of order the calling thread computes them."""
    job = QuantizeJob(
        model_dir=model_dir,
        precisions=(Precision(bits=4, method="gptq", group_size=32),) * 3,
        calibration=synthetic_calibration(100, num_sequences=4, sequence_tokens=32),
        options=GptqOptions(order=order),
    )
    quantize_checkpoint(job, tmp_path / "gptq", lambda *_: None)
    whole = _stage(tmp_path / "gptq", 4)
    apart = _stage(tmp_path / "gptq", 4, experts=_apart(counts, share), host=pool)
    assert host_expert_bytes(apart.layers) > 0
    hidden = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0))
    found, expected = (one.run_whole(hidden) for one in (apart, whole))
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert (pool.busy[1] > 0) == (order == "none")
    message = "layer 0: found experts at 8 bits beside 4, expected those of the checkpoint"
    with pytest.raises(SpecError, match=message):
        _stage(tmp_path / "gptq", 4, experts=_apart(counts, share, 8), host=pool)


@pytest.mark.parametrize("whole", [True, False])
def test_a_planned_strategy_runs_in_the_memory_that_it_states(model_dir, whole, expected):
    """Two groups of cores, of which the first has too little memory for all experts."""
    host = DeviceHost(type="mine", threads=1, memory_bytes=10**9)
    entry = DeviceEntry(type="mine", like="cpu", gather_bytes_per_s=1e9)

    def request(memory_bytes, **options):
        group = DeviceGroup(type="mine", count=1, threads=1, memory_bytes=memory_bytes, host=host)
        node = Node(name="here", devices=(group,))
        return PlanRequest(
            model=load_model_dir(model_dir),
            model_source=str(model_dir),
            cluster=Cluster(name="here", nodes=(node,), device_types=(entry,)),
            workload=Workload(batch=4, prompt_tokens=16, new_tokens=6),
            dtype="float32",
            kv_bits=32,
            bits=(16,),
            overrides=Overrides(micro_batching=MicroBatching(prefill=2, decode=4)),
            whole_experts=whole,
            **options,
        )

    whole = planner.make_plan(request(10**10, whole_layers=True)).estimate.stages[0].memory
    plan = planner.make_plan(request(whole.total - 300_000))
    assert plan.stages[0].num_apart == 2 + (not whole)
    answers, measured = run_threads(plan, model_dir, _requests())
    assert _tokens(answers) == expected
    planned, held = plan.estimate.stages[0].memory, measured.stages[0].held
    assert planned.weights == held.weights
    buffers = 3 * 512 * (2 * 64 + 3 * 32) * 4  # choices of a call; rows in, between and out
    on_host = sum(10 - len(one.resident) for one in plan.stages[0].experts.layers)
    assert on_host == 20 if whole else 10 < on_host < 20
    assert planned.host == on_host * 3 * 64 * 32 * 4 + buffers
    assert planned.host == held.host or not HAS_STEPS


def test_decode_steps_of_an_accelerator_are_not_captured(model_dir, counts):
    for share, reason in ((0, None), (1, "experts are in the host's memory")):
        stage = _stage(model_dir, experts=_apart(counts, share))
        assert compiled_steps._not_captured(stage, cache_of(stage)) == reason
