"""Chunked prefill: token budget, completion, memory release, preemption of the newest sequence."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmpq.batching.kv_blocks import BlockPool
from llmpq.batching.policies.chunked import Chunk, ChunkedScheduler, ChunkLimits
from llmpq.errors import CapacityError, LlmpqError


def _limits(**given_):
    return ChunkLimits(**{"tokens": 8, "sequences": 4, "blocks": 100, "block_tokens": 4, **given_})


def _play(scheduler, wanted, ahead=1):
    """Run to the end; return the iterations and the tokens each request made."""
    iterations, made, out, ended = [], dict.fromkeys(range(len(wanted)), 0), [], []
    for number, (prompt, new) in enumerate(wanted):
        scheduler.arrive(number, prompt, new)
    while len(ended) < len(wanted):
        chunks = scheduler.schedule() if len(out) < ahead else ()
        if chunks:
            iterations.append(chunks)
            out.append(chunks)
        else:
            completed = out.pop(0)
            for chunk in completed:
                made[chunk.request] += chunk.makes_token
            ended += scheduler.complete(completed)
    assert sorted(ended) == list(range(len(wanted)))
    return iterations, made


def test_long_prompt_is_chunked_and_mixed_with_decode_steps():
    iterations, _ = _play(ChunkedScheduler(_limits()), [(3, 4), (14, 2)])
    assert iterations[0] == (Chunk(0, 0, 3, True), Chunk(1, 0, 5, False))
    assert iterations[1] == (Chunk(0, 3, 1, True), Chunk(1, 5, 7, False))
    assert iterations[2] == (Chunk(0, 4, 1, True), Chunk(1, 12, 2, True))
    assert iterations[3] == (Chunk(0, 5, 1, True), Chunk(1, 14, 1, True))


def test_newest_sequence_is_preempted_and_resumes_first():
    scheduler = ChunkedScheduler(_limits(blocks=6, tokens=64))
    iterations, _ = _play(scheduler, [(8, 12), (8, 8), (4, 1)])
    assert scheduler.preemptions > 0
    admitted = [chunk.request for chunks in iterations for chunk in chunks if chunk.tokens > 1]
    assert admitted.index(2) > admitted.index(1)


def test_preempted_sequence_reuses_blocks_not_overwritten():
    pool = BlockPool(4)
    mine = pool.allocate(2)
    pool.set_content(mine[0], (7, 0))
    pool.set_content(mine[1], (7, 1))
    pool.release(mine)
    assert pool.cached(7, 5) == mine
    other = pool.allocate(3)  # the two never used, and the last one of the freed
    assert mine[1] in other
    assert pool.cached(7, 5) == [mine[0]]
    assert pool.allocate(0, [mine[0]]) == [mine[0]]
    with pytest.raises(LlmpqError, match="1 wanted, 0 free"):
        pool.allocate(1)


def test_block_has_one_owner():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(LlmpqError, match="not allocated"):
        pool.release(blocks)


def test_request_that_never_fits_raises_an_error():
    with pytest.raises(CapacityError, match="more than the 2 KV blocks"):
        ChunkedScheduler(_limits(blocks=2)).arrive(0, 5, 4)
    with pytest.raises(CapacityError, match="at least 1"):
        BlockPool(0)


@given(
    wanted=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=12),
    tokens=st.integers(1, 24),
    sequences=st.integers(1, 6),
    blocks=st.integers(8, 20),
    ahead=st.integers(1, 2),
)
@example(  # the youngest gives way while its last token is being made
    wanted=[(1, 1)] * 4 + [(1, 5), (1, 5), (12, 2), (1, 1)],
    tokens=6,
    sequences=4,
    blocks=8,
    ahead=2,
)
def test_every_request_gets_its_tokens_within_the_limits(wanted, tokens, sequences, blocks, ahead):
    limits = _limits(tokens=tokens, sequences=sequences, blocks=blocks)
    scheduler = ChunkedScheduler(limits)
    iterations, made = _play(scheduler, wanted, ahead)
    assert made == {number: new for number, (_, new) in enumerate(wanted)}
    for chunks in iterations:
        assert sum(chunk.tokens for chunk in chunks) <= tokens
        assert len(chunks) <= sequences
        assert len({chunk.request for chunk in chunks}) == len(chunks)
    assert scheduler._pool.free == blocks
    assert scheduler.running == 0
