"""Turns between requests of many answers and requests of one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmpq.batching.block_scheduler import BlockScheduler
from llmpq.batching.engine_step import EngineLimits, EngineRequest
from llmpq.batching.queue_order import FairTurns, queue_order


def scheduler(**given_) -> BlockScheduler:
    values = {"token_budget": 8, "max_sequences": 8, "num_blocks": 64, "block_size": 4}
    return BlockScheduler(EngineLimits(**{**values, **given_}), queue_order("fcfs"))


def add(engine: BlockScheduler, number: int, group: str | None = None, prompt: int = 4) -> None:
    engine.add(
        EngineRequest(
            request=number,
            token_ids=None,
            prompt_tokens=prompt,
            max_tokens=2,
            arrival_s=0.0,
            group=group,
        )
    )


def admitted(engine: BlockScheduler) -> list[int]:
    """Return the requests in the order of their first step, until all are finished."""
    order: list[int] = []
    while (step := engine.schedule(0.0)) is not None:
        order += [chunk.request for chunk in step.chunks if chunk.request not in order]
        done = [chunk.request for chunk in step.chunks if chunk.makes_token]
        engine.complete(step.number, dict.fromkeys(done, 5), done)
    assert engine.is_idle
    return order


def test_a_later_request_waits_for_one_answer_of_many():
    engine = scheduler(token_budget=4)
    for number in range(50):
        add(engine, number, "many")
    step = engine.schedule(0.0)
    assert step is not None
    add(engine, 100)
    add(engine, 101, "two")
    add(engine, 102, "two")
    engine.complete(step.number, {0: 5}, [0])
    order = admitted(engine)
    assert order[:2] == [100, 101]
    assert order.index(102) <= 3
    assert order[4:] == list(range(2, 50))


def test_requests_of_one_answer_keep_the_order_of_arrival():
    engine = scheduler()
    for number in range(20):
        add(engine, number, f"request {number}" if number % 2 else None)
    assert admitted(engine) == list(range(20))


def test_further_answers_leave_room_for_other_requests():
    engine = scheduler(token_budget=64, max_sequences=16, num_blocks=32)
    for number in range(40):
        add(engine, number, "many")
    first = engine.schedule(0.0)
    assert first is not None
    assert len(first.chunks) == 14  # of 16 sequences
    add(engine, 100)
    engine.complete(first.number, dict.fromkeys(range(14), 5), [])
    second = engine.schedule(0.0)
    assert second is not None
    assert second.chunks[-1].request == 100


def test_further_answers_leave_blocks_for_other_requests():
    engine = scheduler(token_budget=64, max_sequences=64, num_blocks=16, watermark=0.0)
    for number in range(20):
        add(engine, number, "many")
    step = engine.schedule(0.0)
    assert step is not None
    assert len(step.chunks) == 14
    assert engine.free_blocks == 2


def test_a_request_alone_may_take_all_blocks_for_one_answer():
    engine = scheduler(token_budget=64, num_blocks=8)
    add(engine, 0, "two", prompt=30)
    add(engine, 1, "two", prompt=30)
    assert admitted(engine) == [0, 1]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_the_turns_of_a_request_differ_and_never_fall_behind(events):
    turns, waiting, last = FairTurns(), [], {}
    for group, adds in events:
        if adds:
            turn = turns.add(group)
            assert turn > last.get(group, -1) or not any(item[0] == group for item in waiting)
            last[group] = turn
            waiting.append((group, turn))
        elif waiting:
            waiting.sort(key=lambda item: item[1])
            found, turn = waiting.pop(0)
            turns.start(found, turn)
            turns.stop(found)
            turns.remove(found)
            if not any(item[0] == found for item in waiting):
                last.pop(found, None)
            assert turns.add("new") == turn
            turns.remove("new")
