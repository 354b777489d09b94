"""Compiled mixers against transformers' own functions in float64, for any rows of a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from llmpq.kernels.cpu.mixers import (
    DeltaInputs,
    GatedDelta,
    Mamba2,
    SelectiveScan,
    ShortConvolution,
)
from llmpq.kernels.cpu.native import library

pytestmark = pytest.mark.skipif(library() is None, reason="needs the compiled kernels")

WIDTH, ROWS, SLOTS = 4, 4, 8
EPSILON = 1e-6
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

FIRST, TOKENS, SLOT, IS_NEW, KEPT, DRAFT_SLOT = range(6)
"""Columns of the rows."""


def random_rows(counts):
    """Rows of so many tokens, in slots of their own, some of which begin, or end with drafts."""
    size = len(counts)
    firsts, tokens = torch.tensor([0, *counts[:-1]]).cumsum(0), torch.tensor(counts)
    slots, others = torch.randperm(SLOTS)[: 2 * size].split(size)
    is_new, has_drafts = torch.rand(size) < 0.4, torch.rand(size) < 0.5
    has_drafts &= ~is_new
    kept = torch.where(has_drafts, (torch.rand(size) * tokens).long(), tokens)
    after = torch.where(has_drafts, others, slots)
    return torch.stack([firsts, tokens, slots, is_new.long(), kept, after], dim=1)


def parts_of(rows):
    """Each row, or its tokens before the drafts and the drafts, with whether it has any."""
    for first, tokens, slot, is_new, kept, draft_slot in rows.tolist():
        has_drafts = kept < tokens
        if kept:
            yield [first, kept, slot, is_new, kept, slot], has_drafts
        if has_drafts:
            yield [first + kept, tokens - kept, slot, 0, 0, draft_slot], True


def convolve(values, row, states, weight, bias, activation):
    """The convolution of a row's ``[T, C]`` in float64, and its state after it."""
    before = states[row[SLOT]][None] * (not row[IS_NEW])
    whole = torch.cat([before, values.double().t()[None]], dim=-1)
    bias = None if bias is None else bias.double()
    found = reference.causal_conv1d_fn(whole, weight[:, 0].double(), bias, activation=activation)
    return found[0, :, -row[TOKENS] :].t(), whole[0, :, -weight.shape[-1] :]


class DeltaCase:
    """A layer of Gated DeltaNet with random parameters, states and tokens."""

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
        self.rows = random_rows(counts)
        self.summands = 0.0

    def run(self):
        """The output, and the states after it."""
        delta = GatedDelta(
            ShortConvolution(self.conv, None, is_activated=True),
            self.log_rate, self.bias, self.norm, EPSILON,
            key_heads=self.key_heads, key_dim=self.key_dim,
        )  # fmt: skip
        assert delta.fits(self.dtype)
        conv_states, states = self.conv_states.clone(), self.states.clone()
        return delta(self.inputs, self.rows, conv_states, states), conv_states, states

    def expected(self):
        """The same by transformers, one row after the other in float64."""
        outputs = []
        conv_states, states = self.conv_states.double(), self.states.double()
        for row, _ in parts_of(self.rows):
            span = slice(row[FIRST], row[FIRST] + row[TOKENS])
            convolved, conv_states[row[DRAFT_SLOT]] = convolve(
                self.inputs.mixed[span], row, conv_states, self.conv, None, "silu"
            )
            convolved = convolved[None]
            query, key, value = convolved.split([self.keys, self.keys, self.values], dim=-1)
            decay = self.inputs.decay[span].double() + self.bias.double()
            # The function of transformers computes in float32: its text, in float64.
            out, state, largest = recurrent(
                query.unflatten(-1, (-1, self.key_dim)), key.unflatten(-1, (-1, self.key_dim)),
                value.unflatten(-1, (-1, self.value_dim)),
                -self.log_rate.double().exp() * functional.softplus(decay)[None],
                self.inputs.beta[span].double().sigmoid()[None],
                states[row[SLOT]][None] * (not row[IS_NEW]),
            )  # fmt: skip
            states[row[DRAFT_SLOT]] = state[0]
            gate = self.inputs.gate[span].double().unflatten(-1, (-1, self.value_dim))
            root = torch.rsqrt(out[0].pow(2).mean(-1, keepdim=True) + EPSILON)
            after = root * self.norm.double() * functional.silu(gate)
            outputs.append((out[0] * after).flatten(1))
            self.summands = max(self.summands, float((largest[..., None] * after).abs().max()))
        return torch.cat(outputs), conv_states, states


def recurrent(query, key, value, decay, beta, state):
    """The gated delta rule: its outputs ``[1, T, heads, features]`` and state.

    Also the largest number of the state at every token ``[T, heads]``.
    """
    share = value.shape[2] // key.shape[2]
    query, key = (reference.l2norm(x.repeat_interleave(share, dim=2)) for x in (query, key))
    query = query / query.shape[-1] ** 0.5
    state, outputs, largest = state.clone(), [], []
    for t in range(value.shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        read = (state * key[:, t, :, :, None]).sum(-2)
        delta = (value[:, t] - read) * beta[:, t, :, None]
        state = state + key[:, t, :, :, None] * delta[:, :, None]
        outputs.append((state * query[:, t, :, :, None]).sum(-2))
        largest.append(state[0].abs().amax((-2, -1)))
    return torch.stack(outputs, dim=1), state, torch.stack(largest)


def check(case, summed):
    """Compare a case's output and states; ``summed`` numbers are added up for each token."""
    found, expected = case.run(), case.expected()
    longest = int(case.rows[:, TOKENS].max())
    # The state carries on the errors of sums.
    relative = 8 * 2.0**-24 * (summed + longest)
    for name, one, other in zip(("output", "conv", "state"), found, expected, strict=True):
        rounding = UNIT[case.dtype] if name == "output" else 0.0
        error, size = (one.double() - other).abs().max(), float(other.abs().max())
        # A small sum of large numbers has the errors of these; a norm makes all sums as large.
        summands = max(size, case.summands) if name == "output" else size
        assert error <= relative * summands + rounding * size, name


def test_the_text_of_the_oracle_is_that_of_transformers():
    torch.manual_seed(3)
    query, key = (torch.randn(1, 7, 2, 16) for _ in range(2))
    value, decay, beta = torch.randn(1, 7, 4, 32), -torch.rand(1, 7, 4), torch.rand(1, 7, 4)
    state = torch.randn(1, 4, 16, 32)
    expected = reference.torch_recurrent_gated_delta_rule(
        query, key, value, g=decay, beta=beta, initial_state=state, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    found = recurrent(query, key, value, decay, beta, state)[:2]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    key_heads=st.integers(1, 3),
    share=st.integers(1, 3),
    key_dim=st.sampled_from([16, 48, 128, 256]),
    value_dim=st.sampled_from([16, 32, 48, 128]),
    counts=st.lists(st.sampled_from([1, 1, 2, 3, 17, 70]), min_size=1, max_size=ROWS),
    dtype=st.sampled_from(list(UNIT)),
    width=st.integers(2, 8),
)
def test_gated_deltas_of_any_rows_are_those_of_transformers(seed, **sizes):
    case = DeltaCase(seed, **sizes)
    check(case, case.key_dim)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_prompt_in_parts_is_the_whole_one(threads):
    sizes = {"key_heads": 2, "share": 2, "key_dim": 32, "value_dim": 64, "dtype": torch.float32}
    case = DeltaCase(5, counts=[200], **sizes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, conv_states, states = case.run()
        check(case, case.key_dim)
        _, _, slot, begins, *_ = case.rows[0].tolist()
        inputs, outputs, first = case.inputs, [], 0
        for tokens in (1, 70, 64, 1, 64):
            span = slice(first, first + tokens)
            parts = {
                name: getattr(inputs, name)[span] for name in ("mixed", "gate", "beta", "decay")
            }
            case.inputs = DeltaInputs(**parts)
            case.rows = torch.tensor([[0, tokens, slot, int(begins and not first), tokens, slot]])
            out, case.conv_states, case.states = case.run()
            outputs.append(out)
            first += tokens
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(case.states, states, rtol=1e-4, atol=1e-5)
    assert torch.equal(case.conv_states[slot], conv_states[slot])


@pytest.mark.parametrize(
    ("key_dim", "value_dim", "width"), [(8, 16, 4), (16, 24, 4), (16, 16, 9), (272, 16, 4)]
)
def test_other_shapes_are_left_to_transformers(key_dim, value_dim, width):
    channels = 2 * key_dim + value_dim
    delta = GatedDelta(
        ShortConvolution(torch.ones(channels, 1, width), None, is_activated=True),
        torch.ones(1), torch.ones(1), torch.ones(value_dim), 1e-6, key_heads=1, key_dim=key_dim,
    )  # fmt: skip
    assert not delta.fits(torch.float32)


class MambaCase:
    """A layer of Mamba 2 with random parameters, states and tokens."""

    def __init__(self, seed, *, groups, share, head_dim, state_dim, counts, dtype, bias, limits):
        torch.manual_seed(seed)
        self.groups, self.heads = groups, groups * share
        self.head_dim, self.state_dim, self.dtype = head_dim, state_dim, dtype
        self.width, tokens = self.heads * head_dim, sum(counts)
        self.bc = groups * state_dim
        channels = self.width + 2 * self.bc
        self.conv = torch.randn(channels, 1, WIDTH) / WIDTH
        self.conv_bias = torch.randn(channels) if bias else None
        self.log_rate, self.bias = torch.rand(self.heads).mul(16).log(), torch.randn(self.heads)
        self.skip, self.norm = torch.randn(self.heads), torch.rand(self.width) + 0.5
        self.limits = limits
        self.joined = torch.randn(tokens, self.width + channels + self.heads).to(dtype)
        self.conv_states = torch.randn(SLOTS, channels, WIDTH)
        self.states = torch.randn(SLOTS, self.heads, head_dim, state_dim)
        self.rows = random_rows(counts)
        self.summands = 0.0

    def run(self):
        """The output, and the states after it."""
        mamba = Mamba2(
            ShortConvolution(self.conv, self.conv_bias, is_activated=True),
            self.log_rate, self.bias, self.skip, self.norm, EPSILON,
            normed=self.width // self.groups, groups=self.groups, state_dim=self.state_dim,
            limits=self.limits,
        )  # fmt: skip
        assert mamba.fits(self.dtype)
        conv_states, states = self.conv_states.clone(), self.states.clone()
        return mamba(self.joined, self.rows, conv_states, states), conv_states, states

    def expected(self):
        """The same, one row after the other in float64."""
        outputs = []
        conv_states, states = self.conv_states.double(), self.states.double()
        norm = mamba2.GraniteMoeHybridRMSNormGated(
            self.width, group_size=self.width // self.groups, eps=EPSILON
        )
        for row, has_drafts in parts_of(self.rows):
            span = slice(row[FIRST], row[FIRST] + row[TOKENS])
            gate, mixed, dt = (
                self.joined[span]
                .double()
                .split([self.width, self.conv.shape[0], self.heads], dim=-1)
            )
            convolved, conv_states[row[DRAFT_SLOT]] = convolve(
                mixed, row, conv_states, self.conv, self.conv_bias, "silu"
            )
            x, b, c = convolved.split([self.width, self.bc, self.bc], dim=-1)
            dt = functional.softplus(dt + self.bias.double())
            if row[IS_NEW] or (row[TOKENS] > 1 and not has_drafts):
                dt = dt.clamp(*self.limits)
            out, states[row[DRAFT_SLOT]], sizes = select(
                x.unflatten(-1, (self.heads, -1)), dt, -self.log_rate.double().exp(),
                b.unflatten(-1, (self.groups, -1)), c.unflatten(-1, (self.groups, -1)),
                states[row[SLOT]] * (not row[IS_NEW]),
            )  # fmt: skip
            skipped = self.skip.double()[:, None] * x.unflatten(-1, (self.heads, -1))
            out, sizes = out + skipped, sizes + skipped.abs()
            gated = (out.flatten(1) * functional.silu(gate)).unflatten(-1, (self.groups, -1))
            scale = torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            outputs.append((gated * scale).flatten(1) * self.norm.double())
            sizes = (sizes.flatten(1) * functional.silu(gate)).unflatten(-1, (self.groups, -1))
            after = (sizes * scale).flatten(1) * self.norm.double()
            self.summands = max(self.summands, float(after.abs().max()))
        return torch.cat(outputs), conv_states, states


def select(x, dt, rate, b, c, state):
    """The selective state space, token by token: ``[T, heads, features]``, and its state.

    Also the sums of magnitudes ``[T, heads, features]``.
    """
    share = x.shape[1] // b.shape[1]
    b, c = (one.repeat_interleave(share, dim=1) for one in (b, c))
    outputs, sizes = [], []
    for t in range(len(x)):
        state = state * (rate * dt[t]).exp()[:, None, None]
        state = state + (dt[t][:, None] * x[t])[..., None] * b[t][:, None]
        outputs.append((state * c[t][:, None]).sum(-1))
        sizes.append((state * c[t][:, None]).abs().sum(-1))
    return torch.stack(outputs), state, torch.stack(sizes)


def test_the_text_of_the_selective_state_space_is_that_of_transformers():
    torch.manual_seed(4)
    x, b, c = torch.randn(9, 4, 8), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    dt, rate, skip = torch.rand(9, 4), -torch.rand(4), torch.randn(4)
    state = torch.randn(4, 8, 16)
    out, expected = mamba2.mamba2_chunk_scan(
        x[None], dt[None], rate, b[None], c[None], 4, D=skip, initial_states=state[None],
        return_final_states=True,
    )  # fmt: skip
    found, last, _ = select(x, dt, rate, b, c, state)
    torch.testing.assert_close(found + skip[:, None] * x, out[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, expected[0], rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    head_dim=st.sampled_from([16, 48, 64]),
    state_dim=st.sampled_from([16, 48, 128]),
    counts=st.lists(st.sampled_from([1, 1, 2, 3, 17, 70]), min_size=1, max_size=ROWS),
    dtype=st.sampled_from(list(UNIT)),
    bias=st.booleans(),
    limits=st.sampled_from([(0.0, float("inf")), (0.5, 1.0)]),
)
def test_state_spaces_of_any_rows_are_those_of_transformers(seed, **sizes):
    case = MambaCase(seed, **sizes)
    check(case, case.state_dim)


class ScanCase:
    """Mamba 1 behind its convolution with random parameters, states and tokens."""

    def __init__(self, seed, *, channels, state_dim, counts, dtype):
        torch.manual_seed(seed)
        self.channels, self.dtype, tokens = channels, dtype, sum(counts)
        self.log_rate = torch.rand(channels, state_dim).mul(16).log()
        self.skip = torch.randn(channels)
        self.joined = torch.randn(tokens, 2 * channels).to(dtype)
        self.convolved = torch.randn(tokens, channels).to(dtype)
        self.selected = (
            torch.rand(tokens, channels), torch.randn(tokens, state_dim),
            torch.randn(tokens, state_dim),
        )  # fmt: skip
        self.states = torch.randn(SLOTS, channels, state_dim)
        self.conv_states = torch.zeros(1)
        self.rows = random_rows(counts)
        self.summands = 0.0

    def run(self):
        """The output, and the states after it."""
        scan = SelectiveScan(
            ShortConvolution(torch.ones(self.channels, 1, WIDTH), None, is_activated=True),
            self.log_rate,
            self.skip,
        )
        assert scan.fits(self.dtype)
        states = self.states.clone()
        out = scan(self.joined, self.convolved, self.selected, self.rows, states)
        return out, self.conv_states, states

    def expected(self):
        """The same, token by token in float64."""
        outputs, states = [], self.states.double()
        rate = -self.log_rate.double().exp()
        for row, _ in parts_of(self.rows):
            state = states[row[SLOT]] * (not row[IS_NEW])
            for t in range(row[FIRST], row[FIRST] + row[TOKENS]):
                step, b, c = (one[t].double() for one in self.selected)
                x, gate = self.convolved[t].double(), self.joined[t, self.channels :].double()
                state = (step[:, None] * rate).exp() * state + (step * x)[:, None] * b
                outputs.append((state @ c + self.skip.double() * x) * functional.silu(gate))
                sizes = state.abs() @ c.abs() + (self.skip.double() * x).abs()
                after = sizes * functional.silu(gate).abs()
                self.summands = max(self.summands, float(after.max()))
            states[row[DRAFT_SLOT]] = state
        return torch.stack(outputs), self.conv_states.double(), states


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    channels=st.sampled_from([16, 48, 256]),
    state_dim=st.sampled_from([16, 48, 128]),
    counts=st.lists(st.sampled_from([1, 1, 2, 3, 17, 70]), min_size=1, max_size=ROWS),
    dtype=st.sampled_from(list(UNIT)),
)
def test_selective_scans_of_any_rows_are_those_of_the_formula(seed, **sizes):
    check(ScanCase(seed, **sizes), sizes["state_dim"])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    channels=st.sampled_from([16, 80, 256]),
    width=st.integers(2, 8),
    counts=st.lists(st.sampled_from([1, 1, 2, 3, 17, 70]), min_size=1, max_size=ROWS),
    dtype=st.sampled_from(list(UNIT)),
    has_bias=st.booleans(),
)
def test_gated_convolutions_of_any_rows_are_those_of_transformers(**sizes):
    check_convolution(**sizes)


def check_convolution(seed, channels, width, counts, dtype, has_bias):
    """Compare the gated convolution of LFM2, and its states."""
    torch.manual_seed(seed)
    rows, joined = random_rows(counts), torch.randn(sum(counts), 3 * channels).to(dtype)
    weight, states = torch.randn(channels, 1, width), torch.randn(SLOTS, channels, width)
    bias = torch.randn(channels) if has_bias else None
    convolution = ShortConvolution(weight, bias, is_activated=False)
    assert convolution.fits(dtype)
    found = states.clone()
    output = convolution(joined, rows, found)
    expected, others = torch.empty(len(joined), channels).double(), states.double()
    factor, gate, values = joined.chunk(3, dim=-1)
    for row, _ in parts_of(rows):
        span = slice(row[FIRST], row[FIRST] + row[TOKENS])
        inputs = factor[span] * values[span]  # rounded
        made, others[row[DRAFT_SLOT]] = convolve(inputs, row, others, weight, bias, None)
        expected[span] = gate[span].double() * made
    assert torch.equal(found.double(), others)
    error = (output.double() - expected).abs()
    # Sums of as many products as the kernel is wide, and a bias; each product's magnitude counts.
    size = (gate.double().abs() * 40 * weight.abs().sum()).max()
    assert bool((error <= 2.0**-24 * (width + 2) * size + UNIT[dtype] * expected.abs()).all())
