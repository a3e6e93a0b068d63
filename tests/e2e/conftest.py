"""The whole system as real processes, once per test session and worker."""

from collections.abc import Iterator

import pytest

from tests.support.live import Grpc, Rest, Stack, start_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One system for all end-to-end tests."""
    running = start_stack(tmp_path_factory.mktemp("stack"))
    yield running
    running.stop()


@pytest.fixture
def rest(stack: Stack) -> Iterator[Rest]:
    client = Rest(stack.rest_url)
    yield client
    client.close()


@pytest.fixture
def rpc(stack: Stack) -> Iterator[Grpc]:
    client = Grpc(stack.grpc_address)
    yield client
    client.close()
