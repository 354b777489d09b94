"""ClusterCosts: every cost a planner asks for, per device of one cluster."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from llmpq.costmodel import memory
from llmpq.costmodel.base import CommModel, Estimate, LatencyModel, chunked_s
from llmpq.costmodel.host_experts import (
    HostExperts,
    host_buffer_bytes,
    routed_experts,
    without_experts,
)
from llmpq.costmodel.importers.import_table import public_source, public_table
from llmpq.costmodel.roofline import RooflineLatencyModel
from llmpq.costmodel.tables.latency import TableLatencyModel
from llmpq.costmodel.tables.profiles import (
    Profile,
    ProfileKey,
    StageOverhead,
    find_profile,
    read_folder,
    read_links,
)
from llmpq.errors import SpecError
from llmpq.logging import get_logger
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, Device, limited_set
from llmpq.spec.devices.figures import DeviceSpec, PrecisionCost, compute_format, reads_blocks
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import MicroBatching
from llmpq.spec.precision import DTYPE_BYTES, Dtype, Phase, Variant
from llmpq.spec.runtime_constants import PROMPT_CHUNK_TOKENS
from llmpq.spec.tables import LatencyTable
from llmpq.spec.workload import Workload

_logger = get_logger(__name__)

LatencySource = Literal["table", "fit", "roofline"]
"""How latency is predicted: by a table and a regression between its points, by the paper's fit of a
table, or by the roofline alone, which reads no table."""

_BASELINE_RATES = {"bfloat16": 0.29, "float16": 0.29}
_AVX2_RATES = {"bfloat16": 0.74, "float16": 0.74}
_AVX512_RATES = {"bfloat16": 0.98, "float16": 0.98}
_HALF_RATES = {
    "baseline": _BASELINE_RATES,
    "avx2": _AVX2_RATES,
    "avx2_vnni": _AVX2_RATES,
    "avx512": _AVX512_RATES,
    "avx512_vnni": _AVX512_RATES,
}
"""What 16-bit matrix products reach of float32's rate with AVX-512, without bf16 pairs.

They are widened: 16 bits stored, float32 computed. Measured 2026-11-26: Intel Xeon held to each
set, one thread, weights 3072 x 1024, 512 rows (SSE: 128): 34, 86 and 124 GFLOP/s; torch 2.13's
float32 31, 82 and 121.
"""

_CPU_COSTS = {
    "float32": (
        PrecisionCost(bits=8, compute=0.13, stream=1.2, overhead=1.2),
        PrecisionCost(bits=4, compute=0.45, stream=0.35, overhead=1.2, thin=0.8),
        PrecisionCost(bits=3, compute=0.45, stream=0.315, overhead=1.2, thin=0.78),
    ),
    "float16": (
        PrecisionCost(bits=8, compute=0.04, stream=0.91, overhead=1.2, thin=1.5),
        PrecisionCost(bits=4, compute=0.065, stream=0.72, overhead=1.2, thin=1.28),
        PrecisionCost(bits=3, compute=0.065, stream=0.65, overhead=1.2, thin=1.28),
    ),
}
"""Runs in other formats than bfloat16 on a CPU: the compiled kernels against torch's matmul.

They multiply in float32 or in 8 bits whatever the run's format, which torch does in neither.
Measured: same machine, one thread, weights 2048 x 2048, 1 to 512 rows (benchmarks/kernel_times.py).
4 and 3 bits of float16: those of 8, times what both took over 8 in bfloat16.
"""


_OLDER_CPU_COSTS = (
    PrecisionCost(bits=8, compute=0.84, stream=0.87, overhead=1.2, thin=0.67),
    PrecisionCost(bits=4, compute=0.47, stream=0.7, overhead=1.2, thin=0.68),
    PrecisionCost(bits=3, compute=0.47, stream=0.6, overhead=1.2, thin=0.66),
)
"""Runs on a CPU without products of bf16 pairs: arithmetic over float32's matmul.

Measured: Intel Xeon held to AVX2, one thread, torch 2.13, weights 2048 x 2048, 1 to 512 rows
(benchmarks/kernel_times.py).
"""

_BASELINE_SAVED_BYTES = 10_000_000
"""What a process of SSE holds less than the catalogue's CPU: libraries of wider instructions.

Measured with two stages of a small Llama (Xeon with AMX): 11.2 and 10.4 MB less than held to AVX2.
"""

_WHOLE_STREAM = {8: 0.97, 4: 0.9, 3: 0.8}
"""Least factor on bandwidth of a whole processor: its cores unpack codes faster than memory reads.

By tokens a second of llama.cpp: Ryzen 9 7950X, Q8_0 0.97 and Q4_0 0.95 (discussion 164 and pull
request 54 of ikawrakow/ik_llama.cpp); EPYC 9554, Q4_K_M 0.87 of Q8_0 (ahelpme.com). 3 bits: as much
below 4 as of one thread, assumed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCosts:
    """Seconds and bytes of one model on one cluster; equal devices of one group cost the same.

    Attributes:
        dtype: number format of unquantized weights and activations.
        specs, latency: figures and latency model of every group, by ``Device.group``.
        formats: number formats of stages on every group, by ``Device.group``; empty: ``dtype``.
        head_bits: bits of the head's matrix.
        can_stream: whether the runtime streams weights of this model.
        stage: seconds per micro-batch that a stage takes in addition to its layers (positions,
            masks, unpacking a message), by ``Device.group``.
        rooflines, hosts: analytic latency of every group, and of the part of its node that computes
            experts beside it, by ``Device.group``.
    """

    model: ModelSpec
    cluster: Cluster
    dtype: Dtype
    kv_bits: int
    specs: tuple[DeviceSpec, ...]
    latency: tuple[LatencyModel, ...]
    comm: CommModel
    stage: tuple[StageOverhead, ...] = ()
    rooflines: tuple[RooflineLatencyModel, ...] = ()
    hosts: tuple[RooflineLatencyModel | None, ...] = ()
    formats: tuple[Dtype, ...] = ()
    head_bits: int = 16
    can_stream: bool = True

    def format_of(self, device: Device | None) -> Dtype:
        """Return the number format in which a device computes; of no device the run's."""
        return self.formats[device.group] if self.formats and device is not None else self.dtype

    def kv_bits_of(self, device: Device | None) -> int:
        """Return the bits of a cached key or value on a device: 4, 8, or those of its format."""
        if self.kv_bits < 8 * DTYPE_BYTES[self.dtype]:
            return self.kv_bits
        return 8 * DTYPE_BYTES[self.format_of(device)]

    def capacity_bytes(self, device: Device) -> int:
        """Return the usable memory: the cluster's figure, or the type's less its reserve.

        Devices that share their layers hold equal parts of weights and slots, so memories add.
        """
        spec = self.specs[device.group]
        own = device.memory_bytes or max(0, spec.memory_bytes - spec.reserve_bytes)
        return device.members * own

    def runtime_bytes(self, device: Device) -> int:
        """Return what the process and its context hold before any tensor."""
        return device.members * self.specs[device.group].runtime_bytes

    def layer_s(
        self, device: Device, phase: Phase, bits: int, batch: int, tokens: float, kind: int
    ) -> float:
        """Return the seconds of ONE layer of ``layer_types[kind]``; see ``LatencyModel``."""
        return self.latency[device.group].layer_s(phase, bits, batch, tokens, kind)

    def variant_s(
        self, device: Device, phase: Phase, variant: Variant, batch: int, tokens: float, kind: int
    ) -> float:
        """Return the seconds of ONE layer of ``layer_types[kind]``, however it is stored.

        Dense part and experts are parts of a whole layer's seconds, by the work of both.

        Raises:
            SpecError: experts are on the host, of which something is not known.
        """
        bits = variant.bits
        whole_s = self.layer_s(device, phase, bits, batch, tokens, kind)
        if variant == Variant(bits):
            return whole_s
        roofline, layer = self.rooflines[device.group], self.model.layer_types[kind]
        routed, dense = routed_experts(layer), without_experts(layer)
        self._check_experts(kind)
        width = variant.expert_bits or bits
        dense_s = roofline.spec_s(dense, phase, bits, batch, tokens)
        experts_s = roofline.layer_s(phase, width, batch, tokens, kind)
        experts_s -= roofline.spec_s(dense, phase, width, batch, tokens)
        scale = whole_s / roofline.layer_s(phase, bits, batch, tokens, kind)
        count = routed[0].count
        resident = count if variant.resident is None else variant.resident
        beside_s = scale * max(0.0, experts_s) * resident / count
        if resident == count:
            return scale * dense_s + beside_s
        host, rows = self.host_of(device), batch * (tokens if phase is Phase.PREFILL else 1.0)
        gather = host.gather_bytes_per_s
        assert gather is not None, "host_of checks it"
        # That of a CPU worker slows its whole layer.
        crowding = self._crowding(device) / self.crowding(device)
        law = HostExperts(
            experts=count,
            chosen=routed[0].active,
            on_host=count - resident,
            expert_bytes=memory.expert_bytes(self.model, kind, width, self.format_of(device)),
            gather_bytes_per_s=gather / crowding,
            row_s=crowding
            * host.row_s(phase, width, sum(op.out_features * op.in_features for op in routed)),
            hop_s=self._hop_s(device, rows),
        )
        return law.layer_s(rows, scale * dense_s, beside_s)

    def host_of(self, device: Device) -> RooflineLatencyModel:
        """Return the latency model of the part of a node that computes a device's experts.

        Raises:
            SpecError: the cluster names none, or its rate of scattered reads was not measured.
        """
        found = self.hosts[device.group] if self.hosts else None
        if found is None:
            raise SpecError(
                f"cluster {self.cluster.name}: field 'host': found none of {device.label}, "
                "expected type, threads and memory_bytes of what computes its experts"
            )
        if found.gather_bytes_per_s is None:
            raise SpecError(
                f"device type {found.device.type}: field 'gather_bytes_per_s': found none, "
                f"expected it of the host of {device.label}; llmpq-profile device --device cpu "
                "measures it"
            )
        return found

    def _check_experts(self, kind: int) -> None:
        if not self.model.layer_types[kind].num_experts:
            layer = self.model.layer_kinds.index(kind)
            raise SpecError(
                f"model {self.model.name}: found no routed experts in layer {layer}, expected some "
                "in layers of the strategy's field 'experts.layers'"
            )

    def _hop_s(self, device: Device, rows: float) -> float:
        """Return the seconds of rows from a device to its host; a CPU shares the host's memory."""
        spec = self.specs[device.group]
        if spec.kind == "cpu":
            return 0.0
        nbytes = rows * self.model.hidden_size * DTYPE_BYTES[self.format_of(device)]
        return spec.link_latency_s + nbytes / spec.link_bytes_per_s

    def layer_steps_s(
        self,
        device: Device,
        phase: Phase,
        variant: int | Variant,
        batch: int,
        tokens: float,
        kind: int,
    ) -> float:
        """Return the seconds of a layer with prompts in chunks, as the runtime runs them.

        ``variant`` is how it is stored, or the bits of all of it.
        """

        def seconds(rows: int, length: float) -> float:
            if isinstance(variant, Variant):
                return self.variant_s(device, phase, variant, rows, length, kind)
            return self.layer_s(device, phase, variant, rows, length, kind)

        if phase is Phase.DECODE:
            return seconds(batch, tokens)
        return chunked_s(seconds, batch, tokens)

    def layer_estimate(
        self, device: Device, phase: Phase, bits: int, batch: int, tokens: float, kind: int
    ) -> Estimate:
        """Return the seconds of ``layer_s`` with their uncertainty."""
        return self.latency[device.group].layer_estimate(phase, bits, batch, tokens, kind)

    def master_s(self, device: Device, phase: Phase, batch: int, tokens: float) -> float:
        """Return the seconds of the master's own work on one micro-batch; see ``LatencyModel``."""
        return self.latency[device.group].master_s(phase, batch, tokens, self.head_bits)

    def stage_s(self, device: Device, phase: Phase) -> float:
        """Return the seconds per micro-batch of a stage in addition to layers and master."""
        return self.stage[device.group].seconds(phase) if self.stage else 0.0

    def crowding(self, device: Device) -> float:
        """Return the slowdown of a CPU worker whose host has more threads than cores, or 1."""
        return 1.0 if device.threads is None else self._crowding(device)

    def _crowding(self, device: Device) -> float:
        """Return the slowdown of all threads of a device's node."""
        node = self.cluster.node_of(device)
        if node.cores is None:
            return 1.0
        return max(1.0, (node.worker_threads + node.host_threads) / node.cores)

    def send_s(
        self, source: Device, target: Device, phase: Phase, batch: int, tokens: int
    ) -> float:
        """Return the seconds to send a micro-batch's hidden states, and what travels with them.

        In decode one token per sequence is sent, whatever ``tokens`` is.
        """
        rows = batch * tokens if phase is Phase.PREFILL else batch
        size_bytes = rows * self.model.message_features * DTYPE_BYTES[self.format_of(source)]
        return self.comm.send_s(source, target, size_bytes)

    def layer_weight_bytes(self, device: Device, kind: int, bits: int) -> int:
        """Return the bytes of one layer's weights as the device's kernels store them.

        At bits that the device does not multiply by, no memory is enough.
        """
        if bits not in self.specs[device.group].bits:
            return self.capacity_bytes(device) + 1
        form = self.format_of(device)
        on_cpu = self.specs[device.group].kind == "cpu"
        more = memory.absorbed_bytes(self.model, kind, form) if on_cpu else 0
        return memory.layer_weight_bytes(self.model, kind, bits, form) + more

    def variant_bytes(self, device: Device, kind: int, variant: Variant) -> tuple[int, int]:
        """Return the bytes of one layer's weights on a device, and on its host."""
        whole = self.layer_weight_bytes(device, kind, variant.bits)
        if variant == Variant(variant.bits):
            return whole, 0
        self._check_experts(kind)
        form, count = self.format_of(device), self.model.layer_types[kind].num_experts
        each = memory.expert_bytes(self.model, kind, variant.expert_bits or variant.bits, form)
        resident = count if variant.resident is None else variant.resident
        dense = whole - count * memory.expert_bytes(self.model, kind, variant.bits, form)
        return dense + resident * each, (count - resident) * each

    def has_experts_apart(self, device: Device, kind: int, bits: int) -> bool:
        """Return whether a device's host may compute the routed experts of a kind of layer."""
        if device.host is None or device.members > 1:
            return False
        is_known = bits in self.specs[device.group].bits
        return is_known and self.model.layer_types[kind].num_experts > 0

    def host_buffer_bytes(
        self,
        device: Device,
        workload: Workload,
        micro_batching: MicroBatching,
        experts: Collection[tuple[int, int]],
    ) -> int:
        """Return the bytes of buffers in the memory of a device's host.

        Args:
            device: with experts on its host.
            workload: requests.
            micro_batching: sizes of micro-batches.
            experts: kinds of layers with experts there, and their bits.
        """
        form = self.format_of(device)
        prompt = min(workload.max_prompt_tokens, PROMPT_CHUNK_TOKENS)
        rows = max(micro_batching.prefill * prompt, micro_batching.decode)
        return host_buffer_bytes(
            [self.model.layer_types[kind] for kind, _ in experts],
            [bits for _, bits in experts],
            DTYPE_BYTES[form],
            0 if self.specs[device.group].kind == "cpu" else rows,
        )

    def streams(self, device: Device) -> bool:
        """Return whether weights of a device may rest on its disk."""
        is_cpu = self.specs[device.group].kind == "cpu" and device.members == 1
        return is_cpu and self.can_stream and self._disk_bytes_per_s(device) is not None

    def _disk_bytes_per_s(self, device: Device) -> float | None:
        """Return a device's share of the disk of its host; ``None`` where that is not known."""
        whole = self.specs[device.group].disk_bytes_per_s
        if device.disk_bytes_per_s is not None or whole is None:
            return device.disk_bytes_per_s
        groups = self.cluster.node_of(device).devices
        return whole / sum(group.count for group in groups if group.type == device.type)

    def stream_s(self, device: Device, nbytes: int, tokens: float = 1.0) -> float:
        """Return the seconds in which a device reads weights from its disk for a micro-batch.

        Prompts run ``PROMPT_CHUNK_TOKENS`` at a time, and each pass reads all of them.

        Args:
            device: that ``streams``.
            nbytes: of the weights.
            tokens: of a prompt, 1 in decode.
        """
        rate = self._disk_bytes_per_s(device)
        assert rate is not None, "only devices that stream are asked for"
        return math.ceil(tokens / PROMPT_CHUNK_TOKENS) * nbytes / rate

    def layer_kv_bytes(
        self,
        kind: int,
        slots: int,
        max_tokens: int,
        device: Device | None = None,
        *,
        keeps_all: bool = False,
    ) -> int:
        """Return the bytes of one layer's blocks for ``slots`` sequences; see ``memory``."""
        bits = self.kv_bits_of(device)
        return memory.layer_kv_bytes(self.model, kind, slots, max_tokens, bits, keeps_all=keeps_all)

    def copied_kv_bytes(
        self,
        slots: int,
        max_tokens: int,
        device: Device | None = None,
        layers: tuple[int, int] | None = None,
    ) -> int:
        """Return the bytes of the copies of earlier layers' keys and values that a stage keeps.

        ``layers`` are the first and end layer of the stage; by default the most that any keeps.
        """
        model = self.model
        if layers is None:
            sources = {layer.kv_source for layer in model.layer_types}
            kinds = tuple(model.layer_kinds[index] for index in sources if index is not None)
        else:
            kinds = model.copied_kinds(*layers)
        return sum(self.layer_kv_bytes(kind, slots, max_tokens, device) for kind in kinds)

    def token_kv_bytes(self, kind: int, tokens: int) -> int:
        """Return the bytes of one layer's keys and values of so many tokens."""
        return memory.token_kv_bytes(self.model, kind, tokens, self.kv_bits)

    def temporary_bytes(
        self,
        device: Device,
        workload: Workload,
        micro_batching: MicroBatching,
        is_master: bool,
        *,
        is_last: bool = False,
        kv_bytes: int = 0,
    ) -> int:
        """Return the peak bytes that live only during a step; see ``memory.temporary_bytes``."""
        each = memory.temporary_bytes(
            self.model,
            workload,
            micro_batching,
            dtype=self.format_of(device),
            device_kind=self.specs[device.group].kind,
            reads_blocks=reads_blocks(self.specs[device.group]),
            is_master=is_master,
            kv_bits=self.kv_bits_of(device),
            is_last=is_last or self.cluster.num_devices == 1,
            kv_bytes=kv_bytes,
            head_bits=self.head_bits,
        )
        return device.members * each  # hidden states are whole on every device that shares layers

    def master_bytes(self, device: Device | None = None) -> int:
        """Return the bytes of embeddings, final norm and head.

        At bits of the head that the device does not multiply by, no memory is enough.
        """
        if device is not None and self.head_bits not in self.specs[device.group].bits:
            return self.capacity_bytes(device) + 1
        on_cpu = device is not None and self.specs[device.group].kind == "cpu"
        number = self.format_of(device)
        return memory.master_bytes(self.model, number, self.head_bits, on_cpu=on_cpu)

    def latency_source(self, device: Device) -> str:
        """Return where the seconds of a device come from: ``roofline`` or ``table <file>``."""
        return self.latency[device.group].source


def build_costs(  # noqa: PLR0913  a model, its numbers, where it runs and what was measured
    model: ModelSpec,
    cluster: Cluster,
    *,
    dtype: Dtype,
    kv_bits: int,
    head_bits: int = 16,
    profile_dir: Path | None = None,
    latency: LatencySource = "table",
    can_stream: bool = True,
) -> ClusterCosts:
    """Build the costs of a model on a cluster, from tables where there are any, else the roofline.

    A table that the cluster names or ``profile_dir`` holds comes first, then one of the public
    database if the ``profiles`` extra is installed. The folder is searched for latency tables whose
    provenance matches a device and for link tables of this cluster's nodes.

    Raises:
        SpecError: an unknown device type, a malformed table, or one of another model or device.
    """
    obstacle = kv_obstacle(model, cluster, kv_bits)
    if obstacle is not None:
        raise SpecError(f"kv_bits: found {kv_bits} with {obstacle}, expected {_MORE_BITS[kv_bits]}")
    tables = read_folder(profile_dir)
    specs: list[DeviceSpec] = []
    models: list[LatencyModel] = []
    stages: list[StageOverhead] = []
    formats: list[Dtype] = []
    rooflines: list[RooflineLatencyModel] = []
    hosts: list[RooflineLatencyModel | None] = []
    for device in cluster.devices:
        if device.local_index:
            continue
        spec = catalog.device(device.type, cluster)
        if device.disk_bytes_per_s is not None and spec.kind != "cpu":
            raise SpecError(
                f"cluster {cluster.name}: field 'disk_bytes_per_s': found "
                f"{device.disk_bytes_per_s:g} of {device.label}, expected it of CPU workers alone: "
                "other devices do not stream weights"
            )
        own = compute_format(spec, dtype, device.dtype)
        spec = _figures(spec, device, own)
        is_kept = kv_bits >= 8 * DTYPE_BYTES[dtype]
        analytic = RooflineLatencyModel(
            model=model, device=spec, dtype=own,
            kv_bits=8 * DTYPE_BYTES[own] if is_kept else kv_bits,
            threads=device.threads or spec.cores or 1,
        )  # fmt: skip
        key = ProfileKey(model=model, dtype=own, device=device)
        formats.append(own)
        rooflines.append(analytic)
        hosts.append(_host_roofline(analytic, cluster, device))
        profile = None if latency == "roofline" else _profile(key, tables, cluster)
        if profile is None and device.members > 1:
            raise SpecError(
                f"device {device.label}: found no table of {device.members} devices that share a "
                "layer, expected one in the profile folder (llmpq-profile import "
                f"--tensor_parallel {device.members}), or the 'profiles' extra with such layers"
            )
        if profile is None and model.has_states:
            _warn_of_states(model.name)
        specs.append(spec)
        stages.append(StageOverhead() if profile is None else profile.stage)
        models.append(
            analytic
            if profile is None
            else TableLatencyModel(
                table=profile.table,
                analytic=analytic,
                profiled_kind=model.layer_kinds[profile.layer],
                file=profile.file,
                fitted_only=latency == "fit",
            )
        )
    return ClusterCosts(
        model=model,
        cluster=cluster,
        dtype=dtype,
        kv_bits=kv_bits,
        specs=tuple(specs),
        latency=tuple(models),
        comm=read_links(profile_dir, cluster, tuple(specs)),
        stage=tuple(stages),
        rooflines=tuple(rooflines),
        hosts=tuple(hosts),
        formats=tuple(formats),
        head_bits=head_bits,
        can_stream=can_stream,
    )


def _host_roofline(
    own: RooflineLatencyModel, cluster: Cluster, device: Device
) -> RooflineLatencyModel | None:
    """Return the latency model of the host of a device, ``None`` if the cluster names none.

    Raises:
        SpecError: it is not a CPU.
    """
    if device.host is None:
        return None
    spec = catalog.device(device.host.type, cluster)
    if spec.kind != "cpu":
        raise SpecError(
            f"cluster {cluster.name}: field 'host.type': found {device.host.type} of "
            f"{device.label}, of kind '{spec.kind}', expected a CPU"
        )
    # The set that the device states is that of its node's processor, too.
    known = device.host.instruction_set or device.instruction_set
    figures = _figures(spec, replace(device, instruction_set=known), own.dtype)
    return replace(own, device=figures, threads=device.host.threads)


_MORE_BITS = {4: "8, or 16 for those of the dtype", 8: "16 for those of the dtype"}


def kv_obstacle(model: ModelSpec, cluster: Cluster, kv_bits: int) -> str | None:
    """Return why no plan may cache keys and values at so few bits, ``None`` if one may."""
    found = [layer.kv_obstacle(kv_bits) for layer in model.layer_types]
    if kv_bits == 4:
        kinds = {one.label: catalog.device(one.type, cluster).kind for one in cluster.devices}
        found += [
            f"device {label} of kind '{kind}', which has no kernel for them"
            for label, kind in kinds.items()
            if kind != "cpu"
        ]
    return next((one for one in found if one is not None), None)


@cache
def _warn_of_states(name: str) -> None:
    _logger.warning(
        "%s: layers with a recurrent state are forecast by their work, and take several times as "
        "long where transformers' own code computes it; llmpq-profile measures them",
        name,
    )


def _profile(key: ProfileKey, tables: dict[str, LatencyTable], cluster: Cluster) -> Profile | None:
    """Return the table of a device: the cluster's, the folder's, else the public database's.

    The database speaks for types of the catalogue, not for those that the cluster describes.
    """
    found = find_profile(key, tables)
    type_name = catalog.device_type(key.device.type, cluster)
    if found is not None or type_name in {one.type for one in cluster.device_types or ()}:
        return found
    table = public_table(key.model, type_name, key.dtype, members=key.device.members)
    if table is None:
        return None
    return Profile(table=table, file=public_source(type_name), layer=0)


def _figures(spec: DeviceSpec, device: Device, dtype: Dtype) -> DeviceSpec:
    """Return the figures of a device; those of a CPU depend on its instructions and the dtype."""
    if spec.kind != "cpu":
        return spec
    rates = dict(spec.flops)
    own_set = limited_set(device.instruction_set, device.cpu_isa) or ""
    is_host = spec.flops == catalog.device("cpu").flops  # whose figures are those of Zen 5
    for name, share in _HALF_RATES.get(own_set, {}).items():
        if name in rates and "float32" in rates:
            own = share * rates["float32"]
            rates[name] = own if is_host else min(rates[name], own)
    if spec.precision_costs == catalog.device("cpu").precision_costs:
        costs = _precision_costs(spec, device, dtype, rates)
        if spec.cores is not None:
            costs = tuple(
                replace(one, stream=max(one.stream, _WHOLE_STREAM[one.bits])) for one in costs
            )
        spec = replace(spec, precision_costs=costs)
    saved = _BASELINE_SAVED_BYTES if is_host and own_set == "baseline" else 0
    part, gather = device.cpu_share or 1.0, spec.gather_bytes_per_s
    return replace(
        spec,
        runtime_bytes=spec.runtime_bytes - saved,
        flops=tuple((name, part * rate) for name, rate in rates.items()),
        memory_bytes_per_s=part * spec.memory_bytes_per_s,
        gather_bytes_per_s=None if gather is None else part * gather,
        layer_overhead_s=spec.layer_overhead_s / part,
        step_overhead_s=None if spec.step_overhead_s is None else spec.step_overhead_s / part,
    )


def _precision_costs(
    spec: DeviceSpec, device: Device, dtype: Dtype, rates: dict[str, float]
) -> tuple[PrecisionCost, ...]:
    """Return the factors of a CPU that states none of its own.

    One that computes bfloat16 slower than float32 converts it: it has no products of bf16 pairs.
    """
    full, own = rates.get("float32", 0.0), rates.get(dtype, 0.0)
    has_pairs = rates.get("bfloat16", 0.0) >= full
    is_oldest = limited_set(device.instruction_set, device.cpu_isa) == "baseline"
    if has_pairs or is_oldest:
        return _CPU_COSTS.get(dtype, spec.precision_costs)
    # The kernels take the same time in every format.
    return tuple(replace(cost, compute=cost.compute * own / full) for cost in _OLDER_CPU_COSTS)
