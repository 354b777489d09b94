"""Session: one batch at a time for a caller without an event loop, to its end, abort or failure."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator

import pytest
from helpers.clocks import PATIENCE_S
from helpers.processes import wait_for
from helpers.ranks import make_plan

from llmpq.dist import Prompt
from llmpq.dist.async_engine import NewToken, Session
from llmpq.dist.io.control_channel import ControlChannel, Message
from llmpq.dist.io.results import Result
from llmpq.dist.launch import ranks as module
from llmpq.dist.transport.endpoint import Endpoint
from llmpq.errors import SpecError, StageError

ENDLESS, BAD, DEADLY = 90, 91, 92
"""First tokens of prompts that are not answered, cannot be served, or end the ranks."""


class Ranks:
    """Plays the ranks: answers a prompt with its own tokens, the last prompt first.

    Attributes:
        messages: ids of the batches and aborts that it received.
        has_ended: set once it has ended.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[str, int]] = []
        self.has_ended = threading.Event()

    def launch(self, job, *rest) -> None:
        check: Callable[[], None] = rest[-1]
        try:
            with Endpoint(path=str(job.prompts)).connect(PATIENCE_S) as sock:
                sock.settimeout(None)
                channel = ControlChannel(sock)
                channel.send("ready", max_model_len=40, vocab_size=100, start_s={})
                with contextlib.suppress(EOFError):
                    while True:
                        message = channel.receive(0.01)
                        check()
                        if message is not None:
                            self.messages.append((message["kind"], message["id"]))
                            if message["kind"] == "batch":
                                self.answer(channel, message)
        finally:
            self.has_ended.set()

    def answer(self, channel: ControlChannel, batch: Message) -> None:
        def send(**fields: object) -> None:
            channel.send("batch", id=batch["id"], **fields)

        prompts = [(line["id"], line["prompt_token_ids"]) for line in batch["prompts"]]
        if any(tokens[0] == BAD for _, tokens in prompts):
            send(error="prompt: found 91")
            return
        for id, tokens in reversed(prompts):
            if batch["streams"]:
                send(tokens=[[id, token, str(token)] for token in tokens])
            if tokens[0] == DEADLY:
                raise StageError("stage 0: was ended by SIGKILL")
            if tokens[0] == ENDLESS:
                return
            answer = {"id": id, "token_ids": tokens, "text": "", "finish_reason": "length"}
            send(result=answer)
        send(is_done=True)


@pytest.fixture
def ranks(monkeypatch) -> Ranks:
    found = Ranks()
    monkeypatch.setattr(module, "launch", found.launch)
    return found


@pytest.fixture
def session(ranks, tiny_model) -> Iterator[Session]:
    with Session(make_plan((0, 3)), tiny_model("llama", seed=1)) as found:
        yield found


def prompts(*first: int) -> list[Prompt]:
    return [Prompt(id=n, where="", token_ids=(token, 5)) for n, token in enumerate(first)]


def test_results_have_the_order_of_the_prompts_and_follow_their_tokens(session):
    assert [result.token_ids for result in session.generate(prompts(1, 2, 3))] == [
        (1, 5), (2, 5), (3, 5),
    ]  # fmt: skip
    found = list(session.run(prompts(1, 2), streams=True))
    tokens = [(item.id, item.token_id) for item in found if isinstance(item, NewToken)]
    assert tokens == [(1, 2), (1, 5), (0, 1), (0, 5)]
    assert [type(item) for item in found] == [NewToken, NewToken, Result] * 2


def test_a_batch_is_refused_alone(session):
    with pytest.raises(SpecError, match="found 91"):
        session.generate(prompts(1, BAD))
    assert len(session.generate(prompts(1, 2))) == 2


def test_a_later_batch_ends_an_earlier_one(session, ranks):
    first = session.run(prompts(1, ENDLESS), streams=True)
    next(first)
    assert session.generate(prompts(1))[0].token_ids == (1, 5)
    with pytest.raises(StageError, match="ended by a later one"):
        next(first)
    assert ranks.messages == [("batch", 0), ("abort", 0), ("batch", 1)]


def test_a_batch_that_is_left_is_aborted(session, ranks):
    with contextlib.closing(session.run(prompts(ENDLESS), streams=True)) as answers:
        next(answers)
    wait_for(lambda: ranks.messages, lambda found: found == [("batch", 0), ("abort", 0)])


def test_a_death_fails_the_batch_and_all_later_ones(session):
    with pytest.raises(StageError, match="SIGKILL"):
        session.generate(prompts(1, DEADLY))
    for _ in range(2):
        with pytest.raises(StageError, match=r"start another one; .*SIGKILL"):
            session.generate(prompts(1))


def test_a_closed_session_answers_nothing_and_closes_again(session, ranks):
    session.close()
    assert ranks.has_ended.is_set()
    with pytest.raises(StageError, match="is closed"):
        session.generate(prompts(1))
    session.close()


def test_a_session_without_a_user_ends_its_ranks(ranks, tiny_model):
    session = Session(make_plan((0, 3)), tiny_model("llama", seed=1))
    session.generate(prompts(1))
    del session
    gc.collect()
    assert ranks.has_ended.wait(PATIENCE_S)
