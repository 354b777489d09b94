"""The divergence indicator: measure how one quantized layer changes the predictions.

For every (layer, bitwidth) a stream of hidden states passes through the model with that one layer
quantized by the kernels that serve it. The score is the divergence of its predictions from those
of the 16-bit model, ``KL(p16 || p)`` in nats per token. It includes how later layers and the head
amplify or damp the error.

The ``L B + 1`` streams of L layers and B bitwidths share the calibration tokens. Together they hold
at most as many hidden states as the whole calibration set, and cost about half a forward pass of
it plus its logits. Layers are loaded one at a time.

Shape legend: L layers, B bitwidths, R sequences of a probe, T tokens of each, H hidden size,
V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from llmpq.calibration import CalibrationSet
from llmpq.calibration.walk import Progress
from llmpq.indicator.base import IndicatorInput, Scores
from llmpq.kernels.base import exact_dtype, open_device
from llmpq.models import DecoderStage, Master, load_config
from llmpq.models.master import is_tied
from llmpq.quant.loading.loader import load_stage
from llmpq.quant.loading.master import load_master

_CHUNK_VALUES = 1 << 20  # scores C x V: 4 MiB in float32
_WHOLE = None  # the stream of the 16-bit model

Key = tuple[int, int] | None
"""Layer and bitwidth of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Mean divergence from the 16-bit model with one layer quantized.

    Attributes:
        probe_tokens: tokens of each stream; by default an equal share of the calibration tokens.
    """

    probe_tokens: int | None = None

    def score(self, subject: IndicatorInput, progress: Progress | None = None) -> Scores:
        """Run all streams layer by layer and compare their predictions."""
        count = load_config(subject.model_dir).num_hidden_layers
        run = _Run(subject, count, self._probe(subject, count), progress)
        for index in range(count):
            run.pass_layer(index)
        found = run.divergences()
        return {
            width: tuple(found[index, width] for index in range(count)) for width in subject.bits
        }

    def score_head(
        self, subject: IndicatorInput, progress: Progress | None = None
    ) -> Mapping[int, float]:
        """Compare the predictions with the head at each bitwidth, on the tokens of the layers.

        A token embedding that is the same matrix changes with it.

        Raises:
            SpecError: as ``score``, or the head cannot be quantized.
        """
        count = load_config(subject.model_dir).num_hidden_layers
        batches = batches_of(subject, self._probe(subject, count))
        masters = {width: _master_of(subject, width) for width in (16, *subject.bits)}
        states = {
            width: [master.embed(ids, positions_of(ids)) for ids in batches]
            for width, master in masters.items()
            if width == 16 or is_tied(masters[16].config)
        }
        for index in range(count):
            layer = _load(subject, index, 16)
            for width, own in states.items():
                states[width] = [layer.run_whole(hidden) for hidden in own]
            del layer
            if progress is not None:
                progress(index + 1, count, f"head, layer {index}")
        whole, tokens = states[16], sum(ids.numel() for ids in batches)
        found = {}
        for width in subject.bits:
            pairs = zip(whole, states.get(width, whole), strict=True)
            ends = masters[16], masters[width]
            found[width] = sum(_divergence(ends, *pair) for pair in pairs) / tokens
        return found

    def _probe(self, subject: IndicatorInput, count: int) -> Tensor:
        """Return the tokens ``[R, T]`` that every stream sees."""
        tokens = subject.tokens_for("divergence")
        tokens.check(load_config(subject.model_dir).vocab_size, None)
        streams = count * len(subject.bits) + 1
        return cut_probe(tokens, self.probe_tokens or tokens.tokens // streams)


def cut_probe(tokens: CalibrationSet, share: int) -> Tensor:
    """Return ``[R, T]`` tokens, about ``share``, from sequences spread evenly over the set.

    At least 2 tokens; a share of less than one sequence is its beginning.
    """
    rows, length = tokens.token_ids.shape
    length = max(1, min(length, max(2, share)))
    chosen = max(1, min(rows, share // length))
    return tokens.token_ids[torch.arange(chosen) * rows // chosen, :length]


class _Run:
    """The hidden states of all streams."""

    def __init__(
        self, subject: IndicatorInput, num_layers: int, probe: Tensor, progress: Progress | None
    ) -> None:
        self.subject = subject
        self.progress = progress
        self.done = 0
        # Unit: one stream through one layer; the predictions of a stream count as one layer.
        passes = sum(1 + len(subject.bits) * (index + 1) for index in range(num_layers))
        self.total = passes + num_layers * len(subject.bits)
        open_device(torch.device(subject.device))
        self.batches = batches_of(subject, probe)
        master = _master_of(subject)
        self.states: dict[Key, list[Tensor]] = {
            _WHOLE: [master.embed(ids, positions_of(ids)) for ids in self.batches]
        }

    def pass_layer(self, index: int) -> None:
        """Start the streams that change layer ``index`` and run the others through it."""
        entering = self.states[_WHOLE]
        for width in self.subject.bits:
            changed = _load(self.subject, index, width)
            self.states[index, width] = self._through(changed, entering)
            del changed
            self._report(f"layer {index} at {width} bits")
        plain = _load(self.subject, index, 16)
        for key, states in self.states.items():
            if key is _WHOLE or key[0] < index:
                self.states[key] = self._through(plain, states)
                self._report(f"layer {index}")

    def divergences(self) -> dict[tuple[int, int], float]:
        """Return the mean divergence of every stream; frees the streams."""
        master = _master_of(self.subject)
        whole = self.states.pop(_WHOLE)
        found = {}
        for key in list(self.states):
            assert key is not None
            changed = self.states.pop(key)
            pairs = zip(whole, changed, strict=True)
            total = sum(_divergence((master, master), one, other) for one, other in pairs)
            found[key] = max(0.0, total / sum(ids.numel() for ids in self.batches))
            self._report("predictions")
        return found

    def _through(self, layer: DecoderStage, states: list[Tensor]) -> list[Tensor]:
        return [layer.run_whole(hidden) for hidden in states]

    def _report(self, what: str) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, what)


def _load(subject: IndicatorInput, index: int, width: int) -> DecoderStage:
    return load_stage(
        subject.model_dir, index, index + 1, [width], dtype=subject.dtype, device=subject.device
    )


def _master_of(subject: IndicatorInput, head_bits: int = 16) -> Master:
    return load_master(
        subject.model_dir, dtype=subject.dtype, device=subject.device, head_bits=head_bits
    )


def batches_of(subject: IndicatorInput, probe: Tensor) -> list[Tensor]:
    """Return the probe ``[R, T]`` in parts of as many rows as run at once."""
    rows = max(1, subject.batch_tokens // probe.shape[1])
    return list(torch.split(probe.to(subject.device), rows))


@torch.inference_mode()
def _divergence(masters: tuple[Master, Master], whole: Tensor, changed: Tensor) -> float:
    """Sum over tokens of ``KL(p16 || p)`` in nats, from each master's states ``[R, T, H]``."""
    total = 0.0
    pairs = zip(*map(_chunks, masters, (whole, changed)), strict=True)
    for one, other in pairs:
        expected = torch.log_softmax(masters[0].logits(one), dim=-1)  # [C, V]
        scores = torch.log_softmax(masters[1].logits(other), dim=-1)
        ratio = (expected - scores).mul_(expected.exp_())
        # Rounding can make the divergence of two nearly equal rows negative.
        total += float(ratio.sum(dim=-1).clamp_(min=0).sum(dtype=exact_dtype(ratio.device)))
    return total


def _chunks(master: Master, hidden: Tensor) -> Iterator[Tensor]:
    size = max(1, _CHUNK_VALUES // master.config.get_text_config().vocab_size)
    yield from torch.split(hidden.flatten(0, 1), size)


def positions_of(ids: Tensor) -> Tensor:
    """Return the positions of whole sequences ``[R, T]``."""
    return torch.arange(ids.shape[1]).expand(ids.shape)
