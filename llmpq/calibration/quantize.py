"""Quantize a whole checkpoint to GPTQ's or compressed-tensors' format, layer by layer.

``rtn`` reads, rounds and writes each layer. ``gptq`` calibrates every layer on the outputs of the
quantized layers before it, and inside a layer every step on those of the quantized steps before it
(true-sequential). Memory holds two layers, the activations between two layers, and the Hessians of
one step.

Shape legend: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from llmpq import __version__
from llmpq.calibration.data import CalibrationSet
from llmpq.calibration.stats import Hessian
from llmpq.calibration.walk import LayerWalk, Progress, WalkedLayer, split_experts_
from llmpq.errors import SpecError
from llmpq.models import Checkpoint
from llmpq.models.weights import find_stored
from llmpq.quant.checkpoint.format import from_integers, make_config
from llmpq.quant.checkpoint.reader import stored_modules
from llmpq.quant.checkpoint.writer import (
    SHARD_BYTES,
    CheckpointWriter,
    compressed_config,
    compressed_parts,
)
from llmpq.quant.loading.master import head_key, load_master
from llmpq.quant.modules.layer import (
    Matrix,
    has_common_layout,
    matrices_of,
    quantizable_names,
)
from llmpq.quant.quantizers.gptq import GptqOptions, gptq, round_integers
from llmpq.quant.quantizers.integer import IntegerWeight
from llmpq.spec.fields import read_json
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.huggingface.quantization import FIELD, ZERO_OFFSETS, is_gptq
from llmpq.spec.model_files.config import gguf_config
from llmpq.spec.precision import Precision

Format = Literal["gptq", "compressed-tensors"]
Encode = Callable[[IntegerWeight], dict[str, Tensor]]

# With fewer tokens per input feature, the Hessian is mostly noise.
_MIN_TOKENS_PER_FEATURE = 0.25
_HEAD_BLOCK_ROWS = 1 << 13


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeJob:
    """A checkpoint to quantize, the method, and the bits of each layer.

    Attributes:
        model_dir: the checkpoint, not quantized.
        precisions: of every layer, in order.
        head: of the LM head; ``None`` leaves it. A head that is tied to the token embedding gets a
            matrix of its own, and the embedding stays as it is.
        calibration: tokens for GPTQ; ``None`` rounds to nearest.
        options: of GPTQ.
        format: of the result, ``gptq`` or ``compressed-tensors``.
        shard_bytes: maximum size of a file of the result.
    """

    model_dir: Path
    precisions: tuple[Precision, ...]
    head: Precision | None = None
    calibration: CalibrationSet | None = None
    options: GptqOptions = field(default_factory=GptqOptions)
    format: Format = "gptq"
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeReport:
    """Result of a quantization.

    Attributes:
        weights_bytes: of all tensors written.
        rounded: operators that were rounded to nearest because too few tokens reached them.
    """

    weights_bytes: int
    rounded: tuple[str, ...]


def quantize_checkpoint(
    job: QuantizeJob, output: Path | str, progress: Progress | None = None
) -> QuantizeReport:
    """Write a checkpoint that gptqmodel, transformers and vLLM can read.

    Args:
        job: what to quantize.
        output: directory to make; it appears when it is complete.
        progress: called after each layer.

    Raises:
        SpecError: ``output`` exists, the checkpoint is quantized already, precisions do not fit
            its layers, or as ``Checkpoint`` and the quantizers.
    """
    checkpoint = _source_of(job)
    head_name = checkpoint.module_name(checkpoint.head_name("weight")).removesuffix(".weight")
    head = None if job.head is None else (head_name, job.head)
    quantization = _quantization(job, checkpoint.skeleton.layers_name, head)
    encode = _encoder(quantization)
    rounded: list[str] = []
    count = len(job.precisions)
    walk = None
    if job.calibration is not None:
        walk = LayerWalk(job.model_dir, job.calibration, finish=head is not None)
    with CheckpointWriter(output, job.shard_bytes) as writer:
        _copy_other_tensors(checkpoint, writer, None if head is None else f"{head_name}.weight")
        for index, weights in _quantized_layers(job, checkpoint, walk, rounded):
            _write_layer(checkpoint, index, weights, writer, encode)
            if progress is not None:
                progress(index + 1, count, f"layer {index} at {job.precisions[index]}")
        config = gguf_config(job.model_dir) or read_json(job.model_dir / "config.json")
        if job.head is not None:
            _write_parts(head_name, encode, _quantized_head(job, job.head, walk), writer)
            _untie(config)
        config[FIELD] = quantization
        writer.commit(config, job.model_dir)
    return QuantizeReport(weights_bytes=writer.total_bytes, rounded=tuple(rounded))


def _quantization(
    job: QuantizeJob, layers_name: str, head: tuple[str, Precision] | None
) -> dict[str, Any]:
    """Return the ``quantization_config`` of the result.

    Raises:
        SpecError: the format does not hold reordered columns, or no layer is quantized.
    """
    act_order = job.calibration is not None and job.options.order == "full"
    if job.format == "gptq":
        return make_config(
            job.precisions, layers_name, act_order=act_order, meta=_meta(job), head=head
        )
    if act_order:
        raise SpecError("compressed-tensors: found --act_order, expected columns in order")
    return compressed_config(job.precisions, layers_name, _meta(job), head)


def _encoder(quantization: Mapping[str, Any]) -> Encode:
    """Return the function that makes the tensors of an operator."""
    if quantization["quant_method"] == "gptq":
        zero_offset = ZERO_OFFSETS[quantization["checkpoint_format"]]
        return partial(from_integers, zero_offset=zero_offset)
    return compressed_parts


def _source_of(job: QuantizeJob) -> Checkpoint:
    if is_gptq(job.model_dir):
        raise SpecError(f"{job.model_dir}: is quantized already, expected a plain checkpoint")
    checkpoint = Checkpoint(job.model_dir)
    if checkpoint.config.num_hidden_layers != len(job.precisions):
        raise SpecError(
            f"{job.model_dir}: found {checkpoint.config.num_hidden_layers} layers and precisions "
            f"of {len(job.precisions)}"
        )
    layer = checkpoint.empty_layer(0)
    if not has_common_layout(layer):
        raise SpecError(
            f"{job.model_dir}: no file format has a layout for the quantized experts of "
            f"{checkpoint.config.model_type}; they can be quantized while they are loaded"
        )
    for matrix in matrices_of(layer):
        for precision in set(job.precisions):
            _check_groups(job, precision, matrix.name, matrix.in_features)
    if job.head is not None:
        inputs = load_model_dir(job.model_dir).head_in_features
        _check_groups(job, job.head, "the head", inputs)
    return checkpoint


def _check_groups(job: QuantizeJob, precision: Precision, name: str, inputs: int) -> None:
    group = precision.group_size
    if group is not None and inputs > group and inputs % group:
        raise SpecError(
            f"{job.model_dir}: groups of {group} do not divide the {inputs} inputs of {name}, as "
            "GPTQ files need; choose another group size, or -1 for one group"
        )


def _quantized_layers(
    job: QuantizeJob, checkpoint: Checkpoint, walk: LayerWalk | None, rounded: list[str]
) -> Iterator[tuple[int, dict[str, IntegerWeight]]]:
    """Yield the index of every layer and its quantized operators by name, none at 16 bits."""
    if walk is None:
        for index, precision in enumerate(job.precisions):
            yield index, {} if precision.bits == 16 else _rounded(checkpoint, index, precision)
        return
    for layer in walk:
        precision = job.precisions[layer.index]
        if precision.bits == 16:
            yield layer.index, {}
        else:
            yield layer.index, _calibrated(layer, precision, job.options, rounded)


def _rounded(checkpoint: Checkpoint, index: int, precision: Precision) -> dict[str, IntegerWeight]:
    layer = checkpoint.empty_layer(index)
    layer.load_state_dict(checkpoint.layer_state_dict(index), assign=True)
    split_experts_(layer)
    return {
        name: round_integers(layer.get_parameter(f"{name}.weight"), precision)
        for name in quantizable_names(layer)
    }


def _calibrated(
    layer: WalkedLayer, precision: Precision, options: GptqOptions, rounded: list[str]
) -> dict[str, IntegerWeight]:
    """Quantize a layer step by step; later steps get the outputs of the quantized earlier ones."""
    weights: dict[str, IntegerWeight] = {}
    for step in layer.steps:
        for names in _batches(layer, step):
            hessians = layer.collect(Hessian, names)
            readers: dict[int, list[str]] = {}
            for name in names:
                readers.setdefault(id(hessians[name]), []).append(name)
            for stacked in readers.values():
                found = hessians[stacked[0]]
                is_enough = found.tokens >= _MIN_TOKENS_PER_FEATURE * len(found.matrix)
                if not is_enough:
                    rounded += [f"layer {layer.index} {name}" for name in stacked]
                hessian = found if is_enough else None
                weights |= _quantize_stacked(layer, stacked, hessian, precision, options)
    return weights


def _quantize_stacked(
    layer: WalkedLayer,
    names: Sequence[str],
    hessian: Hessian | None,
    precision: Precision,
    options: GptqOptions,
) -> dict[str, IntegerWeight]:
    """Quantize operators of one input as one matrix; put the rounded weights into the layer."""
    operators = [layer.operators[name] for name in names]
    stacked = torch.cat([operator.weight for operator in operators])  # [N, K]
    if hessian is None:
        quantized = round_integers(stacked, precision)
    else:
        quantized = gptq(stacked, hessian.matrix, precision, options)
    found = {}
    start = 0
    for name, operator in zip(names, operators, strict=True):
        part = quantized.rows(slice(start, start + operator.out_features))
        operator.weight.data.copy_(part.dequantize())
        found[name] = part
        start += operator.out_features
    return found


def _batches(layer: WalkedLayer, step: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield parts of a step whose Hessians fit the memory of the layer itself.

    Operators with the same input share one Hessian; those of experts do not.
    """
    if len({layer.reader(name) for name in step}) == 1:
        yield step
        return
    budget = sum(tensor.nbytes for tensor in layer.module.parameters())
    one = 4 * layer.operators[step[0]].in_features ** 2
    size = max(1, budget // one)
    for start in range(0, len(step), size):
        yield step[start : start + size]


def _quantized_head(
    job: QuantizeJob, precision: Precision, walk: LayerWalk | None
) -> IntegerWeight:
    """Quantize the head, calibrated on the outputs of the quantized layers; ``None`` rounds it.

    Rows are independent: a block of them at a time needs little memory.
    """
    master = load_master(job.model_dir, dtype=torch.float32, device="cpu")
    weight = master.get_parameter(head_key(master)).data
    blocks = torch.split(weight, _HEAD_BLOCK_ROWS)
    if walk is None:
        return IntegerWeight.stacked([round_integers(block, precision) for block in blocks])
    hessian = Hessian(weight.shape[1])
    for hidden in walk.hidden:
        hessian.add(master.head_inputs(hidden.flatten(0, 1)))
    return IntegerWeight.stacked(
        [gptq(block, hessian.matrix, precision, job.options) for block in blocks]
    )


def _untie(config: dict[str, Any]) -> None:
    """State in a ``config.json`` that the head has a matrix of its own."""
    config["tie_word_embeddings"] = False
    if isinstance(config.get("text_config"), dict):
        config["text_config"]["tie_word_embeddings"] = False


def _copy_other_tensors(
    checkpoint: Checkpoint, writer: CheckpointWriter, replaced: str | None
) -> None:
    """Copy the tensors outside the layers, without one, under the names of the whole model."""
    count = checkpoint.config.num_hidden_layers
    layers = tuple(checkpoint.layer_prefix(index) for index in range(count))
    for name in checkpoint.tensors.names:
        if not name.startswith(layers) and checkpoint.module_name(name) != replaced:
            writer.add(checkpoint.module_name(name), _load(checkpoint, name))


def _write_layer(
    checkpoint: Checkpoint,
    index: int,
    weights: dict[str, IntegerWeight],
    writer: CheckpointWriter,
    encode: Encode,
) -> None:
    """Write a layer's codes instead of its weights, and its other tensors unchanged."""
    prefix = checkpoint.layer_prefix(index)
    replaced: set[str] = set()
    for matrix in matrices_of(checkpoint.empty_layer(index)) if weights else ():
        modules, stored = _modules_of(checkpoint, prefix, matrix)
        replaced |= stored
        weight = weights[_operator_of(matrix)]
        rows = weight.shape[0] // len(modules)
        for i, module in enumerate(modules):
            part = weight.rows(slice(i * rows, (i + 1) * rows))
            _write_parts(checkpoint.module_name(module), encode, part, writer)
    for name in checkpoint.tensors.names:
        if name.startswith(prefix) and name not in replaced:
            writer.add(checkpoint.module_name(name), _load(checkpoint, name))


def _write_parts(
    module: str, encode: Encode, weight: IntegerWeight, writer: CheckpointWriter
) -> None:
    """Write the tensors of one operator."""
    try:
        parts = encode(weight)
    except SpecError as error:
        raise SpecError(f"{module}: {error}") from error
    for part, tensor in parts.items():
        writer.add(f"{module}.{part}", tensor)


def _modules_of(
    checkpoint: Checkpoint, prefix: str, matrix: Matrix
) -> tuple[tuple[str, ...], set[str]]:
    """Return the modules that hold a matrix, stacked along N, and the tensors they replace."""
    candidates = list(stored_modules(prefix, matrix))
    for modules in candidates:
        if f"{modules[0]}.weight" in checkpoint.tensors:
            return modules, {f"{module}.weight" for module in modules}
    fused = find_stored(checkpoint.tensors, prefix + matrix.key)
    assert fused is not None  # one of the spellings was read
    return candidates[0], {fused}


def _operator_of(matrix: Matrix) -> str:
    """Return the name of a matrix in a ``WalkedLayer``."""
    if matrix.expert is None:
        return matrix.name
    return f"{matrix.key.removesuffix('_proj')}.{matrix.expert}"


def _load(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.tensors.load(checkpoint.tensors.source(name))
    return tensor.to(checkpoint.dtype) if checkpoint.tensors.decodes else tensor


def _meta(job: QuantizeJob) -> dict[str, Any]:
    meta: dict[str, Any] = {"quantizer": [f"llmpq:{__version__}"]}
    if job.calibration is None:
        return meta | {"method": "rtn"}
    return meta | {
        "method": "gptq",
        "damp_percent": job.options.damping,
        "true_sequential": True,
        "order": job.options.order,
        "calibration": job.calibration.source,
        "calibration_sha256": job.calibration.digest,
    }
