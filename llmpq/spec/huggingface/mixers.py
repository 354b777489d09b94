"""Layers that keep a state of fixed size in place of keys and values, among layers of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from llmpq.spec.huggingface.attention import AttentionSizes, LatentAttention, SelfAttention
from llmpq.spec.huggingface.config import HEADS, HIDDEN, Config
from llmpq.spec.huggingface.feed_forward import FeedForward, has_bias, linear
from llmpq.spec.huggingface.windows import ATTENTION, LINEAR
from llmpq.spec.model import LinearSpec

Mixer = Callable[[Config], AttentionSizes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """Attention in some layers, another mixer in the rest.

    Attributes:
        attention: of its layers.
        mixer: of the others.
        is_attention: whether each layer is attention if ``layer_types`` is absent.
    """

    attention: SelfAttention | LatentAttention
    mixer: Mixer
    is_attention: Callable[[Config], Sequence[bool]]

    def __call__(self, fields: Config) -> Sequence[AttentionSizes]:
        """Return the attention or mixer of every layer."""
        names = fields.words("layer_types", fields.layers(), (*ATTENTION, *LINEAR))
        chosen = (
            self.is_attention(fields) if names is None else [name in ATTENTION for name in names]
        )
        attention, mixer = self.attention(fields)[0], self.mixer(fields)
        return [attention if is_attention else mixer for is_attention in chosen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """Attention and another mixer side by side in every layer (Falcon-H1).

    Attributes:
        attention: reads what the mixer reads.
        mixer: of all layers; its output is added to that of attention.
    """

    attention: SelfAttention
    mixer: Mixer

    def __call__(self, fields: Config) -> Sequence[AttentionSizes]:
        """Return both as the attention of every layer."""
        attention, mixer = self.attention.one(fields), self.mixer(fields)
        both = replace(
            attention,
            linears=attention.linears + mixer.linears,
            others=attention.others + mixer.others,
            state_values=mixer.state_values,
        )
        return [both] * fields.layers()


@dataclass(frozen=True, slots=True)
class Everywhere:
    """A mixer in every layer (Mamba).

    Attributes:
        mixer: of all layers.
    """

    mixer: Mixer

    def __call__(self, fields: Config) -> Sequence[AttentionSizes]:
        """Return the mixer of every layer."""
        return [self.mixer(fields)] * fields.layers()


def no_feed_forward(fields: Config) -> Sequence[FeedForward]:
    """Return nothing behind the mixer of every layer (Mamba)."""
    return [FeedForward(linears=())] * fields.layers()


def by_interval(fields: Config) -> Sequence[bool]:
    """Return attention in every ``full_attention_interval``-th layer (Qwen3-Next)."""
    every = fields.size("full_attention_interval", default=4)
    return [(index + 1) % every == 0 for index in range(fields.layers())]


def by_group(fields: Config) -> Sequence[bool]:
    """Return attention in the last layer of every ``layer_group_size`` (Ling 3.0)."""
    every = fields.size("layer_group_size")
    return [(index + 1) % every == 0 for index in range(fields.layers())]


def by_delta_list(fields: Config) -> Sequence[bool]:
    """Return attention in ``full_attn_layers``, counted from 1, or in every fourth (Kimi)."""
    given, count = fields.inner("linear_attn_config"), fields.layers()
    if given.has("full_attn_layers"):
        chosen = given.indices("full_attn_layers")
        return [index + 1 in chosen for index in range(count)]
    return [index > 0 and index % 4 == 0 for index in range(count)]


def by_list(fields: Config) -> Sequence[bool]:
    """Return attention in the layers of ``full_attn_idxs``, by default all (LFM2)."""
    count = fields.layers()
    chosen = fields.indices("full_attn_idxs") if fields.has("full_attn_idxs") else range(count)
    return [index in chosen for index in range(count)]


def by_indices(fields: Config) -> Sequence[bool]:
    """Return attention in the layers of ``attn_layer_indices``, by default none (Bamba)."""
    chosen = fields.indices("attn_layer_indices") if fields.has("attn_layer_indices") else ()
    return [index in chosen for index in range(fields.layers())]


def by_period(fields: Config) -> Sequence[bool]:
    """Return attention once in ``attn_layer_period`` layers, from ``attn_layer_offset`` on."""
    return fields.periodic("attn_layer_period", "attn_layer_offset")


def every_other(fields: Config) -> Sequence[bool]:
    """Return attention in every other layer, from the first on (MiniMax)."""
    return [index % 2 == 0 for index in range(fields.layers())]


def nowhere(fields: Config) -> Sequence[bool]:
    """Return no attention at all (Granite 4)."""
    return [False] * fields.layers()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A selective state space (Dao and Gu, "Transformers are SSMs", 2024).

    Attributes:
        prefix: path of the mixer.
        heads, head_dim, groups, state_dim, kernel: fields of its sizes. A head that is ``"auto"``
            or absent is an equal share of ``mamba_expand`` times the hidden size.
        width: field of the inner features in place of that product, where it is set.
        bias, conv_bias: fields of the biases of its projections and of its convolution.
        out_bias: that of the last projection; ``None`` for the same.
        norm_if: field that must be set for the gated norm; ``None`` for no such field.
    """

    prefix: str = "mamba"
    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state_dim: str = "mamba_d_state"
    kernel: str = "mamba_d_conv"
    bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"
    width: str | None = None
    out_bias: str | None = None
    norm_if: str | None = None

    def __call__(self, fields: Config) -> AttentionSizes:
        """Return the mixer of one layer."""
        hidden, heads = fields.size(*HIDDEN), fields.size(self.heads)
        stated = None if self.width is None else fields.optional_size(self.width)
        if fields.has(self.head_dim) and fields.take(self.head_dim) != "auto":
            width = heads * fields.size(self.head_dim)
        else:
            width = fields.size("mamba_expand") * hidden if stated is None else stated
            if width % heads:
                raise fields.error(self.heads, heads, f"a divisor of {width} inner features")
        state_dim, kernel = fields.size(self.state_dim), fields.size(self.kernel)
        convolved = width + 2 * fields.size(self.groups) * state_dim
        bias = has_bias(fields, self.bias)
        out_bias = bias if self.out_bias is None else has_bias(fields, self.out_bias)
        is_normed = self.norm_if is None or fields.flag_or(self.norm_if, default=False)
        norm = width if is_normed else 0
        return _mixer(
            (
                linear(f"{self.prefix}.in_proj", width + convolved + heads, hidden, bias),
                linear(f"{self.prefix}.out_proj", hidden, width, out_bias),
            ),
            others=convolved * (kernel + has_bias(fields, self.conv_bias)) + 3 * heads + norm,
            state_values=convolved * kernel + width * state_dim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba1:
    """A selective state space with a state of each channel (Gu and Dao, "Mamba", 2023).

    Attributes:
        prefix: path of the mixer.
        expand, state_dim, kernel, rank: fields of its sizes. A rank that is ``"auto"`` or absent is
            a sixteenth of the hidden size, rounded up.
        width: field of the inner features, by default ``expand`` times the hidden size.
        bias, conv_bias: fields of the biases of its projections and of its convolution.
        norms: whether time steps, B and C are normed with weights (Jamba).
    """

    prefix: str = "mamba"
    expand: str = "mamba_expand"
    width: str | None = None
    state_dim: str = "mamba_d_state"
    kernel: str = "mamba_d_conv"
    rank: str = "mamba_dt_rank"
    bias: str = "mamba_proj_bias"
    conv_bias: str = "mamba_conv_bias"
    norms: bool = False

    def __call__(self, fields: Config) -> AttentionSizes:
        """Return the mixer of one layer."""
        hidden = fields.size(*HIDDEN)
        stated = None if self.width is None else fields.optional_size(self.width)
        width = fields.size(self.expand) * hidden if stated is None else stated
        has_rank = fields.has(self.rank) and fields.take(self.rank) != "auto"
        rank = fields.size(self.rank) if has_rank else -(-hidden // 16)
        state_dim, kernel = fields.size(self.state_dim), fields.size(self.kernel)
        selected, bias = rank + 2 * state_dim, has_bias(fields, self.bias)
        others = width * (kernel + has_bias(fields, self.conv_bias) + state_dim + 1)
        return _mixer(
            (
                linear(f"{self.prefix}.in_proj", 2 * width, hidden, bias),
                linear(f"{self.prefix}.x_proj", selected, width),
                linear(f"{self.prefix}.dt_proj", width, rank, bias=True),
                linear(f"{self.prefix}.out_proj", hidden, width, bias),
            ),
            others=others + (selected if self.norms else 0),
            state_values=width * (kernel + state_dim),
        )


def gated_delta_net(
    inputs: Callable[[int, int, int], dict[str, int]], output: str = "out_proj"
) -> Mixer:
    """Return the linear attention of Qwen3-Next (Yang et al., "Gated Delta Networks", 2025).

    Sizes that are absent are those of OLMo Hybrid: as many heads as attention has, keys of three
    quarters of an equal share of the hidden size, values twice as wide.

    Args:
        inputs: the input operators and their outputs, from the widths of all keys and of all
            values and the number of value heads.
        output: the output operator.
    """

    def mixer(fields: Config) -> AttentionSizes:
        hidden, heads = fields.size(*HIDDEN), fields.size(*HEADS)
        keys = fields.size("linear_num_key_heads", default=heads)
        values = fields.size("linear_num_value_heads", default=heads)
        key_dim = fields.size("linear_key_head_dim", default=int(0.75 * hidden / keys))
        value_dim = fields.size("linear_value_head_dim", default=2 * key_dim)
        key, value, kernel = (
            keys * key_dim,
            values * value_dim,
            fields.size("linear_conv_kernel_dim"),
        )
        convolved = 2 * key + value
        linears = [
            linear(f"linear_attn.{name}", width, hidden)
            for name, width in inputs(key, value, values).items()
        ]
        return _mixer(
            (*linears, linear(f"linear_attn.{output}", hidden, value)),
            others=2 * values + convolved * kernel + value_dim,
            state_values=convolved * kernel + values * key_dim * value_dim,
        )

    return mixer


def joined_inputs(key: int, value: int, heads: int) -> dict[str, int]:
    """Return the two input operators of Qwen3-Next."""
    return {"in_proj_qkvz": 2 * key + 2 * value, "in_proj_ba": 2 * heads}


def separate_inputs(key: int, value: int, heads: int) -> dict[str, int]:
    """Return the four input operators of Qwen3.5."""
    return {
        "in_proj_qkv": 2 * key + value, "in_proj_z": value, "in_proj_b": heads, "in_proj_a": heads,
    }  # fmt: skip


def single_inputs(key: int, value: int, heads: int) -> dict[str, int]:
    """Return the six input operators of OLMo Hybrid."""
    return {
        "q_proj": key, "k_proj": key, "v_proj": value,
        "a_proj": heads, "b_proj": heads, "g_proj": value,
    }  # fmt: skip


def delta_attention(fields: Config) -> AttentionSizes:
    """Return the linear attention of Kimi Linear, whose keys decay by channel (Kimi Team, 2025)."""
    given = fields.inner("linear_attn_config")

    def size(name: str, other: str) -> int:
        return given.size(name) if given.has(name) else fields.size(other)

    hidden = fields.size(*HIDDEN)
    heads, head_dim = size("num_heads", "linear_num_heads"), size("head_dim", "linear_head_dim")
    kernel = size("short_conv_kernel_size", "linear_conv_kernel_dim")
    width = heads * head_dim
    named = {
        "q_proj": (width, hidden), "k_proj": (width, hidden), "v_proj": (width, hidden),
        "forget_gate.f_a_proj": (head_dim, hidden), "forget_gate.f_b_proj": (width, head_dim),
        "b_proj": (heads, hidden), "g_a_proj": (head_dim, hidden), "g_b_proj": (width, head_dim),
        "o_proj": (hidden, width),
    }  # fmt: skip
    return _delta_mixer(named, heads, head_dim, kernel)


def safe_delta_attention(fields: Config) -> AttentionSizes:
    """Return the linear attention of Ling 3.0: Kimi's with gates of full rank.

    Where transformers has saved a configuration, ``head_dim`` is another size.
    """
    hidden, heads = fields.size(*HIDDEN), fields.size(*HEADS)
    head_dim = fields.size("linear_head_dim" if fields.has("linear_head_dim") else "head_dim")
    kernel, width = fields.size("short_conv_kernel_size"), heads * head_dim
    named = {
        "q_proj": (width, hidden), "k_proj": (width, hidden), "v_proj": (width, hidden),
        "forget_gate.f_proj": (width, hidden), "b_proj": (heads, hidden),
        "g_proj": (width, hidden), "o_proj": (hidden, width),
    }  # fmt: skip
    return _delta_mixer(named, heads, head_dim, kernel)


def _delta_mixer(
    named: dict[str, tuple[int, int]], heads: int, head_dim: int, kernel: int
) -> AttentionSizes:
    """Return linear attention whose keys decay by channel, with the shapes of its operators."""
    width = heads * head_dim
    return _mixer(
        tuple(linear(f"self_attn.{name}", *shape) for name, shape in named.items()),
        others=3 * width * kernel + heads + width + head_dim,
        state_values=3 * width * kernel + width * head_dim,
    )


def short_convolution(fields: Config) -> AttentionSizes:
    """Return the gated convolution of LFM2."""
    hidden, kernel = fields.size(*HIDDEN), fields.size("conv_L_cache")
    bias = has_bias(fields, "conv_bias")
    return _mixer(
        (
            linear("conv.in_proj", 3 * hidden, hidden, bias),
            linear("conv.out_proj", hidden, hidden, bias),
        ),
        others=hidden * kernel + (hidden if bias else 0),
        state_values=hidden * kernel,
    )


def lightning_attention(fields: Config) -> AttentionSizes:
    """Return linear attention with a decay of each head (MiniMax-01, 2025)."""
    hidden, heads, head_dim = fields.size(*HIDDEN), fields.size(*HEADS), fields.head_dim()
    width = heads * head_dim
    return _mixer(
        (
            linear("self_attn.qkv_proj", 3 * width, hidden),
            linear("self_attn.output_gate", width, hidden),
            linear("self_attn.out_proj", hidden, width),
        ),
        others=width,
        state_values=width * head_dim,
    )


NOTHING = AttentionSizes(linears=(), num_heads=0, num_kv_heads=0, head_dim=0)
"""Of a layer that has a feed-forward alone."""


def _mixer(linears: tuple[LinearSpec, ...], others: int, state_values: int) -> AttentionSizes:
    return AttentionSizes(
        linears=linears,
        others=others,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        state_values=state_values,
    )
