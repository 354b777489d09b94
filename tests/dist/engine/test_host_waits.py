"""How often the host of a single stage waits for its GPU: once a step, when it reads the tokens.

The steps run on a CPU by the code that a GPU runs, with operators of torch in place of Triton's
kernels. What would wait for a device is counted: synchronisation, operators whose result the host
reads, and results that it reads as lists.
"""

from __future__ import annotations

import pytest
import torch
from helpers import decode_attention, fused_rows
from helpers.ranks import make_plan, rank_contexts
from helpers.recorded_capture import CalledAgain

from llmpq.batching import Decode, PolicyScheduler, Prefill, Wait, uniform_depth
from llmpq.batching.policy_scheduler import slot_limits
from llmpq.dist.engine import engine as engine_module
from llmpq.dist.engine import executor as executor_module
from llmpq.dist.engine.batch_run import BatchRun
from llmpq.dist.engine.compiled_steps import fuse_layers
from llmpq.dist.engine.cuda_graphs import DecodeGraphs, HostSyncDetector
from llmpq.dist.engine.executor import PipelineExecutor
from llmpq.dist.io.prompts import Request
from llmpq.dist.io.sampling_params import SamplingParams
from llmpq.dist.kv.cache import KVCache
from llmpq.dist.launch.rank import load_runner
from llmpq.dist.metrics.stats import StageClock
from llmpq.quant.loading.master import load_master
from llmpq.spec.precision import Phase

torch.set_num_threads(1)

CPU = torch.device("cpu")
NEW_TOKENS = 6
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.1, top_k=5, min_p=0.05, frequency_penalty=0.5),
    SamplingParams(repetition_penalty=1.2, logit_bias=((3, 1.0),), min_tokens=2),
    SamplingParams(logprobs=2, allowed_token_ids=(1, 5, 9, 20)),
)
_TENSOR = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__")


class _Marks:
    """Marks of a GPU on which the layers of a step take a second."""

    made = 0

    @classmethod
    def of(cls, device):
        assert device == CPU
        return cls()

    def end(self):
        type(self).made += 1

    def seconds(self):
        return 1.0


@pytest.fixture
def waits(monkeypatch):
    """Names of what the host has waited for."""
    found = []
    decode_attention.use(monkeypatch)
    fused_rows.use(monkeypatch)
    monkeypatch.setattr(KVCache, "attends", False)
    monkeypatch.setattr(KVCache, "attends_rows", True)
    monkeypatch.setattr(_Marks, "made", 0)
    monkeypatch.setattr(executor_module, "DeviceMarks", _Marks)
    monkeypatch.setattr(executor_module, "synchronize", lambda _: found.append("synchronize"))

    def graphs(layers, cache):
        fuse_layers(layers, cache)
        made = DecodeGraphs(layers, cache, capture=CalledAgain())
        made.capture([1, 2, 4, len(PARAMS)], 64)
        return made

    monkeypatch.setattr("llmpq.dist.launch.rank.step_runner_of", graphs)

    def nucleus(scores, top_p):  # as on a GPU
        return engine_module._nuclei(scores[None], scores.new_full((1, 1), top_p))[0]

    monkeypatch.setattr(engine_module, "_nucleus", nucleus)
    return found


def _engine(model_dir, clock, plan):
    (context,) = rank_contexts(plan, model_dir)
    limits = slot_limits(len(PARAMS), plan.workload.max_context_tokens)
    return BatchRun(
        executor=PipelineExecutor(
            master=load_master(model_dir, dtype=torch.float32, device=CPU),
            runner=load_runner(context, CPU),
            communicator=None,
            clock=clock,
        ),
        scheduler=PolicyScheduler(_Together(), limits, uniform_depth(1)),
        limits=limits,
        clock=clock,
    )


class _Together:
    """All prompts at once, then all sequences in every step."""

    holds_finished = False

    def decide(self, view):
        if view.waiting and view.free_slots:
            return Prefill(requests=tuple(one.request for one in view.waiting))
        if view.ready:
            return Decode(slots=tuple(one.slot for one in view.ready))
        return Wait()


def _count(monkeypatch, found):
    for name in _TENSOR:
        own = getattr(torch.Tensor, name)

        def noted(tensor, *args, _own=own, _name=name, **kwargs):
            found.append(_name)
            return _own(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, noted)


def test_the_host_reads_once_a_step_and_waits_for_nothing_else(tiny_model, monkeypatch, waits):
    model_dir = tiny_model("llama", seed=1)
    plan = make_plan((0, 3), batch=len(PARAMS), new_tokens=NEW_TOKENS)
    clock = StageClock(micro_batching=plan.micro_batching)
    engine = _engine(model_dir, clock, plan)
    requests = [
        Request(
            id=number, prompt_token_ids=(number + 1, 2, 3), max_new_tokens=NEW_TOKENS,
            sampling_params=params,
        )
        for number, params in enumerate(PARAMS)
    ]  # fmt: skip
    waits.clear()
    detector, answers = HostSyncDetector(), []
    with monkeypatch.context() as patch:
        _count(patch, waits)
        with torch.inference_mode(), detector:
            engine.run(requests, answers.append)
    assert [len(answer.token_ids) for answer in answers] == [NEW_TOKENS] * len(PARAMS)
    assert detector.found == []
    # The prompts make the first token of every answer, and each further step one.
    assert waits == ["tolist"] * NEW_TOKENS
    assert _Marks.made == NEW_TOKENS


def test_the_layers_have_the_time_between_the_marks(tiny_model, waits):
    plan = make_plan((0, 3), batch=1, new_tokens=3)
    now = iter(range(0, 10_000, 5))
    clock = StageClock(micro_batching=plan.micro_batching, now=lambda: float(next(now)))
    engine = _engine(tiny_model("llama", seed=1), clock, plan)
    engine.run([Request(id=0, prompt_token_ids=(1, 2), max_new_tokens=3)], lambda _: None)
    work = clock.stats(0, CPU).work
    assert sum(sample.seconds for sample in work) == sum(sample.count for sample in work) == 3
    assert {sample.phase for sample in work} == {*Phase}
    assert all(sample.master_s > 0 for sample in work)
    assert waits == []
