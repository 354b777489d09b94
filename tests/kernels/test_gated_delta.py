"""Gated DeltaNet against transformers' own functions in float64, for any rows of a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from llmpq.kernels.cpu.gated_delta import DeltaInputs, DeltaRow, GatedDelta
from llmpq.kernels.cpu.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled kernels")

WIDTH, SLOTS = 4, 4
EPSILON = 1e-6
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


class Case:
    """A layer with random parameters, states and tokens."""

    def __init__(self, seed, *, key_heads, share, key_dim, value_dim, counts, dtype, width=WIDTH):
        torch.manual_seed(seed)
        self.key_heads, self.heads = key_heads, key_heads * share
        self.key_dim, self.value_dim, self.dtype = key_dim, value_dim, dtype
        self.keys, self.values = key_heads * key_dim, self.heads * value_dim
        channels, tokens = 2 * self.keys + self.values, sum(counts)
        self.conv = torch.randn(channels, 1, width) / width
        self.log_rate = torch.rand(self.heads).mul(16).log()
        self.bias, self.norm = torch.randn(self.heads), torch.rand(value_dim) + 0.5
        self.inputs = DeltaInputs(
            mixed=torch.randn(tokens, channels).to(dtype),
            gate=torch.randn(tokens, self.values).to(dtype),
            beta=torch.randn(tokens, self.heads).to(dtype),
            decay=torch.randn(tokens, self.heads).to(dtype),
        )
        self.conv_states = torch.randn(SLOTS, channels, width)
        self.states = torch.randn(SLOTS, self.heads, key_dim, value_dim)
        self.rows, first = [], 0
        for slot, count in zip(torch.randperm(SLOTS).tolist(), counts, strict=False):
            is_new = bool(torch.rand(()) < 0.4)
            self.rows.append(DeltaRow(first=first, tokens=count, slot=slot, is_new=is_new))
            first += count

    def run(self):
        """The output, and the states after it."""
        delta = GatedDelta(
            self.conv, self.log_rate, self.bias, self.norm, EPSILON,
            key_heads=self.key_heads, key_dim=self.key_dim,
        )  # fmt: skip
        assert delta.fits(self.dtype)
        conv_states, states = self.conv_states.clone(), self.states.clone()
        return delta(self.inputs, self.rows, conv_states, states), conv_states, states

    def expected(self):
        """The same by transformers, one row after the other in float64."""
        outputs = []
        conv_states, states = self.conv_states.double(), self.states.double()
        for row in self.rows:
            span = slice(row.first, row.first + row.tokens)
            mixed = self.inputs.mixed[span].double().t()[None]
            before = conv_states[row.slot][None] * (not row.is_new)
            whole = torch.cat([before, mixed], dim=-1)
            conv_states[row.slot] = whole[0, :, -self.conv.shape[-1] :]
            convolved = reference.causal_conv1d_fn(
                whole, self.conv[:, 0].double(), activation="silu"
            )[0, :, -row.tokens :].t()[None]
            query, key, value = convolved.split([self.keys, self.keys, self.values], dim=-1)
            decay = self.inputs.decay[span].double() + self.bias.double()
            # The function of transformers computes in float32: its text, in float64.
            out, state = recurrent(
                query.unflatten(-1, (-1, self.key_dim)), key.unflatten(-1, (-1, self.key_dim)),
                value.unflatten(-1, (-1, self.value_dim)),
                -self.log_rate.double().exp() * functional.softplus(decay)[None],
                self.inputs.beta[span].double().sigmoid()[None],
                states[row.slot][None] * (not row.is_new),
            )  # fmt: skip
            states[row.slot] = state[0]
            gate = self.inputs.gate[span].double().unflatten(-1, (-1, self.value_dim))
            normed = out[0] * torch.rsqrt(out[0].pow(2).mean(-1, keepdim=True) + EPSILON)
            outputs.append((normed * self.norm.double() * functional.silu(gate)).flatten(1))
        return torch.cat(outputs), conv_states, states


def recurrent(query, key, value, decay, beta, state):
    """The gated delta rule, token by token: ``[1, T, heads, features]``."""
    share = value.shape[2] // key.shape[2]
    query, key = (reference.l2norm(x.repeat_interleave(share, dim=2)) for x in (query, key))
    query = query / query.shape[-1] ** 0.5
    state, outputs = state.clone(), []
    for t in range(value.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        read = (state * key[:, t, :, :, None]).sum(-2)
        delta = (value[:, t] - read) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * delta[:, :, None]
        outputs.append((state * query[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, dim=1), state


def check(case):
    found, expected = case.run(), case.expected()
    longest = max(row.tokens for row in case.rows)
    # Sums over the features of a key for each token, whose errors the state carries on.
    relative = 8 * 2.0**-24 * (case.key_dim + longest)
    for name, one, other in zip(("output", "conv", "state"), found, expected, strict=True):
        rounding = UNIT[case.dtype] if name == "output" else 0.0
        error = (one.double() - other).abs().max()
        assert error <= (relative + rounding) * other.abs().max(), name


def test_the_text_of_the_oracle_is_that_of_transformers():
    torch.manual_seed(3)
    query, key = (torch.randn(1, 7, 2, 16) for _ in range(2))
    value, decay, beta = torch.randn(1, 7, 4, 32), -torch.rand(1, 7, 4), torch.rand(1, 7, 4)
    state = torch.randn(1, 4, 16, 32)
    expected = reference.torch_recurrent_gated_delta_rule(
        query, key, value, g=decay, beta=beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    found = recurrent(query, key, value, decay, beta, state)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    key_heads=st.integers(1, 3),
    share=st.integers(1, 3),
    key_dim=st.sampled_from([16, 48, 128, 256]),
    value_dim=st.sampled_from([16, 32, 48, 128]),
    counts=st.lists(st.sampled_from([1, 1, 2, 3, 17, 70]), min_size=1, max_size=SLOTS),
    dtype=st.sampled_from(list(UNIT)),
    width=st.integers(2, 8),
)
def test_any_rows_are_those_of_transformers(seed, **sizes):
    check(Case(seed, **sizes))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_prompt_in_parts_is_the_whole_one(threads):
    sizes = {"key_heads": 2, "share": 2, "key_dim": 32, "value_dim": 64, "dtype": torch.float32}
    case = Case(5, counts=[200], **sizes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, conv_states, states = case.run()
        check(case)
        (row,) = case.rows
        inputs, outputs, first = case.inputs, [], 0
        for tokens in (1, 70, 64, 1, 64):
            span = slice(first, first + tokens)
            parts = {
                name: getattr(inputs, name)[span] for name in ("mixed", "gate", "beta", "decay")
            }
            case.inputs = DeltaInputs(**parts)
            is_new = row.is_new and not first
            case.rows = [DeltaRow(first=0, tokens=tokens, slot=row.slot, is_new=is_new)]
            out, case.conv_states, case.states = case.run()
            outputs.append(out)
            first += tokens
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(case.states, states, rtol=1e-4, atol=1e-5)
    assert torch.equal(case.conv_states[row.slot], conv_states[row.slot])


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "width"), [(8, 16, 4), (16, 24, 4), (16, 16, 9), (272, 16, 4)]
)
def test_other_shapes_are_left_to_transformers(key_dim, value_dim, width):
    channels = 2 * key_dim + value_dim
    delta = GatedDelta(
        torch.ones(channels, 1, width), torch.ones(1), torch.ones(1), torch.ones(value_dim), 1e-6,
        key_heads=1, key_dim=key_dim,
    )  # fmt: skip
    assert not delta.fits(torch.float32)
