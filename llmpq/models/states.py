"""Layers with a recurrent state: linear attention, state spaces, short convolutions.

Such a layer of transformers has a module, its mixer, that reads and replaces the state of every
sequence: the last inputs of a convolution, and what the recurrence carries on. Here the rows of a
step are sequences of different lengths, and the states of all running sequences are in slots. The
mixer is called once for all rows of one token that follow others, and once for every other row:
each call sees the cache of transformers (``RowStates``), with the states of its rows.

A mixer with a compiled form (:data:`CompiledRows`) is called once for all rows instead.

States are float32 whatever the run's format: the recurrence of transformers is computed in it, and
the values of a convolution are exact in it.

Shapes: R rows, N tokens of the step, H hidden size, K inputs of the convolution, C channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from llmpq.errors import CapacityError, SpecError, StageError
from llmpq.models.attention import PackedBatch
from llmpq.spec.families import PIECE_TOKENS

_CACHES = ("cache_params", "past_key_values")
"""Names of the argument of a mixer that has the states."""
_RUNS_ROWS = "runs_rows_apart"
"""Attribute of the classes that :func:`use_row_states` makes."""
CONVOLUTION, RECURRENCE = "conv", "recurrent"
StateShapes = dict[str, tuple[int, ...]]
"""Shape of the states of one sequence in a layer by kind: ``conv`` ``[C, K]``, ``recurrent``
``[heads, ...]``; empty for a layer without."""

_KEEPERS = ("update_conv_state", "update_recurrent_state", "set_linear_cache")
"""Methods of caches by which mixers keep states; the last is of lightning attention alone."""
_PIECE = "piece_tokens"
"""Attribute of a mixer: tokens of a row that transformers' code computes at once."""
_IS_ALONE = "computes_rows_alone"
"""Attribute of a mixer: whether it computes one row at a time."""
SELECTIVE = ("conv1d", "in_proj", "x_proj", "dt_proj", "A_log", "D", "out_proj")
"""Parts of a mixer of Mamba 1."""
DECAYS = "decays"
"""Attribute of a mixer of lightning attention: the decay of each head."""
COMPILED = "compiled_rows"
"""Attribute of a mixer that computes rows: a :data:`CompiledRows`, or ``None``."""
CompiledRows = Callable[[Tensor, PackedBatch, dict[str, Tensor]], Tensor | None]
"""Returns ``[1, N, H]`` of a mixer for the rows of a step, whose states ``[slots, ...]`` by kind it
changes; ``None`` for a step that it does not compute."""


class SequenceStates:
    """The states of all running sequences in the layers of a stage, preallocated.

    Args:
        shapes: of each layer, in order.
        first_layer: index of the first of them in the whole model.
        num_slots: sequences.
        device: where the states are.

    Raises:
        CapacityError: there are no slots.
    """

    def __init__(
        self,
        shapes: Sequence[StateShapes],
        first_layer: int,
        *,
        num_slots: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_slots < 1:
            raise CapacityError(f"states: found {num_slots} slots, expected at least 1")
        self.num_slots = num_slots
        self._layers = {
            index: {
                kind: torch.zeros((num_slots, *shape), dtype=torch.float32, device=device)
                for kind, shape in own.items()
            }
            for index, own in enumerate(shapes, first_layer)
        }

    @property
    def nbytes(self) -> int:
        """Bytes held: four for each number."""
        return sum(one.nbytes for layer in self._layers.values() for one in layer.values())

    def check(self, batch: PackedBatch) -> None:
        """Check the slots of a step.

        Raises:
            StageError: a row has none, or one that does not exist.
        """
        parents = (slot for slot in batch.parents if slot >= 0)
        if len(batch.slots) != batch.rows or not all(
            0 <= slot < self.num_slots for slot in (*batch.slots, *parents)
        ):
            raise StageError(
                f"states: found slots {list(batch.slots)} of {batch.rows} rows, expected one of "
                f"[0, {self.num_slots}) for each"
            )

    def of_layer(self, layer: int) -> dict[str, Tensor]:
        """Return the states of a layer by kind, ``[slots, ...]``."""
        return self._layers[layer]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states of slots to other slots, all at once.

        Args:
            copies: source and target of each; targets differ.

        Raises:
            StageError: a slot does not exist.
        """
        for slot in {slot for one in copies for slot in one}:
            if not 0 <= slot < self.num_slots:
                raise StageError(
                    f"states: found slot {slot} to copy, expected one of [0, {self.num_slots})"
                )
        sources, targets = map(torch.tensor, zip(*copies, strict=True))
        for layer in self._layers.values():
            for stored in layer.values():
                found = stored.index_select(0, sources.to(stored.device))
                stored.index_copy_(0, targets.to(stored.device), found)

    def rows(
        self,
        slots: Sequence[int],
        dtype: torch.dtype,
        *,
        is_new: bool,
        sources: Sequence[int] | None = None,
    ) -> RowStates:
        """Return the states of some rows as transformers wants them.

        Args:
            slots: of the rows, each once.
            dtype: of the hidden states.
            is_new: whether the rows begin, so that they have no state yet.
            sources: slots whose states are read, by default the same.
        """
        return RowStates(self._layers, slots, dtype, is_new=is_new, sources=sources)


class RowStates:
    """The states of the rows of one call of a mixer, with the interface of a cache of transformers.

    Args:
        layers: states of all slots by layer and kind; empty records shapes only.
        slots: of the rows.
        dtype: of the hidden states.
        is_new: whether the rows have no state yet.
        sources: slots whose states are read, by default those of the rows.

    Attributes:
        found: shapes of the states that were written, by layer.
    """

    def __init__(
        self,
        layers: dict[int, dict[str, Tensor]],
        slots: Sequence[int],
        dtype: torch.dtype,
        *,
        is_new: bool,
        sources: Sequence[int] | None = None,
    ) -> None:
        self._layers = layers
        self._slots = torch.tensor(slots)
        self._sources = self._slots if sources is None else torch.tensor(sources)
        self._dtype = dtype
        self._is_new = is_new
        self._lent: dict[str, tuple[int, Tensor]] = {}  # layer, what the mixer may write to
        self.found: dict[int, StateShapes] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of the convolution, ``[R, C, K]``; ``None`` for new rows.

        A mixer updates states in place where every row has one token; :meth:`end` keeps them.
        """
        _check_first(state_idx)
        return self._lend(layer_idx, CONVOLUTION)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return what the recurrence carries on, float32 ``[R, ...]``; ``None`` for new rows."""
        _check_first(state_idx)
        return self._lend(layer_idx, RECURRENCE)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Keep the last inputs; return all of ``[R, C, T]`` with those before them."""
        _check_first(state_idx)
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        before = None if self._is_new else self._read(layer_idx, CONVOLUTION)
        if before is None:
            missing = max(0, width - conv_states.shape[-1])
            whole = nn.functional.pad(conv_states, (missing, 0))
        else:
            whole = torch.cat([before, conv_states], dim=-1)
        self._lent.pop(CONVOLUTION, None)
        self._write(layer_idx, CONVOLUTION, whole[..., -width:])
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Keep what the recurrence carries on, ``[R, ...]``."""
        _check_first(state_idx)
        self._lent.pop(RECURRENCE, None)
        self._write(layer_idx, RECURRENCE, recurrent_states)
        return recurrent_states

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return whether the rows have states."""
        del layer_idx, state_idx
        return not self._is_new

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether earlier states are kept: never."""
        del layer_idx
        return False

    @property
    def layers(self) -> _Layers:
        """The layers of the cache, as transformers 5.17 to 5.21 read them."""
        return _Layers(self)

    def end(self) -> None:
        """Keep what the mixer has written in place."""
        for kind, (layer, values) in self._lent.items():
            self._write(layer, kind, values)

    def _lend(self, layer: int, kind: str) -> Tensor | None:
        read = None if self._is_new else self._read(layer, kind)
        if read is not None:
            self._lent[kind] = layer, read
        return read

    def _read(self, layer: int, kind: str) -> Tensor | None:
        stored = self._layers.get(layer, {}).get(kind)
        if stored is None:
            return None
        found = stored.index_select(0, self._sources.to(stored.device))
        return found if kind == RECURRENCE else found.to(self._dtype)

    def _write(self, layer: int, kind: str, values: Tensor) -> None:
        self.found.setdefault(layer, {})[kind] = tuple(values.shape[1:])
        stored = self._layers.get(layer, {}).get(kind)
        if stored is not None:
            stored.index_copy_(0, self._slots.to(stored.device), values.to(stored.dtype))


class _Layers:
    """The layers of a cache, by their index in the model."""

    def __init__(self, states: RowStates) -> None:
        self._states = states

    def __getitem__(self, layer_idx: int) -> _Layer:
        return _Layer(self._states, layer_idx)


class _Layer:
    """The states of one layer."""

    record_past = False

    def __init__(self, states: RowStates, layer_idx: int) -> None:
        self._states = states
        self._layer_idx = layer_idx

    @property
    def conv_states(self) -> list[Tensor | None]:
        """The last inputs of its convolution."""
        return [self._states.get_conv_state(self._layer_idx)]

    @property
    def recurrent_states(self) -> list[Tensor | None]:
        """What its recurrence carries on."""
        return [self._states.get_recurrent_state(self._layer_idx)]


def _check_first(state_idx: int) -> None:
    if state_idx:
        raise SpecError(f"states: found state {state_idx} of a layer, expected one of each kind")


def use_row_states(layer: nn.Module, piece: int | None = None) -> None:
    """Let the mixer of ``layer`` compute the rows of a step apart.

    Args:
        layer: with a mixer.
        piece: tokens of a row that transformers' code computes at once; ``None`` for all.

    Raises:
        SpecError: as :func:`mixer_of`.
    """
    mixer: Any = mixer_of(layer)
    kind: Any = type(mixer)
    mixer.__class__ = _in_rows(kind)  # as torch's parametrizations do
    setattr(mixer, _PIECE, piece)
    if piece is not None and hasattr(mixer, "chunk_size"):
        # Fewer tokens are filled up to it. Any size computes the same.
        mixer.chunk_size = min(piece, mixer.chunk_size)


def bound_copies(mixer: Any) -> None:
    """Bound what transformers' code makes: it computes pieces, and one row at a time.

    For mixers on CPUs that have a kernel, where it cannot be compiled.

    Args:
        mixer: of a layer of which rows are computed apart.
    """
    if getattr(mixer, _PIECE) is None:
        setattr(mixer, _PIECE, PIECE_TOKENS)
        setattr(mixer, _IS_ALONE, True)
        if hasattr(mixer, "chunk_size"):
            mixer.chunk_size = min(PIECE_TOKENS, mixer.chunk_size)


def mixer_of(layer: nn.Module) -> nn.Module:
    """Return the module of a layer that keeps a state.

    Raises:
        SpecError: there is none, or more than one.
    """
    kinds: list[tuple[nn.Module, Any]] = [(part, type(part)) for part in layer.modules()]
    found = [part for part, kind in kinds if is_mixer(kind)]
    if len(found) != 1:
        raise SpecError(
            f"{type(layer).__name__}: found {len(found)} modules that keep a state of "
            "transformers' caches, expected one"
        )
    return found[0]


@cache
def is_mixer(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class read the states of a cache."""
    forward = kind.forward
    if hasattr(kind, _RUNS_ROWS):
        return True
    if not any(name in inspect.signature(forward).parameters for name in _CACHES):
        return False
    code = inspect.unwrap(forward).__code__
    return any(name in code.co_names for name in _KEEPERS)


def mixer_kind(mixer: nn.Module) -> Hashable:
    """Return what mixers have in common that have states of the same shapes, and the same code."""
    kind = getattr(mixer, _RUNS_ROWS, type(mixer))
    return kind, tuple((name, one.shape) for name, one in mixer.named_parameters(recurse=False))


def state_shapes(mixer: nn.Module, hidden_size: int, like: Tensor) -> StateShapes:
    """Return the shapes of the states of one sequence: what a mixer writes for one token.

    Args:
        mixer: as it is in the layer.
        hidden_size: of the model.
        like: tensor with the dtype and device of the layer.
    """
    hidden = like.new_zeros(1, 1, hidden_size)
    states = RowStates({}, [0], hidden.dtype, is_new=True)
    kind: Any = getattr(mixer, _RUNS_ROWS, type(mixer))
    with torch.inference_mode():
        code_of(mixer)(mixer, hidden, **{_cache_argument(kind): states})
    (found,) = states.found.values()
    return found


def run_alone(
    mixer: nn.Module, hidden: Tensor, states: dict[str, Tensor], *, is_new: bool
) -> Tensor:
    """Return ``[1, T, H]`` of transformers' own code of a mixer for one row.

    Args:
        mixer: as it is in the layer.
        hidden: ``[1, T, H]``.
        states: ``[1, ...]`` of the row by kind; they are changed.
        is_new: whether the row begins.
    """
    kind: Any = getattr(mixer, _RUNS_ROWS, type(mixer))
    own = RowStates({mixer.layer_idx: states}, [0], hidden.dtype, is_new=is_new)  # type: ignore[dict-item]
    output = code_of(mixer)(mixer, hidden, **{_cache_argument(kind): own})
    own.end()
    return output


def code_of(mixer: nn.Module) -> Callable[..., Tensor]:
    """Return transformers' own code of a mixer, or what is here in its place."""
    if all(hasattr(mixer, name) for name in SELECTIVE):
        return selective_scan
    if hasattr(mixer, DECAYS):
        return lightning_attention
    kind: Any = getattr(mixer, _RUNS_ROWS, type(mixer))
    code: Callable[..., Tensor] = kind.forward
    return code


def selective_scan(
    mixer: Any, hidden: Tensor, cache_params: RowStates | None = None, **_: object
) -> Tensor:
    """Return ``[R, T, H]`` of a mixer of Mamba 1 (Gu and Dao, 2023, Algorithm 2).

    The code of transformers begins several tokens without a state, and reads weights that may be
    quantized here. Formulas are the same::

        x = silu(conv(u));  d, B, C = x_proj(x);  d = softplus(dt_proj(d))
        h = exp(d A) h + d x B;  y = (C h + D x) silu(z)

    Args:
        mixer: of transformers.
        hidden: ``[R, T, H]``.
        cache_params: states of the rows; ``None`` for whole sequences, whose states are not kept.
    """
    inputs, gate = mixer.in_proj(hidden).chunk(2, dim=-1)  # [R, T, C]
    whole = inputs.transpose(1, 2)
    if cache_params is not None:
        whole = cache_params.update_conv_state(
            whole, mixer.layer_idx, conv_kernel_size=mixer.conv_kernel_size
        )
    whole = nn.functional.pad(whole, (mixer.conv_kernel_size - 1, 0))
    weight, bias = mixer.conv1d.weight, mixer.conv1d.bias
    convolved = nn.functional.conv1d(whole, weight, bias, groups=len(weight))
    mixed = mixer.act(convolved[..., -inputs.shape[1] :]).transpose(1, 2).contiguous()
    steps, entered, read = selected(mixer, mixed)
    rate, skip = -mixer.A_log.float().exp(), mixer.D.float()
    state = None if cache_params is None else cache_params.get_recurrent_state(mixer.layer_idx)
    if state is None:
        state = rate.new_zeros(len(hidden), *rate.shape)
    values, scanned = mixed.float(), torch.empty_like(mixed, dtype=torch.float32)
    for token in range(hidden.shape[1]):
        step = steps[:, token, :, None]
        added = (step * values[:, token, :, None]) * entered[:, token, None]
        state = (step * rate).exp_().mul_(state).add_(added)
        scanned[:, token] = (state @ read[:, token, :, None])[..., 0]
    if cache_params is not None:
        cache_params.update_recurrent_state(state, mixer.layer_idx)
    made = scanned.add_(values.mul_(skip)).mul_(nn.functional.silu(gate.float()))
    output: Tensor = mixer.out_proj(made.to(hidden.dtype))
    return output


def lightning_attention(
    mixer: Any, hidden: Tensor, past_key_values: RowStates | None = None, **_: object
) -> Tensor:
    """Return ``[R, T, H]`` of linear attention with a decay of each head.

    Source: Qin et al., "Lightning Attention-2", 2024; MiniMax-01, 2025, Sec. 2.2. The code of
    transformers computes tokens one by one where a row goes on, and has a cache of its own.

    Args:
        mixer: of transformers.
        hidden: ``[R, T, H]``.
        past_key_values: states of the rows, ``[R, h, d, d]``; ``None`` for whole sequences.
    """
    rows, tokens, _width = hidden.shape
    heads = mixer.num_attention_heads
    joined = mixer.act_fn(mixer.qkv_proj(hidden)).float()
    query, key, value = joined.view(rows, tokens, heads, -1).transpose(1, 2).chunk(3, dim=-1)
    state = None
    if past_key_values is not None:
        state = past_key_values.get_recurrent_state(mixer.layer_idx)
    if state is None:
        state = query.new_zeros(rows, heads, query.shape[-1], value.shape[-1])
    decay = query.new_tensor(getattr(mixer, DECAYS))[:, None, None]  # [h, 1, 1]
    made = []
    for begin in range(0, tokens, mixer.block_size):
        q, k, v = (one[:, :, begin : begin + mixer.block_size] for one in (query, key, value))
        place = torch.arange(1, q.shape[2] + 1, device=q.device)[:, None]  # [B, 1]
        distance = place - place.t()
        weights = (decay * distance.clamp(min=0)).neg_().exp_().mul_(distance >= 0)
        found = (q @ k.transpose(-1, -2)).mul_(weights) @ v
        made.append(found.add_((q * (-decay * place).exp()) @ state))
        left = len(place) - place
        state = state * (-decay * len(place)).exp()
        state = state + (k * (-decay * left).exp()).transpose(-1, -2) @ v
    if past_key_values is not None:
        past_key_values.update_recurrent_state(state, mixer.layer_idx)
    attended = torch.cat(made, dim=2).transpose(1, 2).reshape(rows, tokens, -1)
    normed = mixer.norm(attended.to(hidden.dtype))
    output: Tensor = mixer.out_proj(torch.sigmoid(mixer.output_gate(hidden)) * normed)
    return output


def selected(mixer: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what Mamba 1 selects by the tokens, in float32: time steps, B and C.

    Args:
        mixer: of transformers.
        mixed: convolved channels, ``[..., C]``.
    """
    size = mixer.ssm_state_size
    parts = mixer.x_proj(mixed).split([mixer.time_step_rank, size, size], dim=-1)
    norms = (getattr(mixer, f"{name}_layernorm", None) for name in ("dt", "b", "c"))
    step, entered, read = (
        part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True)
    )
    return nn.functional.softplus(mixer.dt_proj(step).float()), entered.float(), read.float()


def _cache_argument(kind: type[nn.Module]) -> str:
    parameters = inspect.signature(kind.forward).parameters
    return next(name for name in _CACHES if name in parameters)


@cache
def _in_rows(kind: type[nn.Module]) -> type[nn.Module]:
    if hasattr(kind, _RUNS_ROWS):
        return kind
    name = _cache_argument(kind)

    def forward(self: nn.Module, hidden_states: Tensor, *_: object, **given: Any) -> Any:
        made = mixed(self, hidden_states, given)
        return (made, None) if hasattr(self, DECAYS) else made  # as their layers expect

    def mixed(self: nn.Module, hidden_states: Tensor, given: dict[str, Any]) -> Tensor:
        view, mask = given.get(name), given.get("attention_mask")
        assert mask is not None, "the rows of the step"
        states = None if view is None else view.states
        if view is not None and states is None:
            raise SpecError("states: found a cache without those of layers with a recurrent state")
        run, batch = code_of(self), mask.step.batch
        compiled: CompiledRows | None = getattr(self, COMPILED)
        if states is not None and compiled is not None:
            own = states.of_layer(self.layer_idx)
            if (made := compiled(hidden_states, batch, own)) is not None:
                return made
        return run_rows(
            lambda hidden, own: run(self, hidden, **{name: own}),
            hidden_states,
            batch,
            states,
            getattr(self, _PIECE),
            # transformers 5.17 confuses rows of one token where the norm comes before the gate.
            joins_rows=not (
                getattr(self, _IS_ALONE)
                or getattr(getattr(self, "norm", None), "norm_before_gate", False)
            ),
        )

    members = {
        "forward": forward,
        "__module__": kind.__module__,
        _RUNS_ROWS: kind,
        COMPILED: None,
        _PIECE: None,
        _IS_ALONE: False,
    }
    return type(kind.__name__, (kind,), members)


def run_rows(
    mixer: Callable[[Tensor, RowStates | None], Tensor],
    hidden: Tensor,
    batch: PackedBatch,
    states: SequenceStates | None,
    piece: int | None = None,
    *,
    joins_rows: bool = True,
) -> Tensor:
    """Return ``[1, N, H]`` of a mixer for the rows of a step.

    Args:
        mixer: returns ``[R, T, H]`` for hidden states of rows of one length and their states.
        hidden: ``[1, N, H]``.
        batch: rows of the step; several of one sequence follow each other in order.
        states: of all sequences; ``None`` for whole sequences, whose states are not kept.
        piece: tokens of a row that one call computes; ``None`` for all.
        joins_rows: whether one call computes all rows of one token that follow others.
    """
    output = torch.empty_like(hidden)
    spans = [
        slice(first, first + count)
        for first, count in zip(batch.offsets, batch.counts, strict=True)
    ]
    if states is None:
        for span in spans:
            output[:, span] = mixer(hidden[:, span], None)
        return output
    together: list[int] = []
    has_drafts = max(batch.parents) >= 0
    if joins_rows and len(set(batch.slots)) == batch.rows and not has_drafts:
        together = [
            row for row in range(batch.rows) if batch.counts[row] == 1 and batch.starts[row]
        ]
    if len(together) > 1:
        places = torch.tensor([batch.offsets[row] for row in together], device=hidden.device)
        own = states.rows([batch.slots[row] for row in together], hidden.dtype, is_new=False)
        output[0, places] = mixer(hidden[0, places][:, None], own)[:, 0]
        own.end()
    else:
        together = []
    for row in sorted(set(range(batch.rows)).difference(together)):
        first, end = spans[row].start, spans[row].stop
        step = piece or max(1, end - first)
        for begin in range(first, end, step):
            part = slice(begin, min(end, begin + step))
            is_new = batch.starts[row] == 0 and begin == first
            slot, parent = batch.slots[row], batch.parents[row]
            source = parent if parent >= 0 and begin == first else slot
            own = states.rows([slot], hidden.dtype, is_new=is_new, sources=[source])
            output[:, part] = mixer(hidden[:, part], own)
            own.end()
    return output
