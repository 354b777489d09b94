"""What is checked before a model is loaded: plans, folders, memory, prompts and contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from llmpq.dist.io.job import check_model
from llmpq.dist.io.prompts import RequestId, Tokenizer
from llmpq.errors import CapacityError, SpecError
from llmpq.multillm.graph import ANSWER, PROMPT, Application, AppNode, fixed_text, template_fields
from llmpq.multillm.running.dataflow import JOINT
from llmpq.multillm.schedule import ApplicationSchedule, plans_of
from llmpq.multillm.workload import Item
from llmpq.options.engine import EngineOptions
from llmpq.options.limits import max_model_len
from llmpq.spec import catalog
from llmpq.spec.cluster import Cluster, Device
from llmpq.spec.huggingface.families import load_model_dir
from llmpq.spec.model_files.config import absolute_model_path
from llmpq.spec.model_files.tokenizer import missing_tokenizer
from llmpq.spec.model_files.weight_headers import find_gguf
from llmpq.spec.plan import Plan
from llmpq.units import format_bytes

Plans = Mapping[str | Plan | int | None, Plan]
LoadTokenizer = Callable[[Path], Tokenizer | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """A model of the application as it is run.

    Attributes:
        name: in the application.
        folder: with its weights.
        tokenizer: of the model.
        context: longest sequence under all its plans, in tokens.
    """

    name: str
    folder: Path
    tokenizer: Tokenizer
    context: int


def prepare_models(
    app: Application,
    schedule: ApplicationSchedule,
    cluster: Cluster,
    folders: Mapping[str, Path],
    load_tokenizer: LoadTokenizer,
) -> tuple[dict[str, RunModel], Plans]:
    """Check that every model of a checked schedule can be loaded where it is to run.

    Args:
        app: the application.
        schedule: of it.
        cluster: of the schedule.
        folders: of weights by model, where they are not the application's or the plans' own.
        load_tokenizer: reads the tokenizer of a folder.

    Returns:
        The models by name, and the plans by ``ModelReplica.source``.

    Raises:
        SpecError: a folder, a plan or a tokenizer cannot be used.
        CapacityError: a plan needs more memory than its devices have.
    """
    unknown = sorted(set(folders) - {model.name for model in app.models})
    if unknown:
        raise SpecError(f"model: found folder of '{unknown[0]}', expected a model of {app.name}")
    plans = plans_of(schedule, cluster)
    devices = {device.label: device for device in cluster.devices}
    own: dict[str, list[Plan]] = {model.name: [] for model in app.models}
    for field, one in schedule.entries():
        for number, replica in enumerate(one.replicas):
            plan = plans[replica.source]
            own[one.model].append(plan)
            places = [devices[label] for label in replica.devices]
            _check_memory(f"{field}.replicas[{number}]", one.model, plan, places, cluster)
    found = {}
    for model in app.models:
        folder = _folder(model.name, folders.get(model.name, Path(model.model)), own[model.name])
        spec = load_model_dir(folder)
        contexts = [] if model.max_model_len is None else [model.max_model_len]
        for plan in own[model.name]:
            check_model(plan, folder, spec)
            if plan.is_split:
                raise SpecError(
                    f"plan of model '{model.name}': found stages of their own for prefill and "
                    "decode, expected stages that do both"
                )
            contexts.append(max_model_len(plan, EngineOptions(), spec.max_positions))
        tokenizer = load_tokenizer(folder)
        if tokenizer is None:
            raise SpecError(
                f"{folder}: found no tokenizer, expected one for the texts of prompts: "
                f"{missing_tokenizer(folder)}"
            )
        found[model.name] = RunModel(
            name=model.name, folder=folder, tokenizer=tokenizer, context=min(contexts)
        )
    return found, plans


def _folder(name: str, given: Path, plans: Sequence[Plan]) -> Path:
    sources = [given, *(Path(plan.model.source) for plan in plans if plan.model.source)]
    for path in sources:
        if path.is_dir() or find_gguf(path) is not None:
            return absolute_model_path(path)
    raise SpecError(
        f"model '{name}': found no folder of weights in {', '.join(map(str, sources))}, expected "
        f"--model {name}=DIR"
    )


def _check_memory(
    where: str, model: str, plan: Plan, devices: Sequence[Device], cluster: Cluster
) -> None:
    for stage, estimate in zip(plan.stages, plan.estimate.stages, strict=True):
        device = devices[stage.device]
        has = device.memory_bytes or catalog.device(device.type, cluster).memory_bytes
        if estimate.memory.total > has:
            raise CapacityError(
                f"schedule: field '{where}': model '{model}' needs "
                f"{format_bytes(estimate.memory.total)} on {device.label}, which has "
                f"{format_bytes(has)}; plan again for this cluster"
            )


def check_prompts(
    app: Application,
    items: Mapping[str, Sequence[Item]],
    models: Mapping[str, RunModel],
    *,
    refuses_overflow: bool,
) -> None:
    """Check that all items have texts and that prompts fit their models, before any is asked.

    Args:
        app: the application.
        items: of every node with a request file.
        models: by name.
        refuses_overflow: whether prompts that do not fit, and answers that may be too long for the
            next prompt, are errors; otherwise such requests fail one by one.

    Raises:
        SpecError: names the line and the node; or the nodes whose answers may not fit.
    """
    for found in items.values():
        for item in found:
            if not item.prompts:
                raise SpecError(
                    f"{item.where}: field 'prompt': found nothing, expected a text: lengths alone "
                    "are for planning"
                )
    if not refuses_overflow:
        return
    for name in app.order:
        node = app.node(name)
        if name in items:
            _check_first_prompts(app, node, items[name], models[node.model])
    reached = _reached(app, items)
    for name in app.order:
        _check_answers(app, app.node(name), items, models, reached)


def _check_first_prompts(
    app: Application, node: AppNode, items: Sequence[Item], model: RunModel
) -> None:
    """Check prompts that need no answer, exactly; those of later chunks without the answer."""
    for item in items:
        for template in node.templates:
            fixed = fixed_text(template)
            has_prompt = PROMPT in template_fields(template)
            texts = item.prompts if app.is_chain(node.name) else (JOINT.join(item.prompts),)
            for text in texts:
                tokens = len(model.tokenizer.encode(fixed + text * has_prompt))
                if not 0 < tokens < model.context:
                    raise SpecError(misfit(item.where, node.name, tokens, model))


def _check_answers(
    app: Application,
    node: AppNode,
    items: Mapping[str, Sequence[Item]],
    models: Mapping[str, RunModel],
    reached: Mapping[str, set[RequestId]],
) -> None:
    """Check the longest prompt of a node that reads answers, by the limits of its producers.

    Only producers that one item reaches count together.
    """
    readers = [*app.producers(node.name), *([node.name] if app.is_chain(node.name) else [])]
    if not readers:
        return
    model = models[node.model]
    limits = {name: _longest_answer(app, name, models) for name in readers}
    prompt = _prompt_tokens(app, node.name, items, model)
    together = {
        tuple(name for name in readers if item in reached[name]) for item in reached[node.name]
    }
    longest, limits = max(
        (
            (_longest_prompt(template, found, prompt, model), found)
            for found in ({name: limits[name] for name in names} for names in together)
            for template in node.templates
        ),
        key=itemgetter(0),
        default=(0, limits),
    )
    if longest >= model.context:
        answers = ", ".join(f"{name} {limit}" for name, limit in limits.items())
        raise SpecError(
            f"node '{node.name}': prompts may have {longest} tokens with answers of up to "
            f"({answers}), expected fewer than {model.context}, the context of model "
            f"'{model.name}' under its plans; lower max_new_tokens of these nodes, plan for longer "
            "sequences, or pass --overflow skip"
        )


def _reached(app: Application, items: Mapping[str, Sequence[Item]]) -> dict[str, set[RequestId]]:
    """Return the items about which each node may be asked, whatever the answers are."""
    found: dict[str, set[RequestId]] = {}
    for name in app.order:
        own = {item.id for item in items.get(name, ())}
        found[name] = own.union(*(found[producer] for producer in app.producers(name)))
    return found


def _longest_answer(app: Application, name: str, models: Mapping[str, RunModel]) -> int:
    """Return the most tokens of a node's answer to one item."""
    node = app.node(name)
    context = models[node.model].context
    limit = min(node.max_new_tokens or context, context)
    if app.is_chain(name):
        return limit
    producers = len(app.producers(name)) if node.join == "each" else 1
    return limit * producers * len(node.templates)


def _longest_prompt(template: str, limits: Mapping[str, int], prompt: int, model: RunModel) -> int:
    values = {**limits, PROMPT: prompt, ANSWER: max(limits.values(), default=0)}
    fixed = len(model.tokenizer.encode(fixed_text(template)))
    return fixed + sum(values.get(name, 0) for name in template_fields(template))


def _prompt_tokens(
    app: Application, name: str, items: Mapping[str, Sequence[Item]], model: RunModel
) -> int:
    """Return the tokens of the longest text that ``{prompt}`` stands for at a node."""
    texts = (
        text
        for source in _sources(app, name)
        for item in items[source]
        for text in (item.prompts if app.is_chain(name) else (JOINT.join(item.prompts),))
    )
    return len(model.tokenizer.encode(max(texts, key=len, default="")))


def _sources(app: Application, name: str) -> Iterator[str]:
    """Yield the nodes with request files from which answers reach a node."""
    producers = app.producers(name)
    if not producers:
        yield name
    for producer in producers:
        yield from _sources(app, producer)


def misfit(where: str, node: str, tokens: int, model: RunModel) -> str:
    """Return the message of a prompt that leaves no room for an answer."""
    return (
        f"{where}: node '{node}': found a prompt of {tokens} tokens, expected 1 to "
        f"{model.context - 1}: the context of model '{model.name}' under its plans is "
        f"{model.context}"
    )
