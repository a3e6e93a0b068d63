"""One encode for everybody across processes, and at most two when whoever leads is lost."""

import random
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from mimo.metrics import Metrics
from mimo.store import EmbeddingKey
from mimo.store.redis_store import RedisLimits, RedisStore
from tests.support.lease_fleet import Replica, Trial, embedding_for, num_encodes

SIDE_BY_SIDE = 100  # trials of a round
NUM_ROUNDS = 5  # of kills, and as many of cancels: a thousand trials

pytestmark = pytest.mark.timeout(600)  # a crowded machine is slow, and that is not what is tested


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "encodes"


@pytest.fixture
def replicas(redis_url: str, log: Path) -> Iterator[list[Replica]]:
    """Two that live."""
    replicas = [Replica(redis_url, log) for _ in range(2)]
    yield replicas
    for replica in replicas:
        replica.stop()


def new_keys() -> list[EmbeddingKey]:
    return [EmbeddingKey(secrets.token_hex(32)) for _ in range(SIDE_BY_SIDE)]


async def all_is_right(
    redis_url: str, log: Path, keys: list[EmbeddingKey], answers: list[list[set[bytes]]]
) -> bool:
    """Each key has its embedding, all its clients were told of that one, and work was bounded."""
    store = RedisStore.from_url(redis_url, Metrics("llm"), limits=RedisLimits(timeout_s=30.0))
    encodes = num_encodes(log)
    for index, key in enumerate(keys):
        lookup = await store.get(key)
        assert lookup.manifest is not None
        assert lookup.tensor == embedding_for(key)
        assert set().union(*(each[index] for each in answers)) == {lookup.manifest.digest}
        assert 1 <= encodes[key] <= 2
    await store.aclose()
    return True


async def test_sixty_four_clients_at_each_of_two_replicas_cause_one_encode(
    redis_url: str, log: Path, replicas: list[Replica]
) -> None:
    (key, *_) = new_keys()
    for replica in replicas:
        replica.order([Trial(key, num_clients=64)])
    answers = [replica.digests() for replica in replicas]
    assert await all_is_right(redis_url, log, [key], answers)
    assert num_encodes(log) == {key: 1}


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
async def test_killing_the_leading_process_at_any_point_harms_nobody(
    redis_url: str, log: Path, replicas: list[Replica], seed: int
) -> None:
    chance = random.Random(seed)
    keys = new_keys()
    half = SIDE_BY_SIDE // 2
    doomed = [Replica(redis_url, log) for _ in range(2)]
    for replica, led in zip(doomed, (keys[:half], keys[half:]), strict=True):
        trials = [Trial(key, 2, start_s=chance.uniform(0.0, 0.1)) for key in led]
        replica.order(trials, die_s=chance.uniform(0.0, 0.3))
    for replica in replicas:
        replica.order([Trial(key, 2, start_s=chance.uniform(0.0, 0.2)) for key in keys])
    for replica in doomed:
        replica.await_death()
    answers = [replica.digests() for replica in replicas]
    assert await all_is_right(redis_url, log, keys, answers)


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
async def test_cancelling_the_leading_clients_at_any_point_harms_nobody(
    redis_url: str, log: Path, replicas: list[Replica], seed: int
) -> None:
    chance = random.Random(seed)
    keys = new_keys()
    leading, following = replicas
    leading.order(
        [
            Trial(
                key,
                num_clients=chance.randint(0, 1),
                start_s=chance.uniform(0.0, 0.1),
                num_doomed=chance.randint(1, 3),
                cancel_s=chance.uniform(0.0, 0.2),
            )
            for key in keys
        ]
    )
    following.order([Trial(key, 2, start_s=chance.uniform(0.0, 0.2)) for key in keys])
    answers = [replica.digests() for replica in replicas]
    assert await all_is_right(redis_url, log, keys, answers)
