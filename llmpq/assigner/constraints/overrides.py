"""Overrides: manual decisions of devices, order, layers, bits, memory and micro-batches.

The values are those of the command line; ``resolve`` applies them to a cluster. Each decision can
be listed and removed, so that an error message can name one that leaves no plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from llmpq.spec.plan import MicroBatching
from llmpq.units import GIB

HEAD = "head"
"""Name of the head in ``--fix_bits``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Manual decisions; the default leaves everything to the planner.

    A device is named by its label ``node/type#0``. Where several are allowed, ``node/type``,
    ``node`` or ``type`` name all that match.

    Attributes:
        memory: memory limit in bytes, by device or devices.
        exclude: devices to leave out.
        use: devices that hold at least one layer each.
        order: devices in pipeline order; the others are left out.
        layers: a device and the half-open range ``first, end`` of its layers.
        layer_bits: half-open range ``first, end`` and the bits of its layers.
        device_bits: the bits of all layers of a device, by device or devices.
        head_bits: the bits of the head's matrix.
        micro_batching: the two micro-batch sizes.
    """

    memory: tuple[tuple[str, int], ...] = ()
    exclude: tuple[str, ...] = ()
    use: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    layers: tuple[tuple[str, int, int], ...] = ()
    layer_bits: tuple[tuple[int, int, int], ...] = ()
    device_bits: tuple[tuple[str, int], ...] = ()
    head_bits: int | None = None
    micro_batching: MicroBatching | None = None

    def __bool__(self) -> bool:
        return self != Overrides()

    @property
    def shapes_the_plan(self) -> bool:
        """Whether they constrain the search itself, not only its devices and micro-batches."""
        return bool(self.use or self.order or self.layers or self.layer_bits or self.device_bits)

    def options(self) -> tuple[str, ...]:
        """Return every decision as its command-line option."""
        return tuple(text for text, _ in self.without_each())

    def without_each(self) -> Iterator[tuple[str, Overrides]]:
        """Yield every decision as its option, and the overrides without it."""
        for field, texts in self._texts():
            entries = getattr(self, field)
            for index, text in enumerate(texts):
                yield text, replace(self, **{field: entries[:index] + entries[index + 1 :]})
        if self.head_bits is not None:
            yield f"--fix_bits {HEAD}={self.head_bits}", replace(self, head_bits=None)
        if self.order:
            yield f"--fix_order {' '.join(self.order)}", replace(self, order=())
        if self.micro_batching is not None:
            sizes = self.micro_batching
            text = f"--micro_batch {sizes.prefill} {sizes.decode}"
            yield text, replace(self, micro_batching=None)

    def _texts(self) -> Iterator[tuple[str, list[str]]]:
        yield "memory", [f"--memory_gib {name}={size / GIB:g}" for name, size in self.memory]
        yield "exclude", [f"--exclude {name}" for name in self.exclude]
        yield "use", [f"--use {name}" for name in self.use]
        yield "layers", [f"--fix_layers {name}={a}:{b}" for name, a, b in self.layers]
        yield "layer_bits", [f"--fix_bits {a}:{b}={bits}" for a, b, bits in self.layer_bits]
        yield "device_bits", [f"--fix_bits {name}={bits}" for name, bits in self.device_bits]


NO_OVERRIDES = Overrides()
