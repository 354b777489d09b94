"""A walk collects the same inputs as a plain run of the whole model, for every family."""

import weakref

import pytest
import torch
from helpers.tiny_models import load_reference

from llmpq.calibration import (
    CalibrationSet,
    Hessian,
    LayerWalk,
    Moments,
    synthetic_calibration,
)
from llmpq.errors import SpecError

torch.set_num_threads(1)

FAMILIES = ["llama", "opt", "bloom", "gpt_neox", "phi", "mixtral", "qwen3_moe", "gemma2"]


def decoder_layers(model):
    return next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList))


def calibration(sequences=3, tokens=9):
    return synthetic_calibration(100, num_sequences=sequences, sequence_tokens=tokens)


def reference_inputs(model_dir, tokens):
    """Inputs of every linear operator of a plain run: ``{(layer, name): [tokens, K]}``."""
    model = load_reference(model_dir)
    seen = {}
    for index, layer in enumerate(decoder_layers(model)):
        for name, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(
                    lambda _m, x, key=(index, name): seen.update({key: x[0].flatten(0, -2)})
                )
    with torch.inference_mode():
        hidden = model(tokens, output_hidden_states=True).hidden_states
    return seen, hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_and_hessian_equal_those_of_a_plain_run(tiny_model, family):
    model_dir, data = tiny_model(family, seed=1), calibration()
    expected, hidden = reference_inputs(model_dir, data.token_ids)
    walk = LayerWalk(model_dir, data, batch_tokens=10, finish=True)
    for layer in walk:
        torch.testing.assert_close(
            torch.cat(walk.hidden), hidden[layer.index], atol=1e-4, rtol=1e-4
        )
        hessians = layer.collect(Hessian)
        moments = layer.collect(Moments, advance=True)
        plain = [name for name in layer.operators if (layer.index, name) in expected]
        assert plain
        for name in plain:
            x = expected[layer.index, name].double()
            assert moments[name].tokens == hessians[name].tokens == len(x)
            torch.testing.assert_close(
                hessians[name].matrix.double(), x.T @ x, atol=2e-3, rtol=1e-3
            )
            assert moments[name].mean == pytest.approx(float(x.mean()), abs=1e-4)
            assert moments[name].variance == pytest.approx(float(x.var(correction=0)), rel=1e-3)


@pytest.mark.parametrize(
    ("family", "steps"),
    [
        ("llama", ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"]),
        ("opt", ["k_proj v_proj q_proj", "out_proj", "fc1", "fc2"]),
        ("bloom", ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]),
    ],
)
def test_operators_of_one_input_are_one_step(tiny_model, family, steps):
    layer = next(iter(LayerWalk(tiny_model(family, seed=1), calibration())))
    found = [{name.rpartition(".")[2] for name in names} for names in layer.steps]
    assert found == [set(step.split()) for step in steps]
    collected = layer.collect(Hessian)
    first = layer.steps[0]
    assert len({id(collected[name]) for name in first}) == 1


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_every_expert_is_an_operator_of_its_own(tiny_model, family):
    layer = next(iter(LayerWalk(tiny_model(family, seed=1), calibration())))
    experts = layer.module.mlp.experts.num_experts
    *_, first, second = layer.steps
    assert first == tuple(f"mlp.experts.gate_up.{i}" for i in range(experts))
    assert second == tuple(f"mlp.experts.down.{i}" for i in range(experts))
    moments = layer.collect(Moments)
    routed = sum(moments[name].tokens for name in first)
    per_token = getattr(layer.module.mlp, "top_k", None) or layer.module.mlp.gate.top_k
    assert routed == calibration().tokens * per_token


def test_a_replaced_operator_changes_what_comes_after_it(tiny_model):
    plain = LayerWalk(tiny_model("llama", seed=1), calibration())
    changed = LayerWalk(tiny_model("llama", seed=1), calibration())
    for one, other in zip(plain, changed, strict=True):
        if other.index == 0:
            zero = torch.nn.Linear(32, 32, bias=False)
            zero.weight.data.zero_()
            before = other.collect(Hessian, ["self_attn.o_proj"])
            other.module.set_submodule("self_attn.v_proj", torch.nn.Linear(32, 16, bias=False))
            after = other.collect(Hessian, ["self_attn.o_proj"])
            name = "self_attn.o_proj"
            assert not torch.equal(before[name].matrix, after[name].matrix)
            one.advance()
            other.advance()
            assert not torch.equal(plain.hidden[0], changed.hidden[0])


def test_results_do_not_depend_on_the_order_of_sequences(tiny_model):
    rows = calibration(6).token_ids

    def result(order):
        data = CalibrationSet(token_ids=rows[order], source="test")
        walk = LayerWalk(tiny_model("llama", seed=1), data, batch_tokens=18)
        return [layer.collect(Hessian, advance=True) for layer in walk]

    for one, other in zip(result([0, 1, 2, 3, 4, 5]), result([4, 2, 0, 5, 3, 1]), strict=True):
        assert all(torch.equal(one[name].matrix, other[name].matrix) for name in one)


def test_a_pass_ends_after_the_last_observed_operator(tiny_model):
    layer = next(iter(LayerWalk(tiny_model("llama", seed=1), calibration())))
    ran = []
    layer.module.mlp.register_forward_pre_hook(lambda *_: ran.append(True))
    assert layer.steps
    ran.clear()
    layer.collect(Moments, ["self_attn.q_proj", "self_attn.v_proj"])
    assert not ran
    layer.collect(Moments, ["mlp.down_proj"])
    assert ran


def test_a_layer_is_freed_before_the_next_one_is_loaded(tiny_model):
    passed = []
    for layer in LayerWalk(tiny_model("mixtral", seed=1), calibration()):
        assert not any(ref() for ref in passed)
        layer.collect(Moments)
        passed.append(weakref.ref(layer.module))
    assert len(passed) == 3


def test_progress_is_called_after_every_walked_layer(tiny_model):
    told = []
    walk = LayerWalk(tiny_model("opt", seed=1), calibration(), progress=lambda *a: told.append(a))
    for layer in walk:
        layer.advance()
    assert told == [(1, 3, "layer 0"), (2, 3, "layer 1"), (3, 3, "layer 2")]


def test_tokens_the_model_does_not_have_are_refused(tiny_model):
    data = synthetic_calibration(10_000, num_sequences=2, sequence_tokens=8)
    with pytest.raises(SpecError, match="vocabulary of 100"):
        LayerWalk(tiny_model("llama", seed=1), data)
