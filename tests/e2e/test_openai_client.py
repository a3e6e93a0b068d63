"""The official Python client against a running system, unchanged but for its base URL."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.media import gradient, image_file, tone, wav_file

openai = pytest.importorskip("openai", reason="needs the extra `oracles`")

pytestmark = pytest.mark.check

PICTURE = image_file(gradient(64, 96))
SOUND = wav_file(tone(0.5))


@pytest.fixture
def client(stack: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{stack.rest_url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


def ask(client: Any, *content: Any, **options: Any) -> Any:
    messages = [{"role": "user", "content": list(content)}]
    given = {"model": "mimo-tiny", "max_tokens": 8, **options}
    return client.chat.completions.create(messages=messages, **given)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def picture(data: bytes = PICTURE) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def sound(data: bytes = SOUND) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


def test_text(client: Any) -> None:
    completion = ask(client, text("hello"))
    (choice,) = completion.choices
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length")
    usage = completion.usage
    assert 1 <= usage.completion_tokens <= 8
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert completion.model == "mimo-tiny"
    assert completion.system_fingerprint.startswith("fp_")
    assert completion._request_id == completion.mimo["request_id"]


def test_the_same_seed_gives_the_same_answer(client: Any) -> None:
    answers = {
        ask(client, text("hello"), temperature=1, seed=7).choices[0].message.content
        for _ in range(2)
    }
    assert len(answers) == 1


@pytest.mark.parametrize("part, kind", [(picture(), "image"), (sound(), "audio")])
def test_media(client: Any, part: Any, kind: str) -> None:
    completion = ask(client, part, text("what is it?"))
    details = completion.usage.prompt_tokens_details.model_dump()
    assert details[f"{kind}_tokens"] > 0
    parts = ("text_tokens", "image_tokens", "video_tokens", "audio_tokens")
    assert sum(details[name] for name in parts) == completion.usage.prompt_tokens
    assert [item["modality"] for item in completion.mimo["items"]] == [kind]


def test_several_choices(client: Any) -> None:
    completion = ask(client, text("hello"), n=3, temperature=1, seed=7)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]


def test_a_stream_ends_with_usage_and_tells_the_same(client: Any) -> None:
    whole = ask(client, text("hello"))
    stream = ask(client, text("hello"), stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    contents = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(contents) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.usage for chunk in chunks} == {None}


def test_the_stream_helper_assembles_every_choice(client: Any) -> None:
    with client.chat.completions.stream(
        model="mimo-tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_completion_tokens=8,
        n=2,
    ) as stream:
        for _ in stream:
            pass
        snapshot = stream.current_completion_snapshot
    assert [choice.message.role for choice in snapshot.choices] == ["assistant", "assistant"]
    assert {choice.finish_reason for choice in snapshot.choices} <= {"stop", "length"}


def test_logprobs(client: Any) -> None:
    choice = ask(client, text("hello"), logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)


def test_a_bad_request_names_its_param_and_is_not_tried_again(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, text("hello"), temperature=3)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")
    assert caught.value.request_id


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_picture_is_the_requests_fault(client: Any, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, text("what is it?"), picture(PICTURE[:80]), stream=stream)
    assert (caught.value.code, caught.value.param) == ("invalid_media", "messages[0].content[1]")


def test_an_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, text("hello"), model="nobody")
    assert caught.value.code == "model_not_found"


def test_models(client: Any) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("mimo-tiny", "model")
    assert client.models.retrieve("mimo-tiny").id == "mimo-tiny"
