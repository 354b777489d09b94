"""The reproductions of the batching papers, in small."""

import random

import pytest

from llmpq.spec.workload import truncated_normal
from reproduce.exegpt import TASKS, law
from reproduce.multibin import BATCH, LONGEST_S, SHORTEST_S, Queue, _uniform, uniform_throughput

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("bins", [1, 2, 3, 5, 8, 13, 21, 32])
def test_the_queue_serves_what_the_theorem_promises(bins):
    # One bin is the noisiest: 2,500 batches whose seconds deviate by 11 % err by 0.2 %.
    rate, _ = _uniform(bins).play(float("inf"), seed=1, requests=20_000)
    assert rate == pytest.approx(uniform_throughput(SHORTEST_S, LONGEST_S, BATCH, bins), rel=0.005)


def test_servers_serve_beside_each_other():
    one = Queue(draw=lambda _: 2.0, boundaries=(), servers=1, batch=2)
    two = Queue(draw=lambda _: 2.0, boundaries=(), servers=2, batch=2)
    assert one.play(float("inf"), seed=0, requests=8) == (1.0, 5.0)
    assert two.play(float("inf"), seed=0, requests=8) == (2.0, 3.0)


def test_mistakes_go_to_neighbours_only():
    queue = Queue(draw=lambda _: 0.0, boundaries=(1.0, 2.0, 3.0), error=1.0)
    chance = random.Random(0)
    assert {queue._bin_of(0.5, chance) for _ in range(20)} == {1}
    assert {queue._bin_of(1.5, chance) for _ in range(40)} == {0, 2}


def test_lengths_shift_with_their_mean():
    _, answer = TASKS["S"]
    assert law(answer, 1.0, 1.0) == truncated_normal(*answer)
    assert law(answer, 1.3, 1.0).mean > 1.2 * law(answer, 1.0, 1.0).mean
