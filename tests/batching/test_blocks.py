"""Block allocator: every block is free or used, and content is found only by equal tokens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from llmpq.batching.blocks import BlockAllocator, OffloadedBlocks, StateSlots, next_key, root_key
from llmpq.errors import CapacityError, LlmpqError


def test_freed_block_is_found_until_it_is_allocated_again():
    blocks = BlockAllocator(4)
    mine = blocks.allocate(2)
    for block, key in zip(mine, ("a", "b"), strict=True):
        blocks.cache(block, key)
    blocks.free(mine)
    assert blocks.find(["a", "b", "c"]) == ["a", "b"]
    other = blocks.allocate(3)  # the two without content, then the end of the freed prefix
    assert mine[1] in other
    assert blocks.find(["a", "b"]) == ["a"]
    assert blocks.allocate(0, ["a"]) == [mine[0]]
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
    """Random sequences of blocks against a model of the users and the content of every place."""

    @initialize(host=st.integers(0, 4), disk=st.integers(0, 4))
    def start(self, host, disk):
        self.size = 8
        self.sizes = {"blocks": self.size, "host": host, "disk": disk}
        self.copies = []
        tiers = [("host", host), ("disk", disk)]
        self.offloaded = OffloadedBlocks(tiers, self.copies, has_window=False)
        self.blocks = BlockAllocator(self.size, self.offloaded)
        self.owned: list[tuple[list[int], int]] = []  # blocks, and how many of them are shared
        self.content = {}  # key of (tier, place)

    def users(self, block):
        return sum(block in blocks for blocks, _ in self.owned)

    def copy(self):
        """Make the copies; what they read is what they name."""
        for copy in self.copies:
            assert self.content[copy.source, copy.source_place] == copy.key
            assert 0 <= copy.target_place < self.sizes[copy.target]
            self.content[copy.target, copy.target_place] = copy.key
        self.copies.clear()

    @rule(data=st.data(), count=st.integers(0, 5), most=st.integers(0, 3))
    def allocate(self, data, count, most):
        prefix = self.blocks.find(list(range(most)))
        assert prefix == list(range(len(prefix)))
        if count + self.blocks.count_taken(prefix) > self.blocks.num_free:
            with pytest.raises(LlmpqError, match="free"):
                self.blocks.allocate(count, prefix)
            return
        found = self.blocks.allocate(count, prefix)
        read = [copy for copy in self.copies if copy.source == "disk"]
        self.copy()
        unread = [copy for copy in read if data.draw(st.booleans())]
        if unread:
            for copy in unread:
                self.blocks.forget(copy.key)
                assert self.blocks.tier_of(copy.key) is None
            self.blocks.free(found)
            return
        for key, block in enumerate(found[: len(prefix)]):
            assert self.content["blocks", block] == key
        for block in found[len(prefix) :]:
            assert not self.users(block)
            self.content.pop(("blocks", block), None)
        if found:
            self.owned.append((found, len(prefix)))

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), key=st.integers(0, 3))
    def cache(self, data, key):
        blocks, shared = data.draw(st.sampled_from(self.owned))
        if len(blocks) > shared and ("blocks", blocks[shared]) not in self.content:
            known = self.blocks.tier_of(key) == "blocks"
            self.blocks.cache(blocks[shared], key)
            if not known:
                self.content["blocks", blocks[shared]] = key

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

    @invariant()
    def no_tier_holds_more_than_its_size(self):
        for tier in ("host", "disk"):
            assert self.offloaded.count(tier) <= self.sizes[tier]


AllocatorMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_random_use_keeps_every_block_in_one_place = AllocatorMachine.TestCase


def test_saved_states_give_way_to_sequences():
    slots = StateSlots(3)
    running = slots.allocate()
    first, second = slots.save(b"a"), slots.save(b"b")
    assert sorted((running, first, second)) == [0, 1, 2]
    assert slots.save(b"a") == -1  # there already, and the most recently used one now
    assert (slots.find(b"a"), slots.has(b"b"), slots.num_free) == (first, True, 2)
    assert slots.allocate() == second  # of the least recently used one
    assert not slots.has(b"b")
    assert slots.allocate() == first
    assert slots.num_free == 0
    assert slots.save(b"c") == -1  # no slot is free
    slots.free(running)
    assert slots.save(b"c") == running
    slots.forget(b"c")
    slots.forget(b"c")
    assert (slots.has(b"c"), slots.allocate()) == (False, running)
