"""Block allocator: every block is free or used, and content is found only by equal tokens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmpq.batching.blocks import BlockAllocator, next_key, root_key
from llmpq.errors import CapacityError, LlmpqError


def test_freed_block_is_found_until_it_is_allocated_again():
    blocks = BlockAllocator(4)
    mine = blocks.allocate(2)
    for block, key in zip(mine, ("a", "b"), strict=True):
        blocks.cache(block, key)
    blocks.free(mine)
    assert blocks.find(["a", "b", "c"]) == mine
    other = blocks.allocate(3)  # the two without content, then the end of the freed prefix
    assert mine[1] in other
    assert blocks.find(["a", "b"]) == [mine[0]]
    assert blocks.allocate(0, [mine[0]]) == [mine[0]]
    with pytest.raises(LlmpqError, match="found 0 free, expected 1"):
        blocks.allocate(1)


def test_least_recently_used_content_is_evicted_first():
    blocks = BlockAllocator(3)
    first, second, third = blocks.allocate(3)
    for block, key in ((first, "1"), (second, "2"), (third, "3")):
        blocks.cache(block, key)
    blocks.free([second])
    blocks.free([first])
    blocks.free([third])
    blocks.allocate(0, blocks.find(["2"]))  # used again
    blocks.free([second])
    blocks.allocate(1)
    assert [bool(blocks.find([key])) for key in "123"] == [False, True, True]


def test_shared_block_is_free_after_its_last_user():
    blocks = BlockAllocator(1)
    (block,) = blocks.allocate(1)
    blocks.cache(block, "key")
    blocks.allocate(0, blocks.find(["key"]))
    blocks.free([block])
    assert blocks.num_free == 0
    blocks.free([block])
    assert blocks.num_free == 1
    with pytest.raises(LlmpqError, match="not allocated"):
        blocks.free([block])


def test_equal_content_is_cached_once():
    blocks = BlockAllocator(2)
    first, second = blocks.allocate(2)
    blocks.cache(first, "key")
    blocks.cache(second, "key")
    blocks.free([first])
    blocks.allocate(1)  # the content of the first is lost, and the second has no key
    assert blocks.find(["key"]) == []
    with pytest.raises(CapacityError, match="at least 1"):
        BlockAllocator(0)


def test_keys_depend_on_salt_and_on_every_token_before():
    keys = {
        next_key(next_key(root_key(salt), before), tokens)
        for salt in ("", "user")
        for before in ([1, 2], [2, 1])
        for tokens in ([3, 4], [3, 5])
    }
    assert len(keys) == 8


class AllocatorMachine(RuleBasedStateMachine):
    """Random sequences of blocks against a model that lists the users of every block."""

    def __init__(self):
        super().__init__()
        self.size = 8
        self.blocks = BlockAllocator(self.size)
        self.owned: list[tuple[list[int], int]] = []  # blocks, and how many of them are shared
        self.content: dict[int, int] = {}  # key by block, as written by the users

    def users(self, block):
        return sum(block in blocks for blocks, _ in self.owned)

    @rule(count=st.integers(0, 5), prefix=st.integers(0, 3))
    def allocate(self, count, prefix):
        shared = self.blocks.find(list(range(prefix)))
        for key, block in enumerate(shared):
            assert self.content[block] == key
        needed = count + self.blocks.count_free(shared)
        if needed > self.blocks.num_free:
            with pytest.raises(LlmpqError, match="free"):
                self.blocks.allocate(count, shared)
            return
        found = self.blocks.allocate(count, shared)
        assert found[: len(shared)] == shared
        for block in found[len(shared) :]:
            assert not self.users(block)
            self.content.pop(block, None)
        if found:
            self.owned.append((found, len(shared)))

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), key=st.integers(0, 3))
    def cache(self, data, key):
        blocks, shared = data.draw(st.sampled_from(self.owned))
        if len(blocks) > shared and blocks[shared] not in self.content:
            known = self.blocks.find([key])
            self.blocks.cache(blocks[shared], key)
            if not known:
                self.content[blocks[shared]] = key

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data):
        entry = data.draw(st.sampled_from(self.owned))
        self.owned.remove(entry)
        self.blocks.free(entry[0])

    @invariant()
    def no_block_is_lost(self):
        used = {block for blocks, _ in self.owned for block in blocks}
        assert self.blocks.num_free == self.size - len(used)


AllocatorMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_random_use_keeps_every_block_in_one_place = AllocatorMachine.TestCase
