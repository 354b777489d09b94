"""Plans for vLLM 0.33 and SGLang 0.5: layers of every stage by an environment variable.

Both give all nodes the same number of stages and all stages the same tensor parallelism, and name
the ranks of a node by the order of its visible devices. Mixed bits are a property of the
checkpoint: GPTQ with rules for layers (4 and 8 symmetric bits), or compressed-tensors with a group
for each bitwidth (vLLM only).
"""

from __future__ import annotations

from collections.abc import Callable

from llmpq.assigner.export.pipeline import (
    Command,
    Export,
    kind_of,
    local_devices,
    nodes_in_order,
    single_dtype,
    source_of,
    weights_of,
)
from llmpq.errors import SpecError
from llmpq.spec.plan import Plan, StageAssignment

PORT = 29501
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
                *("--master-addr", servers.first_node, "--master-port", str(PORT)),
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
                *("--dist-init-addr", f"{servers.first_node}:{PORT}"),
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
        if plan.kv_bits == 8:
            raise SpecError(
                f"export to {engine}: found keys and values in 8-bit integers, expected 16 bits; "
                "the engine has FP8 instead (plan without --kv_bits 8)"
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
