"""The audio process on real gRPC: a tiny checkpoint from disk, an in-memory store."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import grpc
import pytest
import torch
from torch import Tensor

from mimo.errors import (
    EmbeddingMismatch,
    InvalidRequest,
    MimoError,
    Reason,
    StartupError,
    Unavailable,
)
from mimo.metrics import AUDIO, Metrics
from mimo.nn.interop import from_torch, to_torch
from mimo.rpc.channel import open_channel
from mimo.rpc.status import from_rpc_error
from mimo.rpc.tensors import (
    chunk_from_proto,
    chunk_to_proto,
    chunks_to_proto,
    header_from_proto,
    header_to_proto,
)
from mimo.tensor import Assembler, split
from mimo.v1 import (
    audio_pb2,
    audio_pb2_grpc,
    encoding_pb2,
    replica_pb2,
    replica_pb2_grpc,
    tensor_pb2,
)
from services.audio.__main__ import audio_service
from services.audio.model import AudioTower
from services.audio.settings import AudioSettings
from tests.support.serving import serving
from tests.support.tiny_audio import make_tower, make_waveform, write_checkpoint


@dataclass
class Running:
    model: AudioTower  # the same weights, in this process
    stub: "audio_pb2_grpc.AudioEncoderAsyncStub"
    description: replica_pb2.DescribeResponse
    metrics: Metrics

    def target(self, key: str = "a" * 64, **changes) -> encoding_pb2.EncodeTarget:
        fields = {"key": key, "encoder_fingerprint": self.description.fingerprint, **changes}
        return encoding_pb2.EncodeTarget(**fields)


@contextlib.asynccontextmanager
async def running_in(directory) -> AsyncIterator[Running]:
    model = make_tower()
    write_checkpoint(directory / "toy", model)
    settings = AudioSettings(
        model=str(directory / "toy"), store="memory://", device="cpu", max_item_seconds=10.0
    )
    metrics = Metrics(AUDIO)
    async with (
        serving(settings, metrics, audio_service) as address,
        open_channel(address) as channel,
    ):
        description = await replica_pb2_grpc.ReplicaStub(channel).Describe(
            replica_pb2.DescribeRequest()
        )
        yield Running(model, audio_pb2_grpc.AudioEncoderStub(channel), description, metrics)


@pytest.fixture
async def running(tmp_path) -> AsyncIterator[Running]:
    async with running_in(tmp_path) as running:
        yield running


def header(waveform: Tensor) -> tensor_pb2.TensorHeader:
    return header_to_proto("float32", tuple(waveform.shape))


def encode_messages(target: encoding_pb2.EncodeTarget, waveform: Tensor, sample_rate: int = 24000):
    yield audio_pb2.EncodeWaveformRequest(
        start=audio_pb2.EncodeWaveformStart(
            target=target, sample_rate=sample_rate, waveform=header(waveform)
        )
    )
    for chunk in split(from_torch(waveform), 4096):
        yield audio_pb2.EncodeWaveformRequest(chunk=chunk_to_proto(chunk))


def tokenize_messages(waveform: Tensor, sample_rate: int = 24000):
    yield audio_pb2.TokenizeWaveformRequest(
        start=audio_pb2.TokenizeWaveformStart(sample_rate=sample_rate, waveform=header(waveform))
    )
    for chunk in chunks_to_proto(from_torch(waveform)):
        yield audio_pb2.TokenizeWaveformRequest(chunk=chunk)


async def encode(running: Running, messages) -> tuple[encoding_pb2.Encoded, Tensor | None]:
    responses = [response async for response in running.stub.EncodeWaveform(messages)]
    encoded = responses[0].encoded
    if not encoded.inline:
        assert len(responses) == 1
        return encoded, None
    return encoded, assemble(encoded.embedding, [response.chunk for response in responses[1:]])


async def tokenize(running: Running, messages) -> Tensor:
    responses = [response async for response in running.stub.TokenizeWaveform(messages)]
    return assemble(responses[0].codes, [response.chunk for response in responses[1:]])


def assemble(proto: tensor_pb2.TensorHeader, chunks) -> Tensor:
    assembler = Assembler(*header_from_proto(proto))
    for chunk in chunks:
        assembler.add(chunk_from_proto(chunk))
    return to_torch(assembler.finish())


async def failure(call) -> MimoError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_embedding_over_the_wire_has_the_models_bits(running):
    waveform = make_waveform(24000)
    encoded, rows = await encode(running, encode_messages(running.target(inline=True), waveform))
    assert encoded.outcome == encoding_pb2.CACHE_OUTCOME_MISS and encoded.encode_ms > 0
    assert rows is not None and rows.shape == (7, 12)
    assert torch.equal(rows, running.model([waveform])[0])


async def test_second_call_is_answered_from_the_store_without_an_upload(running):
    waveform = make_waveform(24000)
    first, _ = await encode(running, encode_messages(running.target(), waveform))
    assert len(first.manifest_digest) == 32 and list(first.embedding.shape) == [7, 12]
    start_only = [next(encode_messages(running.target(), waveform))]
    second, _ = await encode(running, iter(start_only))
    assert second.outcome == encoding_pb2.CACHE_OUTCOME_HIT
    assert second.manifest_digest == first.manifest_digest
    inline = [next(encode_messages(running.target(inline=True), waveform))]
    _, rows = await encode(running, iter(inline))
    assert rows is not None and torch.equal(rows, running.model([waveform])[0])


async def test_bypass_encodes_again(running):
    waveform = make_waveform(5000)
    await encode(running, encode_messages(running.target(), waveform))
    encoded, _ = await encode(running, encode_messages(running.target(bypass=True), waveform))
    assert encoded.outcome == encoding_pb2.CACHE_OUTCOME_BYPASS


async def test_clips_of_many_calls_do_not_mix(running):
    waveforms = [make_waveform(1000 * size, seed=size) for size in range(1, 9)]
    answers = await asyncio.gather(
        *(
            encode(running, encode_messages(running.target(f"{i:064x}", inline=True), waveform))
            for i, waveform in enumerate(waveforms)
        )
    )
    for waveform, (_, rows) in zip(waveforms, answers, strict=True):
        torch.testing.assert_close(rows, running.model([waveform])[0], rtol=1e-5, atol=1e-5)


async def test_codes_over_the_wire_equal_the_models(running):
    waveform = make_waveform(24000)
    codes = await tokenize(running, tokenize_messages(waveform))
    assert codes.dtype == torch.int16 and codes.shape == (26, 4)
    assert torch.equal(codes.long(), running.model.tokenize([waveform])[0])
    assert running.metrics.value("mimo_encoder_queued_work") == 0


async def test_key_of_another_encoder_is_a_mismatch(running):
    target = running.target(encoder_fingerprint="0" * 64)
    got = await failure(encode(running, encode_messages(target, make_waveform(1000))))
    assert isinstance(got, EmbeddingMismatch)


BAD_WAVEFORMS = {
    "empty": (torch.zeros(0), 24000, Reason.MEDIA_EMPTY, "waveform"),
    "too long": (torch.zeros(240_001), 24000, Reason.MEDIA_LIMIT, "waveform"),
    "other rate": (torch.zeros(1000), 16000, Reason.INVALID_VALUE, "sample_rate"),
    "stereo": (torch.zeros(2, 500), 24000, Reason.INVALID_VALUE, "waveform"),
    "not a number": (torch.full((1000,), float("nan")), 24000, Reason.INVALID_VALUE, "waveform"),
}


@pytest.mark.parametrize("call", ["encode", "tokenize"])
async def test_bad_waveforms_are_refused(running, call):
    for name, (waveform, sample_rate, reason, field) in BAD_WAVEFORMS.items():
        if call == "encode":
            messages = encode_messages(running.target(), waveform, sample_rate)
            got = await failure(encode(running, messages))
        else:
            got = await failure(tokenize(running, tokenize_messages(waveform, sample_rate)))
        assert isinstance(got, InvalidRequest), name
        assert (got.reason, got.field) == (reason, field), name


async def test_one_bad_clip_fails_alone(running):
    bad = make_waveform(3000)
    bad[7] = float("inf")
    good = make_waveform(4000)
    failed, (_, rows) = await asyncio.gather(
        failure(encode(running, encode_messages(running.target("b" * 64), bad))),
        encode(running, encode_messages(running.target("c" * 64, inline=True), good)),
    )
    assert failed.reason is Reason.INVALID_VALUE
    torch.testing.assert_close(rows, running.model([good])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("call", ["encode", "tokenize"])
async def test_damaged_chunk_is_refused(running, call):
    waveform = make_waveform(100)
    chunk = next(split(from_torch(waveform)))
    broken = chunk_to_proto(replace(chunk, crc32c=chunk.crc32c ^ 1))
    if call == "encode":
        messages = list(encode_messages(running.target(), waveform))
        messages[1] = audio_pb2.EncodeWaveformRequest(chunk=broken)
        got = await failure(encode(running, iter(messages)))
    else:
        messages = list(tokenize_messages(waveform))
        messages[1] = audio_pb2.TokenizeWaveformRequest(chunk=broken)
        got = await failure(tokenize(running, iter(messages)))
    assert isinstance(got, InvalidRequest) and "damaged" in got.message


async def test_early_answers_reach_a_caller_that_is_still_uploading(running):
    """Ten uploads of a megabyte that nobody needs: refused by their header, or already encoded."""
    too_long = torch.zeros(300_000)
    for _ in range(5):
        got = await failure(encode(running, encode_messages(running.target(), too_long)))
        assert got.reason is Reason.MEDIA_LIMIT
    waveform = make_waveform(240_000)
    outcomes = []
    for _ in range(6):
        encoded, _ = await encode(running, encode_messages(running.target(), waveform))
        outcomes.append(encoded.outcome)
    assert outcomes == [encoding_pb2.CACHE_OUTCOME_MISS] + [encoding_pb2.CACHE_OUTCOME_HIT] * 5


async def test_caller_that_leaves_in_the_middle_of_its_upload_harms_nobody(running):
    waveform = make_waveform(24000)
    messages = encode_messages(running.target(), waveform)
    call = running.stub.EncodeWaveform()
    await call.write(next(messages))
    await call.write(next(messages))
    call.cancel()
    encoded, _ = await encode(running, encode_messages(running.target(), waveform))
    assert encoded.outcome != encoding_pb2.CACHE_OUTCOME_HIT


async def test_upload_without_a_start_is_refused(running):
    chunk = tensor_pb2.TensorChunk(data=struct.pack("<f", 0.0), last=True)
    got = await failure(encode(running, iter([audio_pb2.EncodeWaveformRequest(chunk=chunk)])))
    assert got.reason is Reason.MISSING_FIELD


async def test_describe_tells_what_runs(running):
    description = running.description
    assert (description.component, description.model) == ("audio", "toy")
    assert description.hidden_size == 12
    assert description.dtype == description.embedding_dtype == tensor_pb2.DTYPE_FLOAT32
    assert dict(description.numeric_profile) == {
        "audio_codebook_round": "bf16",
        "audio_inv_freq_round": "bf16",
    }
    assert {choice.layer_kind for choice in description.attention} == {"window", "full"}
    assert description.limits["sample_rate"] == 24000


async def test_a_broken_device_ends_the_service(tmp_path, monkeypatch):
    def tokenize_nothing(self, waveforms):
        raise torch.AcceleratorError("an illegal memory access was encountered")

    with pytest.raises(StartupError, match="device is broken"):
        async with running_in(tmp_path) as running:
            monkeypatch.setattr(AudioTower, "tokenize", tokenize_nothing)
            error = await failure(tokenize(running, tokenize_messages(make_waveform(2400))))
            assert isinstance(error, Unavailable)
