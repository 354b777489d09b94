"""Plans, comparisons and explanations as text and as the objects of ``--json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmpq.assigner.draft_placement import DraftPlace
from llmpq.assigner.explain.compare import Outcome
from llmpq.assigner.explain.explanation import Alternative, Explanation
from llmpq.assigner.explain.infeasible import binding_text
from llmpq.costmodel.tables.latency import RegressionLatencyModel
from llmpq.spec import catalog
from llmpq.spec.cluster import BF16_SETS, host_text, limited_set
from llmpq.spec.devices.figures import offered_kernels
from llmpq.spec.fields import to_json
from llmpq.spec.model import ModelSpec
from llmpq.spec.plan import Plan, Search, StageAssignment, StageEstimate, seconds_of_requests
from llmpq.spec.precision import Phase
from llmpq.spec.tables import LatencyTable
from llmpq.spec.workload import Workload
from llmpq.units import GIB, MIB, format_bytes, format_duration, format_number, format_seconds

BAR_WIDTH = 12
SLOW = ("reference",)
FROM_GIB = 4 * GIB
"""Sizes from here on are shown in GiB, smaller ones in MiB."""
MOST_PLACES = 4
"""Places of a draft model that are named."""
MANY_ORDERS = 10**6
"""Orders from here on are shown with one digit."""


def plan_record(plan: Plan, path: str | None) -> dict[str, Any]:
    """Return the JSON object of a plan, which is stored at ``path``."""
    devices = plan.cluster.devices
    return {
        **to_json(plan.search),
        "objective_s": plan.estimate.objective_s,
        "latency_s": plan.estimate.latency_s,
        "quality": plan.estimate.quality,
        "divergence_nats": plan.divergence_nats,
        "time_to_first_token_s": plan.first_token_s,
        "answer_tokens_per_s": plan.answer_tokens_per_s,
        "decode_tokens_per_s": plan.decode_tokens_per_s,
        "throughput_tokens_per_s": plan.throughput_tokens_per_s,
        "prefill_micro_batch": plan.micro_batching.prefill,
        "decode_micro_batch": plan.micro_batching.decode,
        "schedule": None if plan.schedule is None else to_json(plan.schedule),
        "draft": None if plan.draft is None else to_json(plan.draft),
        "dropped_devices": [devices[index].label for index in plan.dropped_devices],
        "stages": [
            _stage_record(plan, stage, estimate)
            for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True)
        ],
        "strategy": path,
        "model": plan.model.name,
        "cluster": plan.cluster.name,
        "workload": plan.workload.name,
        "dtype": plan.dtype,
        "head_bits": plan.head_width,
        "head_loss": dict(plan.provenance.inputs).get("head_loss"),
        "omega": dict(plan.provenance.inputs).get("omega"),
    }


def _stage_record(plan: Plan, stage: StageAssignment, estimate: StageEstimate) -> dict[str, Any]:
    return {
        "phase": None,
        **to_json(stage),
        "dtype": plan.dtype_of(stage),
        **to_json(estimate),
        "device": plan.device_of(stage).label,
        "device_index": stage.device,
        "memory_bytes": estimate.memory.total,
        "memory_parts_bytes": to_json(estimate.memory),
    }


def plan_table(plan: Plan, dropped: Mapping[int, str]) -> str:
    """Return a plan as text: its stages, the totals, and why devices were left out.

    Args:
        plan: the plan.
        dropped: the reason for every device left out, by its index.
    """
    lines = [f"{_title(plan)}, {plan.dtype}", "", *aligned(_stage_rows(plan)), "", *_totals(plan)]
    by_reason: dict[str, list[int]] = {}
    for device, reason in dropped.items():
        by_reason.setdefault(reason, []).append(device)
    for reason, members in by_reason.items():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        lines.append(f"left out       {plan.cluster.devices[members[0]].label}{more}: {reason}")
    return "\n".join(lines)


def _title(plan: Plan) -> str:
    return f"{plan.model.name} on {plan.cluster.name}: {plan.workload.text}"


def memory_unit(largest_bytes: float) -> tuple[int, str, str]:
    """Return the unit for sizes up to ``largest_bytes``: its bytes, name and number format."""
    return (GIB, "GiB", ".1f") if largest_bytes >= FROM_GIB else (MIB, "MiB", ".0f")


def memory_pair(used: int, capacity: int) -> str:
    """Return ``used of capacity`` in one unit."""
    size, name, digits = memory_unit(max(used, capacity))
    return f"{used / size:{digits}} of {capacity / size:{digits}} {name}"


def long_seconds(seconds: float) -> str:
    """Return the seconds of a whole batch with four digits, without an exponent."""
    return f"{seconds:.4g} s" if seconds < 1e4 else f"{seconds:,.0f} s"


def plans_text(number: int) -> str:
    """Return a number of plans in words."""
    return "1 plan" if number == 1 else f"{number} plans"


def front_record(
    plans: Sequence[Plan], paths: Sequence[str], picture: str | None
) -> dict[str, Any]:
    """Return the JSON object of a Pareto front: every plan, the best quality first."""
    return {
        "plans": [plan_record(plan, path) for plan, path in zip(plans, paths, strict=True)],
        "picture": picture,
    }


def front_table(plans: Sequence[Plan], paths: Sequence[str]) -> str:
    """Return the plans of a Pareto front as a table."""
    has_nats = plans[0].divergence_nats is not None
    rows: list[tuple[str, ...]] = [
        (
            *("plan", "quality lost", *(["KL, nats"] if has_nats else []), "latency"),
            *(*speed_heads(plans[0].workload), "bits", "batches", "devices", "file"),
        )
    ]
    for number, (plan, path) in enumerate(zip(plans, paths, strict=True), start=1):
        micro = plan.micro_batching
        rows.append(
            (
                str(number),
                f"{plan.estimate.quality:.4g}",
                *([format_number(plan.divergence_nats or 0.0)] if has_nats else []),
                long_seconds(plan.estimate.latency_s),
                *speed_cells(plan),
                compact_bits(plan.bits),
                f"{micro.prefill}, {micro.decode}",
                f"{len(plan.stages)} of {len(plan.cluster.devices)}",
                path,
            )
        )
    title = f"{_title(plans[0])}; quality lost: 0 = unquantized, 1 = every layer at 4 bits"
    return "\n".join([title, "", *aligned(rows), ""])


def speed_heads(work: Workload) -> tuple[str, ...]:
    """Return the heads of the columns of :func:`speed_cells`."""
    rates = ("tokens/s",) if work.batch == 1 else ("tokens/s each", f"tokens/s all {work.batch}")
    return ("first token", *rates)


def speed_cells(plan: Plan) -> tuple[str, ...]:
    """Return the time to the first token, and tokens a second of one answer and of all."""
    rates = (plan.answer_tokens_per_s, plan.decode_tokens_per_s)[: min(2, plan.workload.batch)]
    return (
        format_seconds(plan.first_token_s),
        *("-" if rate is None else format_number(rate) for rate in rates),
    )


def compact_bits(bits: Sequence[int]) -> str:
    """Return bitwidths as counts, widest first, such as ``12x16 4x8``."""
    counts = Counter(bits)
    return " ".join(f"{counts[width]}x{width}" for width in sorted(counts, reverse=True)) or "-"


def rate_text(requests_per_s: float | None) -> str:
    """Return the requests a second of a way to cut the cluster."""
    if requests_per_s is None:
        return "not planned in time"
    return f"{requests_per_s:.4g}" if requests_per_s else "does not fit"


def stage_bits(stage: StageAssignment) -> str:
    """Return the bits of a stage's layers, how many are on disk, and have experts on the host."""
    read = f", {len(stage.on_disk)} read from disk" if stage.on_disk else ""
    apart = f", experts of {stage.num_apart} on the host" if stage.num_apart else ""
    return f"{compact_bits(stage.bits)}{read}{apart}"


def apart_text(stage: StageAssignment, estimate: StageEstimate) -> list[str]:
    """Return what of a stage is in the memory of its host, in words; nothing where nothing is."""
    host = estimate.memory.host
    if host is None:
        return []
    experts = f"experts of {stage.num_apart} layer{'s' * (stage.num_apart > 1)}"
    return [f"{experts} in host memory ({format_bytes(host)})"]


def _stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return the table of stages, with the phase of each stage where a plan is split (WAA)."""
    rows: list[tuple[str, ...]] = [
        (
            *("rank", "device", *_phase(plan, "phase"), "layers", "bits"),
            *(*_format(plan, "format"), "memory", "prefill", "decode"),
        )
    ]
    for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True):
        layers = f"{stage.first_layer}-{stage.end_layer - 1}" if stage.num_layers else "none"
        rows.append(
            (
                str(stage.rank),
                plan.device_of(stage).label,
                *_phase(plan, "both" if stage.phase is None else stage.phase.value),
                layers,
                stage_bits(stage),
                *_format(plan, plan.dtype_of(stage)),
                _memory_text(estimate.memory.total, estimate.capacity_bytes)
                + (f", {format_bytes(host)} on the host" if (host := estimate.memory.host) else ""),
                format_seconds(estimate.prefill_s),
                format_seconds(estimate.decode_s),
            )
        )
    return rows


def _phase(plan: Plan, cell: str) -> tuple[str, ...]:
    return (cell,) if plan.is_split else ()


def _format(plan: Plan, cell: str) -> tuple[str, ...]:
    """Return the cell of a stage's number format, where not all have the plan's."""
    return (cell,) if len(plan.dtypes) > 1 else ()


def format_text(plan: Plan) -> tuple[str, ...]:
    """Return what CPUs have, and what devices cannot do: formats they lack, slow bitwidths."""
    lines = _cpu_text(plan)
    for stage in plan.stages:
        device = plan.device_of(stage)
        spec, form = catalog.device(device.type, plan.cluster), plan.dtype_of(stage)
        if plan.dtype not in spec.formats:
            lines.append(
                f"format         {device.label} computes {', '.join(spec.formats)}, not "
                f"{plan.dtype}: its stage runs in {form}; states are rounded to it on arrival"
            )
        slow = [b for b in sorted(set(stage.bits)) if offered_kernels(spec, b, form)[:1] == SLOW]
        if slow:
            lines.append(
                f"kernels        {device.label} has no fast kernel for "
                f"{' and '.join(map(str, slow))} bits: every call dequantizes the whole weight"
            )
    return tuple(lines)


def _cpu_text(plan: Plan) -> list[str]:
    """Return what each kind of CPU worker has, and what 16 bits mean on it."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for stage in plan.stages:
        device = plan.device_of(stage)
        used = limited_set(device.instruction_set, device.cpu_isa)
        if used is not None:
            what = host_text(device)
            if (form := plan.dtype_of(stage)) != "float32" and used not in BF16_SETS:
                what += f"; 16 bits are {form} stored, float32 computed"
            kind = kinds.setdefault(f"{device.node}/{device.type}", {})
            kind.setdefault(what, []).append(device.label)
    return [
        f"cpu            {name if len(kind) == 1 else ', '.join(labels)}: {what}"
        for name, kind in kinds.items()
        for what, labels in kind.items()
    ]


def _memory_text(used: int, capacity: int) -> str:
    share = used / capacity if capacity else 1.0
    filled = min(BAR_WIDTH, round(share * BAR_WIDTH))
    bar = "#" * filled + "." * (BAR_WIDTH - filled)
    return f"[{bar}] {memory_pair(used, capacity)}"


def aligned(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Return the lines of a table with columns of equal width.

    ``numbers``: all columns but the first have numbers, which end below each other.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def cells(row: Sequence[str]) -> Iterator[str]:
        for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
            yield cell.rjust(width) if numbers and column else cell.ljust(width)

    return ["  ".join(cells(row)).rstrip() for row in rows]


def _head_text(plan: Plan) -> list[str]:
    """Return the line of a head that is quantized."""
    if plan.head_width == 16:
        return []
    loss = dict(plan.provenance.inputs).get("head_loss")
    return [
        f"head           {plan.head_width} bits, on rank 0"
        + ("" if loss is None else f"; of the quality lost {loss}")
    ]


def _totals(plan: Plan) -> list[str]:
    estimate, search = plan.estimate, plan.search
    micro = plan.micro_batching
    lines = [
        f"micro-batches  prefill {micro.prefill}, decode {micro.decode}",
        *_head_text(plan),
        f"latency        {long_seconds(estimate.latency_s)} for the whole batch "
        f"({search.formula} formula)",
        f"speed          {plan.speed_text()}",
        f"quality        {estimate.quality:.4g} lost (0 = unquantized, 1 = every layer at 4 bits)"
        + _nats_text(plan.divergence_nats),
        f"objective      {long_seconds(estimate.objective_s)} = latency + {search.theta_s:g} s x "
        "quality",
    ]
    omega = dict(plan.provenance.inputs).get("omega")
    if omega is not None:
        lines.append(f"sensitivity    {omega}")
    if search.bound_s is not None and search.gap is not None:
        proof = "proven optimal" if search.status == "optimal" else "not proven optimal"
        lines.append(
            f"bound          {long_seconds(search.bound_s)}, gap {max(0.0, search.gap):.2%} "
            f"({proof} over {_orders_text(search)}: candidates solved {search.pairs_searched}, "
            f"ruled out by their bound {search.pairs_pruned})"
        )
    lines.append(
        f"planning       {format_seconds(search.planning_s)}, method {search.method}"
        + (f", solver {search.solver}" if search.solver else "")
    )
    return lines


def _orders_text(search: Search) -> str:
    """Return over which orders of the devices a proof is, in words."""
    number = f"{search.orders:,}" if search.orders < MANY_ORDERS else f"{search.orders:.1g}"
    if search.order_set is None:
        return f"{number} device orders"
    if search.orders == 1:
        return "the given order" if search.order_set == "given" else "the only order of devices"
    return {
        "all": f"all {number} orders of devices",
        "types": f"the {number} orders that keep equal devices of a node adjacent; --orders all "
        "searches every order",
        "leading": f"{number} orders: each kind of device first, the others as in the cluster file",
    }[search.order_set]


def _nats_text(nats: float | None) -> str:
    return "" if nats is None else f", about {format_number(nats)} nats of KL divergence a token"


def comparison_table(outcomes: Sequence[Outcome]) -> str:
    """Return one row per method, the lowest objective first, then the methods without a plan."""
    plans = sorted(
        ((outcome.method, outcome.plan) for outcome in outcomes if outcome.plan is not None),
        key=lambda item: item[1].estimate.objective_s,
    )
    lines = []
    if plans:
        least_s = plans[0][1].estimate.objective_s
        heads = (
            *("method", "objective", "latency", *speed_heads(plans[0][1].workload)),
            *("quality lost", "bits", "stages", "micro-batches", "planned in"),
        )
        rows = [_row(method, plan, least_s) for method, plan in plans]
        lines += [*aligned([heads, *rows]), ""]
    lines += [
        f"{outcome.method}: no plan: {outcome.error}"
        for outcome in outcomes
        if outcome.plan is None
    ]
    return "\n".join(lines).rstrip()


def _row(method: str, plan: Plan, least_s: float) -> tuple[str, ...]:
    estimate, micro = plan.estimate, plan.micro_batching
    more = estimate.objective_s / least_s - 1 if least_s > 0 else 0.0
    return (
        method,
        f"{long_seconds(estimate.objective_s)} (+{more:.1%})",
        long_seconds(estimate.latency_s),
        *speed_cells(plan),
        f"{estimate.quality:.3g}",
        compact_bits(plan.bits),
        f"{sum(stage.num_layers > 0 for stage in plan.stages)} of {len(plan.cluster.devices)}",
        f"{micro.prefill}, {micro.decode}",
        format_seconds(plan.search.planning_s),
    )


def stored_text(model: ModelSpec) -> list[str]:
    """Return a line about the stored bits of a quantized model, none for other models."""
    if not model.stored:
        return []
    counts = Counter(map(str, model.stored))
    parts = ", ".join(f"{count} layers {name}" for name, count in counts.items())
    return [f"stored         {parts}: each layer keeps its stored bits"]


def draft_text(
    plan: Plan, asked: str | None = None, places: Sequence[DraftPlace] = ()
) -> list[str]:
    """Return lines about the draft model of a plan, and the best places it might have.

    ``asked`` is one that may not pay.
    """
    draft, devices = plan.draft, plan.cluster.devices
    lines = [] if asked is None else [f"draft model    {asked} does not pay: none"]
    if draft is not None:
        bits = "as stored" if draft.bits is None else f"at {draft.bits} bits"
        lines = [
            f"draft model    {draft.model} {bits} on {devices[draft.device].label}: "
            f"{draft.num_speculative_tokens} tokens, {format_bytes(draft.memory_bytes)}; decoding "
            f"{draft.speedup:.2f} times as fast if {draft.acceptance_rate:.0%} are accepted"
        ]
    stages = {stage.device: f"stage {stage.rank}" for stage in plan.stages}
    for place in sorted(places, key=lambda one: -one.speedup)[:MOST_PLACES]:
        found = f"{place.speedup:.2f} times with {place.tokens} tokens"
        lines.append(
            f"  on {devices[place.device].label}, {stages.get(place.device, 'no stage')}: "
            f"{place.obstacle or found}"
        )
    if len(places) > MOST_PLACES:
        lines.append(f"  and {len(places) - MOST_PLACES} other devices")
    return lines


def schedule_text(plan: Plan) -> list[str]:
    """Return lines about the schedule of a plan."""
    schedule = plan.schedule
    if schedule is None:
        return []
    sizes = plan.micro_batching
    lines = [f"policy         {schedule.policy}"]
    degrees = {device.members for device in plan.cluster.devices} - {1}
    lines += [f"sharing        {degree} devices share every layer" for degree in sorted(degrees)]
    if schedule.policy == "rra":
        lines[0] += (
            f": encode {schedule.encode_batch} in micro-batches of {sizes.prefill}, then decode "
            f"about {schedule.decode_batch} for {schedule.decode_iterations} iterations"
        )
    if schedule.policy == "waa":
        encoders = len(plan.stages_of(Phase.PREFILL))
        lines[0] += (
            f": {encoders} of {len(plan.stages)} stages encode {schedule.encode_batch} at a time, "
            f"the others decode {schedule.decode_batch} in micro-batches of {sizes.decode}"
        )
    if schedule.policy == "multibin" and schedule.boundaries is not None:
        edges = ", ".join(f"{edge:g}" for edge in schedule.boundaries)
        bins = f"{len(schedule.boundaries) + 1} bins" if edges else "1 bin"
        lines[0] += f": batches of {schedule.decode_batch}, {bins}" + (
            f", answers from {edges} tokens" if edges else ""
        )
        lines.append("               if the lengths of answers are predicted right (--predictor)")
    found = schedule.estimate
    if found is not None:
        bound = "" if found.latency_bound_s is None else f" of {found.latency_bound_s:g} s allowed"
        lines.append(
            f"expected       {format_number(found.requests_per_s)} requests/s; "
            f"{found.new_tokens} tokens take {format_seconds(found.latency_s)}{bound}"
        )
    return lines


def explanation_text(plan: Plan, found: Explanation) -> Iterator[str]:
    """Yield the lines of an explanation."""
    bound = found.binding
    by = {True: "its slowest stage", False: "one pass through all stages"}
    prefill, decode = by[bound.prefill_by_slowest], by[bound.decode_by_slowest]
    yield f"set by         prefill by {prefill}, decode by {decode}"
    for stage, item in zip(plan.stages, bound.stages, strict=True):
        yield f"binds          {stage.rank} {plan.device_of(stage).label}: {binding_text(item)}"
    for answer in found.forced:
        yield f"if used        {_named(answer.devices)}: {_cost_text(plan, answer)}"
    yield from more_text(plan, found.more)


def more_text(plan: Plan, more: Sequence[Alternative]) -> Iterator[str]:
    """Yield what one more device of each kind brings."""
    for answer in more:
        yield f"one more       {_named(answer.devices)}: {_gain_text(plan, answer)}"


def more_record(plan: Plan, more: Sequence[Alternative]) -> list[dict[str, Any]]:
    """Return the JSON objects of one more device of each kind."""
    return [
        {"device": device, **_answer_record(plan, answer)}
        for answer in more
        for device in answer.devices
    ]


def requests_text(plans: Sequence[Plan], number: int | None) -> list[str]:
    """Return a line about the time of so many requests, none without a number."""
    if number is None:
        return []
    seconds = seconds_of_requests(plans, number)
    return [f"requests       {number:,} take {format_duration(seconds)}, in full batches"]


def requests_record(plans: Sequence[Plan], number: int | None) -> dict[str, Any]:
    """Return the entry of the time of so many requests in a JSON object, none without a number."""
    if number is None:
        return {}
    return {"requests": {"number": number, "seconds": seconds_of_requests(plans, number)}}


def explanation_record(plan: Plan, found: Explanation) -> dict[str, Any]:
    """Return the JSON object of an explanation."""
    devices = plan.cluster.devices
    record: dict[str, Any] = {
        "prefill_set_by": _set_by(found.binding.prefill_by_slowest),
        "decode_set_by": _set_by(found.binding.decode_by_slowest),
        "stages": [
            {
                "rank": item.rank,
                "device": plan.device_of(stage).label,
                "binding": list(item.constraints),
                "free_bytes": item.slack_bytes,
                "smallest_step_bytes": item.step_bytes,
                "prefill_share_of_slowest": item.prefill_share,
                "decode_share_of_slowest": item.decode_share,
                "master_share_of_decode": item.master_share,
                "text": binding_text(item),
            }
            for stage, item in zip(plan.stages, found.binding.stages, strict=True)
        ],
        "dropped": [
            {"device": devices[index].label, "reason": reason, **_forced_record(plan, found, index)}
            for index, reason in found.dropped.items()
        ],
    }
    if found.more:
        record["one_more"] = more_record(plan, found.more)
    return record


def _set_by(slowest: bool) -> str:
    return "slowest stage" if slowest else "one pass"


def _named(devices: Sequence[str]) -> str:
    return devices[0] + (f" (or {len(devices) - 1} alike)" if len(devices) > 1 else "")


def _cost_text(plan: Plan, answer: Alternative) -> str:
    if answer.plan is None:
        return answer.reason
    now, other = plan.estimate, answer.plan.estimate
    best = "the best plan" if answer.proven else "the best plan found"
    return (
        f"{best} that uses it costs {other.objective_s - now.objective_s:+.3g} s "
        f"({long_seconds(other.objective_s)}: latency {long_seconds(other.latency_s)}, "
        f"quality lost {other.quality:.3g})"
    )


def _gain_text(plan: Plan, answer: Alternative) -> str:
    if answer.plan is None:
        return answer.reason
    now, other = plan.throughput_tokens_per_s, answer.plan.throughput_tokens_per_s
    return (
        f"{long_seconds(answer.plan.estimate.latency_s)} for the whole batch "
        f"({other / now - 1:+.1%} throughput) at no more loss of quality"
        f"{'' if answer.proven else ', by the best plan found'}"
    )


def _forced_record(plan: Plan, found: Explanation, index: int) -> dict[str, Any]:
    label = plan.cluster.devices[index].label
    for answer in found.forced:
        if label in answer.devices:
            return {"if_used": _answer_record(plan, answer)}
    return {}


def _answer_record(plan: Plan, answer: Alternative) -> dict[str, Any]:
    if answer.plan is None:
        return {"status": "none", "reason": answer.reason}
    now, other = plan.estimate, answer.plan.estimate
    return {
        "status": "optimal" if answer.proven else "feasible",
        "latency_s": other.latency_s,
        "quality": other.quality,
        "objective_s": other.objective_s,
        "costs_s": other.objective_s - now.objective_s,
        "throughput_tokens_per_s": answer.plan.throughput_tokens_per_s,
        "throughput_gain": answer.plan.throughput_tokens_per_s / plan.throughput_tokens_per_s - 1,
    }


def table_summary(table: LatencyTable) -> str:
    """Return a line for each phase and bitwidth with the smallest and the largest shape.

    A line follows for each sample that forecasts leave out, and why.
    """
    lines = ["phase    bits  smallest shape            largest shape"]
    seen: dict[tuple[str, int], list[str]] = {}
    for sample in sorted(table.samples, key=lambda one: one.batch * one.tokens):
        text = f"{sample.batch} x {sample.tokens}: {format_seconds(sample.seconds)}"
        seen.setdefault((sample.phase.value, sample.bits), []).append(text)
    for (phase, bits), texts in sorted(seen.items()):
        lines.append(f"{phase:8} {_bits_text(bits):>6}  {texts[0]:24}  {texts[-1]}")
    return "\n".join([*lines, *outlier_lines(table)])


def outlier_lines(table: LatencyTable) -> list[str]:
    """Return a line for each sample that forecasts leave out, and why."""
    return [
        f"{one.phase.value:8} {_bits_text(one.bits):>6}  {one.batch} x {one.tokens} is left out of "
        f"forecasts: its {format_seconds(one.seconds)} are {ratio:.2g} times what the others give"
        for one, ratio in RegressionLatencyModel(table).outliers()
    ]


def _bits_text(bits: int) -> str:
    """Return the name of a bitwidth of a table, or of the master's work."""
    return str(bits) if bits > 0 else f"head {-bits}" if bits else "master"
