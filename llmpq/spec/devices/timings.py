"""What ``llmpq-profile device`` measures, as numbers between the profiler and the fit."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from llmpq.spec.devices.figures import DeviceKind
from llmpq.spec.precision import Dtype, Phase

HEAD_DIM = 64
"""Of a measured layer."""
HEADS_PER_GROUP = 4
"""Query heads to a head of keys and values, as most models have."""
MLP_RATIO = 2
"""Width of the MLP over the features."""


def kv_heads_of(features: int) -> int:
    """Return the heads of keys and values of a measured layer: whole groups of query heads."""
    heads = features // HEAD_DIM
    return heads // gcd(heads, HEADS_PER_GROUP)


def narrow_features(features: int) -> int:
    """Return the features of the narrow layers: half, of whole heads; 0 where none are measured."""
    return features // 2 // HEAD_DIM * HEAD_DIM


def layer_matrices(features: int) -> tuple[tuple[int, int], ...]:
    """Return the rows and columns of the matrices of a measured layer, those of a Llama."""
    kv, wide = HEAD_DIM * kv_heads_of(features), MLP_RATIO * features
    attention = ((features, features), (kv, features), (kv, features), (features, features))
    return (*attention, (wide, features), (wide, features), (features, wide))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTiming:
    """Seconds of a step through one decoder layer, without its overhead.

    Attributes:
        dtype, bits: number format of the activations, and bits of the weights.
        batch: sequences.
        tokens: of a prompt; in decode, of a context.
    """

    dtype: Dtype
    bits: int
    phase: Phase
    batch: int
    tokens: int
    seconds: float

    @property
    def rows(self) -> int:
        """Tokens that pass through the layer."""
        return self.batch * (self.tokens if self.phase is Phase.PREFILL else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimings:
    """Rates, copies and overheads that were measured on one device.

    Attributes:
        threads: of a CPU; 1 for others.
        copy_bytes_per_s: bytes read and written by a copy inside its memory.
        features: of a layer: see ``layer_matrices``.
        layers: in one number format at 16 bits and others, decode steps of three batches and
            prompts of two sizes, all short; of the largest batch and of the larger size long ones,
            too, at 16 bits. In every other format, prompts of the larger size at 16 bits.
        narrow: prompts of the larger size through layers of half the features, at the same bits.
        layer_overhead_s: a decoder layer with next to no work.
        step_overhead_s: a step with next to no work, without its layers.
        host_bytes_per_s, host_latency_s: of a copy from and to host memory, ``None`` for a CPU.
        gather_bytes_per_s: of scattered experts, by the threads of a CPU; ``None`` for others.
        cpu_taken: share of the timing thread's time that other programs took, ``None`` if unknown.
    """

    kind: DeviceKind
    memory_bytes: int
    threads: int
    copy_bytes_per_s: float
    features: int
    layers: tuple[LayerTiming, ...]
    layer_overhead_s: float
    step_overhead_s: float
    narrow: tuple[LayerTiming, ...] = ()
    host_bytes_per_s: float | None = None
    host_latency_s: float | None = None
    compute_capability: tuple[int, int] | None = None
    gather_bytes_per_s: float | None = None
    cpu_taken: float | None = None
