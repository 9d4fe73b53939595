"""reference.blocks: tables worked by hand, bad calls, and lives of many sequences beside a model that knows what every slot holds."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from reference import BlockManager
from reference.blocks import Prefix


def computed(manager, sequence, tokens):
    """A prompt that is admitted and computed in one step. Returns its cached tokens."""
    cached = manager.admit(sequence, tokens)
    assert manager.schedule(sequence, len(tokens) - cached) is not None
    manager.computed(sequence, len(tokens) - cached)
    return cached


def test_a_full_hit_leaves_a_token_to_compute():
    manager = BlockManager(8, 4)
    computed(manager, 0, range(8))
    assert manager.admit(1, range(8)) == 4  # the last block is computed again: it holds the only query
    assert manager.admit(2, range(9)) == 8
    assert manager.admit(3, range(4)) == 0
    assert [manager.table(i) for i in range(4)] == [[0, 1], [0], [0, 1], []]
    assert manager.broken_invariants() == []


def test_blocks_are_handed_out_in_the_order_that_is_asked_for():
    manager = BlockManager(3, 2, order=[2, 0, 1])
    computed(manager, 0, range(5))
    assert manager.table(0) == [2, 0, 1]
    manager.free(0)
    computed(manager, 1, [9])
    assert manager.table(1) == [1]  # of the blocks that were used, the one that left first


def test_blocks_of_one_token():
    manager = BlockManager(4, 1)
    assert computed(manager, 0, [5, 6]) == 0
    assert manager.admit(1, [5, 6]) == 1
    assert manager.admit(2, [5, 6, 7]) == 2
    assert manager.admit(3, [6, 6]) == 0


@pytest.mark.parametrize("position", range(8))
def test_any_single_token_of_a_prefix_counts(position):
    """kekzl/imp #1301: a hash that ignored the last token survived a suite that changed the first one only."""
    manager = BlockManager(9, 4)
    computed(manager, 0, range(9))
    tokens = list(range(9))
    tokens[position] = 99
    assert manager.admit(1, tokens) == position // 4 * 4


def test_the_same_block_after_another_parent_is_no_hit():
    manager = BlockManager(9, 2)
    computed(manager, 0, [1, 1, 7, 7, 0])
    computed(manager, 1, [2, 2, 0])
    assert manager.admit(2, [2, 2, 7, 7, 0]) == 2


def test_a_block_is_found_once_it_is_full_and_computed():
    """ROCm/ATOM #902: a hash that is published before the KV is there."""
    manager = BlockManager(9, 4)
    manager.admit(0, range(9))
    manager.schedule(0, 9)
    assert manager.admit(1, range(9)) == 0
    manager.computed(0, 7)
    assert manager.admit(2, range(9)) == 4
    manager.computed(0, 1)
    assert manager.admit(3, range(9)) == 8


def test_a_freed_prefix_is_found_until_its_block_is_used_again():
    """nano-vllm #163: a stale hash names a block that holds something else."""
    manager = BlockManager(3, 2)
    computed(manager, 0, [1, 2, 3, 4, 5])
    manager.free(0)
    assert manager.admit(1, [1, 2, 3, 4, 5]) == 4  # all of it is still there
    manager.free(1)
    assert computed(manager, 2, [6, 7]) == 0
    assert manager.table(2) == [2]  # the partial block left first
    assert computed(manager, 3, [8, 9]) == 0 and manager.table(3) == [1]
    assert manager.admit(4, [1, 2, 3, 4, 5]) == 2
    assert manager.broken_invariants() == []


def test_a_free_block_that_is_hit_is_free_no_longer():
    manager = BlockManager(2, 2)
    computed(manager, 0, [1, 2])
    manager.free(0)
    assert manager.admit(1, [1, 2, 3]) == 2
    assert manager.schedule(1, 1) == []
    manager.admit(2, [4])
    assert manager.schedule(2, 1) is None  # and nothing has changed
    assert manager.table(2) == [] and manager.broken_invariants() == []
    manager.free(1)
    assert manager.schedule(2, 1) == []


def test_two_that_compute_the_same_at_once_keep_their_own_blocks():
    """nano-vllm #219."""
    manager = BlockManager(8, 2)
    for i in range(2):
        manager.admit(i, [1, 2, 3, 4, 5])
        manager.schedule(i, 5)
    manager.computed(0, 5)
    manager.computed(1, 5)
    assert manager.table(0) == [0, 1, 2] and manager.table(1) == [3, 4, 5]
    manager.free(1)
    assert manager.admit(2, [1, 2, 3, 4, 5]) == 4 and manager.table(2) == [0, 1]
    assert manager.broken_invariants() == []


def test_a_chunk_may_end_anywhere():
    manager = BlockManager(8, 4)
    manager.admit(0, range(11))
    for chunk, table in ((3, [0]), (1, [0]), (5, [0, 1, 2]), (2, [0, 1, 2])):
        assert manager.schedule(0, chunk) == []
        manager.computed(0, chunk)
        assert manager.table(0) == table


def test_both_branches_of_a_fork_write_into_blocks_of_their_own():
    manager = BlockManager(8, 4)
    computed(manager, 0, range(6))
    manager.fork(0, 1)
    manager.fork(0, 2)
    for i, copies in ((1, [(1, 2)]), (0, [(1, 3)]), (2, [])):  # the last one holds the block alone by then
        manager.append(i, 100 + i)
        assert manager.schedule(i, 1) == copies
        manager.computed(i, 1)
    assert [manager.table(i) for i in range(3)] == [[0, 3], [0, 2], [0, 1]]
    assert manager.broken_invariants() == []


def test_a_fork_at_a_blocks_end_copies_nothing():
    manager = BlockManager(8, 4)
    computed(manager, 0, range(8))
    manager.fork(0, 1)
    manager.append(1, 9)
    assert manager.schedule(1, 1) == [] and manager.table(1) == [0, 1, 2] and manager.table(0) == [0, 1]


def test_a_fork_shares_no_block_that_was_scheduled_only():
    manager = BlockManager(8, 2)
    manager.admit(0, range(6))
    manager.schedule(0, 2)
    manager.computed(0, 2)
    manager.schedule(0, 4)
    manager.fork(0, 1)
    assert manager.table(0) == [0, 1, 2] and manager.table(1) == [0]


def test_equal_hashes_are_no_hit():
    class Colliding(BlockManager):
        def _hash(self, parent, tokens):
            return 0

    manager = Colliding(8, 2)
    computed(manager, 0, [1, 2, 3, 4, 5])
    assert manager.admit(1, [8, 9, 3]) == 0
    assert manager.admit(2, [1, 2, 3, 4, 5]) == 2  # the second block's hash was taken: a hit is lost, none is wrong
    assert manager.broken_invariants() == []


def test_prefixes_are_equal_from_the_first_token_on():
    root, other = Prefix(None, (1, 2), 0), Prefix(None, (1, 3), 0)
    assert Prefix(root, (5,), 0).equals(Prefix(Prefix(None, (1, 2), 1), (5,), 1))
    assert not Prefix(root, (5,), 0).equals(Prefix(other, (5,), 0))
    assert not Prefix(root, (5,), 0).equals(Prefix(None, (5,), 0))


@pytest.mark.clause("ERR-1")
@pytest.mark.parametrize(
    ("sentence", "call"),
    {
        "num_blocks is 0, it must be at least 1": lambda m: BlockManager(0, 4),
        "block_size is 0, it must be at least 1": lambda m: BlockManager(4, 0),
        "order is [0, 0], it must name each of 2 blocks once": lambda m: BlockManager(2, 4, order=[0, 0]),
        "sequence 0 is there already": lambda m: m.admit(0, [1]),
        "sequence 1 has no tokens": lambda m: m.admit(1, []),
        "there is no sequence 7": lambda m: m.schedule(7, 1) if 7 in m.tables else m.free(7),
        "sequence 0 schedules 0 tokens, it must be at least 1": lambda m: m.schedule(0, 0),
        "sequence 0 has 3 tokens, 0 computed and 4 scheduled ones end at 4": lambda m: m.schedule(0, 4),
        "sequence 0 has room for 0 of its tokens, 0 and 1 computed ones end at 1": lambda m: m.computed(0, 1),
    }.items(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_calls(sentence, call):
    manager = BlockManager(4, 2)
    manager.admit(0, [1, 2, 3])
    with pytest.raises(ValueError) as told:
        call(manager)
    assert str(told.value) == sentence


class Lives(RuleBasedStateMachine):
    """What every slot holds is known as the tokens up to it: after any step, each computed position's slot holds its own."""

    @initialize(num_blocks=st.integers(1, 12), block_size=st.sampled_from([1, 2, 3, 4, 16]))
    def begin(self, num_blocks, block_size):
        self.manager, self.block_size = BlockManager(num_blocks, block_size), block_size
        self.slots = {}  # slot -> the tokens up to and with the one whose KV it holds
        self.tokens = {}
        self.num_computed = {}
        self.number = 0

    def pick(self, which):
        return list(self.tokens)[which % len(self.tokens)] if self.tokens else None

    @rule(length=st.integers(1, 40), changed=st.sets(st.integers(0, 39), max_size=2))
    def admit(self, length, changed):
        tokens = [int(p in changed) for p in range(length)]
        cached = self.manager.admit(self.number, tokens)
        assert cached < length and cached % self.block_size == 0
        assert len(self.manager.table(self.number)) * self.block_size == cached
        self.tokens[self.number], self.num_computed[self.number] = tokens, cached
        self.number += 1

    @rule(which=st.integers(0, 9), num_tokens=st.integers(1, 9))
    def compute(self, which, num_tokens):
        i = self.pick(which)
        if i is None or self.num_computed[i] == len(self.tokens[i]):
            return
        num_tokens = min(num_tokens, len(self.tokens[i]) - self.num_computed[i])
        before = self.manager.table(i)
        copies = self.manager.schedule(i, num_tokens)
        if copies is None:
            assert self.manager.table(i) == before
            return
        size = self.block_size
        for source, target in copies:
            for offset in range(size):
                self.slots[target * size + offset] = self.slots.get(source * size + offset)
        table = self.manager.table(i)
        for p in range(self.num_computed[i], self.num_computed[i] + num_tokens):
            self.slots[table[p // size] * size + p % size] = tuple(self.tokens[i][: p + 1])
        self.num_computed[i] += num_tokens
        self.manager.computed(i, num_tokens)

    @rule(which=st.integers(0, 9), token=st.integers(0, 1))
    def append(self, which, token):
        i = self.pick(which)
        if i is not None:
            self.manager.append(i, token)
            self.tokens[i] = self.tokens[i] + [token]

    @rule(which=st.integers(0, 9))
    def fork(self, which):
        i = self.pick(which)
        if i is not None:
            self.manager.fork(i, self.number)
            self.tokens[self.number], self.num_computed[self.number] = list(self.tokens[i]), self.num_computed[i]
            self.number += 1

    @rule(which=st.integers(0, 9))
    def free(self, which):
        i = self.pick(which)
        if i is not None:
            self.manager.free(i)
            del self.tokens[i], self.num_computed[i]

    @invariant()
    def every_computed_position_has_its_slot(self):
        if not hasattr(self, "manager"):
            return
        assert self.manager.broken_invariants() == []
        for i, tokens in self.tokens.items():
            table = self.manager.table(i)
            for p in range(self.num_computed[i]):
                assert self.slots[table[p // self.block_size] * self.block_size + p % self.block_size] == tuple(tokens[: p + 1])


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
