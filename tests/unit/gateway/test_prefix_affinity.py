"""Which decoder a prompt goes to because it has seen its beginning."""

from gateway.affinity import SHORTEST, PrefixMemory, beginnings

SYSTEM = list(range(1000))


def test_the_next_turn_finds_the_replica_of_the_last() -> None:
    memory = PrefixMemory()
    first = SYSTEM + [1] * 300
    other = SYSTEM + [2] * 300
    memory.remember(beginnings(first, b""), "a:1")
    memory.remember(beginnings(other, b""), "b:1")
    assert memory.find(beginnings(first + [7] * 200, b"")) == "a:1"
    assert memory.find(beginnings(other + [7] * 200, b"")) == "b:1"


def test_a_new_conversation_finds_who_last_saw_the_shared_beginning() -> None:
    memory = PrefixMemory()
    memory.remember(beginnings(SYSTEM + [1] * 300, b""), "a:1")
    assert memory.find(beginnings(SYSTEM + [3] * 10, b"")) == "a:1"
    assert memory.find(beginnings([5] * 1000, b"")) is None


def test_tenants_do_not_share_beginnings() -> None:
    memory = PrefixMemory()
    memory.remember(beginnings(SYSTEM, b"a"), "a:1")
    assert memory.find(beginnings(SYSTEM, b"b")) is None


def test_beginnings_are_few_whatever_the_length() -> None:
    assert len(beginnings([1] * (SHORTEST - 1), b"")) == 1
    assert len(beginnings([], b"")) == 1
    assert len(beginnings([1] * 262_144, b"")) < 60


def test_short_prompts_are_their_own_beginning() -> None:
    assert beginnings([1, 2], b"") != beginnings([1, 3], b"")
    assert beginnings([1, 2], b"") == beginnings([1, 2], b"")


def test_the_oldest_beginnings_are_forgotten() -> None:
    memory = PrefixMemory(max_entries=2)
    for number in range(3):
        memory.remember(beginnings([number], b""), f"{number}:1")
    assert memory.find(beginnings([0], b"")) is None
    assert memory.find(beginnings([2], b"")) == "2:1"
