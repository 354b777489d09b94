"""Try the inputs of public reports, and write what happens beside the right value.

    python benchmarks/cases.py --results benchmarks/results             # all: ten minutes
    python benchmarks/cases.py --results ... --only 31 ml-explore/mlx-lm#1754
    PYTHONPATH=OTHER_TREE python benchmarks/cases.py --results ... --before   # the column "before"

``cases.json`` has a line for each report: what was wanted, what the run must show, and the tests
that hold it. A case with a function here is tried as a user would, with inputs that it makes; of
the others the tests are run. Status 1 when a case shows something else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from case_inputs import (
    ANSWERED,
    CALLS,
    CHAT,
    CPU,
    SMALL,
    answers,
    ask,
    demo,
    edit,
    equal,
    model,
    only,
    outcome,
    piece_model,
    plan,
    program,
    reference,
    run,
    server,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from workbench import ROOT, origin, write_results

TABLE = Path(__file__).with_suffix(".json")
TOPIC = "cases"
COLUMNS = ("case", "report", "date", "kind", "before", "now", "right", "siblings", "tests")
Probe = Callable[[Path], str]
PROBES: dict[str, Probe] = {}


def probe(*cases: str) -> Callable[[Probe], Probe]:
    """Register what tries a case."""

    def register(function: Probe) -> Probe:
        PROBES.update(dict.fromkeys(cases, function))
        return function

    return register


# ---- Cases at b162ab4


def add_shards(folder: Path, made: Path) -> None:
    """Put the weights of a model beside its file once more, in shards with an index."""
    shards = folder / "shards"
    AutoModelForCausalLM.from_pretrained(made).save_pretrained(shards, max_shard_size="250KB")
    for file in shards.glob("*.safetensors*"):
        file.rename(made / file.name)


@probe("01-longrope-length")
def _longrope(folder: Path) -> str:
    half = 8
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0 + 0.02 * i for i in range(half)],
        "long_factor": [1.0 + 1.5 * i for i in range(half)],
    }  # fmt: skip
    made = model(
        folder, "phi3", max_position_embeddings=256, original_max_position_embeddings=64,
        rope_parameters=rope,
    )  # fmt: skip
    prompt = torch.randint(3, 100, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    wrong = []
    for budget in (32, 512):
        with server(folder, "--token_budget", budget) as client:
            for length in (56, 100, 60):  # the first leaves blocks for the others
                choice = ask(
                    client, prompt=prompt[:length], max_tokens=12, ignore_eos=True,
                    return_token_ids=True,
                )  # fmt: skip
                if choice["token_ids"] != reference(made, prompt[:length], 12):
                    wrong.append(f"{length} in chunks of {budget}")
    return f"other tokens: {', '.join(wrong)}" if wrong else "tokens of transformers"


@probe("02-tied-flag-own-head")
def _own_head(folder: Path) -> str:
    made = model(folder, tie_word_embeddings=False)
    edit(made / "config.json", tie_word_embeddings=True)
    prompt = [5, 17, 33, 8, 61]
    return equal(answers(folder, [prompt], 8), [reference(made, prompt, 8)])


@probe("04-gguf-in-hub-cache")
def _gguf_in_a_hub_cache(folder: Path) -> str:
    from helpers.gguf_writer import write_gguf  # noqa: PLC0415  needs the extra gguf

    made = model(folder)
    blob = folder / "hub" / "blobs" / "0a1b2c"
    blob.parent.mkdir(parents=True)
    write_gguf(made, blob)
    link = folder / "hub" / "snapshots" / "main" / "tiny-F32.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../blobs/0a1b2c")
    done = plan(folder, "--model", link)
    if done.returncode:
        return outcome(done, folder)
    name = json.loads((folder / "plan.json").read_text())["model"]["name"]
    return f"{name}: {equal(answers(folder, [[5, 17, 33]], 8), [reference(made, [5, 17, 33], 8)])}"


@probe("05-gemma3-minimal-text-config")
def _short_text_config(folder: Path) -> str:
    from llmpq.spec.huggingface.families import load_model_dir  # noqa: PLC0415

    shown = []
    for layers, hidden, inner in ((34, 2560, 10240), (62, 5376, 21504)):
        heads = {} if layers == 34 else {"num_attention_heads": 32, "num_key_value_heads": 16}
        text = {
            "hidden_size": hidden, "intermediate_size": inner, "model_type": "gemma3_text",
            "num_hidden_layers": layers, "sliding_window": 1024, "head_dim": 128, **heads,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        }  # fmt: skip
        if layers == 34:
            del text["head_dim"]
        name = folder / f"{layers}"
        name.mkdir()
        config = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
        (name / "config.json").write_text(json.dumps(config))
        words = ("--device_names", "A100-80G", "--device_numbers", 1, "--global_bz", 1, "--s", 512)
        done = run("algo", "--model", name, *words, "--n", 64, "--output", folder / "plan.json")
        if done.returncode:
            return outcome(done, folder)
        found = load_model_dir(name)
        layer = found.layers[0]
        sizes = f"{layer.num_heads}/{layer.num_kv_heads}/{layer.head_dim}"
        shown.append(f"{sizes}, vocabulary {found.vocab_size}")
    return "; ".join(shown)


@probe("07-end-tokens-of-tokenizer")
def _end_of_the_tokenizer(folder: Path) -> str:
    made = demo(folder)
    edit(made / "generation_config.json", eos_token_id=[1])
    edit(made / "tokenizer_config.json", eos_token=":")
    with server(folder) as client:
        choice = ask(client, prompt="To", max_tokens=8, allowed_token_ids=[27])
    return f"{choice['finish_reason']} after {choice['text']!r}"


@probe("08-layer-types-without-use-flag")
def _windows_by_layer_types(folder: Path) -> str:
    made = model(folder, "qwen3", head_dim=16)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    windows = {"sliding_window": 8, "layer_types": kinds}
    edit(made / "config.json", use_sliding_window=..., **windows)
    prompt = [(7 * i + 3) % 97 for i in range(40)]
    found = answers(folder, [prompt], 8)
    edit(made / "config.json", use_sliding_window=True)
    return equal(found, [reference(made, prompt, 8)])


@probe("10-shards-without-index")
def _shards_without_an_index(folder: Path) -> str:
    made = model(folder)
    expected = reference(made, [5, 17, 33], 8)
    add_shards(folder, made)
    (made / "model.safetensors.index.json").unlink()
    (made / "model.safetensors").unlink()
    return equal(answers(folder, [[5, 17, 33]], 8), [expected])


@probe("11-lfs-pointer")
def _pointer_of_lfs(folder: Path) -> str:
    made = model(folder)
    (made / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    )
    return str(answers(folder, [[5, 17, 33]], 8))


@probe("13-tekken-only")
def _tekken_only(folder: Path) -> str:
    made = model(folder)
    (made / "tekken.json").write_text('{"config": {"version": "v3"}, "vocab": []}')
    with server(folder) as client:
        return str(ask(client, "chat/completions", messages=[{"role": "user", "content": "a"}]))


@probe("14-gguf-architectures")
def _other_architectures(folder: Path) -> str:
    from helpers.gguf_families import CONVERSIONS  # noqa: PLC0415  needs the extra gguf
    from helpers.gguf_writer import write_gguf  # noqa: PLC0415
    from helpers.tiny_configs import tiny_config  # noqa: PLC0415
    from helpers.tiny_models import make_tiny_model_script  # noqa: PLC0415

    script, shown = make_tiny_model_script(), {}
    for family in ("gpt_oss", "glm4_moe", "qwen3_next", "deepseek_v2"):
        own = folder / family
        own.mkdir()
        fields = CONVERSIONS[family].config | {"max_position_embeddings": 256}
        config = tiny_config(family, **fields)
        made = script.save_model(script.make_model(config, seed=1), own, dtype=torch.float32)
        prompt = [(7 * number) % 90 + 3 for number in range(19)]
        done = plan(own, "--model", write_gguf(made, own / "m.gguf"))
        found = answers(own, [prompt], 8) if done.returncode == 0 else outcome(done, own)
        shown.setdefault(equal(found, [reference(made, prompt, 8)]), []).append(family)
    return "; ".join(f"{', '.join(names)}: {result}" for result, names in shown.items())


@probe("17-weights-behind-links")
def _weights_behind_links(folder: Path) -> str:
    made = model(folder)
    expected = [reference(made, [5, 17, 33], 8)]
    made.rename(folder / "elsewhere")
    made.mkdir()
    for file in (folder / "elsewhere").iterdir():
        (made / file.name).symlink_to(file)
    return equal(answers(folder, [[5, 17, 33]], 8), expected)


@probe("28-template-of-parts")
def _template_of_parts(folder: Path) -> str:
    template = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    edit(piece_model(folder) / "tokenizer_config.json", chat_template=template)
    with server(folder) as client:
        body = {"messages": [{"role": "user", "content": "the cat"}]}
        tokens = client.post("/tokenize", json=body).json()["tokens"]
        return repr(client.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


@probe("29-developer-role")
def _developer(folder: Path) -> str:
    template = (
        "{% for m in messages %}{% if m.role not in ['system', 'user'] %}"
        "{{ raise_exception('role ' + m.role) }}{% endif %}{{ m.content }}{% endfor %}"
    )
    edit(piece_model(folder) / "tokenizer_config.json", chat_template=template)
    messages = [{"role": "developer", "content": "the"}, {"role": "user", "content": "cat"}]
    with server(folder) as client:
        found = ask(client, "chat/completions", messages=messages, max_tokens=1)
    return found if isinstance(found, str) else ANSWERED


@probe("34-responses")
def _responses(folder: Path) -> str:
    piece_model(folder)
    with server(folder) as client:
        body = {"input": "hi", "instructions": "the cat", "max_output_tokens": 4}
        found = client.post("/v1/responses", json=body).json()
        missing = client.post("/v1/nothing", json={})
    return f"{found['object']}, {found['status']}; {missing.json()['error']['message']}"


@probe("35-tool-calls")
def _required_tool(folder: Path) -> str:
    edit(demo(folder) / "tokenizer_config.json", chat_template=CALLS)
    schema = {
        "type": "object", "properties": {"x": {"type": "integer", "maximum": 9}},
        "required": ["x"], "additionalProperties": False,
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1'}}
    error = {"role": "tool", "tool_call_id": "a", "content": "the arguments are not JSON"}
    replayed = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}, error]
    with server(folder) as client:
        body = {"messages": messages, "tools": tools, "tool_choice": "required",
                "parallel_tool_calls": False}  # fmt: skip
        found = ask(client, "chat/completions", max_tokens=80, **body)
        again = ask(client, "chat/completions", max_tokens=2, messages=replayed)
    if isinstance(found, str):
        return found
    (made,) = found["message"]["tool_calls"]
    fields = ", ".join(json.loads(made["function"]["arguments"]))
    shown = f"{found['finish_reason']}: {made['function']['name']}({fields})"
    return f"{shown}; replayed: {again if isinstance(again, str) else ANSWERED}"


@probe("32-cors")
def _cross_origin(folder: Path) -> str:
    demo(folder)
    page = "http://localhost:3000"
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with server(folder, "--allowed_origins", page) as client:
        found = client.options("/v1/chat/completions", headers=asked | {"Origin": page})
        answer = client.get("/v1/models", headers={"Origin": page})
    name = "access-control-allow-origin"
    return f"{found.status_code}, {found.headers.get(name)}; {answer.headers.get(name)}"


@probe("31-text-offset")
def _offsets_in_the_text(folder: Path) -> str:
    demo(folder)
    with server(folder) as client:
        choice = ask(client, prompt="The server listens on", max_tokens=1, echo=True, logprobs=1)
    return str(choice["logprobs"]["text_offset"][:4])


@probe("46-long-prompt-memory")
def _a_long_prompt(folder: Path) -> str:
    words = ("--model", "meta-llama/Llama-3.1-8B", "--device_names", "L40S")
    done = run("check", *words, "--s", 131000, "--n", 72, "--json")
    return outcome(done, folder, "fits")


@probe("47-message-hides-temporary")
def _what_does_not_fit(folder: Path) -> str:
    words = ("--model", "meta-llama/Llama-3.1-8B", "--device_names", "L40S", "--device_numbers", 1)
    sizes = ("--global_bz", 1, "--s", 131000, "--n", 72, "--bits", 4)
    return outcome(run("algo", *words, *sizes, "--output", folder / "p.json"), folder, "planned")


@probe("49-no-dtype-is-float32")
def _no_dtype(folder: Path) -> str:
    words = ("--model", "openai/gpt-oss-120b", "--device_names", "GB10", "--device_numbers", 1)
    sizes = ("--global_bz", 1, "--s", 512, "--n", 128, "--bits", 4)
    done = run("algo", *words, *sizes, "--output", folder / "plan.json")
    if done.returncode:
        return outcome(done, folder)
    return str(json.loads((folder / "plan.json").read_text())["dtype"])


@probe("50-windows-keep-all-keys")
def _keys_outside_windows(folder: Path) -> str:
    from llmpq.costmodel.memory import layer_kv_bytes  # noqa: PLC0415
    from llmpq.spec.huggingface.families import load_model_dir  # noqa: PLC0415

    text = {
        "hidden_size": 5376, "intermediate_size": 21504, "model_type": "gemma3_text",
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "sliding_window": 1024, "vocab_size": 262208,
    }  # fmt: skip
    config = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    found = load_model_dir(folder)
    cached = sum(layer_kv_bytes(found, kind, 1, 32768, 16) for kind in found.layer_kinds)
    return f"{cached / 2**30:.2f} GiB"


@probe("59-output-replaces-what-is-there")
def _links_and_pipes(folder: Path) -> str:
    demo(folder)
    (folder / "real.json").write_text("{}")
    (folder / "link.json").symlink_to("real.json")
    os.mkfifo(folder / "pipe")
    plan(folder, name="link.json")
    shown = ["link kept" if (folder / "link.json").is_symlink() else "link replaced"]
    shown.append("target written" if len((folder / "real.json").read_text()) > 2 else "target old")
    with subprocess.Popen(["timeout", "60", "head", "-c", "1", folder / "pipe"],
                          stdout=subprocess.PIPE, text=True) as reader:  # fmt: skip
        plan(folder, name="pipe")
        shown.append(f"pipe read {reader.communicate()[0]!r}")
    return ", ".join(shown)


@probe("61-ipv6-in-brackets")
def _host_in_brackets(folder: Path) -> str:
    demo(folder)
    with server(folder, "--host", "[::1]") as client:
        found = ask(client, prompt="a", max_tokens=1)
    shown = [found if isinstance(found, str) else f"{client.base_url.host} answered"]
    words = ("--strat_file_name", folder / "plan.json", "--nnodes", 2)
    done = run("dist", *words, "--master_addr", "tcp://10.0.0.1")
    return "; ".join([*shown, outcome(done, folder)])


@probe("62-full-temporary-folder")
def _full_temporary_folder(folder: Path) -> str:
    model(folder)
    plan(folder)
    (folder / "p").write_text('{"id": 1, "prompt_token_ids": [1, 2]}\n')
    (folder / "full").mkdir()
    command = f"mount -t tmpfs -o size=4k tmpfs {folder / 'full'} && TMPDIR={folder / 'full'} exec "
    words = [*program("dist"), "--strat_file_name"]
    words += [str(folder / "plan.json"), "--prompts", str(folder / "p"), "--output"]
    command += shlex.join([*words, str(folder / "a")])
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, check=False
    )
    shown = re.sub(r"/llmpq-\w+", "/llmpq-...", outcome(done, folder))
    return re.sub(r" on [\w.-]+\)", ")", shown)


@probe("70-byte-order-mark")
def _marks_of_byte_order(folder: Path) -> str:
    demo(folder)
    group = {"name": "n0", "devices": [{"type": "cpu", "count": 1}]}
    cluster = json.dumps({"schema": 1, "name": "one", "nodes": [group], "links": []})
    shown = []
    for encoding in ("utf-8-sig", "utf-16"):
        (folder / "cluster.json").write_text(cluster, encoding=encoding)
        sizes = ("--global_bz", 2, "--s", 64, "--n", 16, "--no_explain")
        words = ("--model", folder / "model", "--cluster", folder / "cluster.json", *sizes)
        done = run("algo", *words, "--output", folder / "plan.json")
        shown.append(f"{encoding} {outcome(done, folder, 'read')}")
    return ", ".join(shown)


# ---- Reports of 2026


@probe("ml-explore/mlx-lm#1754")
def _space_of_the_first_token(folder: Path) -> str:
    piece_model(folder)
    with server(folder) as client:
        choice = ask(client, prompt="the cat", echo=True, **only("▁sat"))
    return repr(choice["text"])


@probe("ollama/ollama#14692")
def _bytes_of_a_part(folder: Path) -> str:
    piece_model(folder)
    messages = [{"role": "user", "content": "the"}]
    with server(folder) as client:
        choice = ask(client, "chat/completions", messages=messages, logprobs=True, **only("<0xE2>"))
    return str(choice["logprobs"]["content"][0]["bytes"])


@probe("thinking-machines-lab/tinker-feedback#90")
def _special_stop(folder: Path) -> str:
    piece_model(folder)
    with server(folder) as client:
        choice = ask(client, prompt="the", stop="<|end|>", **only("<|end|>"))
    return str(choice["finish_reason"])


@probe("local-inference-lab/vllm#193")
def _no_tools(folder: Path) -> str:
    piece_model(folder)
    messages = [{"role": "user", "content": "the"}]
    with server(folder) as client:
        shown = []
        for tools in ({}, {"tools": []}):
            body = {"messages": messages, "add_generation_prompt": False, **tools}
            tokens = client.post("/tokenize", json=body).json()["tokens"]
            shown.append(client.post("/detokenize", json={"tokens": tokens}).json()["prompt"])
    return "as without" if shown[0] == shown[1] else f"{shown[1]!r} for {shown[0]!r}"


@probe("cubist38/mlx-openai-server#205")
def _no_content(folder: Path) -> str:
    piece_model(folder)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "r"},
    ]
    with server(folder) as client:
        found = ask(client, "chat/completions", messages=messages, max_tokens=1)
    return found if isinstance(found, str) else ANSWERED


@probe("jundot/omlx#2005")
def _template_of_the_processor(folder: Path) -> str:
    made = piece_model(folder)
    edit(made / "tokenizer_config.json", chat_template=...)
    (made / "chat_template.json").write_text(json.dumps({"chat_template": CHAT}))
    messages = [{"role": "user", "content": "q"}]
    with server(folder) as client:
        found = ask(client, "chat/completions", messages=messages, max_tokens=1)
    return found if isinstance(found, str) else ANSWERED


@probe("Blaizzy/mlx-vlm#1464")
def _single_file_beside_shards(folder: Path) -> str:
    made = model(folder)
    expected = reference(made, [5, 17, 33], 8)
    add_shards(folder, made)
    torch.manual_seed(1)
    config = CONFIG_MAPPING["llama"](**SMALL)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "other")
    (folder / "other" / "model.safetensors").replace(made / "model.safetensors")
    found = answers(folder, [[5, 17, 33]], 8)
    return "tokens of the index" if found == [expected] else equal(found, None)


@probe("1CatAI/1Cat-vLLM#407")
def _superseded_tensors(folder: Path) -> str:
    made = model(folder)
    add_shards(folder, made)
    (made / "model.safetensors").unlink()
    file = sorted(made.glob("*.safetensors"))[0]
    old = {"model.old.weight": torch.zeros(1 << 20, dtype=torch.half)}
    save_file(load_file(file) | old, file, metadata={"format": "pt"})
    edit(made / "config.json", dtype=..., torch_dtype=...)
    done = run("algo", "--model", made, *CPU, "--global_bz", 1, "--s", 16, "--n", 16, "--output",
               folder / "plan.json")  # fmt: skip
    if done.returncode:
        return outcome(done, folder)
    return str(json.loads((folder / "plan.json").read_text())["dtype"])


@probe("sgl-project/sglang#40285")
def _layers_for_drafts(folder: Path) -> str:
    made = model(folder)
    expected = reference(made, [5, 17, 33], 8)
    file = made / "model.safetensors"
    tensors = load_file(file)
    drafts = {
        name.replace(".layers.0.", ".layers.4."): value[:1].clone()
        for name, value in tensors.items()
        if ".layers.0." in name
    }
    save_file(tensors | drafts, file, metadata={"format": "pt"})
    return equal(answers(folder, [[5, 17, 33]], 8), [expected])


@probe("sgl-project/sglang#32279")
def _missing_shard(folder: Path) -> str:
    made = model(folder)
    add_shards(folder, made)
    (made / "model.safetensors").unlink()
    sorted(made.glob("*.safetensors"))[-1].unlink()
    return str(answers(folder, [[5, 17, 33]], 8))


@probe("vllm-project/vllm#33661")
def _rotated_activations(folder: Path) -> str:
    del folder
    from llmpq.errors import LlmpqError  # noqa: PLC0415
    from llmpq.spec.huggingface.quantization import codes_config  # noqa: PLC0415

    group = {"type": "hadamard", "apply": [{"location": "input", "targets": ["re:.*down_proj$"]}]}
    fields = {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": {"num_bits": 4}, "format": "pack-quantized"}},
        "transform_config": {"config_groups": {"R4": group}},
    }
    try:
        codes_config(fields, "config.json")
    except LlmpqError as error:
        return str(error)
    return "the rotation is ignored"


@probe("sgl-project/sglang#28209")
def _another_part_of_gguf(folder: Path) -> str:
    from helpers.gguf_writer import write_gguf  # noqa: PLC0415  needs the extra gguf

    whole = write_gguf(model(folder), folder / "whole.gguf")
    subprocess.run([sys.executable, "-c", SPLIT, whole, folder], check=True)
    return outcome(plan(folder, "--model", folder / "m-00002-of-00002.gguf"), folder, "planned")


SPLIT = """
import sys, gguf
reader = gguf.GGUFReader(sys.argv[1])
half = len(reader.tensors) // 2
for part, tensors in enumerate((reader.tensors[:half], reader.tensors[half:]), start=1):
    writer = gguf.GGUFWriter(f"{sys.argv[2]}/m-{part:05d}-of-00002.gguf", "llama")
    for name, entry in reader.fields.items() if part == 1 else ():
        if not name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(name, entry.contents(), entry.types[0])
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file()
    writer.close()
"""


@probe("unslothai/unsloth#6723")
def _extra_special_tokens(folder: Path) -> str:
    made = piece_model(folder)
    shown = []
    for extra in ([], ["<|end|>"], {}):
        edit(made / "tokenizer_config.json", extra_special_tokens=extra)
        try:
            with server(folder) as client:
                found = ask(client, prompt="the cat", max_tokens=1)
            shown.append(found if isinstance(found, str) else ANSWERED)
        except RuntimeError as error:
            shown.append(str(error))
    return ", ".join(dict.fromkeys(shown))


@probe("lyogavin/airllm#369")
def _theta_in_either_place(folder: Path) -> str:
    made = model(folder, max_position_embeddings=256)
    prompt = [(7 * i + 3) % 97 for i in range(100)]
    shown = []
    for fields in (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": ...},
        {"rope_parameters": ..., "rope_theta": 500.0},
        {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0},
    ):
        edit(made / "config.json", **fields)
        (folder / "plan.json").unlink(missing_ok=True)
        found = answers(folder, [prompt], 6)
        shown.append(equal(found, [reference(made, prompt, 6)]))
    return ", ".join(dict.fromkeys(shown))


@probe("modular/modular#6665")
def _null_heads(folder: Path) -> str:
    text = {
        "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "global_head_dim": 32, "vocab_size": 100, "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 8, "num_global_key_value_heads": None,
        "num_kv_shared_layers": 0, "attention_k_eq_v": False,
    }  # fmt: skip
    (folder / "model").mkdir()
    config = {"model_type": "gemma4", "dtype": "bfloat16", "text_config": text}
    (folder / "model" / "config.json").write_text(json.dumps(config))
    return outcome(plan(folder), folder, "planned")


@probe("huggingface/transformers#44914")
def _cleaned_spaces(folder: Path) -> str:
    made = demo(folder)
    edit(made / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    plan(folder)
    (folder / "p").write_text(
        json.dumps({"id": 1, "prompt": "if x !=", "max_new_tokens": 24, "ignore_eos": True}) + "\n"
    )
    paths = ("--strat_file_name", folder / "plan.json", "--prompts", folder / "p")
    run("dist", *paths, "--output", folder / "a")
    found = json.loads((folder / "a").read_text())
    own = Tokenizer.from_file(str(made / "tokenizer.json")).decode(found["token_ids"])
    return "text of the tokens" if found["text"] == own else "another text"


@probe("jundot/omlx#1571")
def _forms_that_cannot_be(folder: Path) -> str:
    demo(folder)
    shown = []
    schemas: tuple[dict[str, Any], ...] = (
        {"type": "string", "pattern": "(?<=a)b"},
        {"type": "object", "not": {"required": ["a"]}},
    )
    with server(folder) as client:
        for schema in schemas:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            found = ask(client, prompt="a", max_tokens=40, response_format=form)
            shown.append(found[:3] if isinstance(found, str) else repr(found["text"]))
    return ", ".join(shown)


@probe("Blaizzy/mlx-vlm#1818")
def _answers_without_a_seed(folder: Path) -> str:
    demo(folder)
    with server(folder) as client:
        body = {"prompt": ["The"] * 4, "max_tokens": 12, "temperature": 1.5}
        texts = {
            choice["text"]
            for _ in range(2)
            for choice in client.post("/v1/completions", json=body).json()["choices"]
        }
        seeded = {ask(client, prompt="The", temperature=1.5, seed=3)["text"] for _ in range(2)}
    return f"{'several' if len(texts) > 4 else 'equal'} without, {len(seeded)} with a seed"


@probe("Blaizzy/mlx-vlm#1331")
def _sampling_of_the_model(folder: Path) -> str:
    made = demo(folder)
    edit(made / "generation_config.json", do_sample=True, temperature=1.0, top_k=1)
    with server(folder) as client:
        body = {"prompt": "The", "max_tokens": 8}
        answered = [client.post("/v1/completions", json=body).json() for _ in range(3)]
    found = {one["choices"][0]["text"] for one in answered}
    return "top_k 1 of the file holds" if len(found) == 1 else "ignored"


@probe("Arthur-Ficial/apfel#100")
def _usage_on_demand(folder: Path) -> str:
    demo(folder)
    shown = []
    with server(folder) as client:
        for more in ({}, {"stream_options": {"include_usage": True}}):
            body = {"prompt": "a", "max_tokens": 2, "stream": True, **more}
            text = client.post("/v1/completions", json=body).text
            shown.append(text.count('"choices":[]'))
    return f"{shown[0]} and {shown[1]} chunks without choices"


@probe("entrius/gittensor#1750")
def _no_tokens_at_most(folder: Path) -> str:
    demo(folder)
    with server(folder) as client:
        return ", ".join(str(ask(client, prompt="a", max_tokens=most))[:3] for most in (0, -1))


@probe("unslothai/unsloth#6752")
def _proxy_of_the_host(folder: Path) -> str:
    demo(folder)
    proxy = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    with server(folder, **proxy) as client:
        found = ask(client, prompt="a", max_tokens=1)
    return found if isinstance(found, str) else ANSWERED


@probe("IBM/ado#1261")
def _user_without_a_name(folder: Path) -> str:
    demo(folder)
    plan(folder)
    (folder / "p").write_text('{"id": 1, "prompt": "a", "max_new_tokens": 2}\n')
    folder.chmod(0o777)
    words = [*program("dist"), "--strat_file_name"]
    words += [str(folder / "plan.json"), "--prompts", str(folder / "p"), "--output"]
    done = subprocess.run(
        ["unshare", "-U", "--map-user=1000770000", "--map-group=0", "env", "-u", "HOME", "-u",
         "USER", "-u", "LOGNAME", *words, str(folder / "a")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return outcome(done, folder)


@probe("mitodl/ol-infrastructure#5309")
def _no_temporary_folder(folder: Path) -> str:
    demo(folder)
    plan(folder)
    code = (
        "import sys, tempfile\n"
        "tempfile._candidate_tempdir_list = lambda: ['/proc']\n"
        "from llmpq.cli.commands.dist import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (folder / "p").write_text('{"id": 1, "prompt": "a"}\n')
    words = ["--strat_file_name", str(folder / "plan.json"), "--prompts", str(folder / "p")]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--output", str(folder / "a")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return outcome(done, folder)


@probe("QuantMLResearch/AI-Kline#13")
def _locale_without_letters(folder: Path) -> str:
    demo(folder, "modèle")
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ("--model", folder / "modèle", *CPU, "--global_bz", 2, "--s", 64, "--n", 16)
    done = run("algo", *words, "--output", folder / "plan.json", "--json", **ascii_only)
    return outcome(done, folder, "planned")


@probe("ollama/ollama#17201")
def _cache_of_a_token(folder: Path) -> str:
    del folder
    from llmpq.spec import catalog  # noqa: PLC0415

    names = ("Qwen/Qwen3-4B", "deepseek-ai/DeepSeek-V2-Lite")
    layers = [catalog.model(name).layers for name in names]
    return ", ".join(f"{sum(one.kv_bytes_per_token(2) for one in each):.0f}" for each in layers)


@probe("jranaraki/vllm-fit#27")
def _parameters(folder: Path) -> str:
    del folder
    from llmpq.spec import catalog  # noqa: PLC0415

    return f"{catalog.model('mistralai/Mixtral-8x7B-v0.1').parameters} parameters"


@probe("ggml-org/llama.cpp#28337")
def _projector_beside_a_model(folder: Path) -> str:
    from helpers.gguf_headers import gguf_bytes  # noqa: PLC0415
    from helpers.gguf_writer import write_gguf  # noqa: PLC0415  needs the extra gguf

    (folder / "gguf").mkdir()
    write_gguf(model(folder), folder / "gguf" / "m.gguf")
    (folder / "gguf" / "mmproj-F16.gguf").write_bytes(gguf_bytes(architecture="clip"))
    (folder / "gguf" / "config.json").write_bytes((folder / "model" / "config.json").read_bytes())
    done = plan(folder, "--model", folder / "gguf")
    if done.returncode:
        return outcome(done, folder)
    found = answers(folder, [[5, 17, 33]], 8)
    return found if isinstance(found, str) else ANSWERED


@probe("chrishayuk/larql#365")
def _forms_of_gguf(folder: Path) -> str:
    from helpers.gguf_writer import demo_tokenizer, write_gguf  # noqa: PLC0415  needs gguf

    vocabulary, extra = demo_tokenizer()
    made = model(folder, vocab_size=vocabulary)
    plan(folder, "--model", write_gguf(made, folder / "m.gguf", extra=extra))
    with server(folder) as client:
        form = {"choice": ["yes", "never"]}
        found = ask(client, prompt="a", max_tokens=8, structured_outputs=form)
    return found if isinstance(found, str) else "a choice of the form"


# ---- The table


def test_result(nodes: Sequence[str]) -> str:
    """Run the tests of a case; return whether all pass."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    last = (done.stdout.strip().splitlines() or [""])[-1]
    passed = re.search(r"(\d+) passed", last)
    return f"{passed[1]} tests pass" if done.returncode == 0 and passed else f"tests: {last}"


def try_case(entry: Mapping[str, Any]) -> str:
    """Return what a case shows."""
    function = PROBES.get(entry["case"])
    if function is None:
        return test_result(entry["tests"])
    with tempfile.TemporaryDirectory(prefix="llmpq-case-") as name:
        try:
            shown = function(Path(name))
        except Exception as error:  # a case must not end the others
            shown = f"{type(error).__name__}: {error}"[:300]
        return shown.replace(name, "")


def row_of(entry: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a case: what the table says, and what the case showed."""
    row = {name: entry.get(name) or old.get(name, "") for name in COLUMNS}
    return {**row, "tests": ", ".join(entry["tests"])}


def main() -> int:
    """Try the cases, print them, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="cases; the others keep their rows")
    parser.add_argument("--before", action="store_true", help="write the column 'before'")
    parser.add_argument("--results", type=Path, help="folder of result files")
    options = parser.parse_args()
    entries = json.loads(TABLE.read_text(encoding="utf-8"))
    file = None if options.results is None else options.results / f"{TOPIC}.json"
    found = json.loads(file.read_text()) if file is not None and file.exists() else {}
    old = {row["case"]: row for item in found.get("tables", []) for row in item["rows"]}
    chosen = options.only or [entry["case"] for entry in entries]
    wrong = 0
    for entry in entries:
        name = entry["case"]
        if name not in chosen:
            continue
        shown = try_case(entry)
        is_right = shown == entry["shows"] if entry["shows"] else shown.endswith(" tests pass")
        wrong += not is_right
        print(f"{'ok   ' if is_right else 'other'} {name}: {shown}", flush=True)
        old.setdefault(name, {})["before" if options.before else "now"] = shown
    if file is not None:
        titles = dict.fromkeys(entry["table"] for entry in entries)
        tables = [
            {
                "title": title,
                "columns": list(COLUMNS),
                "rows": [
                    row_of(entry, old[entry["case"]])
                    for entry in entries
                    if entry["table"] == title and entry["case"] in old
                ],
            }
            for title in titles
        ]
        command = "python benchmarks/cases.py --results benchmarks/results"
        write_results(file, {**origin(TOPIC, command), "tables": tables})
    return int(wrong > 0 and not options.before)


if __name__ == "__main__":
    sys.exit(main())
