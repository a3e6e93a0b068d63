"""Room for embeddings: what is shared, what is not, and that all of it comes back."""

import contextlib

import pytest

from mimo.errors import Overloaded, Reason
from mimo.store import EmbeddingKey, Modality
from mimo.store.memory_store import MemoryStore
from services.llm.embeddings import EmbeddingPool, MediaItem

KEYS = [EmbeddingKey("a" * 64), EmbeddingKey("b" * 64)]


def item(num_rows: int, key: int = 0, index: int = 0) -> MediaItem:
    """Rows of ten bytes."""
    return MediaItem(index, Modality.IMAGE, KEYS[key], "uint8", (num_rows, 10), "")


@pytest.fixture
def pool() -> EmbeddingPool:
    return EmbeddingPool(MemoryStore(), max_bytes=100)


def has_room(pool: EmbeddingPool, num_rows: int) -> bool:
    try:
        with pool.hold([item(num_rows, key=1)]):
            return True
    except Overloaded:
        return False


def test_requests_that_read_the_same_item_share_its_room(pool: EmbeddingPool) -> None:
    with pool.hold([item(6)]), pool.hold([item(6)]):
        assert has_room(pool, 4)
        assert not has_room(pool, 5)
    assert has_room(pool, 10)


def test_a_key_that_is_announced_in_two_sizes_needs_room_for_both(pool: EmbeddingPool) -> None:
    with pool.hold([item(6)]), pytest.raises(Overloaded), pool.hold([item(5)]):
        pass
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(pool.hold([item(1)]))
        second.enter_context(pool.hold([item(9)]))
        first.close()
        assert not has_room(pool, 2)
        second.close()
        assert has_room(pool, 10)
        assert not has_room(pool, 11)


def test_rows_that_are_sent_are_the_requests_own(pool: EmbeddingPool) -> None:
    with pool.hold([item(6)]) as first:
        first.receive(item(6))
        assert has_room(pool, 4)  # what was kept for a read is not kept besides
        with pytest.raises(Overloaded) as caught, pool.hold([item(6)]):
            pass
        assert caught.value.reason is Reason.OVERLOADED
    with pool.hold([item(5)]) as first, pool.hold([item(5)]) as second:
        first.receive(item(5))
        second.receive(item(5))
        assert not has_room(pool, 1)
    with pool.hold([item(6)]), pool.hold([item(6)]) as second:
        with pytest.raises(Overloaded):
            second.receive(item(6))
        assert has_room(pool, 4)
    assert has_room(pool, 10)


def test_an_item_that_is_sent_twice_to_a_request_is_there_twice(pool: EmbeddingPool) -> None:
    with pool.hold([item(4), item(4, index=1)]) as hold:
        hold.receive(item(4))
        hold.receive(item(4, index=1))
        assert has_room(pool, 2)
        assert not has_room(pool, 3)
    with pool.hold([item(6), item(6, index=1)]) as hold:
        with pytest.raises(Overloaded) as caught:
            hold.receive(item(6))
        assert caught.value.reason is Reason.CAPACITY
    assert has_room(pool, 10)
