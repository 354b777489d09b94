"""Limits of an engine of packed steps: those of the ranks are those that simulator and planner use.

Needs no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from llmpq.batching import uniform_depth
from llmpq.batching.blocks import NOTHING_KEPT, OffloadLimits
from llmpq.batching.engine_step import DraftLimits, EngineLimits, planned_limits
from llmpq.batching.speculation import SpeculativeConfig, row_cost_of
from llmpq.errors import CapacityError, SpecError
from llmpq.options.engine import MAX_SEQUENCES, EngineOptions
from llmpq.spec.catalog import device, resolve_model
from llmpq.spec.families import family_of, known_families
from llmpq.spec.huggingface.config import LengthScaling
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model import ModelSpec
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.plan import MTP, Plan, draft_bytes
from llmpq.spec.precision import DTYPE_BYTES, Phase, default_precision, linear_bytes
from llmpq.spec.runtime_constants import (
    KV_BLOCK_SIZE,
    KV_FILE_HEADER_BYTES,
    PROMPT_CHUNK_TOKENS,
    kept_blocks,
    state_slots,
)
from llmpq.units import format_bytes

NO_SCALING = LengthScaling()
MOST_FIRST_COST = 0.5
"""Most that a pass of a draft model is expected to cost before it is measured, in steps."""


def engine_limits(
    plan: Plan,
    options: EngineOptions,
    *,
    window_tokens: int | None = None,
    scaling: LengthScaling = NO_SCALING,
    state_bytes: int = 0,
) -> EngineLimits:
    """Return the limits of an engine of packed steps: the only place that computes them.

    By default it has the KV memory and the largest step that the plan has memory for.

    Args:
        plan: the strategy.
        options: of the engine.
        window_tokens: largest window of the model's layers, ``None`` without one.
        scaling: of its rotary angles.
        state_bytes: of the recurrent states of a sequence, in all layers. There are ``state_slots``
            of the plan's sequences, and those of the cache of states: what running ones leave of
            them are saved states, with which prefixes are reused, and states after draft tokens.

    Raises:
        SpecError: a limit is below 1, or a draft model's directory has no model.
    """
    work, sizes, num_stages = plan.workload, plan.micro_batching, len(plan.path(Phase.DECODE))
    blocks_of_sequence = -(-work.max_context_tokens // KV_BLOCK_SIZE)
    num_blocks = options.num_blocks or work.batch * blocks_of_sequence
    config = options.speculative_config
    chunk = min(work.max_prompt_tokens, PROMPT_CHUNK_TOKENS)
    largest_step = max(sizes.prefill * chunk, sizes.decode)
    max_sequences = options.max_sequences or min(MAX_SEQUENCES, num_blocks)
    if state_bytes:
        _check_states(plan, options)
        max_sequences = min(max_sequences, work.batch)
    return EngineLimits(
        token_budget=options.token_budget or min(PROMPT_CHUNK_TOKENS, largest_step),
        max_sequences=max_sequences,
        num_blocks=num_blocks,
        block_size=KV_BLOCK_SIZE,
        watermark=options.watermark,
        prefix_caching=options.prefix_caching,
        steps_in_flight=uniform_depth(num_stages).max_in_flight(Phase.DECODE),
        num_speculative_tokens=0 if config is None else config.num_speculative_tokens,
        row_cost=row_cost_of(plan),
        draft=draft_limits(plan, config, num_blocks),
        switches_after=scaling.switches_after,
        grows_after=scaling.grows_after,
        window_tokens=own_window(plan, window_tokens),
        num_window_blocks=min(window_blocks(plan, window_tokens) or 0, num_blocks),
        num_state_slots=_state_slots(plan, options, state_bytes),
        offload=offload_limits(plan, options, window_blocks(plan, window_tokens) or 0),
    )


def check_state_cache(options: EngineOptions, model: ModelSpec) -> None:
    """Check the size of the cache of states.

    Raises:
        SpecError: not one state of the model fits, or it has none.
    """
    found, least = options.state_cache_bytes, model.state_bytes()
    if found and not least:
        raise SpecError(
            f"state_cache_size: found {format_bytes(found)}, expected 0: no layer of {model.name} "
            "has a recurrent state"
        )
    if 0 < found < least:
        raise SpecError(
            f"state_cache_size: found {format_bytes(found)}, expected at least "
            f"{format_bytes(least)}, the states of a sequence"
        )


def _state_slots(plan: Plan, options: EngineOptions, state_bytes: int) -> int:
    """Return the states of the plan's sequences, and those that fit into the cache of states."""
    if not state_bytes:
        return 0
    return state_slots(plan.workload.batch) + options.state_cache_bytes // state_bytes


def _check_states(plan: Plan, options: EngineOptions) -> None:
    """Refuse what would need states that are not kept.

    Raises:
        SpecError: stages that only prefill, or offloaded prefixes.
    """
    wanted = {
        "policy: found waa": plan.is_split,
        "kv_offloading_size: found copies of blocks": options.kv_offloading_bytes > 0,
    }
    for found, is_wanted in wanted.items():
        if is_wanted:
            raise SpecError(
                f"{found}, expected none: layers of {plan.model.name} have a recurrent state, of "
                "which only the newest is kept"
            )


def offload_limits(plan: Plan, options: EngineOptions, num_window_blocks: int) -> OffloadLimits:
    """Return how many copies of blocks fit into an engine's budgets, those of all stages together.

    Blocks of layers with windows and others have a share as of the plan's memory.

    Args:
        plan: the strategy.
        options: of the engine.
        num_window_blocks: of the plan, in layers with windows; 0 where all have the same.
    """
    host = options.kv_offloading_bytes
    disk = 0 if options.kv_offloading_folder is None else options.kv_offloading_disk_bytes
    if not host + disk:
        return NOTHING_KEPT
    work, stages = plan.workload, plan.estimate.stages
    blocks = work.batch * -(-work.max_context_tokens // KV_BLOCK_SIZE)
    kv_bytes = sum(stage.memory.kv for stage in stages)
    files = (blocks + num_window_blocks) * len(stages)
    file_bytes = kv_bytes + files * KV_FILE_HEADER_BYTES
    return OffloadLimits(
        host_blocks=blocks * host // kv_bytes,
        disk_blocks=blocks * disk // file_bytes,
        host_window_blocks=num_window_blocks * host // kv_bytes,
        disk_window_blocks=num_window_blocks * disk // file_bytes,
    )


def check_host_memory(
    plan: Plan, options: EngineOptions, ranks: Collection[int], available_bytes: int
) -> None:
    """Check that a host has memory for its CPU stages and its part of what is kept beyond the plan.

    Args:
        plan: the strategy.
        options: of the engine.
        ranks: of this host.
        available_bytes: of this host's memory.

    Raises:
        CapacityError: it has less.
    """
    here = [(plan.stages[rank], plan.estimate.stages[rank].memory) for rank in ranks
            if rank < len(plan.stages)]  # fmt: skip
    planned = sum(
        memory.total + draft_bytes(plan.draft, stage.device)
        for stage, memory in here
        if device(plan.device_of(stage).type, plan.cluster).kind == "cpu"
    )
    kept_sizes = {
        "kv_offloading_size": options.kv_offloading_bytes,
        "state_cache_size": options.state_cache_bytes,
    }
    names = " and ".join(name for name, size in kept_sizes.items() if size)
    asked, kv_bytes = sum(kept_sizes.values()), sum(memory.kv for _, memory in here)
    all_bytes = sum(stage.memory.kv for stage in plan.estimate.stages)
    kept = asked * kv_bytes // all_bytes
    if planned + kept > available_bytes:
        most = max(0, available_bytes - planned) * all_bytes // max(1, kv_bytes)
        raise CapacityError(
            f"{names}: found {format_bytes(asked)}, expected at most "
            f"{format_bytes(most)}: this host has {format_bytes(available_bytes)} available, and "
            f"its stages take {format_bytes(planned)}"
        )


def policy_limits(
    plan: Plan,
    options: EngineOptions,
    *,
    window_tokens: int | None = None,
    scaling: LengthScaling = NO_SCALING,
    state_bytes: int = 0,
) -> EngineLimits:
    """Return the limits of an engine whose steps a batching policy decides.

    The sequences of the plan have a slot each, of as many blocks as the longest one needs.

    Args and errors: as for :func:`engine_limits`.
    """
    slots = plan.workload.batch
    num_blocks = slots * kept_blocks(plan.workload.max_context_tokens, None)
    options = replace(
        options,
        num_blocks=num_blocks,
        max_sequences=slots,
        state_cache_bytes=0,
        kv_offloading_bytes=0,
        kv_offloading_folder=None,
    )
    limits = engine_limits(
        plan, options, window_tokens=window_tokens, scaling=scaling, state_bytes=state_bytes
    )
    if state_bytes and limits.num_speculative_tokens:
        # Running sequences leave none: each has another state, after its draft tokens.
        return replace(limits, num_state_slots=max(2 * slots, limits.num_state_slots))
    return limits


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


def planned_speculation(plan: Plan) -> SpeculativeConfig | None:
    """Return the speculative decoding with a plan's draft model, ``None`` without one."""
    if plan.draft is None:
        return None
    if plan.draft.model == MTP:
        return SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=plan.draft.num_speculative_tokens,
            bits=plan.draft.bits,
        )
    return SpeculativeConfig(
        method="draft_model",
        num_speculative_tokens=plan.draft.num_speculative_tokens,
        model=str(absolute_model_path(plan.draft.model)),
        bits=plan.draft.bits,
    )


def draft_limits(
    plan: Plan, config: SpeculativeConfig | None, num_blocks: int
) -> DraftLimits | None:
    """Return the size of a run's draft model, ``None`` without one.

    A pass of another one than the plan's is expected to take the time of its weights' bytes,
    relative to those of the plan. The plan's own may be simulated where it is not.

    Args:
        plan: the strategy.
        config: of speculative decoding.
        num_blocks: KV blocks of the engine.

    Raises:
        SpecError: the directory has no model.
    """
    if config is not None and config.method == "mtp":
        return _mtp_limits(plan, num_blocks)
    if config is None or config.model is None:
        return None
    if plan.draft is not None and absolute_model_path(plan.draft.model) == Path(config.model):
        with contextlib.suppress(SpecError):
            positions = resolve_model(plan.draft.model)[0].max_positions
            return planned_limits(plan, num_blocks, positions)
        return planned_limits(plan, num_blocks)
    model = load_model_dir(config.model)
    if model.has_states:
        raise SpecError(
            f"speculative_config: found {config.model}, whose layers have a recurrent state, "
            "expected a draft model without"
        )
    parts = [stage.memory for stage in plan.estimate.stages]
    plan_bytes = sum(part.weights + part.master for part in parts)
    cost = _weight_bytes(model, config.bits, DTYPE_BYTES[plan.dtype]) / plan_bytes
    return DraftLimits(
        num_blocks=num_blocks, cost=min(cost, MOST_FIRST_COST), max_tokens=model.max_positions
    )


def _mtp_limits(plan: Plan, num_blocks: int) -> DraftLimits:
    """Return the size of a model's layer for multi-token prediction.

    A pass is expected to take the time of a layer and of the head, by their bytes in the plan.

    Raises:
        SpecError: the plan has stages that only prefill.
    """
    if plan.is_split:
        raise SpecError(
            "speculative_config: found method 'mtp' and a plan with stages that only prefill, "
            "expected one without --policy waa"
        )
    planned = planned_limits(plan, num_blocks)
    if plan.draft is not None and planned is not None and plan.draft.model == MTP:
        return replace(planned, reads_states=True)
    parts = [stage.memory for stage in plan.estimate.stages]
    weights, master = sum(part.weights for part in parts), sum(part.master for part in parts)
    cost = (weights / plan.model.num_layers + master) / (weights + master)
    return DraftLimits(num_blocks=num_blocks, cost=min(cost, MOST_FIRST_COST), reads_states=True)


def check_mtp(model: ModelSpec, option: str) -> None:
    """Check that layers for multi-token prediction of a model's family are known.

    Raises:
        SpecError: they are not; the message begins with the name of the option.
    """
    if family_of(model.family).mtp is None:
        known = ", ".join(family.name for family in known_families() if family.mtp is not None)
        raise SpecError(
            f"{option}: found 'mtp' with {model.name}, of family {model.family}, expected a model "
            f"with a layer for multi-token prediction, of one of {known}"
        )


def mtp_bits(plan: Plan, config: SpeculativeConfig) -> int:
    """Return the bits of a layer for multi-token prediction: by default those of the last layer."""
    return config.bits or plan.stages[-1].bits[-1]


def mtp_bytes(plan: Plan, config: SpeculativeConfig, model: ModelSpec) -> tuple[int, int]:
    """Return the bytes of a model's layer for multi-token prediction, and of one of its blocks."""
    dtype_bytes = DTYPE_BYTES[plan.dtype_of(plan.stages[0])]
    precision, size = default_precision(mtp_bits(plan, config)), model.hidden_size
    layer = model.layers[model.mtp_layer]
    joined = linear_bytes(size, 2 * size, precision, dtype_bytes) + 3 * size * dtype_bytes
    block = KV_BLOCK_SIZE * layer.kv_values_per_token * dtype_bytes
    return layer.weight_bytes(precision, dtype_bytes) + joined, block


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
