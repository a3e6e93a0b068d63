"""From a directory to an engine: what is done to the weights on the way."""

import pytest
import torch

from mimo.checkpoint.directory import BUNDLED
from mimo.metrics import LLM, Metrics
from mimo.nn.linear import packing_for
from services.llm import loading
from services.llm.engine.core import EngineCore
from services.llm.engine.request import Request, SamplingParams
from services.llm.settings import LlmSettings


def load(dtype: str) -> EngineCore:
    settings = LlmSettings(
        model=str(BUNDLED), device="cpu", dtype=dtype, threads=1, kv_memory_mib=16
    )
    return loading.load(settings, Metrics(LLM)).core


def answer(core: EngineCore) -> list[int]:
    request = Request(
        request_id="one",
        token_ids=list(range(100, 140)),
        num_prompt_tokens=40,
        params=SamplingParams(max_tokens=12),
        max_draft_tokens=0,
    )
    core.add(request)
    while core.scheduler.num_unfinished:
        core.step()
    return request.token_ids[40:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_packed_and_change_no_answer(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packing_for(getattr(torch, dtype), "cpu") is None:
        pytest.skip("nothing packs such weights here")
    packs: list[object] = []
    pack_weights = loading.pack_weights
    monkeypatch.setattr(loading, "pack_weights", lambda *a: (packs.append(a), pack_weights(*a)))
    fast = answer(load(dtype))
    assert len(packs) == 2  # the decoder and its drafting blocks
    monkeypatch.setattr(loading, "packing_for", lambda dtype, device: None)
    assert answer(load(dtype)) == fast
    assert len(packs) == 2
