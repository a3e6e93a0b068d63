"""A decoder of two processes: the tokens of one, and an end with the reason when either ends."""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import save_file
from torch import Tensor

from mimo.errors import ConfigError, Retry, Unavailable
from mimo.metrics import LLM, Metrics
from mimo.nn.interop import from_torch
from mimo.rpc.channel import open_channel
from mimo.rpc.server import NOT_SERVING, REASON_KEY, SERVING
from mimo.rpc.status import from_rpc_error
from mimo.rpc.tensors import chunk_to_proto, header_to_proto
from mimo.store import EmbeddingKey
from mimo.tensor import split
from mimo.v1 import encoding_pb2, llm_pb2, llm_pb2_grpc
from models import generate
from services.llm import loading
from services.llm.__main__ import llm_service
from services.llm.settings import LlmSettings
from tests.support import golden_decoder
from tests.support.serving import serving

pytestmark = [pytest.mark.check, pytest.mark.timeout(400)]

NUM_PROMPTS = 24
PROMISED_S = 5.0  # within which a lost rank takes the service out of service
MODALITIES = {
    "image_token_id": encoding_pb2.MODALITY_IMAGE,
    "audio_token_id": encoding_pb2.MODALITY_AUDIO,
}


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mimo-tiny with random weights: fused projections, 8 heads on 2 and 4, 8 experts."""
    directory = tmp_path_factory.mktemp("bundled") / "mimo-tiny"
    generate.generate(directory)
    return directory


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One and two key-value heads, and MTP blocks that often guess right."""
    directory = tmp_path_factory.mktemp("chain") / "chain"
    directory.mkdir()
    config = golden_decoder.config("chain_vis7") | {
        "max_position_embeddings": 256,
        "image_token_id": golden_decoder.IMAGE_PAD,
        "audio_token_id": golden_decoder.AUDIO_PAD,
    }
    (directory / "config.json").write_text(json.dumps(config))
    weights = golden_decoder.weights("chain_vis7")
    save_file(
        {name: tensor.float().contiguous() for name, tensor in weights.items()},
        directory / "model.safetensors",
    )
    return directory


# ── the same tokens ──


def calls(directory: Path) -> list[list[llm_pb2.GenerateTokensRequest]]:
    """The messages of calls of every kind: with and without media, greedy and sampled."""
    config = json.loads((directory / "config.json").read_text())
    draw = random.Random(0)
    return [_call(config, draw, number) for number in range(NUM_PROMPTS)]


def _call(
    config: Mapping[str, Any], draw: random.Random, number: int
) -> list[llm_pb2.GenerateTokensRequest]:
    pads = list(MODALITIES)[: number % 3]  # no item, a picture, a picture and a sound
    ids: list[int] = []
    items, spans, messages = [], [], []
    for index, pad in enumerate(pads):
        ids += _text(draw, 5)
        length = draw.randint(2, 9)
        rows = torch.randn(length, config["hidden_size"], generator=_generator(number, index))
        spans.append(llm_pb2.Span(item_index=index, prompt_offset=len(ids), length=length))
        ids += [config[pad]] * length
        items.append(_item(MODALITIES[pad], number, index, rows))
        messages += _chunks(index, rows)
    ids += _text(draw, draw.randint(1, 40))
    sampling = {"max_tokens": 24, "top_p": 1.0, "repetition_penalty": 1.0, "seed": number}
    if number % 2:
        sampling |= {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3}
    start = llm_pb2.GenerateTokensStart(
        prompt_ids=ids, items=items, spans=spans, sampling=llm_pb2.Sampling(**sampling)
    )
    return [llm_pb2.GenerateTokensRequest(start=start), *messages]


def _text(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(1, 50) for _ in range(length)]


def _generator(*seeds: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seeds) % 2**31)


def _item(modality: Any, number: int, index: int, rows: Tensor) -> llm_pb2.MediaItem:
    return llm_pb2.MediaItem(
        modality=modality,
        key=EmbeddingKey(f"{number * 10 + index:064x}"),
        embedding=header_to_proto("float32", tuple(rows.shape)),
        state=llm_pb2.ITEM_STATE_INLINE,
        encoder_fingerprint="f" * 64,
    )


def _chunks(index: int, rows: Tensor) -> list[llm_pb2.GenerateTokensRequest]:
    return [
        llm_pb2.GenerateTokensRequest(
            item_chunk=llm_pb2.ItemChunk(item_index=index, chunk=chunk_to_proto(chunk))
        )
        for chunk in split(from_torch(rows), 1000)
    ]


def settings(directory: Path, ranks: int) -> LlmSettings:
    return LlmSettings(
        model=str(directory),
        device="cpu",
        store="memory://",
        tensor_parallel=ranks,
        kv_memory_mib=8,
        max_running=8,
        max_step_tokens=64,
    )


async def answers(directory: Path, ranks: int) -> tuple[list[list[int]], int]:
    """The tokens of every call, all sent at once, and how many of them were accepted drafts."""
    async with (
        serving(settings(directory, ranks), Metrics(LLM), llm_service) as address,
        open_channel(address) as channel,
    ):
        stub = llm_pb2_grpc.LanguageModelStub(channel)
        responses = await asyncio.gather(
            *(
                _collect(stub.GenerateTokens(iter(messages), wait_for_ready=True))
                for messages in calls(directory)
            )
        )
    tokens = [[i for response in call for i in response.tokens.ids] for call in responses]
    return tokens, sum(sum(call[-1].finished.accepted) for call in responses)


async def _collect(call: Any) -> list[llm_pb2.GenerateTokensResponse]:
    return [response async for response in call]


@pytest.mark.parametrize("model", ["bundled", "chain"])
async def test_two_ranks_give_the_tokens_of_one(model: str, request: pytest.FixtureRequest) -> None:
    directory = request.getfixturevalue(model)
    alone, _ = await answers(directory, 1)
    together, num_accepted = await answers(directory, 2)
    assert together == alone
    assert all(len(tokens) == 24 for tokens in alone)
    assert len({tuple(tokens) for tokens in alone}) > NUM_PROMPTS // 2
    assert num_accepted > 0 or model == "bundled"  # whose random blocks guess nothing


# ── the end ──


class Process:
    """A decoder of two ranks as a process of its own. Rank 1 is its child."""

    def __init__(self, directory: Path, scratch: Path) -> None:
        flags = {
            "--model": str(directory),
            "--device": "cpu",
            "--store": "memory://",
            "--address": "127.0.0.1:0",
            "--tensor-parallel": "2",
            "--kv-memory-mib": "8",
        }
        arguments = [part for flag in flags.items() for part in flag]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.llm", *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        self.lines: list[str] = []
        self.rank_pid = self.read_until("rank started")["pid"]
        ready = self.read_until("ready")
        self.address, self.ops = ready["address"], ready["ops"]

    def read_until(self, message: str) -> dict[str, Any]:
        """The first log line with this message."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            with contextlib.suppress(ValueError):
                entry: dict[str, Any] = json.loads(line)
                if entry["message"] == message:
                    return entry
        raise AssertionError("".join(self.lines))

    def finish(self) -> tuple[int, str]:
        """Its exit status and its last line, once it has ended by itself."""
        with self.process:
            assert self.process.stderr is not None
            self.lines += self.process.stderr
        return self.process.returncode, self.lines[-1]


@pytest.fixture
def process(chain: Path, tmp_path: Path) -> Iterator[Process]:
    running = Process(chain, tmp_path)
    yield running
    running.process.kill()
    with running.process:
        pass


async def wait_for_status(ops: grpc.aio.Channel, wanted: int) -> Mapping[str, str]:
    """The trailing metadata of the first health check with this status."""
    check = health_pb2_grpc.HealthStub(ops).Check
    while True:
        asked = health_pb2.HealthCheckRequest(service="readiness")
        call = check(asked, wait_for_ready=True)
        if (await call).status == wanted:
            return {str(key): str(value) for key, value in await call.trailing_metadata()}
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def watched(process: Process) -> AsyncIterator[grpc.aio.Channel]:
    """A connection to its health service, which says that all is well."""
    async with open_channel(process.ops) as ops:
        assert REASON_KEY not in await wait_for_status(ops, SERVING)
        yield ops


@contextlib.asynccontextmanager
async def endless_call(address: str) -> AsyncIterator[Any]:
    """A call that has begun to answer and has much more to say."""
    sampling = llm_pb2.Sampling(max_tokens=250, top_p=1.0, repetition_penalty=1.0)
    start = llm_pb2.GenerateTokensStart(prompt_ids=[3, 10, 17], sampling=sampling)
    async with open_channel(address) as channel:
        stub = llm_pb2_grpc.LanguageModelStub(channel)
        message = llm_pb2.GenerateTokensRequest(start=start)
        call = stub.GenerateTokens(iter([message]), wait_for_ready=True)
        await call.read()
        yield call


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "rank 1 of 2 was killed by SIGKILL"),
        (signal.SIGSTOP, "rank 1 of 2 was silent for 3 s"),
    ],
)
async def test_a_lost_rank_takes_the_service_down_with_the_reason(
    process: Process, number: signal.Signals, reason: str
) -> None:
    async with watched(process) as ops, endless_call(process.address) as call:
        os.kill(process.rank_pid, number)
        async with asyncio.timeout(PROMISED_S):
            metadata = await wait_for_status(ops, NOT_SERVING)
        assert metadata[REASON_KEY] == reason
        with pytest.raises(grpc.RpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        error = from_rpc_error(caught.value)
        assert isinstance(error, Unavailable)
        assert (error.message, error.retry) == (reason, Retry.ELSEWHERE)
    status, last_line = await asyncio.to_thread(process.finish)
    assert (status, last_line) == (1, f"mimo-llm: {reason}\n")
    assert gone(process.rank_pid)


async def test_an_idle_service_notices_a_lost_rank(process: Process) -> None:
    async with watched(process) as ops:
        os.kill(process.rank_pid, signal.SIGKILL)
        async with asyncio.timeout(PROMISED_S):
            metadata = await wait_for_status(ops, NOT_SERVING)
    assert metadata[REASON_KEY] == "rank 1 of 2 was killed by SIGKILL"
    assert (await asyncio.to_thread(process.finish))[0] == 1


async def test_sigterm_ends_both_ranks_and_is_no_failure(process: Process, tmp_path: Path) -> None:
    assert os.listdir(tmp_path)
    process.process.send_signal(signal.SIGTERM)
    assert (await asyncio.to_thread(process.finish))[0] == 0
    assert gone(process.rank_pid)
    assert not os.listdir(tmp_path)


async def test_a_rank_does_not_outlive_rank_0(process: Process, tmp_path: Path) -> None:
    process.process.kill()
    await asyncio.to_thread(process.process.wait)
    while not gone(process.rank_pid):
        await asyncio.sleep(0.02)
    assert not os.listdir(tmp_path)


def test_a_model_that_ranks_do_not_divide_is_refused(chain: Path) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel 3 does not divide"):
        loading.load(settings(chain, 3), Metrics(LLM))
