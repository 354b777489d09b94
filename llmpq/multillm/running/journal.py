"""Journal: the answers of a run, one JSON line each, written when a request is finished.

It is the result of a run and what ``--resume`` goes on from. A line is ``{"node", "id", "part",
"token_ids", "text", "finish_reason"}``. The folder also has ``run.json``, which says what the
answers are of.

Answers as files of OpenAI's Batch API: one file a node, one line an item.

A line is ``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``; its
body is a completion with one choice for each of the node's requests of the item.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from llmpq.dist.io.prompts import RequestId, request_id, token_ids_of
from llmpq.dist.io.results import LineWriter, read_lines
from llmpq.errors import SpecError
from llmpq.multillm.graph import Application
from llmpq.multillm.running.dataflow import RequestKey
from llmpq.multillm.schedule import application_digest
from llmpq.multillm.workload import Item
from llmpq.spec.fields import (
    SCHEMA,
    Fields,
    Rule,
    digest_of,
    dump_json,
    from_json,
    read_json,
    to_json,
    write_text,
)

ANSWERS, RUN = "answers.jsonl", "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAnswer:
    """Tokens and text of one finished request, a line of the journal.

    Attributes:
        token_ids: the new tokens, a stop token included.
        text: the same as text.
        finish_reason: ``stop`` by a stop token, ``length`` by the limit.
    """

    key: RequestKey
    token_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What a folder of answers is of; answers of something else are not mixed with them.

    Attributes:
        application: its name.
        application_digest: of the graph.
        requests_digest: of all requests.
        sampling_digest: of how tokens are chosen.
    """

    SCHEMA: ClassVar[int] = SCHEMA

    application: str
    application_digest: str
    requests_digest: str
    sampling_digest: Annotated[str, Rule(optional=True)] = ""


def identity_of(
    app: Application, items: Mapping[str, Sequence[Item]], sampling: object
) -> RunIdentity:
    """Return the identity of a run; ``sampling`` is JSON."""
    requests = {
        name: [[one.id, one.prompts, one.max_new_tokens] for one in found]
        for name, found in items.items()
    }
    return RunIdentity(
        application=app.name,
        application_digest=application_digest(app),
        requests_digest=digest_of(requests),
        sampling_digest=digest_of(sampling),
    )


class AnswerJournal(LineWriter):
    """Appends answers to the file of a folder.

    Args:
        folder: new, or with ``resume`` that of an earlier run of the same requests.
        identity: of the run.
        resume: whether the folder may hold answers.

    Attributes:
        answers: those of earlier runs.

    Raises:
        SpecError: the folder holds answers and is not to be resumed, or answers of other requests.
    """

    def __init__(self, folder: Path, identity: RunIdentity, *, resume: bool) -> None:
        path, run = folder / ANSWERS, folder / RUN
        if run.exists():
            _check_resumed(run, identity, resume=resume)
        found = read_answers(path) if path.exists() else []
        if found and not run.exists():
            raise SpecError(f"{path}: found answers without {RUN}, expected a folder of a run")
        self.answers = {answer.key: answer for answer in found}
        write_text(run, dump_json(to_json(identity)))
        super().__init__(path, self.answers)

    def write(self, answer: RequestAnswer) -> None:
        """Append one answer, as :meth:`LineWriter.write_line`."""
        value = asdict(answer)
        key = value.pop("key")
        line = {"node": key["node"], "id": key["item"], "part": key["part"], **value}
        self.write_line(answer.key, line)


def read_answers(path: Path) -> list[RequestAnswer]:
    """Read the answers of a run; a last line that was cut short is left out."""
    return [_answer(fields) for fields in read_lines(path)]


def _check_resumed(run: Path, identity: RunIdentity, *, resume: bool) -> None:
    if not resume:
        raise SpecError(
            f"{run.parent}: found the answers of a run, expected a new folder, or --resume to "
            "continue it"
        )
    before = from_json(RunIdentity, Fields(read_json(run), str(run)))
    for name, was in to_json(before).items():
        now = to_json(identity)[name]
        if was != now:
            raise SpecError(
                f"{run}: field '{name}': found {was!r}, expected {now!r}: the folder has answers "
                "of other requests; take another folder"
            )


def _answer(fields: Fields) -> RequestAnswer:
    key = RequestKey(fields.text("node"), request_id(fields), fields.integer("part"))
    answer = RequestAnswer(
        key=key,
        token_ids=token_ids_of(fields, "token_ids"),
        text=str(fields.take("text")),
        finish_reason=cast(
            'Literal["stop", "length"]', fields.text("finish_reason", ("stop", "length"))
        ),
    )
    fields.done()
    return answer


def write_batch_files(
    folder: Path, app: Application, errors: Mapping[RequestKey, str]
) -> tuple[Path, ...]:
    """Write ``NODE.batch.jsonl`` for every node from the answers of a run.

    Args:
        folder: of the run.
        app: the application.
        errors: requests that could not be asked, and why.

    Returns:
        The files.
    """
    found: dict[str, defaultdict[RequestId, list[RequestAnswer]]] = {
        node.name: defaultdict(list) for node in app.nodes
    }
    for answer in read_answers(folder / ANSWERS):
        found[answer.key.node][answer.key.item].append(answer)
    failed: dict[tuple[str, RequestId], str] = {}
    for key, text in errors.items():
        failed.setdefault((key.node, key.item), text)
        found[key.node][key.item]
    paths = []
    for node, items in found.items():
        path = folder / f"{node}.batch.jsonl"
        lines = [
            _line(app, node, id, answers, failed.get((node, id))) for id, answers in items.items()
        ]
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))
        paths.append(path)
    return tuple(paths)


def _line(
    app: Application, node: str, id: RequestId, answers: Sequence[RequestAnswer], error: str | None
) -> dict[str, Any]:
    name = digest_of([node, id])
    if error is None:
        body: dict[str, Any] = {
            "id": f"cmpl-{name}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": app.node(node).model,
            "choices": [
                {
                    "index": answer.key.part,
                    "text": answer.text,
                    "logprobs": None,
                    "finish_reason": answer.finish_reason,
                }
                for answer in sorted(answers, key=lambda one: one.key.part)
            ],
        }
    else:
        body = {"error": {"message": error, "type": "invalid_request_error", "param": "prompt"}}
    return {
        "id": f"batch_req_{name}",
        "custom_id": str(id),
        "response": {
            "status_code": 200 if error is None else 400,
            "request_id": name,
            "body": body,
        },
        "error": body.get("error"),
    }
