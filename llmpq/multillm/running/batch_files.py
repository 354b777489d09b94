"""Answers as files of OpenAI's Batch API: one file a node, one line an item.

A line is ``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``; its
body is a completion with one choice for each of the node's requests of the item.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmpq.dist.io.prompts import RequestId
from llmpq.multillm.graph import Application
from llmpq.multillm.running.dataflow import RequestKey
from llmpq.multillm.running.journal import ANSWERS, Answer, read_answers
from llmpq.spec.fields import digest_of, write_text


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
    found: dict[str, defaultdict[RequestId, list[Answer]]] = {
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
    app: Application, node: str, id: RequestId, answers: Sequence[Answer], error: str | None
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
