"""llmpq chat: talk to a model on this host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llmpq.cli.common import make_parser, require, run_command
from llmpq.cli.front.answers import LoadedModel, add_answer_options, sampling_of
from llmpq.cli.front.host_plan import say_plan
from llmpq.cli.front.plan_options import add_host_plan_options
from llmpq.errors import SpecError
from llmpq.options.declare import add_options
from llmpq.options.run import AnswerOptions

if TYPE_CHECKING:
    from llmpq.server.text.tokenizer import ChatEncoder

END = ("/exit", "/quit", "/bye")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(_parser(), _run, argv)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "llmpq chat",
        "Talk to a model on this host. Ctrl-C ends an answer; Ctrl-D or /exit ends the talk.",
    )
    add_options(parser, AnswerOptions, "model", "system")
    add_answer_options(parser)
    add_host_plan_options(parser.add_argument_group("plan"))
    return parser


def _run(options: argparse.Namespace) -> int:
    if options.json:
        raise SpecError("--json: found with llmpq chat, expected llmpq run")
    sampling_of(options, 1)
    with LoadedModel(options.model, options, "llmpq chat") as model:
        require("torch", "transformers", "safetensors", "jinja2")
        say_plan(model.found)
        model.load()
        Conversation(model, options).run(_lines())
    return 0


def _lines() -> Iterator[str]:
    """Yield what the user types, or the lines of standard input."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lines can be edited
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")
    print()


class Conversation:
    """The messages so far, which fit into the context of the plan.

    Args:
        model: answers.
        options: of the command.
    """

    def __init__(self, model: LoadedModel, options: argparse.Namespace) -> None:
        self._model = model
        self._options = options
        self._first = (
            [] if options.system is None else [{"role": "system", "content": options.system}]
        )
        self._messages: list[dict[str, str]] = []
        self._encoder = self._find_encoder()

    def run(self, lines: Iterator[str]) -> None:
        """Answer every line."""
        for line in lines:
            if line.strip() in END:
                return
            if line.strip():
                self._answer(line)

    def _answer(self, text: str) -> None:
        prompt: str | tuple[int, ...] = text
        if self._encoder is not None:
            self._messages.append({"role": "user", "content": text})
            prompt = self._fitting_prompt(self._encoder)
            if not prompt:
                return
        sampling = sampling_of(self._options, self._model.found.plan.workload.new_tokens)
        try:
            answer = self._model.answer(prompt, sampling)
        except SpecError as error:
            print(f"llmpq chat: {error}", file=sys.stderr)
            del self._messages[-1:]
            return
        if self._encoder is not None:
            self._messages.append({"role": "assistant", "content": answer.text})

    def _fitting_prompt(self, encoder: ChatEncoder) -> tuple[int, ...]:
        """Return the tokens of the conversation; forget its beginning where it is too long."""
        work = self._model.found.plan.workload
        most = work.max_context_tokens - work.new_tokens
        while True:
            tokens = encoder.encode([*self._first, *self._messages], {})
            if len(tokens) <= most:
                return tokens
            if len(self._messages) == 1:
                print(
                    f"llmpq chat: found {len(tokens)} tokens, expected at most "
                    f"{most}; --max_model_len allows more where they fit",
                    file=sys.stderr,
                )
                self._messages.clear()
                return ()
            del self._messages[:2]
            print("llmpq chat: the first message and its answer are forgotten", file=sys.stderr)

    def _find_encoder(self) -> ChatEncoder | None:
        from llmpq.server.text.tokenizer import ChatEncoder

        try:
            return ChatEncoder(self._model.found.model.path)
        except SpecError as error:
            if "chat template" not in str(error):
                raise
            print(
                "llmpq chat: this model has no chat template: it continues each text by itself",
                file=sys.stderr,
            )
            return None


if __name__ == "__main__":
    sys.exit(main())
