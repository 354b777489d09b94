"""A model's own layer for multi-token prediction: its drafts are right, and change no answer."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import modeling_layers

if not hasattr(modeling_layers, "MtpLayer"):
    pytest.skip("this transformers has no such layers", allow_module_level=True)

from helpers.answer_drafts import draft_freely
from helpers.lanes import a_third
from helpers.mtp import MtpOracle
from helpers.ranks import make_plan, run_threads, serve_script
from helpers.scripted_channel import Script
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import generate_alone, make_tiny_model_script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmpq.batching.engine_step import DraftWork
from llmpq.batching.speculation import SpeculativeConfig
from llmpq.dist.engine.mtp import MtpDrafter
from llmpq.dist.io.generation import GenerationRequest
from llmpq.dist.io.job import Job
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.launch.draft_runner import load_mtp_drafter
from llmpq.dist.launch.rank import load_master
from llmpq.errors import SpecError
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import engine_limits
from llmpq.quant.loading.mtp import load_mtp
from llmpq.spec.model_files.facts import model_facts
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE

torch.set_num_threads(1)

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5_moe_text", "qwen3_5_text",
            "qwen3_5_text wide", "qwen3_next")  # fmt: skip
OWN = {
    # The last layer has experts, as in the models that are published.
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1},
    # Its steps are compiled.
    "qwen3_5_text wide": {
        "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "linear_num_value_heads": 16
    },
}  # fmt: skip
CUTS = {1: (0, 3), 2: (0, 1, 3), 3: (0, 1, 2, 3)}
PROMPTS = [[(7 * number) % 90 + 3 for number in range(35)], [3, 4], [50] * 18, [61]]
NEW = 12
FREE = SamplingParams(ignore_eos=True, max_tokens=NEW)
CONFIG = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
Models = Callable[[str], tuple[Path, MtpOracle, list[list[int]]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A model of a family with such a layer, and transformers' answers."""
    known = {}

    def make(family: str) -> tuple[Path, MtpOracle, list[list[int]]]:
        if family not in known:
            script, folder = make_tiny_model_script(), tmp_path_factory.mktemp(family)
            config = tiny_config(family.split()[0], **OWN.get(family, {}))
            plain = folder / "plain"
            script.save_model(script.make_model(config, seed=1), plain, dtype=torch.float32)
            model_dir = folder / "mtp"
            oracle = MtpOracle(plain, model_dir)
            oracle.model.generation_config.eos_token_id = None
            answers = [generate_alone(oracle.model, one, NEW)[0][len(one) :] for one in PROMPTS]
            known[family] = model_dir, oracle, answers
        return known[family]

    return make


class Recorded:
    """What the layer proposed, and after which tokens."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []
        propose = MtpDrafter.propose

        def record(own, works, tokens):
            drafts = propose(own, works, tokens)
            self.drafts += [(list(ids), draft) for ids, draft in zip(tokens, drafts, strict=True)]
            return drafts

        patch.setattr(MtpDrafter, "propose", record)

    def check(self, oracle: MtpOracle) -> None:
        # Without those of the warm-up, and those behind a prompt of one token: any do there.
        found = [one for one in self.drafts if set(one[0]) != {0} and len(one[0]) > 1]
        assert len(found) > NEW
        for tokens, draft in found:
            assert draft == oracle.draft(tokens, len(draft))


def served(model_dir: Path, num_stages: int, batch: int = 4, **limits) -> list[list[int]]:
    plan = make_plan(CUTS[num_stages], batch=batch, prompt_tokens=48, new_tokens=16, prefill=2)
    script = Script()
    for number, prompt in enumerate(PROMPTS):
        item = GenerationRequest(id=str(number), prompt_token_ids=tuple(prompt), sampling=FREE)
        script.add(1 + number, item)
    serve_script(plan, model_dir, script, EngineOptions(speculative_config=CONFIG, **limits))
    return [script.tokens(str(number)) for number in range(len(PROMPTS))]


@pytest.mark.parametrize(("family", "num_stages"), a_third(FAMILIES, CUTS))
def test_the_engine_drafts_what_transformers_layer_does(models, monkeypatch, family, num_stages):
    model_dir, oracle, answers = models(family)
    draft_freely(monkeypatch)
    recorded = Recorded(monkeypatch)
    token_budget = (24, 7, 33)[num_stages - 1]
    # Each sequence has another state, after its draft tokens.
    assert served(model_dir, num_stages, batch=8, token_budget=token_budget) == answers
    recorded.check(oracle)


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text wide"])
@pytest.mark.parametrize("num_stages", CUTS)
def test_batches_have_the_same_answers(models, monkeypatch, family, num_stages):
    model_dir, oracle, answers = models(family)
    draft_freely(monkeypatch)
    recorded = Recorded(monkeypatch)
    plan = make_plan(
        CUTS[num_stages], batch=4, prompt_tokens=48, new_tokens=16, prefill=2, decode=2
    )
    requests = [Request(id=n, prompt_token_ids=tuple(prompt), max_new_tokens=NEW)
                for n, prompt in enumerate(PROMPTS)]  # fmt: skip
    found, measured = run_threads(plan, model_dir, requests, speculative=CONFIG)
    assert [list(found[number][0]) for number in range(len(PROMPTS))] == answers
    assert measured.draft_tokens
    recorded.check(oracle)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    family=st.sampled_from(FAMILIES),
    num_stages=st.integers(1, 3),
    token_budget=st.integers(1, 40),
    num_blocks=st.integers(3, 12),
    max_sequences=st.integers(1, 4),
)
def test_chunks_and_preemption_change_no_token(models, family, num_stages, **limits):
    model_dir, _, answers = models(family)
    with pytest.MonkeyPatch.context() as patch:
        draft_freely(patch)
        assert served(model_dir, num_stages, **limits) == answers


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), family=st.sampled_from(["glm4_moe", "qwen3_5_text"]))
def test_drafts_are_those_of_the_layer_whatever_was_accepted(models, family, seed):
    """Chunks of any size, drafts or none, accepted or not, computed anew, in any blocks."""
    model_dir, oracle, _ = models(family)
    chance = random.Random(seed)
    drafter = drafter_of(model_dir)
    tables = {number: chance.sample(range(40), 4) for number in range(2)}
    tables[1] = [40 + block for block in tables[1]]
    texts = {number: [chance.randrange(3, 90) for _ in range(chance.randint(1, 40))]
             for number in tables}  # fmt: skip
    done = dict.fromkeys(texts, 0)
    for _ in range(6):
        for number, text in texts.items():
            if chance.random() < 0.1:  # preempted
                done[number] = 0
            while done[number] < len(text):
                first = done[number]
                end = min(len(text), first + chance.randint(1, 40))
                states = oracle.states(text)[first:end]
                if end == len(text):
                    text.append(chance.randrange(3, 90))
                drafter.observe(number, first, states, text, tuple(tables[number]))
                done[number] = end
                if end == len(text) - 1:
                    break
        chosen = [number for number in texts if chance.random() < 0.7]
        works = [DraftWork(number, 0, len(texts[number]), chance.randint(1, 4),
                           tuple(tables[number])) for number in chosen]  # fmt: skip
        if not works:
            continue
        drafts = drafter.propose(works, [texts[number] for number in chosen])
        for work, draft in zip(works, drafts, strict=True):
            text = texts[work.request]
            assert draft == oracle.draft(text, work.length)
            accepted, known = chance.randint(0, work.length), len(text)
            states = oracle.states([*text, *draft])[known - 1 :]
            text += [*draft[:accepted], chance.randrange(3, 90)]
            drafter.observe(work.request, known - 1, states, text, work.blocks)
            done[work.request] = len(text) - 1


def drafter_of(model_dir: Path, bits: int | None = None, num_blocks: int = 80) -> MtpDrafter:
    plan = make_plan((0, 3), batch=4, prompt_tokens=48, new_tokens=16)
    job = Job(
        strategy=model_dir, model_dir=model_dir, prompts=model_dir, output=model_dir,
        engine=EngineOptions(speculative_config=replace(CONFIG, bits=bits)),
    )  # fmt: skip
    cpu = torch.device("cpu")
    master = load_master(model_dir, dtype=torch.float32, device=cpu)
    return load_mtp_drafter(job, plan, master, cpu, num_blocks)


@pytest.mark.parametrize("bits", [8, 3])
def test_the_layer_is_quantized_while_loading(models, bits):
    model_dir, oracle, _ = models("qwen3_5_text wide")
    whole, drafter = drafter_of(model_dir), drafter_of(model_dir, bits)
    assert drafter.held.weights < 0.7 * whole.held.weights
    text = PROMPTS[0]
    drafter.observe(0, 0, oracle.states(text)[:-1], text, (1, 2, 3))
    (draft,) = drafter.propose([DraftWork(0, 0, len(text), 2, (1, 2, 3))], [text])
    assert draft == oracle.draft(text, 2) or bits == 3


@pytest.mark.skipif(find_spec("gguf") is None, reason="needs the gguf package")
def test_the_layer_of_a_gguf_file_is_read(models, monkeypatch, tmp_path):
    from helpers.gguf_writer import write_gguf  # noqa: PLC0415  imports the package

    model_dir, oracle, answers = models("qwen3_5_text")
    file = write_gguf(model_dir, tmp_path / "model.gguf")
    draft_freely(monkeypatch)
    recorded = Recorded(monkeypatch)
    assert served(file, 1, batch=8) == answers
    recorded.check(oracle)
    facts = {fact.name: fact.source for fact in model_facts(file)}
    assert facts["drafts"] == "blk.3.nextn.eh_proj.weight"


def test_a_prompt_that_is_found_again_has_its_entries(models, monkeypatch):
    """Keys and values of the layer lie in the blocks that the second prompt begins with."""
    model_dir, oracle, answers = models("glm4_moe")
    draft_freely(monkeypatch)
    plan = make_plan((0, 3), batch=4, prompt_tokens=48, new_tokens=16)
    script, same = Script(), PROMPTS[0]
    for place in range(2):
        item = GenerationRequest(id=str(place), prompt_token_ids=tuple(same), sampling=FREE)
        script.add(1 + 200 * place, item)
    recorded = Recorded(monkeypatch)
    serve_script(plan, model_dir, script, EngineOptions(speculative_config=CONFIG))
    assert [script.tokens(str(place)) for place in range(2)] == [answers[0]] * 2
    assert script.outputs["1"][0].num_cached_tokens == 2 * KV_BLOCK_SIZE
    recorded.check(oracle)


def test_a_model_without_the_layer_is_refused(models, tiny_model, tmp_path):
    model_dir, _, _ = models("qwen3_5_text")
    assert "drafts" not in {fact.name for fact in model_facts(model_dir.parent / "plain")}
    assert "mtp.fc.weight" in {fact.source for fact in model_facts(model_dir)}
    with pytest.raises(SpecError, match=r"found no tensor 'mtp\.fc\.weight', expected"):
        served(model_dir.parent / "plain", 1)
    broken = Path(shutil.copytree(model_dir, tmp_path / "broken"))
    stored = load_file(broken / "model.safetensors")
    kept = {name: value for name, value in stored.items() if "mtp.norm" not in name}
    save_file(kept, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpecError, match=r"mtp\.norm\.weight"):
        served(broken, 1)
    with pytest.raises(SpecError, match=r"not read of family llama; expected one of deepseek_v3"):
        served(tiny_model("llama", seed=1), 1)


def test_a_layer_without_a_norm_has_that_of_the_model(models, tmp_path):
    """As in GGUF files of llama.cpp."""
    model_dir, _, _ = models("glm4_moe")
    bare = Path(shutil.copytree(model_dir, tmp_path / "bare"))
    stored = load_file(bare / "model.safetensors")
    kept = {name: value for name, value in stored.items() if "shared_head.norm" not in name}
    assert len(kept) == len(stored) - 1
    save_file(kept, bare / "model.safetensors", {"format": "pt"})
    _, ends = load_mtp(bare, 16, dtype=torch.float32, device="cpu")
    assert torch.equal(ends.final_norm.weight, stored["model.norm.weight"])
    assert not torch.equal(ends.final_norm.weight, stored["model.layers.3.shared_head.norm.weight"])


def test_first_cost_is_that_of_a_layer_and_the_head():
    limits = engine_limits(make_plan((0, 3)), EngineOptions(speculative_config=CONFIG))
    assert limits.draft is not None
    assert limits.draft.reads_states
    assert limits.draft.cost == 0.5  # a third of the layers, and all of the rest, at most half
