"""DecoderStage: the decoder layers ``[first_layer, end_layer)`` of transformers, on packed tokens.

A stage calls the modules of transformers with positions, a KV store, and an attention function
that reads the rows of the step.

``RotaryTables`` are cos and sin of the rotary embedding of every layer for one step. Most families
have one table; Gemma 3 has one per attention type. Scalings that depend on the sequence length
(``longrope``, ``dynamic``) are computed row by row, so that a row does not depend on the other rows
of its step. The length is that of the whole sequence, not of the tokens so far: the tokens of a
prompt have the same angles in one chunk and in several.

Shapes: R rows, N tokens of the step, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from llmpq.errors import SpecError
from llmpq.models.adapter import (
    Skeleton,
    accepts,
    has_latent_attention,
    keeps_keys,
    keeps_state,
    kv_sources,
    layer_chunk,
    layer_window,
)
from llmpq.models.attention import (
    Alibi,
    Attention,
    DecodeAttention,
    KVStore,
    LayerAttention,
    PackedBatch,
    RowsView,
    StepAttention,
    on_device,
    use_own_attention,
    use_packed_attention,
)
from llmpq.models.master import SharedKV, TokenLayout, layout_of
from llmpq.models.states import (
    SequenceStates,
    StateShapes,
    is_mixer,
    mixer_kind,
    mixer_of,
    state_shapes,
    use_row_states,
)
from llmpq.spec.families import PIECE_TOKENS, Family, family_of
from llmpq.spec.huggingface.config import SCALING, LengthScaling, read_length_scaling
from llmpq.spec.huggingface.feed_forward import Gated
from llmpq.spec.runtime_constants import ACTIVATION_BLOCK_VALUES, KV_BLOCK_SIZE, ROW_BLOCK

_IN_BLOCKS = "runs_in_row_blocks"
"""Attribute of the classes that :func:`use_row_blocks` makes."""

Table = tuple[Tensor, Tensor] | Tensor
"""``(cos, sin)``, or rotations as complex numbers (DeepSeek-V2)."""
Span = tuple[int, int | None]
"""Number of consecutive tokens of a row whose angles are for one length, and that length; ``None``
for the length up to the last of them."""
LayerArguments = dict[str, Tensor | LayerAttention | RowsView | Table | SharedKV | Alibi | None]
"""Keyword arguments of a layer."""


class LayerWeights(Protocol):
    """Weights of layers that are not always in memory (``llmpq.quant.loading.streaming``)."""

    def acquire(self, index: int) -> None:
        """Wait until those of layer ``index`` of the stage (from 0) are in memory."""
        ...

    def release(self, index: int) -> None:
        """Let go of those of a layer that has run."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers in the stage, in order."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        ...

    @property
    def buffer_bytes(self) -> int:
        """Most bytes of them that are in memory at a time."""
        ...

    def close(self) -> None:
        """Read no more."""
        ...


class DecoderStage(nn.Module):
    """A contiguous range of decoder layers.

    Args:
        config: configuration of the whole model, from ``load_config``.
        layers: from ``build_layer`` in order, weights loaded.
        first_layer: index of ``layers[0]`` in the whole model.
        skeleton: skeleton of the model; by default it is built (5 ms).

    Attributes:
        streamed: weights that rest on disk; ``None`` where all are in memory.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        layers: Sequence[nn.Module],
        first_layer: int,
        skeleton: Skeleton | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.first_layer = first_layer
        self.streamed: LayerWeights | None = None
        self.layers = nn.ModuleList(layers)
        rotary = build_rotary(config, skeleton)
        self.rotary = None if rotary is None else RotaryTables(rotary, config)
        family = family_of(config.model_type)
        self._alibi = family.alibi
        self._has_state = [keeps_state(config, first_layer + n) for n in range(len(layers))]
        for index, layer in enumerate(layers, first_layer):
            _install(layer, family, config, index)
        # Attention in blocks needs the stored keys and values unchanged.
        self.attends_to_cache = (
            family.attends_to_cache and family.is_tested and not has_latent_attention(config)
        )
        self.absorbs_latents = False
        """Whether its latent attention reads latent vectors as they are, where a kernel can."""
        indices = range(first_layer, first_layer + len(layers))
        self.layout = layout_of(config)
        self._sources = [kv_sources(config)[index] for index in indices]
        # The layer of the stage that keeps the keys and values of each source: itself, or the first
        # that reads them.
        self._keepers: dict[int, int] = {}
        for index, source in zip(indices, self._sources, strict=True):
            if source is not None:
                self._keepers.setdefault(source, source if source in indices else index)
        self._windows = [layer_window(config, index) for index in indices]
        self._chunks = [layer_chunk(config, index) for index in indices]
        # BLOOM and GPT-NeoX kept the name from before the cache was an object; Mamba has its own.
        caches = ("layer_past", "cache_params")
        names = (*caches, "alibi", "shared_kv_states", "mamba_attention_mask")
        taken = [{name for name in names if accepts(layer.forward, name)} for layer in layers]
        self._cache_arguments = [
            next((name for name in caches if name in own), "past_key_values") for own in taken
        ]
        # Gemma 4 of transformers 5.17 leaves the last keys and values there, read by none.
        self._leaves_shared = ["shared_kv_states" in own for own in taken]
        self._has_two_masks = ["mamba_attention_mask" in own for own in taken]
        self._ignores_alibi = [self._alibi is None and "alibi" in own for own in taken]
        self.eval()

    @property
    def has_alibi(self) -> bool:
        """Whether :meth:`score_bias` is added to the scores."""
        return self._alibi is not None

    @property
    def end_layer(self) -> int:
        """Index after the last layer."""
        return self.first_layer + len(self.layers)

    def new_states(self, num_slots: int) -> SequenceStates | None:
        """Return states for so many sequences; ``None`` where no layer has any.

        Args:
            num_slots: sequences that run at the same time.
        """
        if not any(self._has_state):
            return None
        size = self.config.hidden_size
        like = next(part for part in self.parameters() if part.is_floating_point())
        known: dict[Hashable, StateShapes] = {}  # transformers' code runs for each kind
        shapes: list[StateShapes] = []
        for layer, has_state in zip(self.layers, self._has_state, strict=True):
            if not has_state:
                shapes.append({})
                continue
            mixer = mixer_of(layer)
            kind = mixer_kind(mixer)
            if kind not in known:
                known[kind] = state_shapes(mixer, size, like)
            shapes.append(known[kind])
        return SequenceStates(shapes, self.first_layer, num_slots=num_slots, device=like.device)

    def span_of(self, index: int) -> tuple[int | None, int | None]:
        """Return window and chunk of layer ``index`` of the stage (from 0); ``None`` for all."""
        return self._windows[index], self._chunks[index]

    @torch.inference_mode()
    def forward(
        self,
        hidden: Tensor,
        batch: PackedBatch,
        cache: KVStore | None = None,
        only: Sequence[int] | None = None,
    ) -> Tensor:
        """Run the layers on the tokens of one step.

        Args:
            hidden: ``[1, N, H]``, or the messages ``[1, N, W]`` of ``layout``.
            batch: rows of the step.
            cache: KV store of these layers; ``None`` runs whole sequences from position 0.
            only: layers of the stage to run (from 0); by default, and with a ``layout``, all.

        Returns:
            The same shape.

        Raises:
            SpecError: ``hidden`` and ``batch`` differ in their number of tokens, or a row starts
                after position 0 without a cache.
        """
        arguments = self.step_arguments(hidden, batch, cache)
        if self.layout is not None:
            return self._run_messages(hidden, arguments, self.layout)
        for index in range(len(self.layers)) if only is None else only:
            hidden = self.run_layer(index, hidden, arguments[index])
        return hidden

    @torch.inference_mode()
    def step_arguments(
        self, hidden: Tensor, batch: PackedBatch, cache: KVStore | None = None
    ) -> list[LayerArguments]:
        """Return the arguments of every layer for one step; see :meth:`forward`."""
        if hidden.shape[:2] != (1, batch.tokens):
            raise SpecError(
                f"step: found hidden states {list(hidden.shape)} for {batch.tokens} tokens"
            )
        if cache is None and any(batch.starts):
            raise SpecError("step: without a cache, expected rows that begin at position 0")
        absorbs = self.absorbs_latents and cache is not None and cache.attends
        returns_all = not (self.attends_to_cache or absorbs)
        view = None if cache is None else cache.view(batch, returns_all=returns_all)
        step = StepAttention(batch, view, returns_all=returns_all)
        positions = on_device(batch.positions.numpy(), hidden.device)
        tables = None
        if self.rotary is not None:
            spans = [*spans_of(batch)] if self.rotary.depends_on_length else []
            tables = self.rotary(hidden, positions, spans)
        return self._arguments(hidden, positions, batch.longest, view, step, tables)

    def run_whole(self, hidden: Tensor, cache: KVStore | None = None) -> Tensor:
        """Run the layers on whole sequences of one length: ``[R, T, H]`` to the same shape.

        Args:
            hidden: ``[R, T, H]``.
            cache: KV store to pass keys and values through, at least R sequences of T tokens, of
                ``KV_BLOCK_SIZE`` tokens a block; ``None`` for none.
        """
        rows, tokens, _ = hidden.shape
        width = -(-tokens // KV_BLOCK_SIZE)
        batch = PackedBatch(
            block_tables=[range(row * width, (row + 1) * width) for row in range(rows)],
            starts=[0] * rows,
            counts=[tokens] * rows,
            slots=range(rows),
        )
        output: Tensor = self(hidden.reshape(1, rows * tokens, -1), batch, cache)
        return output.view(hidden.shape)

    @torch.inference_mode()
    def decode_arguments(
        self, hidden: Tensor, positions: Tensor, view: RowsView
    ) -> list[LayerArguments]:
        """Return the arguments of every layer for one new token per row, computed on the device.

        The result depends on shapes only, so that a CUDA graph can capture it
        (``llmpq.dist.engine.cuda_graphs``).

        Args:
            hidden: ``[1, R, H]``.
            positions: of the new tokens, ``[R]`` integers on the same device.
            view: KV view of the rows.
        """
        step, place = DecodeAttention(view), positions.long()[None]
        tables = None
        if self.rotary is not None:
            tables = self.rotary(hidden, place, [(1, None)] * len(positions))
        return self._arguments(hidden, place, 0, view, step, tables)

    def score_bias(self, longest: int, like: Tensor) -> Alibi:
        """Return ALiBi's bias of the scores.

        Args:
            longest: tokens of the longest sequence.
            like: tensor with the dtype and device of the layers.
        """
        heads: int = self.config.num_attention_heads
        assert self._alibi is not None
        field = self._alibi.largest
        largest = None if field is None else attrgetter(field)(self.config)
        return Alibi(heads=heads, longest=longest, like=like, largest=largest)

    @torch.inference_mode()
    def run_layer(self, index: int, hidden: Tensor, arguments: LayerArguments) -> Tensor:
        """Run layer ``index`` of the stage (from 0) on hidden states; return the same shape."""
        if self.streamed is not None:
            self.streamed.acquire(index)
        output = self.layers[index](hidden, **arguments)
        if self.streamed is not None:
            self.streamed.release(index)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def _run_messages(
        self, messages: Tensor, arguments: Sequence[LayerArguments], layout: TokenLayout
    ) -> Tensor:
        """Run the layers on messages ``[1, N, W]``, which have more than hidden states."""
        state = layout.split(messages, self.first_layer)
        for index, own in enumerate(arguments):
            if state.own is not None:
                own["per_layer_input"] = state.own[:, :, self.first_layer + index]
            own["shared_kv_states"] = state.shared
            source, view = self._sources[index], cast("RowsView", own[self._cache_arguments[index]])
            if source is not None and view is not None:
                keeper = self._keepers[source]
                if keeper == self.first_layer + index:
                    pair = layout.made_by(source, state.shared)
                    assert pair is not None, "the source has run"
                    view.update(*pair, keeper)
                else:
                    view.select(keeper)
            state.hidden = self.run_layer(index, state.hidden, own)
        return layout.join(state)

    def _arguments(
        self,
        hidden: Tensor,
        positions: Tensor,
        longest: int,
        view: RowsView | None,
        step: Attention,
        tables: list[Table] | None,
    ) -> list[LayerArguments]:
        shared: LayerArguments = {"position_ids": positions}
        if self._alibi is not None:
            shared[self._alibi.argument] = self.score_bias(longest, hidden)
        found = []
        for index in range(len(self.layers)):
            own = dict(shared)
            if self._ignores_alibi[index]:
                own["alibi"] = None
            own[self._cache_arguments[index]] = view
            if self._leaves_shared[index]:
                own["shared_kv_states"] = {}
            own["attention_mask"] = LayerAttention(
                step=step,
                window=self._windows[index],
                chunk=self._chunks[index],
                positions=positions,
            )
            if self._has_two_masks[index]:
                own["mamba_attention_mask"] = own["attention_mask"]
            if tables is not None:
                own["position_embeddings"] = tables[self.first_layer + index]
            found.append(own)
        return found


def _install(layer: nn.Module, family: Family, config: PreTrainedConfig, index: int) -> None:
    """Replace parts of layer ``index`` of the model, and its attention function."""
    if family.has_formula:
        block = family.feed_forward
        assert isinstance(block, Gated)
        use_blockwise_activation(layer, f"{block.prefix}.{block.activation}")
    use_row_blocks(layer)
    if keeps_state(config, index):
        use_row_states(layer, None if family.recurrence_bytes is None else PIECE_TOKENS)
    if keeps_keys(config, index) and not use_own_attention(layer, family):
        use_packed_attention(layer)


class BlockwiseActivation(nn.Module):
    """An elementwise activation, computed in place for a block of rows at a time.

    The activations of BLOOM and Phi create five tensors as large as the feed-forward. Blocks bound
    that memory and stay in the cache of a core; the result is bit-identical.

    Args:
        activation: the module of transformers.
    """

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, values: Tensor) -> Tensor:
        """Return ``[..., features]``."""
        features = values.shape[-1]
        rows = max(1, ACTIVATION_BLOCK_VALUES // features)
        if values.numel() <= rows * features or values.device.type != "cpu":
            result: Tensor = self.activation(values)
            return result
        for block in torch.split(values.view(-1, features), rows):
            block.copy_(self.activation(block))
        return values


def use_blockwise_activation(layer: nn.Module, name: str) -> None:
    """Replace the activation ``name`` of ``layer``, such as ``mlp.gelu_impl``."""
    path, _, last = name.rpartition(".")
    owner = layer.get_submodule(path)
    activation = owner.get_submodule(last)
    if not isinstance(activation, BlockwiseActivation):
        setattr(owner, last, BlockwiseActivation(activation))


def use_row_blocks(layer: nn.Module) -> None:
    """Let every feed-forward of ``layer`` compute ``ROW_BLOCK`` tokens at a time on a CPU.

    This bounds its inner tensors, whatever the length of prompts. A feed-forward is a module of
    two linear operators or more whose call takes hidden states alone, or with a residual.
    """
    parts = dict(layer.named_modules())
    kinds: dict[str, Any] = {name: type(part) for name, part in parts.items()}
    mixers = tuple(f"{name}." for name, kind in kinds.items() if is_mixer(kind))
    for name, part in parts.items():
        if name and not name.startswith(mixers) and _is_feed_forward(part):
            part.__class__ = _in_row_blocks(part.__class__)  # as torch's parametrizations do


def _is_feed_forward(part: nn.Module) -> bool:
    arguments = tuple(inspect.signature(part.forward).parameters)
    takes_tokens = len(arguments) == 1 or arguments == ("hidden_states", "residual")
    linears = [child for child in part.children() if hasattr(child, "in_features")]
    return takes_tokens and len(linears) > 1 and not hasattr(part, _IN_BLOCKS)


@cache
def _in_row_blocks(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``kind`` that calls it with blocks of rows."""

    def forward(self: nn.Module, *inputs: Tensor) -> Tensor:
        whole: Tensor = inputs[0]  # [..., N, H]
        if whole.shape[-2] <= ROW_BLOCK or whole.device.type != "cpu":
            same: Tensor = kind.forward(self, *inputs)
            return same
        output = torch.empty_like(whole)
        blocks = [torch.split(one, ROW_BLOCK, dim=-2) for one in (*inputs, output)]
        for *block, made in zip(*blocks, strict=True):
            made.copy_(kind.forward(self, *block))
        return output

    members = {"forward": forward, "__module__": kind.__module__, _IN_BLOCKS: True}
    return type(kind.__name__, (kind,), members)


def length_scaling(config: PreTrainedConfig) -> LengthScaling:
    """Return how the rotary angles of a model depend on the length of a sequence."""
    return read_length_scaling({name: getattr(config, name, None) for name in SCALING})


def spans_of(batch: PackedBatch) -> Iterator[Span]:
    """Yield the spans of the rows of a step."""
    lengths = batch.rope_lengths or batch.lengths
    for start, count, length in zip(batch.starts, batch.counts, lengths, strict=True):
        together = min(count, max(0, length - start))
        if together:
            yield together, length if length > start + together else None
        # Tokens of an answer beyond the length have the angles that they had when they were made.
        yield from [(1, None)] * (count - together)


def build_rotary(config: PreTrainedConfig, skeleton: Skeleton | None = None) -> nn.Module | None:
    """Build the rotary embedding of a model with real buffers; ``None`` if it has none.

    Args:
        config: from :func:`load_config`.
        skeleton: skeleton of the model; by default it is built.
    """
    decoder = (skeleton or Skeleton.of(config)).decoder
    found = (getattr(decoder, name, None) for name in ("rotary_emb", "pos_emb"))
    template = next((one for one in found if one is not None), None)
    if template is None:
        return None
    rotary: nn.Module = type(template)(config)
    return rotary.eval()


class RotaryTables(nn.Module):
    """The rotary module of transformers, called once per step.

    Attributes:
        depends_on_length: whether a row's table depends on its length.

    Args:
        rotary: from ``build_rotary``.
        config: configuration of the whole model.
    """

    def __init__(self, rotary: nn.Module, config: PreTrainedConfig) -> None:
        super().__init__()
        self.rotary = rotary
        layer_types = getattr(config, "layer_types", None)
        self._is_typed = accepts(rotary.forward, "layer_type")
        self._layer_types = list(layer_types or []) if self._is_typed else []
        self._num_layers: int = config.num_hidden_layers
        self.depends_on_length = _depends_on_length(rotary)
        self._config = config

    @property
    def switches_after(self) -> int | None:
        """The longest row with the first of the two tables of ``longrope``; ``None`` elsewhere."""
        return length_scaling(self._config).switches_after

    def forward(self, hidden: Tensor, positions: Tensor, spans: Sequence[Span]) -> list[Table]:
        """Return the table of every layer of the model, each of its tensors ``[1, N, ...]``.

        Args:
            hidden: tensor with the dtype and device of the result.
            positions: of the tokens, ``[1, N]`` int64 on the same device.
            spans: of all rows.
        """
        if not self._is_typed:
            return [self._table(hidden, positions, spans, None)] * self._num_layers
        kinds = set(self._layer_types)
        tables = {kind: self._table(hidden, positions, spans, kind) for kind in kinds}
        return [tables[kind] for kind in self._layer_types]

    def _table(
        self, hidden: Tensor, positions: Tensor, spans: Sequence[Span], kind: str | None
    ) -> Table:
        if not self.depends_on_length:
            return self._call(hidden, positions, kind)
        parts = torch.split(positions, [count for count, _ in spans], dim=1)
        made = []
        for part, (count, length) in zip(parts, spans, strict=True):
            self._reset_length()
            if length is None:
                made.append(self._call(hidden, part, kind))
                continue
            # The modules of transformers take the largest position for the length.
            last = part.new_full((1, 1), length - 1)
            made.append(_first(self._call(hidden, torch.cat([part, last], 1), kind), count))
        return _joined(made)

    def _reset_length(self) -> None:
        """Reset the state that ``dynamic`` scaling keeps of the longest sequence."""
        if self.rotary.__dict__.get("rope_type") == "dynamic":
            original = self.rotary.get_buffer("original_inv_freq")
            self.rotary.register_buffer("inv_freq", original.clone(), persistent=False)
            self.rotary.max_seq_len_cached = self.rotary.original_max_seq_len

    def _call(self, hidden: Tensor, positions: Tensor, kind: str | None) -> Table:
        arguments = {} if kind is None else {"layer_type": kind}
        if hasattr(self.rotary, "mrope_section"):  # positions in time, height and width; equal here
            positions = positions.expand(3, *positions.shape)
        table: Table = self.rotary(hidden, positions, **arguments)
        return table


def _first(table: Table, count: int) -> Table:
    """Return the table of the first ``count`` tokens."""
    if isinstance(table, Tensor):
        return table[:, :count]
    return table[0][:, :count], table[1][:, :count]


def _joined(rows: Sequence[Table]) -> Table:
    """Join the tables of rows along the tokens."""
    complex_rows = [row for row in rows if isinstance(row, Tensor)]
    if complex_rows:
        return torch.cat(complex_rows, 1)
    pairs = [row for row in rows if not isinstance(row, Tensor)]
    return torch.cat([cos for cos, _ in pairs], 1), torch.cat([sin for _, sin in pairs], 1)


def _depends_on_length(rotary: nn.Module) -> bool:
    kinds = getattr(rotary, "rope_type", "default")
    names = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any("dynamic" in str(name) or name == "longrope" for name in names)
