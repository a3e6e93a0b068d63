"""Fixtures that more than one test directory uses."""

import os
from collections.abc import Iterator

import pytest

from tests.support.redis import ValkeyProcess


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A running Redis or Valkey, shared by all tests: use keys of your own."""
    url = os.environ.get("MIMO_TEST_REDIS_URL")
    if url:
        yield url
        return
    server = ValkeyProcess()
    server.start()
    yield server.url
    server.close()


@pytest.fixture
def redis_server() -> Iterator[ValkeyProcess]:
    """A server of the test's own, to be killed and started at will."""
    server = ValkeyProcess()
    server.start()
    yield server
    server.close()
