"""What grows with a conversation is not done in the event loop."""

import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.conversation import Conversation
from gateway.media.workers import WorkerPool
from gateway.model import Model
from gateway.pipeline import FEW_TURNS
from gateway.prompt.template import ChatTemplate, Rendered
from tests.support import byte_model
from tests.support.gateway_stack import ask, open_stack


@pytest_asyncio.fixture
async def workers() -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(1)  # never started: these prompts have no media
    yield pool
    await pool.close()


@pytest.mark.parametrize(("num_turns", "is_ours"), [(FEW_TURNS, True), (FEW_TURNS + 1, False)])
async def test_many_turns_are_rendered_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    workers: WorkerPool,
    num_turns: int,
    is_ours: bool,
) -> None:
    threads: list[threading.Thread] = []
    render = ChatTemplate.render

    def watched(template: ChatTemplate, conversation: Conversation) -> Rendered:
        threads.append(threading.current_thread())
        return render(template, conversation)

    monkeypatch.setattr(ChatTemplate, "render", watched)
    request = ask("Hi")
    conversation = replace(request.conversation, messages=request.conversation.messages * num_turns)
    model = Model.open(byte_model.write(tmp_path), "tiny")
    async with open_stack(model, workers) as stack:
        await stack.pipeline.count(replace(request, conversation=conversation))
    assert [thread is threading.current_thread() for thread in threads] == [is_ours]
