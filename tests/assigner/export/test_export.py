"""Exports hold the plan's layers, order and bits as the other engine reads them."""

import argparse
import importlib.util
import json
import os
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from helpers.ranks import with_weights_on_disk
from hypothesis import given
from hypothesis import strategies as st

from llmpq.assigner.export.export import ENGINES, export_plan, tensor_split, write_export
from llmpq.errors import SpecError
from llmpq.spec.cluster import Cluster, DeviceGroup, Node
from llmpq.spec.plan import (
    MemoryParts,
    MicroBatching,
    ModelRef,
    Plan,
    PlanEstimate,
    Provenance,
    Search,
    StageAssignment,
    StageEstimate,
    read_plan,
)
from llmpq.spec.precision import LayerExperts, StageExperts
from llmpq.spec.workload import Workload

NODE = {"a": ("T4-16G", "V100-32G"), "b": ("T4-16G", "T4-16G")}


def cluster(nodes=NODE, **options):
    made = []
    for name, types in nodes.items():
        groups = tuple(DeviceGroup(type=one, count=1, **options) for one in types)
        made.append(Node(name=name, devices=groups))
    return Cluster(name="mixed", nodes=tuple(made), links=())


def plan_of(layout, *, on=None, kv_bits=16, dtypes=None):
    """A plan from the device and the bits of the layers of every stage."""
    on = on or cluster()
    stages, first = [], 0
    for rank, (device, bits) in enumerate(layout):
        end = first + len(bits)
        stages.append(
            StageAssignment(
                rank=rank,
                device=device,
                first_layer=first,
                end_layer=end,
                bits=tuple(bits),
                dtype=dtypes[rank] if dtypes else None,
            )
        )
        first = end
    memory = MemoryParts(weights=1, kv=1, temporary=1, master=0, runtime=1)
    estimate = StageEstimate(
        prefill_s=1.0,
        decode_s=1.0,
        send_prefill_s=0.0,
        send_decode_s=0.0,
        memory=memory,
        capacity_bytes=100,
    )
    used = {device for device, _ in layout}
    return Plan(
        model=ModelRef(name="org/model", source=None, num_layers=first),
        dtype="float16",
        kv_bits=kv_bits,
        micro_batching=MicroBatching(prefill=1, decode=2),
        stages=tuple(stages),
        dropped_devices=tuple(set(range(len(on.devices))) - used),
        estimate=PlanEstimate(
            latency_s=1.0, quality=0.0, objective_s=1.0, stages=(estimate,) * len(stages)
        ),
        search=Search(method="llmpq"),
        workload=Workload(batch=4, prompt_tokens=32, new_tokens=16),
        cluster=on,
        provenance=Provenance(command="test", version="0"),
    )


FOUR = [(1, [16] * 5), (0, [8] * 3), (2, [4] * 2), (3, [8, 4])]


def values(command, name):
    return command.arguments[command.arguments.index(name) + 1]


def named(export, name):
    return next(command for command in export.commands if command.name == name)


def nodes(export):
    return [command for command in export.commands if command.name.startswith("node-")]


def test_vllm_has_the_layers_and_the_order_of_devices():
    found = export_plan(plan_of(FOUR), "vllm")
    download, quantize, first, second = found.commands
    assert download.arguments == ("hf", "download", "org/model", "--local-dir", "model")
    assert values(quantize, "--model") == "model"
    assert values(quantize, "--format") == "gptq"
    assert "--sym" in quantize.arguments
    assert first.environment["VLLM_PP_LAYER_PARTITION"] == "5,3,2,2"
    assert first.environment["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert values(first, "--pipeline-parallel-size") == "4"
    assert values(first, "--max-model-len") == "48"
    assert (values(first, "--node-rank"), values(second, "--node-rank")) == ("0", "1")
    assert values(second, "--master-addr") == "a"
    assert "--headless" in second.arguments
    assert "--headless" not in first.arguments


def test_three_bits_need_compressed_tensors_in_vllm_and_are_refused_by_sglang():
    plan = plan_of([(0, [3, 4]), (1, [16])])
    assert values(named(export_plan(plan, "vllm"), "quantize"), "--format") == "compressed-tensors"
    with pytest.raises(SpecError, match="found layers of 3 bits"):
        export_plan(plan, "sglang")


def test_llama_cpp_gives_the_output_the_bits_of_the_head():
    for bits, name in ((8, "q8_0"), (4, "q4_k")):
        found = export_plan(replace(plan_of([(0, [16])]), head_bits=bits), "llama.cpp")
        quantize = named(found, "quantize")
        assert values(quantize, "--output-tensor-type") == name
        assert "--token-embedding-type" not in quantize.arguments


@pytest.mark.parametrize(("bits", "kind"), [(8, "gptq"), (3, "compressed-tensors")])
def test_vllm_gets_a_checkpoint_with_the_head_of_the_plan(bits, kind):
    found = export_plan(replace(plan_of([(0, [4])]), head_bits=bits), "vllm")
    quantize = named(found, "quantize")
    assert values(quantize, "--strategy") == "plan.json"
    assert values(quantize, "--format") == kind


def test_sglang_has_the_layers():
    first = export_plan(plan_of([(0, [16] * 3), (1, [16])]), "sglang").commands[0]
    assert first.environment["SGLANG_PP_LAYER_PARTITION"] == "3,1"
    assert values(first, "--pp-size") == "2"
    assert values(first, "--model-path") == "org/model"
    assert "--nnodes" not in first.arguments


def test_llama_cpp_has_a_server_a_stage_and_types_by_layer():
    found = export_plan(plan_of(FOUR, kv_bits=8), "llama.cpp")
    names = [command.name for command in found.commands]
    stages = ["stage-0", "stage-1", "stage-2", "stage-3"]
    assert names == ["download", "convert", "quantize", *stages, "main"]
    main = found.commands[-1]
    assert values(main, "--tensor-split") == "5,3,2,3"
    assert values(main, "--rpc") == "127.0.0.1:50052,127.0.0.1:50053,b:50054,b:50055"
    assert values(main, "--cache-type-k") == "q8_0"
    four = export_plan(plan_of(FOUR, kv_bits=4), "llama.cpp").commands[-1]
    assert values(four, "--cache-type-v") == "q4_0"
    assert values(named(found, "stage-2"), "--host") == "b"
    rules = [line.split("=") for line in found.files["tensor_types.txt"].split()]
    for index, bits in enumerate(plan_of(FOUR).bits):
        name = f"blk.{index}.attn_q.weight"
        kind = next(kind for pattern, kind in rules if re.search(pattern, name))
        assert kind == {16: "f16", 8: "q8_0", 4: "q4_k"}[bits]


def with_experts(plan, layers, *, threads=4, rank=0, **options):
    """The plan with the experts of layers of a stage on the host."""
    own = tuple(LayerExperts(layer=layer, **({"resident": ()} | options)) for layer in layers)
    stages = list(plan.stages)
    stages[rank] = replace(stages[rank], experts=StageExperts(threads=threads, layers=own))
    return replace(plan, stages=tuple(stages))


ONE_NODE = {"a": ("T4-16G", "V100-32G")}
TWO_GPUS = [(1, [16] * 3), (0, [8, 4, 4])]


def overridden(main, num_layers):
    """The experts' tensors that llama.cpp leaves on its CPU, by its own reading of arguments."""
    if "--n-cpu-moe" in main.arguments:
        patterns = [
            rf"blk\.{n}\.ffn_(up|down|gate|gate_up)_(ch|)exps"
            for n in range(int(values(main, "--n-cpu-moe")))
        ]
    else:
        rules = values(main, "--override-tensor").split(",")
        patterns = [rule.partition("=")[0] for rule in rules]
        assert {rule.partition("=")[2] for rule in rules} == {"CPU"}
    parts = ("attn_q", "ffn_gate_inp", "ffn_up_shexp", "ffn_up_exps", "ffn_gate_up_exps")
    names = [f"blk.{n}.{part}.weight" for n in range(num_layers) for part in parts]
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


@given(st.sets(st.integers(0, 11), min_size=1))
def test_llama_cpp_leaves_experts_of_these_layers_on_its_cpu(layers):
    plan = plan_of([(0, [4] * 12)], on=cluster({"a": ("T4-16G",)}))
    main = export_plan(with_experts(plan, sorted(layers)), "llama.cpp").commands[-1]
    assert overridden(main, 12) == {
        f"blk.{n}.{part}.weight" for n in layers for part in ("ffn_up_exps", "ffn_gate_up_exps")
    }
    assert ("--n-cpu-moe" in main.arguments) == (layers == set(range(len(layers))))


def test_llama_cpp_computes_experts_in_the_process_that_has_the_gpus():
    plan = plan_of(TWO_GPUS, on=cluster(ONE_NODE), kv_bits=8)
    plan = with_experts(plan, [1], threads=3)
    plan = with_experts(plan, [4, 5], threads=6, rank=1, bits=3)
    found = export_plan(plan, "llama.cpp")
    assert [command.name for command in found.commands] == [
        *("download", "convert", "quantize", "main"),
    ]
    main = found.commands[-1]
    assert "--rpc" not in main.arguments
    assert "--device" not in main.arguments
    assert main.environment["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert values(main, "--tensor-split") == "3,4"
    assert values(main, "--threads") == "6"
    assert (values(main, "--ctx-size"), values(main, "--parallel")) == ("192", "4")
    assert values(main, "--ubatch-size") == "32"
    assert values(main, "--cache-type-v") == "q8_0"
    rules = [line.split("=") for line in found.files["tensor_types.txt"].split()]

    def type_of(name):
        return next(kind for pattern, kind in rules if re.search(pattern, name))

    kinds = ["f16", "f16", "f16", "q8_0", "q4_k", "q4_k"]
    assert [type_of(f"blk.{n}.attn_q.weight") for n in range(6)] == kinds
    assert [type_of(f"blk.{n}.ffn_up_exps.weight") for n in range(6)] == [
        *kinds[:4],
        *("q3_k", "q3_k"),
    ]
    assert type_of("blk.4.ffn_up_shexp.weight") == "q4_k"


def test_rules_for_tensors_count_in_a_file_of_a_quantized_format():
    """llama-quantize ignores them where the file's own format is not (llama_tensor_get_type)."""
    found = export_plan(plan_of([(0, [16, 4])]), "llama.cpp")
    assert named(found, "quantize").arguments[-1] == "Q8_0"
    rules = [line.split("=") for line in found.files["tensor_types.txt"].split()]
    assert {kind for pattern, kind in rules if re.search(pattern, "blk.0.attn_q.weight")} == {"f16"}


def test_bits_of_experts_alone_make_a_file_of_types():
    plan = with_experts(plan_of([(0, [16] * 2)]), [1], bits=8, resident=None)
    found = export_plan(plan, "llama.cpp")
    assert found.files["tensor_types.txt"].splitlines()[0].endswith("exps=q8_0")
    assert named(found, "stage-0")


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_tensor_split_gives_every_stage_its_layers(counts):
    """load_tensors of llama.cpp: upper_bound of float(i) / (L + 1) among the running shares."""
    on = cluster({"a": ("T4-16G",) * len(counts)})
    plan = plan_of([(i, [16] * count) for i, count in enumerate(counts)], on=on)
    shares = np.array([float(one) for one in tensor_split(plan).split(",")], dtype=np.float32)
    sums = np.cumsum(shares, dtype=np.float32)
    splits = sums / sums[-1]
    total = np.float32(sum(counts) + 1)
    places = [
        int(np.searchsorted(splits, np.float32(i) / total, side="right"))
        for i in range(sum(counts) + 1)
    ]
    assert places == [
        *(rank for rank, count in enumerate(counts) for _ in range(count)),
        len(counts) - 1,
    ]


CPU = {"a": ("cpu",), "b": ("T4-16G",)}


@pytest.mark.parametrize(
    ("engine", "plan", "message"),
    [
        ("vllm", plan_of([(0, [4]), (1, [4])], on=cluster(CPU)), "of kind 'cpu'"),
        ("vllm", plan_of([(0, [4]), (2, [4]), (3, [4])]), "same number of stages"),
        ("vllm", plan_of([(0, [4]), (2, [4]), (1, [4]), (3, [4])]), "do not follow each other"),
        ("vllm", plan_of([(0, [4])], kv_bits=8), "the engine has FP8"),
        ("sglang", plan_of([(0, [4])], kv_bits=4), "in 4-bit integers.*without --kv_bits 4"),
        ("sglang", plan_of([(0, [16])], on=cluster(CPU)), "of kind 'cpu'"),
        ("llama.cpp", plan_of([(0, [16])], on=cluster(tensor_parallel=2)), "one device a stage"),
        ("vllm", plan_of([(0, []), (1, [4])]), "no layers on stage 0"),
        ("vllm", with_experts(plan_of([(0, [4])]), [0]), "found experts on the host or at bits"),
        ("sglang", with_experts(plan_of([(0, [4])]), [0]), "found experts on the host or at bits"),
        (
            "llama.cpp",
            with_experts(plan_of([(0, [4]), (2, [4])]), [0]),
            "found experts on the host beside b/T4-16G#0 .*expected all stages on GPUs of node a",
        ),
        (
            "llama.cpp",
            with_experts(plan_of([(0, [4])], on=cluster(CPU)), [0]),
            "beside a/cpu#0 of kind 'cpu', expected all stages on GPUs of node a",
        ),
        (
            "llama.cpp",
            with_experts(plan_of([(0, [4])]), [0], resident=(2, 5)),
            "found 2 experts of layer 0 on its device and others on the host, expected all or none",
        ),
        *(
            (engine, with_weights_on_disk(plan_of([(0, [4])])), "found weights on disk on stage 0")
            for engine in ENGINES
        ),
        ("vllm", replace(plan_of([(0, [16])]), head_bits=8), "a head of 8 bits"),
        ("sglang", replace(plan_of([(0, [4])]), head_bits=8), "a head of 8 bits"),
    ],
)
def test_what_an_engine_cannot_run_is_refused_with_the_reason(engine, plan, message):
    with pytest.raises(SpecError, match=message):
        export_plan(plan, engine)


def test_advice_about_number_formats_leads_out():
    on = cluster({"a": ("A100-40G", "P100-12G")})
    plan = replace(
        plan_of([(0, [16]), (1, [16])], on=on, dtypes=[None, "float32"]), dtype="bfloat16"
    )
    with pytest.raises(SpecError, match=r"with --dtype float16 or --exclude a/P100-12G#0$"):
        export_plan(plan, "llama.cpp")
    groups = (
        DeviceGroup(type="T4-16G", count=1),
        DeviceGroup(type="cpu", count=1, dtype="float32"),
    )
    on = Cluster(name="mixed", nodes=(Node(name="a", devices=groups),), links=())
    plan = plan_of([(0, [16]), (1, [16])], on=on, dtypes=[None, "float32"])
    with pytest.raises(SpecError, match=r"with --dtype float32 or --exclude a/cpu#0$"):
        export_plan(plan, "llama.cpp")


def test_tensor_parallel_stages_see_all_their_devices():
    found = export_plan(plan_of([(0, [16]), (1, [16])], on=cluster(tensor_parallel=2)), "vllm")
    assert found.commands[0].environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert values(found.commands[0], "--tensor-parallel-size") == "2"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_files_are_scripts_and_records_of_the_same_commands(engine, tmp_path):
    plan = plan_of(FOUR)
    written = write_export(plan, engine, tmp_path / "out")
    scripts = {f"{command.name}.sh" for command in written.commands}
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"plan.json", "engine.json", *scripts, *written.files}
    assert read_plan(tmp_path / "out" / "plan.json") == plan
    record = json.loads((tmp_path / "out" / "engine.json").read_text())
    assert record["layers"] == [5, 3, 2, 2]
    tools = tmp_path / "tools"
    tools.mkdir()
    for command in record["commands"]:
        program = tools / command["arguments"][0]
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@" "$CUDA_VISIBLE_DEVICES"\n')
        program.chmod(0o755)
        script = tmp_path / "out" / f"{command['name']}.sh"
        shown = subprocess.run(
            [script],
            env={"PATH": f"{tools}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        visible = command["environment"].get("CUDA_VISIBLE_DEVICES", "")
        assert shown == [str(program), *command["arguments"][1:], visible]
    with pytest.raises(SpecError, match="exists already"):
        write_export(plan, engine, tmp_path / "out")


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs sglang")
def test_sglang_parses_the_command_and_splits_the_layers(monkeypatch):
    from sglang.srt.distributed.utils import get_pp_indices  # noqa: PLC0415
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415

    plan = plan_of(FOUR)
    for rank, command in enumerate(nodes(export_plan(plan, "sglang"))):
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        found = ServerArgs.from_cli_args(parser.parse_args(command.arguments[3:]))
        assert (found.pp_size, found.tp_size) == (len(plan.stages), 1)
        assert (found.nnodes, found.node_rank, found.dist_init_addr) == (2, rank, "a:29501")
        assert found.max_running_requests == plan.workload.batch
        assert (found.context_length, found.dtype) == (48, "float16")
        monkeypatch.setenv(*next(iter(command.environment.items())))
        for stage in plan.stages:
            split = get_pp_indices(plan.model.num_layers, stage.rank, len(plan.stages))
            assert split == (stage.first_layer, stage.end_layer)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm")
def test_vllm_parses_the_command_and_splits_the_layers(monkeypatch):
    from vllm import platforms  # noqa: PLC0415
    from vllm.platforms.cpu import CpuPlatform  # noqa: PLC0415

    # A CUDA build finds no device on a host without GPUs, and then has no defaults.
    monkeypatch.setattr(platforms, "_current_platform", CpuPlatform())
    from vllm.distributed.utils import get_pp_indices  # noqa: PLC0415
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    plan = plan_of(FOUR)
    for command in nodes(export_plan(plan, "vllm")):
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        parser.add_argument("--headless", action="store_true")
        engine = AsyncEngineArgs.from_cli_args(
            parser.parse_args(["--model", command.arguments[2], *command.arguments[3:]])
        )
        assert engine.pipeline_parallel_size == len(plan.stages)
        assert engine.max_num_seqs == plan.workload.batch
        monkeypatch.setenv(*next(iter(command.environment.items())))
        for stage in plan.stages:
            found = get_pp_indices(plan.model.num_layers, stage.rank, len(plan.stages))
            assert found == (stage.first_layer, stage.end_layer)
