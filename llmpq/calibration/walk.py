"""LayerWalk: run calibration tokens through a model layer by layer and observe operator inputs.

One decoder layer is in memory at a time, with the hidden states that enter it. The caller may
replace operators of a layer before the next one is loaded; later layers then get the changed
outputs. Operators that read the same input are found by running a few tokens.

Shape legend: N sequences, T tokens of each, R sequences of a batch, H hidden size, K inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from llmpq.calibration.data import CalibrationSet
from llmpq.calibration.stats import Collector
from llmpq.errors import SpecError
from llmpq.kernels.base import open_device
from llmpq.models import Checkpoint, DecoderStage, Master, build_layer
from llmpq.quant.modules.layer import expert_keys, expert_views, experts_of, quantizable_names

C = TypeVar("C", bound=Collector)
Progress = Callable[[int, int, str], None]
"""Called after each layer with the number of layers done, their total, and a description."""

BATCH_TOKENS = 4096
_PROBE_TOKENS = 64


class _Stop(Exception):  # noqa: N818  not an error: every observed operator has run
    """Ends a forward pass early."""


class WalkedLayer:
    """One decoder layer of a walk, with its weights and its inputs.

    Experts of mixtures become linear operators: expert 3 of ``mlp.experts`` is
    ``mlp.experts.gate_up.3`` and ``mlp.experts.down.3``.

    Attributes:
        index: its place in the model.
        module: transformers' own layer.
        operators: its linear operators by name, in the layer's own order.
    """

    def __init__(self, stage: DecoderStage, hidden: list[Tensor]) -> None:
        self.index = stage.first_layer
        self.module = stage.layers[0]
        self._stage = stage
        self._hidden = hidden
        self._is_passed = False
        self._steps: list[tuple[str, ...]] | None = None
        self._readers: dict[str, str] = {}
        split_experts_(self.module)
        self.operators: dict[str, nn.Linear] = {}
        for name in quantizable_names(self.module):
            operator = self.module.get_submodule(name)
            assert isinstance(operator, nn.Linear)
            self.operators[name] = operator

    @property
    def steps(self) -> Sequence[tuple[str, ...]]:
        """The operators in the order in which they run, grouped by input.

        For example ``q k v``, ``o``, ``gate up``, ``down``. The first matrices of all experts are
        one step and the second ones the next, although each has its own input.
        """
        if self._steps is None:
            self._probe()
        assert self._steps is not None
        return self._steps

    def reader(self, name: str) -> str:
        """Return the first operator that reads the same input as ``name``; often ``name``."""
        assert self.steps
        return self._readers[name]

    def collect(
        self,
        make: Callable[[int], C],
        names: Sequence[str] | None = None,
        *,
        advance: bool = False,
    ) -> dict[str, C]:
        """Run the calibration tokens through the layer and collect the inputs of operators.

        Operators that read the same input share one collector.

        Args:
            make: makes a collector for an input of K features.
            names: operators to observe; all by default. The pass ends after the last of them.
            advance: also keep the layer's output as the next layer's input; the layer cannot be
                run again.
        """
        names = list(self.operators) if names is None else list(names)
        collectors: dict[str, C] = {}
        for name in names:
            reader = self.reader(name)
            if reader not in collectors:
                collectors[reader] = make(self.operators[name].in_features)
        first = {self._readers[name]: name for name in reversed(names)}
        observers = {first[reader]: collector.add for reader, collector in collectors.items()}
        self._run(observers, keep=advance)
        return {name: collectors[self._readers[name]] for name in names}

    def advance(self) -> None:
        """Run the layer and keep its output; does nothing the second time."""
        if not self._is_passed:
            self._run({}, keep=True)

    def _run(self, observers: Mapping[str, Callable[[Tensor], None]], *, keep: bool) -> None:
        assert not self._is_passed, "the inputs of this layer are gone"
        # The router decides which experts run, so with experts the last operator is not known.
        stops = bool(observers) and not keep and not any(map(_expert_of, observers))
        for batch, hidden in enumerate(self._hidden):
            output = self._forward(hidden, observers, stops=stops)
            if keep:
                assert output is not None
                self._hidden[batch] = output
        self._is_passed = keep

    def _forward(
        self,
        hidden: Tensor,
        observers: Mapping[str, Callable[[Tensor], None]],
        *,
        stops: bool,
    ) -> Tensor | None:
        left = set(observers)

        def look(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            observers[name](x.reshape(-1, x.shape[-1]))
            left.discard(name)
            if stops and not left:
                raise _Stop

        handles: list[RemovableHandle] = []
        for name in observers:
            module = self.module.get_submodule(name)
            handles.append(module.register_forward_pre_hook(partial(look, name)))
        try:
            output = self._stage.run_whole(hidden)
        except _Stop:
            return None
        finally:
            for handle in handles:
                handle.remove()
        return output

    def _probe(self) -> None:
        """Run a few tokens to find the order of the operators and which share an input."""
        seen: list[tuple[str, Tensor, Tensor]] = []

        def note(name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen.append((name, inputs[0], inputs[0].clone()))

        handles = [
            operator.register_forward_pre_hook(partial(note, name))
            for name, operator in self.operators.items()
        ]
        try:
            self._forward(self._hidden[0][:1, :_PROBE_TOKENS], {}, stops=False)
        finally:
            for handle in handles:
                handle.remove()
        self._sort(seen)

    def _sort(self, seen: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        """Set the steps from ``(operator, input, copy of the input)`` in the order of calls."""
        self._readers = {name: name for name in self.operators}
        steps: dict[str, list[str]] = {}
        inputs: list[tuple[str, Tensor, Tensor]] = []
        for name, tensor, value in seen:
            experts = _expert_of(name)
            if experts is not None:
                steps.setdefault(experts, [])
                continue
            # The same tensor may have been overwritten in between: compare the values, too.
            same = (first for first, t, v in inputs if t is tensor and torch.equal(v, value))
            reader = next(same, name)
            if reader == name:
                inputs.append((name, tensor, value))
            self._readers[name] = reader
            steps.setdefault(reader, []).append(name)
        known = {name for names in steps.values() for name in names}
        for name in self.operators:  # experts that no probe token was routed to
            if name not in known:
                steps.setdefault(_expert_of(name) or name, []).append(name)
        self._steps = [tuple(names) for names in steps.values()]


class LayerWalk:
    """Iterates over the decoder layers of a checkpoint, with the calibration tokens' inputs.

    Args:
        model_dir: directory with ``config.json`` and safetensors weights.
        calibration: the tokens.
        dtype: of weights and activations.
        device: to compute on.
        batch_tokens: maximum tokens of one forward pass; at least one sequence is run.
        progress: called after each layer.
        finish: also run the last layer, so that ``hidden`` is its output at the end.

    Attributes:
        checkpoint: the model's weights.
        config: its configuration.
        hidden: inputs of the current layer, batches of ``[R, T, H]``.

    Raises:
        SpecError: as ``Checkpoint``, or the tokens are outside the model's vocabulary.
    """

    def __init__(  # noqa: PLR0913  where, what with, and what it may take
        self,
        model_dir: Path | str,
        calibration: CalibrationSet,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        batch_tokens: int = BATCH_TOKENS,
        progress: Progress | None = None,
        finish: bool = False,
    ) -> None:
        self.checkpoint = Checkpoint(model_dir)
        self.config = self.checkpoint.config
        self.calibration = calibration
        self.dtype = dtype
        self.device = open_device(torch.device(device))
        self.hidden: list[Tensor] = []
        self._batch_tokens = batch_tokens
        self._progress = progress
        self._finish = finish
        positions = getattr(self.config, "max_position_embeddings", None)
        calibration.check(self.config.vocab_size, positions)

    def __iter__(self) -> Iterator[WalkedLayer]:
        """Yield every layer in order; the previous layer's weights have been freed."""
        self.hidden = self._embed()
        count = self.config.num_hidden_layers
        for index in range(count):
            layer = WalkedLayer(self._load(index), self.hidden)
            yield layer
            if index + 1 < count or self._finish:
                layer.advance()
            if self._progress is not None:
                self._progress(index + 1, count, f"layer {index}")
            del layer

    def _embed(self) -> list[Tensor]:
        """Return the inputs of the first layer, batches of ``[R, T, H]``."""
        master = Master(self.config)
        _fill(master, self.checkpoint.master_state_dict(), self.dtype, self.device)
        length = self.calibration.token_ids.shape[1]
        positions = torch.arange(length)
        rows_per_batch = max(1, self._batch_tokens // length)
        batches = torch.split(self.calibration.token_ids, rows_per_batch)
        return [
            master.embed(rows.to(self.device), positions.expand(len(rows), -1)) for rows in batches
        ]

    def _load(self, index: int) -> DecoderStage:
        layer = build_layer(self.config, index)
        _fill(layer, self.checkpoint.layer_state_dict(index), self.dtype, self.device)
        return DecoderStage(self.config, [layer], index).to(self.device)


def split_experts_(layer: nn.Module) -> None:
    """Replace the stacked experts of a layer by linear operators that share their memory.

    Raises:
        SpecError: experts in an unknown layout.
    """
    for name in list(quantizable_names(layer)):
        experts = layer.get_submodule(name)
        if isinstance(experts, nn.Linear):
            continue
        parts = {key: expert_views(experts, key) for key in expert_keys(experts)}
        layer.set_submodule(name, experts_of(experts, parts))


def _expert_of(name: str) -> str | None:
    """Return the list of experts' operators that ``name`` belongs to, or ``None``."""
    parts = name.split(".")
    if len(parts) > 2 and parts[-1].isdigit() and parts[-2] in {"gate_up", "down", "matrices"}:
        return name.rpartition(".")[0]
    return None


def _fill(
    module: nn.Module, state: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Move ``state`` into ``module``, built on the meta device; empties ``state``."""
    placed: dict[str, Tensor] = {}
    for name in list(state):
        tensor = state.pop(name)
        target = dtype if tensor.is_floating_point() else tensor.dtype
        placed[name] = tensor.to(device=device, dtype=target, copy=True)
    module.load_state_dict(placed, assign=True)
    module.requires_grad_(False)
    blank = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if blank:
        raise SpecError(f"{type(module).__name__}: buffer '{blank[0]}' is neither stored nor known")
    assert not any(p.is_meta for p in itertools.chain(module.parameters(), module.buffers()))
