"""This engine in process: scheduler, forward pass and sampler, without the service around them."""

from pathlib import Path

import channel

from mimo.metrics import LLM, Metrics
from services.llm.engine.core import EngineCore
from services.llm.engine.request import Request, SamplingParams
from services.llm.loading import load
from services.llm.settings import LlmSettings


def main() -> None:
    config = channel.config()
    settings = LlmSettings(
        model=str(Path(config["model"])),
        device="cpu",
        dtype=config["dtype"],
        threads=config["threads"],
        max_running=config["max_batch"],
        max_context=config["context"],
        max_draft_tokens=config["drafts"],
        kv_memory_mib=1024,
    )
    core = load(settings, Metrics(LLM)).core
    channel.serve(lambda ids, num_tokens: generate(core, ids, num_tokens))


def generate(core: EngineCore, ids: list[list[int]], num_tokens: int) -> list[list[int]]:
    requests = [
        Request(
            request_id=str(number),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(max_tokens=num_tokens),
            max_draft_tokens=core.max_draft_tokens,
        )
        for number, prompt in enumerate(ids)
    ]
    for request in requests:
        core.add(request)
    while core.scheduler.num_unfinished:
        core.step()
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


if __name__ == "__main__":
    main()
