"""The latency of multi-bin batching with as many servers as batches (Lemma 5.1)."""

import pytest

from reproduce.multibin import BATCH, LONGEST_S, SHORTEST_S, Queue, uniform_boundaries
from reproduce.multibin import uniform_service_s as service_s

SERVERS = 500


@pytest.mark.parametrize("bins", [1, 2, 4, 8])
@pytest.mark.parametrize("rate", [0.2, 2.0])
def test_without_waiting_for_a_server_latency_is_that_of_lemma_5_1(bins, rate):
    queue = Queue(
        draw=lambda chance: chance.uniform(SHORTEST_S, LONGEST_S),
        boundaries=uniform_boundaries(SHORTEST_S, LONGEST_S, bins),
        servers=SERVERS,
    )
    _, latency_s = queue.play(rate, seed=1, requests=40_000)
    # A bin fills at rate / k: of B requests the i-th waits for B - i more.
    forming_s = (BATCH - 1) * bins / (2 * rate)
    expected_s = forming_s + service_s(SHORTEST_S, LONGEST_S, BATCH, bins)
    assert latency_s == pytest.approx(expected_s, rel=0.01)
