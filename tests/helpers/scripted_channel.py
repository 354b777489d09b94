"""A control channel that plays messages at given calls of the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import chain

from llmpq.dist.io.control_channel import AddedRequest, added_to_json, output_from_json
from llmpq.dist.io.generation import GenerationRequest, TokenOutput


@dataclass
class Script:
    """A control channel that plays messages at given calls, and closes when all is answered."""

    messages: dict[int, list[dict]] = field(default_factory=dict)
    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    scores: dict[str, list[tuple]] = field(default_factory=dict)  # of prompts, as they came
    refused: dict[str, str] = field(default_factory=dict)
    stats: dict = field(default_factory=dict)
    calls: int = 0
    due: deque = field(default_factory=deque)

    def add(self, call: int, request: GenerationRequest, **options) -> None:
        if request.sampling.prompt_logprobs is not None:
            options.setdefault("needs_prompt_logprobs", True)
            self.scores[request.id] = []
        fields = added_to_json(AddedRequest(request=request, **options))
        self.messages.setdefault(call, []).append({"kind": "add"} | fields)

    def abort(self, call: int, id: str) -> None:
        self.messages.setdefault(call, []).append({"kind": "abort", "id": id})

    def send(self, kind: str, **fields) -> None:
        if kind == "tokens":
            for item in fields["outputs"]:
                name, output = output_from_json(item)
                own = self.outputs.setdefault(name, [])
                if output.prompt_logprobs is not None:
                    self.scores[name].append(output.prompt_logprobs)
                    continue
                if not own and name in self.scores:
                    whole = chain([None], *self.scores[name])
                    output = replace(output, prompt_logprobs=tuple(whole))
                own.append(output)
        elif kind == "refused":
            self.refused[fields["id"]] = fields["message"]
        elif kind == "stats":
            self.stats = fields["stats"]

    def receive(self, timeout_s: float | None = None) -> dict | None:
        if self.due:
            return self.due.popleft()
        self.calls += 1
        if timeout_s:  # the engine is idle
            left = [call for call in self.messages if call >= self.calls]
            if not left:
                raise EOFError
            self.calls = min(left)
        self.due.extend(self.messages.pop(self.calls, ()))
        return self.due.popleft() if self.due else None

    def tokens(self, id: str) -> list[int]:
        return [token for output in self.outputs.get(id, ()) for token in output.token_ids]
