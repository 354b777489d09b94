"""The batching policy of a run: the requested one, else the strategy's own, else hybrid.

An engine that serves requests as they arrive has limits instead.

Needs no torch, so that a command can check a schedule before it starts a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from llmpq.batching import BatchingPolicy, PipelineShape, make_policy, uniform_depth
from llmpq.batching.draft_model import DraftLimits, planned_limits
from llmpq.batching.engine_step import EngineLimits
from llmpq.batching.length import Prediction, make_predictor
from llmpq.batching.speculation import SpeculativeConfig, row_cost_of
from llmpq.dist.io.job import EngineOptions
from llmpq.dist.io.prompts import Request
from llmpq.errors import SpecError
from llmpq.spec.facts.model_fields import absolute_model_path
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan, Schedule
from llmpq.spec.precision import DTYPE_BYTES, Phase
from llmpq.spec.runtime_constants import KV_BLOCK_SIZE, PROMPT_CHUNK_TOKENS, kept_blocks

MAX_SEQUENCES = 256
MOST_FIRST_COST = 0.5
"""Most that a pass of a draft model is expected to cost before it is measured, in steps."""


def schedule_of(plan: Plan, asked: Schedule | None) -> Schedule:
    """Return the schedule of a run.

    Raises:
        SpecError: it does not fit the plan's stages.
    """
    found = asked or plan.schedule or Schedule(policy="hybrid")
    if found.policy == "waa" and not plan.is_split:
        # On one ring, decode steps queue behind prefills, which WAA is to avoid.
        raise SpecError(
            "schedule: found policy 'waa' for stages that do both phases, expected a plan with "
            "stages of their own for either, as llmpq-algo --policy waa makes"
        )
    if plan.is_split and found.policy != "waa":
        raise SpecError(
            f"schedule: found policy '{found.policy}', expected 'waa': this plan has stages of "
            "their own for prefill and for decode"
        )
    return found


def in_order(requests: Sequence[Request]) -> list[Request]:
    """Return the requests in order of arrival; their indices are their numbers."""
    return sorted(requests, key=lambda request: request.arrival_s)


def policy_of(
    plan: Plan, schedule: Schedule, prediction: Prediction, requests: Sequence[Request]
) -> BatchingPolicy:
    """Return a new policy for these requests.

    The most tokens that a request asks for are the known length of its answer.
    """
    shape = PipelineShape.of(plan)
    ordered = in_order(requests)
    predictor = make_predictor(
        prediction,
        [len(request.prompt_token_ids) for request in ordered],
        [request.max_new_tokens for request in ordered],
    )
    return make_policy(schedule, shape, predictor)


def engine_limits(plan: Plan, options: EngineOptions) -> EngineLimits:
    """Return the limits of an engine of packed steps.

    By default it has the KV memory and the largest step that the plan has memory for.
    """
    work, sizes, num_stages = plan.workload, plan.micro_batching, len(plan.path(Phase.DECODE))
    blocks_of_sequence = -(-work.max_context_tokens // KV_BLOCK_SIZE)
    num_blocks = options.num_blocks or work.batch * blocks_of_sequence
    config = options.speculative_config
    chunk = min(work.prompt_tokens, PROMPT_CHUNK_TOKENS)
    largest_step = max(sizes.prefill * chunk, sizes.decode)
    return EngineLimits(
        token_budget=options.token_budget or min(PROMPT_CHUNK_TOKENS, largest_step),
        max_sequences=options.max_sequences or min(MAX_SEQUENCES, num_blocks),
        num_blocks=num_blocks,
        block_size=KV_BLOCK_SIZE,
        prefix_caching=options.prefix_caching,
        steps_in_flight=uniform_depth(num_stages).max_in_flight(Phase.DECODE),
        num_speculative_tokens=0 if config is None else config.num_speculative_tokens,
        row_cost=row_cost_of(plan),
        draft=draft_limits(plan, config, num_blocks),
    )


def with_windows(limits: EngineLimits, plan: Plan, largest: int | None) -> EngineLimits:
    """Return the limits of an engine for a model with a largest window, ``None`` without any."""
    blocks = window_blocks(plan, largest)
    return replace(
        limits,
        window_tokens=own_window(plan, largest),
        num_window_blocks=min(blocks or 0, limits.num_blocks),
    )


def own_window(plan: Plan, largest: int | None) -> int | None:
    """Return the largest window of a model whose layers with windows have blocks of their own.

    Returns:
        ``None`` where all layers have the same: no window is shorter than a sequence of the plan,
        or stages send each other keys and values.
    """
    longest = plan.workload.max_context_tokens
    if largest is None or plan.is_split:
        return None
    return None if kept_blocks(longest, largest) == kept_blocks(longest, None) else largest


def window_blocks(plan: Plan, largest: int | None) -> int | None:
    """Return the blocks of layers with windows, ``None`` where all layers have the same."""
    window, work = own_window(plan, largest), plan.workload
    return None if window is None else work.batch * kept_blocks(work.max_context_tokens, window)


def draft_limits(
    plan: Plan, config: SpeculativeConfig | None, num_blocks: int
) -> DraftLimits | None:
    """Return the size of a run's draft model, ``None`` without one.

    A pass of another one than the plan's is expected to take the time of its weights' bytes,
    relative to those of the plan.

    Args:
        plan: the strategy.
        config: of speculative decoding.
        num_blocks: KV blocks of the engine.

    Raises:
        SpecError: the directory has no model.
    """
    if config is None or config.model is None:
        return None
    model = load_model_dir(config.model)
    if plan.draft is not None and absolute_model_path(plan.draft.model) == Path(config.model):
        return planned_limits(plan, num_blocks, model.max_positions)
    parts = [stage.memory for stage in plan.estimate.stages]
    plan_bytes = sum(part.weights + part.master for part in parts)
    cost = _weight_bytes(model, config.bits, DTYPE_BYTES[plan.dtype]) / plan_bytes
    return DraftLimits(
        num_blocks=num_blocks, cost=min(cost, MOST_FIRST_COST), max_tokens=model.max_positions
    )


def _weight_bytes(model: ModelSpec, bits: int | None, dtype_bytes: int) -> int:
    layers = zip(model.layers, layer_bits(model, bits), strict=True)
    total = sum(layer.weight_bytes(model.precision(width), dtype_bytes) for layer, width in layers)
    return total + model.master_parameters * dtype_bytes


def layer_bits(model: ModelSpec, bits: int | None) -> list[int]:
    """Return the bits of every layer of a draft model: those asked for, else the stored ones."""
    if bits is not None:
        return [bits] * model.num_layers
    return [precision.bits for precision in model.stored] or [16] * model.num_layers


def max_model_len(plan: Plan, options: EngineOptions, positions: int | None) -> int:
    """Return the most tokens of prompt and answer of a request to an engine.

    By default it is the plan's longest sequence, or less where model or blocks hold less.

    Args:
        plan: the strategy.
        options: of the engine.
        positions: longest sequence of the model, ``None`` when unlimited.

    Raises:
        SpecError: the model or the KV blocks do not hold the length that was asked for.
    """
    limits = engine_limits(plan, options)
    held, asked = limits.num_blocks * limits.block_size, options.max_model_len
    if asked is None:
        return min(plan.workload.max_context_tokens, held, positions or held)
    if asked < 2:
        raise SpecError(f"max_model_len: found {asked}, expected at least 2")
    if positions is not None and asked > positions:
        raise SpecError(
            f"max_model_len: found {asked}, expected at most the model's {positions} positions"
        )
    if asked > held:
        raise SpecError(
            f"max_model_len: found {asked}, expected at most {held}, the tokens of "
            f"{limits.num_blocks} KV blocks; plan for more or longer sequences (--global_bz, --s, "
            "--n) for more blocks"
        )
    return asked
