"""A whole system with two of everything, to be hurt."""

from collections.abc import Iterator

import pytest

from tests.support.live import Stack, start_stack


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all of these, one after the other, on one system (`--dist loadgroup`)."""
    for item in items:
        if "/chaos/" in item.path.as_posix():
            item.add_marker(pytest.mark.xdist_group("chaos"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One gateway and one store; two of every model service."""
    directory = tmp_path_factory.mktemp("pair")
    running = start_stack(directory, "--replicas", "vision=2,audio=2,llm=2")
    yield running
    running.stop()
