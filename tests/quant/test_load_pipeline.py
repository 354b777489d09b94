"""The pipeline keeps order and its budget, and ends at once with the first error of any thread."""

import threading
from functools import partial

import pytest

from llmpq.quant.loading.pipeline import Budget, Cancelled, run_pipeline

LIMIT_S = 30.0


def numbers(count, budget, held=0):
    for number in range(count):
        budget.take(held)
        yield partial(int, number)


def test_pieces_arrive_in_order():
    placed = []
    budget = Budget(10)
    run_pipeline(numbers(100, budget), lambda n, _: n * n, placed.append, budget=budget)
    assert placed == [n * n for n in range(100)]


def test_never_more_under_way_than_the_budget():
    budget = Budget(10)

    def place(_):
        budget.give(3)

    run_pipeline(numbers(200, budget, held=3), lambda n, _: n, place, budget=budget)
    assert 3 <= budget.high_water_bytes <= 9


def test_the_three_work_at_the_same_time():
    """Reading piece 2, working on 1 and placing 0 each wait for the other two to have begun."""
    together = threading.Barrier(3, timeout=LIMIT_S)
    budget = Budget(10)

    def read(number):
        if number == 2:
            together.wait()
        return number

    def work(number, _):
        if number == 1:
            together.wait()
        return number

    def place(number):
        if number == 0:
            together.wait()

    pieces = (partial(read, number) for number in range(3))
    run_pipeline(pieces, work, place, budget=budget)


def test_two_readings_are_under_way_and_arrive_in_order():
    together = threading.Barrier(2, timeout=LIMIT_S)
    second_is_read = threading.Event()

    def read(number):
        together.wait()  # 0 waits for 1
        if number == 0:
            assert second_is_read.wait(LIMIT_S)
        second_is_read.set()
        return number

    placed = []
    pieces = (partial(read, number) for number in range(2))
    run_pipeline(pieces, lambda n, _: n, placed.append, budget=Budget(1))
    assert placed == [0, 1]


def test_work_is_told_whether_another_piece_is_waiting():
    """Reading 0 ends once 1 has been read, as its thread began 2; behind 2 nothing is left."""
    third_has_begun = threading.Event()

    def read(number):
        if number == 0:
            assert third_has_begun.wait(LIMIT_S)
        if number == 2:
            third_has_begun.set()
        return number

    told = {}
    pieces = (partial(read, number) for number in range(3))
    run_pipeline(pieces, told.__setitem__, lambda _: None, budget=Budget(1))
    assert not told[0]
    assert told[2]


def test_a_piece_larger_than_the_budget_goes_alone():
    budget = Budget(10)
    sizes = [4, 25, 4, 25]

    def read():
        for size in sizes:
            budget.take(size)
            yield partial(int, size)

    run_pipeline(read(), lambda size, _: size, budget.give, budget=budget)
    assert budget.high_water_bytes == 25


@pytest.mark.parametrize("where", ["begin", "read", "work", "place"])
def test_the_first_error_comes_out_and_every_thread_ends(where):
    before = threading.active_count()
    budget = Budget(2)

    def fail(stage, number):
        if stage == where and number == 3:
            raise ValueError(f"{stage} failed")
        return number

    def read():
        for number in range(1000):
            budget.take(1)
            yield partial(fail, "read", fail("begin", number))

    def place(number):
        fail("place", number)
        budget.give(1)

    with pytest.raises(ValueError, match=f"{where} failed"):
        run_pipeline(read(), lambda n, _: fail("work", n), place, budget=budget)
    assert threading.active_count() == before


def test_whoever_waits_for_a_closed_budget_is_told():
    budget = Budget(1)
    budget.take(1)
    budget.close()
    with pytest.raises(Cancelled):
        budget.take(1)
