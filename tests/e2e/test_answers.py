"""Questions to the running system: what both faces answer, and how."""

import pytest
import torch

from mimo.checkpoint.directory import model_directory
from tests.support import monolith as mono
from tests.support import samples
from tests.support.live import (
    Grpc,
    Part,
    Rest,
    Stack,
    audio,
    eventually,
    grpc_request,
    image,
    video,
)
from tests.support.monolith import Monolith

PICTURE, SOUND, VIDEO = samples.png(1), samples.wav(0.7), samples.mp4()

QUESTIONS: dict[str, list[Part]] = {
    "text": ["hello"],
    "picture": [image(PICTURE), "what is it?"],
    "sound": ["what do you hear?", audio(SOUND)],
    "video": [video(VIDEO), "what happens?"],
    "all three": [image(PICTURE), audio(SOUND), video(VIDEO), "what do you see and hear?"],
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_both_faces_give_the_same_answer(rest: Rest, rpc: Grpc, name: str) -> None:
    parts = QUESTIONS[name]
    by_rest = rest.ask(*parts, max_tokens=12, ignore_eos=True)
    by_grpc = rpc.ask(*parts, sampling={"max_tokens": 12, "ignore_eos": True})
    assert len(by_rest.choices[0].token_ids) == by_rest.completion_tokens == 12
    assert by_rest.text
    assert by_grpc.choices == by_rest.choices
    assert by_grpc.prompt_tokens == by_rest.prompt_tokens
    assert by_grpc.completion_tokens == by_rest.completion_tokens
    assert by_grpc.outcomes <= {"hit"}


def test_the_running_system_says_what_the_model_alone_says(rest: Rest) -> None:
    """Across processes, with drafts: the same tokens."""
    model = Monolith(model_directory(""), torch.float32)
    prompt = mono.user_turn(
        *mono.picture(model.see(samples.picture(1)[None])),
        *mono.sound(model.hear(samples.sound_of(SOUND))),
        "what is it?",
    )
    reply = rest.ask(image(PICTURE), audio(SOUND), "what is it?", max_tokens=16, ignore_eos=True)
    assert reply.choices[0].token_ids == [said.id for said in model.answer(prompt, 16)]
    assert sum(reply.drafted) > 0


def test_many_media_in_one_question_add_up(rest: Rest) -> None:
    """64 x 96 pixels are 2 x 3 tokens. One second of sound is 101 mel frames, 26 code frames, 7
    tokens; a video of two seconds is two grids of 2 x 2 and uses 1.5 s of sound, 151 mel frames, 38
    code frames, 10 tokens."""
    pictures = [image(samples.png(number)) for number in (11, 12, 13)]
    parts: list[Part] = [
        *pictures[:2],
        "and",
        pictures[2],
        audio(samples.wav(1.0, 523.0)),
        video(VIDEO),
        "what?",
    ]
    reply = rest.ask(*parts, max_tokens=4)
    found = [(item.modality, item.tokens) for item in reply.items]
    assert found == [*[("image", 6)] * 3, ("audio", 7), ("video", 8), ("audio", 10)]
    tokens = reply.prompt_tokens
    assert (tokens["image"], tokens["video"], tokens["audio"]) == (18, 8, 17)
    assert tokens["all"] == sum(tokens[kind] for kind in ("text", "image", "video", "audio"))


@pytest.mark.parametrize(
    ("num_frames", "sound_s", "video_tokens", "sound_tokens"),
    [
        pytest.param(12, 0.4, 8, 3, id="sound shorter than picture"),
        pytest.param(2, 0.5, 4, 3, id="half a second"),
        pytest.param(1, None, 4, 0, id="one frame"),
        pytest.param(8, None, 8, 0, id="silent"),
    ],
)
def test_unusual_videos_are_answered(
    rest: Rest, num_frames: int, sound_s: float | None, video_tokens: int, sound_tokens: int
) -> None:
    """Sound is cut to 6.25 rows for each second of picture: 3 of the 4 rows of half a second."""
    file = samples.mp4(num_frames, sound_s, hertz=200 + num_frames)
    reply = rest.ask(video(file), "what happens?", max_tokens=4, ignore_eos=True)
    assert reply.completion_tokens == 4
    tokens = reply.prompt_tokens
    assert (tokens["video"], tokens["audio"]) == (video_tokens, sound_tokens)


def test_streaming_equals_not_streaming(rest: Rest) -> None:
    parts = QUESTIONS["all three"]
    options = {"max_tokens": 20, "ignore_eos": True, "logprobs": True}
    whole, streamed = rest.ask(*parts, **options), rest.ask_streaming(*parts, **options)
    assert [(choice.text, choice.token_ids) for choice in streamed.choices] == [
        (choice.text, choice.token_ids) for choice in whole.choices
    ]
    assert streamed.choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert streamed.prompt_tokens == whole.prompt_tokens
    assert streamed.completion_tokens == whole.completion_tokens


def test_choices_depend_on_the_seed_and_on_nothing_else(rest: Rest, rpc: Grpc) -> None:
    sampling = {"seed": 7, "temperature": 2.0, "max_tokens": 24, "ignore_eos": True}
    options = {"n": 2, **sampling}
    first, again = rest.ask("hello", **options), rest.ask("hello", **options)
    other = rest.ask("hello", **options | {"seed": 8})
    assert len(first.choices) == 2
    assert first.choices[0].token_ids != first.choices[1].token_ids
    assert again.choices == first.choices
    assert other.choices != first.choices
    assert first.completion_tokens == sum(len(choice.token_ids) for choice in first.choices)
    assert rpc.ask("hello", n=2, sampling=sampling).choices == first.choices


def test_a_stop_string_ends_the_answer_before_it(rest: Rest, rpc: Grpc) -> None:
    options = {"max_tokens": 20, "ignore_eos": True}
    whole = rest.ask("hello", **options).text
    stop = whole[10:14]
    assert len(stop) == 4
    cut = rest.ask("hello", stop=[stop], **options)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.completion_tokens < 20
    assert rpc.ask("hello", sampling=options, stop=[stop]).text == cut.text


def test_logprobs_of_both_faces_agree(rest: Rest, rpc: Grpc) -> None:
    by_rest = rest.ask("hello", max_tokens=8, logprobs=True, top_logprobs=2).choices[0]
    by_grpc = rpc.ask("hello", sampling={"max_tokens": 8}, top_logprobs=2).choices[0]
    assert by_rest.logprobs
    assert all(logprob <= 0 for logprob in by_rest.logprobs)
    assert by_grpc.logprobs == pytest.approx(by_rest.logprobs, rel=1e-4)
    assert rpc.ask("hello", sampling={"max_tokens": 8}).choices[0].logprobs == []


def test_leaving_frees_the_blocks_of_the_cache(stack: Stack, rest: Rest, rpc: Grpc) -> None:
    def used() -> float:
        return stack.total("llm", "mimo_llm_kv_blocks", state="used")

    def aborted() -> float:
        return stack.total("llm", "mimo_llm_requests_finished_total", reason="abort")

    eventually("earlier requests end", lambda: used() == 0)
    before = aborted()
    chunks = rest.stream("hello", max_tokens=4000, ignore_eos=True)
    while not next(chunks)["choices"][0]["delta"].get("content"):
        pass
    assert used() > 0
    chunks.close()
    eventually("blocks are free", lambda: used() == 0 and aborted() == before + 1)

    sampling = {"max_tokens": 4000, "ignore_eos": True}
    call = rpc.stub.Generate(grpc_request("hello", sampling=sampling))
    while not next(call).HasField("delta"):
        pass
    assert used() > 0
    call.cancel()
    eventually("blocks are free", lambda: used() == 0 and aborted() == before + 2)
