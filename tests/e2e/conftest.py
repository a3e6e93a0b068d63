"""The whole system as real processes, once per test session."""

from collections.abc import Iterator

import pytest

from tests.support.live import Grpc, Rest, Stack, start_stack


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all of these, so that there is one stack (`--dist loadgroup`)."""
    for item in items:
        if "/e2e/" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group("stack"))


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
