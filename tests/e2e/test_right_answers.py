"""The bundled model's answers to questions it has never seen, through the whole system.

``tests/fixtures/held_out`` is a part of the folder that ``models.training prompts`` writes: of each
skill a few questions that the model answers rightly. Any fault on the way of a pixel, a sample or a
token turns some of them wrong.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from mimo.cli.prompts import Prompt, read_prompts
from tests.support.live import Grpc, Media, Part, Rest, audio, image, video

FOLDER = Path(__file__).parents[1] / "fixtures" / "held_out"
PROMPTS = read_prompts(FOLDER)
KINDS: dict[str, Callable[[bytes], Media]] = {"image": image, "audio": audio, "video": video}


def parts_of(prompt: Prompt) -> list[Part]:
    return [*(KINDS[kind](path.read_bytes()) for kind, path in prompt.media), prompt.question]


def name_of(prompt: Prompt) -> str:
    return f"{prompt.skill}: {prompt.answer}"


@pytest.mark.parametrize("prompt", PROMPTS, ids=name_of)
def test_the_answer_is_right_by_rest(rest: Rest, prompt: Prompt) -> None:
    assert rest.ask(*parts_of(prompt), temperature=0, max_tokens=64).text == prompt.answer


@pytest.mark.parametrize("prompt", PROMPTS, ids=name_of)
def test_the_answer_is_right_by_grpc(rpc: Grpc, prompt: Prompt) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 64}
    assert rpc.ask(*parts_of(prompt), sampling=sampling).text == prompt.answer


def test_every_skill_is_asked_about() -> None:
    skills = {prompt.skill.partition(",")[0] for prompt in PROMPTS}
    assert skills == {
        "shapes", "reading", "digits", "speech", "video", "voice and picture",
        "everything", "copy", "reverse", "sort", "sums", "chat",
    }  # fmt: skip
