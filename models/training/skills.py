"""The skills of the bundled model: which media a turn shows, and what it asks about them."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from gateway.items import AudioPlan, ImagePlan, VideoPlan
from models.training import questions, text_skills
from models.training.corpus import HELD_OUT, TRAIN, Corpus, DataSet, Facts, processor_config
from models.training.features import IN_BF16
from models.training.media import picture_plan, sound_plan, video_plan
from models.training.questions import Exchange

# How often each skill is trained on. Copying is taught most: reading is copying, too.
MIX = {
    "shapes": 13, "reading": 10, "digits": 3, "speech": 10, "video": 8, "voice and picture": 4,
    "everything": 3, "copy": 5, "reverse": 5, "sort": 3, "sums": 2.5, "chat": 2.5,
}  # fmt: skip
TEXT_MIX = {"copy": 5, "reverse": 5, "sort": 3, "sums": 2, "chat": 1}
WITH_UNSEEN = ("reading", "speech")  # measured with unknown fonts and voices as well

_SOUND_TRACK = 0.25  # of the videos
_ABOUT_SOUND_TRACK = 0.3  # of the questions about those
_IN_BF16 = 0.5  # of the clips that have codes of both arithmetics


@dataclass(frozen=True, slots=True)
class Medium:
    """A sample of a set, as a turn shows it. A video may have a clip of sound with it."""

    name: str
    split: str
    index: int
    plan: ImagePlan | AudioPlan | VideoPlan
    sound: "Medium | None" = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Media and the question about them."""

    skill: str
    media: tuple[Medium, ...]
    exchange: Exchange


class Skills:
    """Draws turns. A split of a set that does not exist is replaced by the held-out one."""

    def __init__(self, corpus: Corpus, *, bf16_clips: int = 0) -> None:
        """The first ``bf16_clips`` training clips have codes made in bfloat16, too."""
        self._corpus = corpus
        self._processor = processor_config()
        self._bf16_clips = bf16_clips
        self._single: dict[str, list[int]] = {}
        self._spoken_colours: dict[str, dict[str, list[int]]] = {}

    def turn(self, rng: random.Random, skill: str, split: str) -> Turn:
        media, exchange = _DRAWERS[skill](self, rng, split)
        return Turn(skill, media, exchange)

    def shapes(self, rng: random.Random, split: str) -> "Drawn":
        picture, facts = self._draw(rng, "shapes", split)
        return (picture,), questions.about_picture(rng, questions.scene_of(facts))

    def reading(self, rng: random.Random, split: str) -> "Drawn":
        picture, facts = self._draw(rng, "texts", split)
        return (picture,), questions.about_text(rng, facts["text"])

    def digits(self, rng: random.Random, split: str) -> "Drawn":
        picture, facts = self._draw(rng, "digits", split)
        return (picture,), questions.about_digit(rng, facts["digit"])

    def speech(self, rng: random.Random, split: str) -> "Drawn":
        sound, facts = self._draw(rng, "sounds", split)
        return (sound,), questions.about_sound(rng, facts["kind"], facts["words"])

    def video(self, rng: random.Random, split: str) -> "Drawn":
        video, facts = self._draw(rng, "videos", split)
        if rng.random() < _SOUND_TRACK:
            video, heard = self._with_sound(rng, video, facts, split)
            if heard and rng.random() < _ABOUT_SOUND_TRACK:
                asked = questions.about_sound(rng, heard["kind"], heard["words"])
                return (video,), Exchange(asked.question, asked.answer, "sound track")
        return (video,), questions.about_video(rng, *questions.clip_of(facts))

    def voice_and_picture(self, rng: random.Random, split: str) -> "Drawn":
        """A picture of one shape and a spoken colour, in half of the cases the right one."""
        picture, facts = self._at("shapes", split, rng.choice(self._single_shapes(split)))
        shape = questions.scene_of(facts).shapes[0]
        clips = self._colour_clips(split)
        spoken = shape.colour
        if rng.random() < 0.5 or spoken not in clips:
            spoken = rng.choice(sorted(clips))
        sound, _ = self._at("sounds", split, rng.choice(clips[spoken]), rng)
        return (picture, sound), questions.about_voice_and_picture(rng, shape, spoken)

    def everything(self, rng: random.Random, split: str) -> "Drawn":
        """A picture and a sound, or a picture, a sound and a video, whose own sound if it has one
        is passed over."""
        picture, scene = self._draw(rng, "shapes", split)
        sound, heard = self._draw(rng, "sounds", split)
        media = [picture, sound]
        sentences = [
            questions.seen(questions.scene_of(scene)),
            questions.heard(heard["kind"], heard["words"]),
        ]
        if rng.random() < 0.5:
            video, clip = self._draw(rng, "videos", split)
            if rng.random() < _SOUND_TRACK:
                video, _ = self._with_sound(rng, video, clip, split)
            media.append(video)
            sentences.append(questions.seen_happening(*questions.clip_of(clip)))
        return tuple(media), questions.about_everything(rng, sentences)

    def _draw(self, rng: random.Random, name: str, split: str) -> tuple[Medium, Facts]:
        if (name, split) not in self._corpus.sets:
            split = HELD_OUT
        return self._at(name, split, rng.randrange(len(self._corpus[name, split])), rng)

    def _at(
        self, name: str, split: str, index: int, rng: random.Random | None = None
    ) -> tuple[Medium, Facts]:
        data = self._corpus[name, split]
        facts, shape = data.facts[index], data.arrays.shape(index)
        if name == "sounds":
            codes = split
            if rng and split == TRAIN and index < self._bf16_clips and rng.random() < _IN_BF16:
                codes = IN_BF16
            return Medium(name, codes, index, sound_plan(shape[0], self._processor)), facts
        if name == "videos":
            plan = video_plan(shape, facts, None, self._processor)
            return Medium(name, split, index, plan), facts
        return Medium(name, split, index, picture_plan(shape, self._processor)), facts

    def _with_sound(
        self, rng: random.Random, video: Medium, facts: Facts, split: str
    ) -> tuple[Medium, Facts | None]:
        """The video with a clip that is not longer than it, if the first one drawn is not."""
        sound, heard = self._draw(rng, "sounds", split)
        assert isinstance(sound.plan, AudioPlan)
        if sound.plan.duration_s > facts["num_frames"] / facts["rate"]:
            return video, None
        shape = self._corpus[video.name, video.split].arrays.shape(video.index)
        plan = video_plan(shape, facts, sound.plan, self._processor)
        return Medium(video.name, video.split, video.index, plan, sound), heard

    def _single_shapes(self, split: str) -> list[int]:
        if split not in self._single:
            scenes = enumerate(self._corpus["shapes", split].facts)
            self._single[split] = [i for i, facts in scenes if facts["layout"] == "one"]
        return self._single[split]

    def _colour_clips(self, split: str) -> dict[str, list[int]]:
        if split not in self._spoken_colours:
            self._spoken_colours[split] = _by_word(self._corpus["sounds", split], "colour")
        return self._spoken_colours[split]


Drawn = tuple[tuple[Medium, ...], Exchange]


def _by_word(data: DataSet, kind: str) -> dict[str, list[int]]:
    """Clips of one kind by their first word."""
    clips: dict[str, list[int]] = {}
    for index, facts in enumerate(data.facts):
        if facts["kind"] == kind:
            clips.setdefault(facts["words"][0], []).append(index)
    return clips


_DRAWERS: dict[str, Callable[[Skills, random.Random, str], Drawn]] = {
    "shapes": Skills.shapes,
    "reading": Skills.reading,
    "digits": Skills.digits,
    "speech": Skills.speech,
    "video": Skills.video,
    "voice and picture": Skills.voice_and_picture,
    "everything": Skills.everything,
    "copy": lambda _, rng, split: ((), text_skills.copy(rng, held_out=split != TRAIN)),
    "reverse": lambda _, rng, split: ((), text_skills.reverse(rng, held_out=split != TRAIN)),
    "sort": lambda _, rng, split: ((), text_skills.sort(rng, held_out=split != TRAIN)),
    "sums": lambda _, rng, split: ((), text_skills.sums(rng)),
    "chat": lambda _, rng, split: ((), text_skills.chat(rng)),
}
