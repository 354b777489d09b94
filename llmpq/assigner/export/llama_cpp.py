"""Plans for llama.cpp: one RPC server a stage, and the layers of each by ``--tensor-split``.

llama.cpp counts the output after the last layer as one more layer and gives layer ``i`` to the
first device whose share of the running sum exceeds ``i / (L + 1)``. The number of layers of every
stage, one more on the last, therefore is an exact split. Bits are the number formats of a GGUF
file, by layer.
"""

from __future__ import annotations

from llmpq.assigner.export.pipeline import (
    Command,
    Export,
    kind_of,
    local_devices,
    single_dtype,
    weights_of,
)
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan, StageAssignment

PORT = 50052
_TYPES = {3: "q3_k", 4: "q4_k", 8: "q8_0"}
_PLAIN = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_PLAIN_MODEL, _MODEL, _TYPE_FILE = "model-plain.gguf", "model.gguf", "tensor_types.txt"


def llama_cpp_commands(plan: Plan) -> Export:
    """Return the commands with which llama.cpp serves a plan: servers of stages, then the main one.

    Raises:
        SpecError: a stage is a team of devices, or stages differ in their number format.
    """
    dtype = _PLAIN[single_dtype(plan, "llama.cpp")]
    servers = tuple(_stage_server(plan, stage) for stage in plan.stages)
    weights, download = weights_of(plan)
    convert = Command(
        name="convert",
        purpose="Makes a GGUF file of the model; llama.cpp's folder is in PATH.",
        node=None,
        arguments=(
            *("convert_hf_to_gguf.py", weights),
            *("--outtype", dtype, "--outfile", _PLAIN_MODEL),
        ),
    )
    is_quantized = {*plan.bits, plan.head_width} != {16}
    # Without a type of its own, a tied embedding gets the output's, any other the file's.
    embedding = ("--token-embedding-type", dtype) if plan.head_width == 16 else ()
    quantize = Command(
        name="quantize",
        purpose="Gives every layer the number format that stands for its bits.",
        node=None,
        arguments=(
            *("llama-quantize", "--tensor-type-file", _TYPE_FILE),
            *("--output-tensor-type", _TYPES.get(plan.head_width, dtype), *embedding),
            *(_PLAIN_MODEL, _MODEL, dtype.upper()),
        ),
    )
    first = plan.device_of(plan.stages[0]).node
    main = Command(
        name="main",
        purpose=f"Run on node {first}, after the servers of all stages.",
        node=first,
        arguments=_main_arguments(plan, first, _MODEL if is_quantized else _PLAIN_MODEL),
    )
    prepare = (*download, convert, *((quantize,) if is_quantized else ()))
    return Export(
        commands=(*prepare, *servers, main),
        files={_TYPE_FILE: _tensor_types(plan, dtype)} if is_quantized else {},
        notes=(
            "3, 4 and 8 bits are q3_K, q4_K and q8_0: 3.44, 4.5 and 8.5 bits a weight. Rows of "
            "q3_K and q4_K are multiples of 256; llama-quantize falls back to other types.",
            "The head is on the last stage; the plan counts it on the first.",
            "RPC servers have no authentication: keep them on a network of your own.",
        ),
    )


def _stage_server(plan: Plan, stage: StageAssignment) -> Command:
    own = plan.device_of(stage)
    if own.members > 1:
        raise SpecError(
            f"export to llama.cpp: found {own.members} devices that share the layers of stage "
            f"{stage.rank}, expected one device a stage"
        )
    is_local = own.node == plan.device_of(plan.stages[0]).node
    kind = kind_of(plan, stage)
    arguments = [
        *("ggml-rpc-server", "--host", "127.0.0.1" if is_local else own.node),
        *("--port", str(PORT + stage.rank)),
    ]
    environment = {}
    if kind == "cpu":
        arguments += ["--device", "CPU"]
        arguments += ["--threads", str(own.threads)] if own.threads is not None else []
    elif kind == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = str(local_devices(plan, stage)[0])
    return Command(
        name=f"stage-{stage.rank}",
        purpose=f"Run on node {own.node}: layers {stage.first_layer} to {stage.end_layer - 1}.",
        node=own.node,
        arguments=tuple(arguments),
        environment=environment,
    )


def _main_arguments(plan: Plan, first: str, model: str) -> tuple[str, ...]:
    nodes = [plan.device_of(stage).node for stage in plan.stages]
    hosts = ["127.0.0.1" if node == first else node for node in nodes]
    sequences, tokens = plan.workload.batch, plan.workload.max_context_tokens
    cache = ("--cache-type-k", "q8_0", "--cache-type-v", "q8_0") if plan.kv_bits == 8 else ()
    return (
        *("llama-server", "--model", model),
        *("--rpc", ",".join(f"{host}:{PORT + rank}" for rank, host in enumerate(hosts))),
        *("--device", ",".join(f"RPC{rank}" for rank in range(len(hosts)))),
        *("--split-mode", "layer", "--tensor-split", tensor_split(plan)),
        *("--gpu-layers", str(plan.model.num_layers + 1)),
        *("--parallel", str(sequences), "--ctx-size", str(sequences * tokens)),
        *cache,
    )


def tensor_split(plan: Plan) -> str:
    """Return the shares of ``--tensor-split``: layers of each stage, one more for the output."""
    counts = [stage.num_layers for stage in plan.stages]
    counts[-1] += 1
    return ",".join(map(str, counts))


def _tensor_types(plan: Plan, dtype: str) -> str:
    """Return one rule a bitwidth: a pattern of tensor names, and their type."""
    layers: dict[int, list[int]] = {}
    for index, bits in enumerate(plan.bits):
        layers.setdefault(bits, []).append(index)
    return "".join(
        rf"^blk\.({'|'.join(map(str, found))})\.={_TYPES.get(bits, dtype)}" + "\n"
        for bits, found in layers.items()
    )
