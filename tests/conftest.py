"""Fixtures that more than one test directory uses."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.redis import ValkeyProcess

# Minutes in tests that share little: each of them may go to another worker.
LONG_FILES = ("tests/unit/llm/test_engine_identity.py",)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker gets whole files, so that module fixtures are made once, and one worker gets all
    end-to-end tests, so that there is one stack. Work is given out in the order of the tree, which
    has the longest first and many short files last, so that no worker is left alone at the end.

    Groups by mark would say this too, but pytest-xdist 3.8 loses them under pytest 9.2 without a
    word (pytest-xdist issue 1386).
    """
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/e2e/"):
                return "stack"
            file = nodeid.partition("::")[0]
            return nodeid if file in LONG_FILES else file

    return Scheduling(config, log)


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
