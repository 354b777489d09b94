"""Write the files with which another engine runs a plan.

Every engine gets one script a node with its environment and command, ``engine.json`` with the same
for programs, the plan, and the script that makes its checkpoint. A plan that the engine cannot run
as it is made is refused; nothing is changed silently.

llama.cpp: one RPC server a stage, and the layers of each by ``--tensor-split``. It counts the
output after the last layer as one more layer and gives layer ``i`` to the first device whose share
of the running sum exceeds ``i / (L + 1)``. The number of layers of every stage, one more on the
last, therefore is an exact split. Bits are the number formats of a GGUF file, by layer.
``llama-quantize`` follows rules for tensors only where the file's own format is quantized. A plan
with experts on the host is one process with the GPUs of its node, without RPC: llama.cpp computes
on its own CPU what ``--n-cpu-moe`` or ``--override-tensor`` leaves there, and copies it to a GPU of
its own for long prompts, which it does for no RPC server.

vLLM 0.33 and SGLang 0.5: layers of every stage by an environment variable. Both give all nodes the
same number of stages and all stages the same tensor parallelism, and name the ranks of a node by
the order of its visible devices. Mixed bits are a property of the checkpoint: GPTQ with rules for
layers (4 and 8 symmetric bits), or compressed-tensors with a group for each bitwidth (vLLM only).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llmpq.errors import SpecError
from llmpq.spec.catalog import device as device_figures
from llmpq.spec.cluster import Device
from llmpq.spec.fields import write_text
from llmpq.spec.plan import Plan, StageAssignment, plan_text
from llmpq.spec.precision import DTYPE_BYTES
from llmpq.spec.runtime_constants import KV_CODE_BITS, PROMPT_CHUNK_TOKENS

DOWNLOADED = "model"
"""Folder of the weights of a model that is known by name only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line with its environment, for one node.

    Attributes:
        name: of its script.
        purpose: what it does, in a sentence.
        node: where to run it; ``None`` for any.
        arguments: the program and its options.
        environment: variables that it needs.
    """

    name: str
    purpose: str
    node: str | None
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """Commands and further files that make another engine run a plan.

    Attributes:
        commands: in the order in which to start them.
        files: other files, by name.
        notes: what differs from the plan's own runtime.
    """

    commands: tuple[Command, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def kind_of(plan: Plan, stage: StageAssignment) -> str:
    """Return the kind of a stage's device: ``cpu``, ``cuda`` or another."""
    return device_figures(plan.device_of(stage).type, plan.cluster).kind


def local_devices(plan: Plan, stage: StageAssignment) -> tuple[int, ...]:
    """Return the numbers of a stage's accelerators among those of its node and kind."""
    own, kind = plan.device_of(stage), kind_of(plan, stage)
    first = sum(
        other.members
        for other in plan.cluster.devices[: stage.device]
        if other.node == own.node and device_figures(other.type, plan.cluster).kind == kind
    )
    return tuple(range(first, first + own.members))


def nodes_in_order(plan: Plan, engine: str) -> dict[str, tuple[StageAssignment, ...]]:
    """Return the stages of every node, in the order of the pipeline.

    Raises:
        SpecError: the stages of a node do not follow each other.
    """
    found: dict[str, list[StageAssignment]] = {}
    last: str | None = None
    for stage in plan.stages:
        node = plan.device_of(stage).node
        if node in found and node != last:
            raise SpecError(
                f"export to {engine}: found stages of node '{node}' that do not follow each other, "
                "expected each node once in the pipeline"
            )
        found.setdefault(node, []).append(stage)
        last = node
    return {node: tuple(stages) for node, stages in found.items()}


def single_dtype(plan: Plan, engine: str) -> str:
    """Return the number format of all stages.

    Raises:
        SpecError: stages differ.
    """
    found = {plan.dtype_of(stage) for stage in plan.stages}
    if len(found) > 1:
        own = [_formats_of(plan.device_of(stage), plan) for stage in plan.stages]
        shared = [one for one in DTYPE_BYTES if all(one in formats for formats in own)]
        fixes = [f"plan with --dtype {one}" for one in sorted(shared, key=DTYPE_BYTES.__getitem__)]
        others = [stage for stage in plan.stages if plan.dtype_of(stage) != plan.dtype]
        named = " ".join(plan.device_of(stage).label for stage in others)
        raise SpecError(
            f"export to {engine}: found stages in {' and '.join(sorted(found))}, expected one "
            f"number format; {' or '.join([*fixes[:1], f'--exclude {named}'])}"
        )
    return found.pop()


def _formats_of(device: Device, plan: Plan) -> tuple[str, ...]:
    """Return the number formats in which a device may compute: the cluster file may name one."""
    return (
        device_figures(device.type, plan.cluster).formats if not device.dtype else (device.dtype,)
    )


def source_of(plan: Plan) -> str:
    """Return the directory of the model, or its name on the Hugging Face hub."""
    # Scripts change to their own folder.
    return plan.model.name if plan.model.source is None else str(Path(plan.model.source).resolve())


def weights_of(plan: Plan) -> tuple[str, tuple[Command, ...]]:
    """Return the directory of the weights, and the command that makes it; none where it exists."""
    if plan.model.source is not None:
        return source_of(plan), ()
    download = Command(
        name="download",
        purpose=f"Downloads {plan.model.name} from the Hugging Face hub.",
        node=None,
        arguments=("hf", "download", plan.model.name, "--local-dir", DOWNLOADED),
    )
    return DOWNLOADED, (download,)


RPC_PORT = 50052
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Routed experts among the names of a layer's tensors; ``LLM_FFN_EXPS_REGEX`` of llama.cpp."""
_TYPES = {3: "q3_k", 4: "q4_k", 8: "q8_0"}
_PLAIN = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_FILE_TYPE = "Q8_0"
_PLAIN_MODEL, _MODEL, _TYPE_FILE = "model-plain.gguf", "model.gguf", "tensor_types.txt"


def llama_cpp_commands(plan: Plan) -> Export:
    """Return the commands with which llama.cpp serves a plan: servers of stages, then the main one.

    Raises:
        SpecError: a stage is a team of devices, stages differ in their number format, or some of a
            layer's experts are on the host and others are not.
    """
    dtype = _PLAIN[single_dtype(plan, "llama.cpp")]
    has_host = any(stage.host_threads for stage in plan.stages)
    if has_host:
        _check_host(plan)
    servers = () if has_host else tuple(_stage_server(plan, stage) for stage in plan.stages)
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
    is_quantized = {*plan.bits, *_expert_bits(plan).values(), plan.head_width} != {16}
    # Without a type of its own, a tied embedding gets the output's, any other the file's.
    embedding = ("--token-embedding-type", dtype) if plan.head_width == 16 else ()
    quantize = Command(
        name="quantize",
        purpose="Gives every layer the number format that stands for its bits.",
        node=None,
        arguments=(
            *("llama-quantize", "--tensor-type-file", _TYPE_FILE),
            *("--output-tensor-type", _TYPES.get(plan.head_width, dtype), *embedding),
            *(_PLAIN_MODEL, _MODEL, _FILE_TYPE),
        ),
    )
    model = _MODEL if is_quantized else _PLAIN_MODEL
    main = _process_with_experts(plan, model) if has_host else _main(plan, model)
    prepare = (*download, convert, *((quantize,) if is_quantized else ()))
    return Export(
        commands=(*prepare, *servers, main),
        files={_TYPE_FILE: _tensor_types(plan, dtype)} if is_quantized else {},
        notes=(
            "3, 4 and 8 bits are q3_K, q4_K and q8_0: 3.44, 4.5 and 8.5 bits a weight. Rows of "
            "q3_K and q4_K are multiples of 256; llama-quantize falls back to other types.",
            "The head is on the last stage; the plan counts it on the first.",
            "The plan's host computes experts for prompts too; llama.cpp copies those that a "
            "prompt needs to its GPUs. A larger --ubatch-size makes that faster where memory is "
            "left."
            if has_host
            else "RPC servers have no authentication: keep them on a network of your own.",
        ),
    )


def _stage_server(plan: Plan, stage: StageAssignment) -> Command:
    own = plan.device_of(stage)
    _check_members(plan, stage)
    is_local = own.node == plan.device_of(plan.stages[0]).node
    kind = kind_of(plan, stage)
    arguments = [
        *("ggml-rpc-server", "--host", "127.0.0.1" if is_local else own.node),
        *("--port", str(RPC_PORT + stage.rank)),
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


def _check_members(plan: Plan, stage: StageAssignment) -> None:
    own = plan.device_of(stage)
    if own.members > 1:
        raise SpecError(
            f"export to llama.cpp: found {own.members} devices that share the layers of stage "
            f"{stage.rank}, expected one device a stage"
        )


def _check_host(plan: Plan) -> None:
    """Check that one process with the GPUs of its node can run a plan with experts on the host."""
    first = plan.device_of(plan.stages[0]).node
    for stage in plan.stages:
        own = plan.device_of(stage)
        _check_members(plan, stage)
        if own.node != first or kind_of(plan, stage) == "cpu":
            raise SpecError(
                f"export to llama.cpp: found experts on the host beside {own.label} of kind "
                f"'{kind_of(plan, stage)}', expected all stages on GPUs of node {first}, whose "
                "process computes the experts"
            )
        for one in () if stage.experts is None else stage.experts.layers:
            if one.resident:
                raise SpecError(
                    f"export to llama.cpp: found {len(one.resident)} experts of layer {one.layer} "
                    "on its device and others on the host, expected all or none there: the "
                    "experts of a layer are one tensor"
                )


def _process_with_experts(plan: Plan, model: str) -> Command:
    """Return the one command of a plan with experts on the host."""
    apart = [
        one.layer
        for stage in plan.stages
        if stage.experts is not None
        for one in stage.experts.layers
        if one.resident is not None
    ]
    if apart == list(range(len(apart))):
        rule = "--n-cpu-moe", str(len(apart))
    else:
        rule = "--override-tensor", rf"blk\.({'|'.join(map(str, apart))}){EXPERTS}=CPU"
    first = plan.device_of(plan.stages[0]).node
    threads = max(stage.host_threads for stage in plan.stages)  # stages take turns
    devices = [index for stage in plan.stages for index in local_devices(plan, stage)]
    is_cuda = {kind_of(plan, stage) for stage in plan.stages} == {"cuda"}
    return Command(
        name="main",
        purpose=f"Run on node {first}.",
        node=first,
        arguments=(
            *("llama-server", "--model", model, *rule, "--threads", str(threads)),
            *_shared_arguments(plan),
        ),
        environment={"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if is_cuda else {},
    )


def _main(plan: Plan, model: str) -> Command:
    """Return the command of the process that uses a RPC server for each stage."""
    nodes = [plan.device_of(stage).node for stage in plan.stages]
    hosts = ["127.0.0.1" if node == nodes[0] else node for node in nodes]
    return Command(
        name="main",
        purpose=f"Run on node {nodes[0]}, after the servers of all stages.",
        node=nodes[0],
        arguments=(
            *("llama-server", "--model", model),
            *("--rpc", ",".join(f"{host}:{RPC_PORT + rank}" for rank, host in enumerate(hosts))),
            *("--device", ",".join(f"RPC{rank}" for rank in range(len(hosts)))),
            *_shared_arguments(plan),
        ),
    )


def _shared_arguments(plan: Plan) -> tuple[str, ...]:
    sequences, tokens = plan.workload.batch, plan.workload.max_context_tokens
    form = {8: "q8_0", 4: "q4_0"}.get(plan.kv_bits)
    cache = () if form is None else ("--cache-type-k", form, "--cache-type-v", form)
    rows = plan.micro_batching.prefill * plan.workload.prompt_tokens
    return (
        *("--split-mode", "layer", "--tensor-split", tensor_split(plan)),
        *("--gpu-layers", str(plan.model.num_layers + 1)),
        *("--parallel", str(sequences), "--ctx-size", str(sequences * tokens)),
        *("--ubatch-size", str(min(rows, PROMPT_CHUNK_TOKENS))),
        *cache,
    )


def tensor_split(plan: Plan) -> str:
    """Return the shares of ``--tensor-split``: layers of each stage, one more for the output."""
    counts = [stage.num_layers for stage in plan.stages]
    counts[-1] += 1
    return ",".join(map(str, counts))


def _expert_bits(plan: Plan) -> dict[int, int]:
    """Return the bits of the experts of layers that have others than the rest of them."""
    return {
        one.layer: one.bits
        for stage in plan.stages
        if stage.experts is not None
        for one in stage.experts.layers
        if one.bits is not None
    }


def _tensor_types(plan: Plan, dtype: str) -> str:
    """Return one rule a bitwidth: a pattern of tensor names, and their type; the first counts."""
    experts, layers = _expert_bits(plan), dict(enumerate(plan.bits))
    return "".join(
        rf"^blk\.({'|'.join(map(str, found))}){names}={_TYPES.get(bits, dtype)}" + "\n"
        for widths, names in ((experts, EXPERTS), (layers, r"\."))
        for bits, found in _by_bits(widths).items()
    )


def _by_bits(widths: Mapping[int, int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for layer, bits in widths.items():
        found.setdefault(bits, []).append(layer)
    return found


MASTER_PORT = 29501
_Arguments = Callable[[int], tuple[str, ...]]
_CHECKPOINT = "checkpoint"
_IN_GPTQ = {4, 8, 16}


def vllm_commands(plan: Plan) -> Export:
    """Return the commands with which vLLM serves a plan, one for each node.

    Raises:
        SpecError: vLLM cannot run the plan; the message says why.
    """
    servers = _Servers(plan, "vllm")
    shared = (
        *("--pipeline-parallel-size", str(len(plan.stages))),
        *("--tensor-parallel-size", str(servers.members)),
        *("--distributed-executor-backend", "mp"),
        *("--dtype", servers.dtype),
        *("--max-model-len", str(plan.workload.max_context_tokens)),
        *("--max-num-seqs", str(plan.workload.batch)),
    )

    def arguments(rank: int) -> tuple[str, ...]:
        own: tuple[str, ...] = ()
        if len(servers.nodes) > 1:
            own = (
                *("--nnodes", str(len(servers.nodes)), "--node-rank", str(rank)),
                *("--master-addr", servers.first_node, "--master-port", str(MASTER_PORT)),
                *(("--headless",) if rank else ()),
            )
        return ("vllm", "serve", servers.model, *shared, *own)

    quantize = servers.quantize("gptq" if servers.widths <= _IN_GPTQ else "compressed-tensors")
    commands = servers.commands("VLLM_PP_LAYER_PARTITION", arguments)
    return Export(commands=(*quantize, *commands), notes=servers.notes)


def sglang_commands(plan: Plan) -> Export:
    """Return the commands with which SGLang serves a plan, one for each node.

    Raises:
        SpecError: SGLang cannot run the plan; the message says why.
    """
    servers = _Servers(plan, "sglang")
    if not servers.widths <= _IN_GPTQ:
        raise SpecError(
            "export to sglang: found layers of 3 bits, expected 4, 8 and 16, which its GPTQ "
            "kernels have; plan with --bits 4 8 16"
        )
    shared = (
        *("--model-path", servers.model),
        *("--pp-size", str(len(plan.stages))),
        *("--tp-size", str(servers.members)),
        *("--dtype", servers.dtype),
        *("--context-length", str(plan.workload.max_context_tokens)),
        *("--max-running-requests", str(plan.workload.batch)),
    )

    def arguments(rank: int) -> tuple[str, ...]:
        own: tuple[str, ...] = ()
        if len(servers.nodes) > 1:
            own = (
                *("--nnodes", str(len(servers.nodes)), "--node-rank", str(rank)),
                *("--dist-init-addr", f"{servers.first_node}:{MASTER_PORT}"),
            )
        return ("python3", "-m", "sglang.launch_server", *shared, *own)

    commands = servers.commands("SGLANG_PP_LAYER_PARTITION", arguments)
    return Export(commands=(*servers.quantize("gptq"), *commands), notes=servers.notes)


class _Servers:
    """A plan checked against what both engines can run."""

    def __init__(self, plan: Plan, engine: str) -> None:
        self.plan, self.engine = plan, engine
        self._check_devices()
        self.nodes = nodes_in_order(plan, engine)
        counts = {len(stages) for stages in self.nodes.values()}
        if len(counts) > 1:
            text = ", ".join(f"{len(stages)} on {node}" for node, stages in self.nodes.items())
            raise SpecError(
                f"export to {engine}: found {text}, expected the same number of stages on every "
                "node, as its launcher starts them"
            )
        self.first_node = next(iter(self.nodes))
        self.dtype = single_dtype(plan, engine)
        self.widths = {*plan.bits, plan.head_width}
        self.is_quantized = self.widths != {16}
        self.model = _CHECKPOINT if self.is_quantized else source_of(plan)

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs from the plan's own runtime."""
        return (
            "The embedding is on the first stage and the head on the last; the plan counts both "
            "on the first.",
            "Keys and values get the same number of blocks on every stage: the fewest that any "
            "stage has room for.",
            "Micro-batches are the engine's own; their sizes in the plan are not used.",
        )

    def quantize(self, kind: str) -> tuple[Command, ...]:
        """Return the commands that make the checkpoint; none if no layer is quantized."""
        if not self.is_quantized:
            return ()
        weights, download = weights_of(self.plan)
        arguments = (
            *("llmpq-quantize", "--model", weights, "--strategy", "plan.json"),
            *("--format", kind, "--sym", "--method", "rtn", "--output", _CHECKPOINT),
        )
        return (
            *download,
            Command(
                name="quantize",
                purpose=f"Makes the {kind} checkpoint on any host by rounding; copy it to every "
                "node. With --method gptq --calibration TEXT it is nearer to the model.",
                node=None,
                arguments=arguments,
            ),
        )

    def commands(self, variable: str, arguments: _Arguments) -> tuple[Command, ...]:
        """Return the command of every node."""
        partition = ",".join(str(stage.num_layers) for stage in self.plan.stages)
        found = []
        for rank, (node, stages) in enumerate(self.nodes.items()):
            visible = [index for stage in stages for index in local_devices(self.plan, stage)]
            found.append(
                Command(
                    name=f"node-{rank}",
                    purpose=f"Run on node {node}.",
                    node=node,
                    arguments=arguments(rank),
                    environment={
                        variable: partition,
                        "CUDA_VISIBLE_DEVICES": ",".join(map(str, visible)),
                    },
                )
            )
        return tuple(found)

    @property
    def members(self) -> int:
        """Devices that share every layer."""
        return self.plan.device_of(self.plan.stages[0]).members

    def _check_devices(self) -> None:
        plan, engine = self.plan, self.engine
        for stage in plan.stages:
            self._check_stage(stage)
        if plan.kv_bits in KV_CODE_BITS:
            raise SpecError(
                f"export to {engine}: found keys and values in {plan.kv_bits}-bit integers, "
                "expected 16 bits; the engine has FP8 instead (plan without --kv_bits "
                f"{plan.kv_bits})"
            )

        if plan.head_width != 16 and (engine != "vllm" or set(plan.bits) == {16}):
            raise SpecError(
                f"export to {engine}: found a head of {plan.head_width} bits, expected 16; vllm "
                "reads others in checkpoints of quantized layers"
            )

    def _check_stage(self, stage: StageAssignment) -> None:
        plan, engine = self.plan, self.engine
        own = plan.device_of(stage)
        if kind_of(plan, stage) != "cuda":
            raise SpecError(
                f"export to {engine}: found {own.label} of kind '{kind_of(plan, stage)}', expected "
                "GPUs that CUDA or ROCm drives"
            )
        if own.members != self.members:
            raise SpecError(
                f"export to {engine}: found stages of {self.members} and {own.members} devices, "
                "expected the same tensor parallelism in all stages"
            )


_ENGINES: Mapping[str, Callable[[Plan], Export]] = {
    "vllm": vllm_commands,
    "sglang": sglang_commands,
    "llama.cpp": llama_cpp_commands,
}
ENGINES = tuple(_ENGINES)
"""The engines that plans are exported to."""

PLAN_FILE = "plan.json"


def export_plan(plan: Plan, engine: str) -> Export:
    """Return the commands with which an engine runs a plan.

    Raises:
        SpecError: the engine cannot run the plan; the message says why.
    """
    if plan.is_split:
        raise SpecError(
            f"export to {engine}: found stages that only prefill or only decode, expected stages "
            "that do both (plan without --schedule waa)"
        )
    on_disk = [stage.rank for stage in plan.stages if stage.on_disk]
    if on_disk:
        raise SpecError(
            f"export to {engine}: found weights on disk on stage {on_disk[0]}, expected all in "
            "memory (plan with --no_streaming); llmpq-dist and llmpq-serve stream them"
        )
    apart = [stage.rank for stage in plan.stages if stage.experts is not None]
    if apart and engine != "llama.cpp":
        raise SpecError(
            f"export to {engine}: found experts on the host or at bits of their own on stage "
            f"{apart[0]}, expected none; llama.cpp, llmpq-dist and llmpq-serve "
            "run such a plan"
        )
    empty = [stage.rank for stage in plan.stages if not stage.num_layers]
    if empty:
        raise SpecError(
            f"export to {engine}: found no layers on stage {empty[0]}, expected at least one on "
            "each; the engine has no master apart from its stages"
        )
    return _ENGINES[engine](plan)


def write_export(plan: Plan, engine: str, output: Path | str) -> Export:
    """Write the files of an export into a new directory.

    Returns:
        Its commands; each has a script of its name.

    Raises:
        SpecError: as :func:`export_plan`, or the directory exists.
    """
    found = export_plan(plan, engine)
    folder = Path(output)
    if folder.exists():
        raise SpecError(f"{folder}: exists already, expected a new directory")
    files = {
        PLAN_FILE: plan_text(plan),
        "engine.json": json.dumps(_record(plan, engine, found), indent=2) + "\n",
        **found.files,
    }
    scripts = {f"{command.name}.sh": _script(command) for command in found.commands}
    for name, text in (files | scripts).items():
        write_text(folder / name, text)
    for name in scripts:
        (folder / name).chmod(0o755)
    return found


def _record(plan: Plan, engine: str, export: Export) -> dict[str, object]:
    return {
        "engine": engine,
        "model": plan.model.name,
        "layers": [stage.num_layers for stage in plan.stages],
        "bits": list(plan.bits),
        "commands": [
            {
                "name": command.name,
                "node": command.node,
                "environment": dict(command.environment),
                "arguments": list(command.arguments),
            }
            for command in export.commands
        ],
        "notes": list(export.notes),
    }


def _script(command: Command) -> str:
    """Return a command as a shell script."""
    settings = [f"export {name}={shlex.quote(text)}" for name, text in command.environment.items()]
    return "\n".join(
        (
            "#!/usr/bin/env bash",
            f"# {command.purpose}",
            "set -euo pipefail",
            'cd "$(dirname "$0")"',
            *settings,
            f"exec {shlex.join(command.arguments)}" + ' "$@"',
            "",
        )
    )
