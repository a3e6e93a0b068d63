"""Stages on stand-in data: resuming changes nothing, what is exported is what was trained."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from gateway.items import MediaOptions
from gateway.media.plan.video import sample_frames
from mimo.checkpoint.index import CheckpointIndex
from mimo.cli.prompts import read_goals, read_prompts
from mimo.cli.score import Score
from mimo.nn.attention import AttentionSelector
from models.training import evaluate as evaluation
from models.training.batch import Batch
from models.training.card import model_card
from models.training.corpus import (
    HELD_OUT,
    HELD_OUT_SPLITS,
    SPLITS,
    Corpus,
    draw_samples,
    processor_config,
)
from models.training.decoder_stage import answer_loss
from models.training.draw import stream
from models.training.export import export
from models.training.features import cache_codes, cache_mels, cache_patches
from models.training.gates import DRAFTS, SKILLS
from models.training.loop import Stage, bars, run
from models.training.networks import Networks, round_to_bf16
from models.training.parallel import ALONE
from models.training.pipeline import ENCODERS, Pipeline
from models.training.ragged import write_ragged
from models.training.settings import Settings
from models.training.skills import MIX, WITH_UNSEEN
from models.training.state import module_state, read_state, write_state
from models.training.synth.sound import COMMANDS, DIGITS
from models.training.synth.video import draw_video
from services.audio.segments import Segment
from services.audio.weights import AudioCheckpoint
from services.llm.model.attention import FullSequences
from services.llm.model.weights import load_decoder
from services.vision.weights import load_vision_tower, read_tower_config

STAGES = ("vision", "audio", "codes", "decoder", "mtp")


def stand_in(name: str, split: str, index: int) -> tuple[np.ndarray, dict[str, object]]:
    """A sample without fonts, scans or voices, which not every machine has."""
    rng = np.random.default_rng([len(name), len(split), index])
    match name:
        case "texts":
            return rng.integers(0, 256, (64, 96, 3), np.uint8), {"text": "AB", "font": ""}
        case "digits":
            pixels = rng.integers(0, 256, (64, 64, 3), np.uint8)
            return pixels, {
                "digit": index % 10,
                "original": 100 * SPLITS[name].index(split) + index,
            }
        case "sounds":
            kind, words = (
                ("beeps", ["beep"] * 2),
                ("digits", [DIGITS[index % 10]]),
                ("commands", [COMMANDS[0]]),
                ("colour", ["red"]),
            )[index % 4]
            samples = rng.integers(-3000, 3000, 6000 + 400 * index, np.int16)
            return samples, {"kind": kind, "words": words}
    return draw_samples(0, name, split, index, index + 1)[0]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Data sets, and what fresh encoders make of them."""
    root = tmp_path_factory.mktemp("train")
    settings = Settings(train_dir=str(root), recipe="smoke", ranks=1, out=str(root / "model"))
    for name, splits in SPLITS.items():
        for split in splits:
            samples = [stand_in(name, split, index) for index in range(12)]
            folder = settings.data / name / split
            write_ragged(folder, [array for array, _ in samples])
            lines = [
                json.dumps(facts | {"digest": sha256(array.tobytes()).hexdigest()})
                for array, facts in samples
            ]
            (folder / "facts.jsonl").write_text("\n".join(lines))
    networks = Networks.fresh(settings.seed)
    with torch.no_grad():
        for level, codebook in enumerate(networks.tokenizer.quantizer.codebooks):
            codebook.normal_(generator=torch.Generator().manual_seed(level))
    corpus = Pipeline(settings, Console())._corpus()
    with bars() as progress:
        cache_mels(corpus, networks.mel(), settings.data, progress)
        cache_codes(corpus, networks.tokenizer, settings.data, progress)
        cache_patches(corpus, networks.tower, settings.data, progress)
    parts = {"tower": networks.tower, "tokenizer": networks.tokenizer}
    for name in (ENCODERS, "codebooks"):
        write_state(settings.state / f"{name}.safetensors", module_state(parts), 1)
    pipeline = Pipeline(settings, Console())
    for name in ("audio", "decoder"):  # later stages start from them
        stage = pipeline.build(name, ALONE)
        write_state(settings.state / f"{name}.safetensors", stage.state(), stage.steps)
    return settings


class Interruption(Exception):
    pass


def interrupt(stage: Stage, at: int) -> None:
    step: Callable[[int], dict[str, float]] = stage.step

    def step_or_stop(index: int) -> dict[str, float]:
        if index == at:
            raise Interruption
        return step(index)

    stage.step = step_or_stop  # type: ignore[method-assign]


@pytest.mark.parametrize("name", STAGES)
def test_a_resumed_stage_ends_like_an_uninterrupted_one(
    settings: Settings, tmp_path: Path, name: str
) -> None:
    pipeline = Pipeline(settings, Console())

    def train(root: Path, stop: int | None = None) -> dict[str, Tensor]:
        stage = pipeline.build(name, ALONE)
        if stop is not None:
            interrupt(stage, stop)
        with bars() as progress:
            run(stage, root, progress, save_every_s=0.0)
        return stage.state()

    torch.set_num_threads(1)
    whole = train(tmp_path / "whole")
    with pytest.raises(Interruption):
        train(tmp_path / "parts", stop=2)
    resumed = train(tmp_path / "parts")
    assert whole.keys() == resumed.keys()
    for tensor_name, tensor in whole.items():
        assert torch.equal(tensor, resumed[tensor_name]), tensor_name
    start = pipeline.build(name, ALONE).state()
    assert any(not torch.equal(start[n], t) for n, t in whole.items() if "optimizer" not in n)
    log = (tmp_path / "whole" / "logs" / f"{name}.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["step"] == 3


def test_a_finished_stage_is_left_alone(settings: Settings, tmp_path: Path) -> None:
    stage = Pipeline(settings, Console()).build("vision", ALONE)
    write_state(tmp_path / "state" / "vision.safetensors", stage.state(), stage.steps)
    interrupt(stage, at=3)
    with bars() as progress:
        run(stage, tmp_path, progress, save_every_s=0.0)


@pytest.mark.check
def test_two_processes_train_together(settings: Settings, tmp_path: Path) -> None:
    """Both see each other's gradients: the result differs from that of one process."""
    shutil.copytree(settings.root, tmp_path / "train")
    pair = dataclasses.replace(settings, train_dir=str(tmp_path / "train"), ranks=2)
    Pipeline(pair, Console())._train("mtp")
    together, steps = read_state(pair.state / "mtp.safetensors")
    assert steps == 3 and all(tensor.isfinite().all() for tensor in together.values())
    shutil.rmtree(pair.state)
    shutil.copytree(settings.state, pair.state)
    Pipeline(dataclasses.replace(pair, ranks=1), Console())._train("mtp")
    single, _ = read_state(pair.state / "mtp.safetensors")
    assert any(not torch.equal(single[name], tensor) for name, tensor in together.items())


def test_every_skill_gives_examples_that_fit_the_model(settings: Settings) -> None:
    examples, encoded = Pipeline(settings, Console())._examples()
    drawn = [examples.held_out(skill, index) for skill in MIX for index in range(3)]
    drawn += [examples.held_out(skill, 0, unseen=True) for skill in WITH_UNSEEN]
    drawn += [examples.train(stream(index), MIX) for index in range(60)]
    batch = Batch.of(drawn, encoded)
    networks = Networks.fresh(0)
    with torch.no_grad():
        x = batch.embed(networks)
        assert torch.isfinite(answer_loss(networks, batch))
    pads = torch.tensor(examples.pad_ids)
    placed = torch.isin(batch.ids, pads).nonzero()[:, 0]
    assert torch.equal(placed, batch.row_targets.sort().values)
    assert len(x) == sum(batch.lengths) and all(length % 8 == 0 for length in batch.lengths)


def test_a_prompt_reads_as_the_gateway_would_send_it(settings: Settings) -> None:
    examples, _ = Pipeline(settings, Console())._examples()
    example = examples.held_out("shapes", 0)
    exchange = example.turn.exchange
    text = examples.spell(example.ids)
    pads = text.count("<|image_pad|>")
    assert text == (
        f"<|im_start|>user\n<|vision_start|>{'<|image_pad|>' * pads}<|vision_end|>"
        f"{exchange.question}<|im_end|><|im_start|>assistant\n<think></think>"
        f"{exchange.answer}<|im_end|>"
    )
    assert examples.spell(example.ids[example.start :]) == f"{exchange.answer}<|im_end|>"


def test_rows_of_a_batch_are_those_of_its_examples_alone(settings: Settings) -> None:
    """Packing, padding and placing against one example at a time."""
    examples, encoded = Pipeline(settings, Console())._examples()
    networks = Networks.fresh(0)
    names = ("everything", "video", "copy", "speech")
    drawn = [examples.held_out(name, index) for name in names for index in range(2)]
    together = Batch.of(drawn, encoded)
    with torch.no_grad():
        packed = together.embed(networks)
        hidden = networks.decoder(packed, together.positions, together.attend)
        for example, start in zip(drawn, together.starts, strict=True):
            alone = Batch.of([example], encoded)
            x = alone.embed(networks)[: len(example.ids)]
            rows = slice(start, start + len(example.ids))
            torch.testing.assert_close(packed[rows], x)
            attend = FullSequences((len(x),))
            expected = networks.decoder(x, torch.arange(len(x)), attend)
            torch.testing.assert_close(hidden[rows], expected, atol=1e-4, rtol=1e-4)


def test_drafts_are_counted_as_speculation_would(settings: Settings) -> None:
    """An answer of 7 tokens; the second block is wrong about the second token it guesses."""
    examples, _ = Pipeline(settings, Console())._examples()
    example = examples.held_out("copy", 0)
    answer = 7
    example = dataclasses.replace(example, ids=(*range(20), *range(answer)), start=20)
    right = {row: True for row in range(40)}
    score = Score()
    evaluation._draft(example, 0, [right, right | {19: False}], score)
    # Known 20: first draft right, second wrong -> 2 tokens. Known 22: both right -> 3. Known 25:
    # one token is left to draft and to emit -> 1.
    assert (score.rounds, score.emitted) == (3, 6)
    assert (score.drafted, score.accepted) == ([3, 2], [3, 1])


def test_every_skill_is_measured_and_named_in_the_card(settings: Settings) -> None:
    report = Pipeline(settings, Console()).evaluate()
    names = {*MIX, *(f"{skill}, unseen" for skill in WITH_UNSEEN)}
    assert {name: result["n"] for name, result in report["skills"].items()} == dict.fromkeys(
        names, settings.amounts.evaluated
    )
    card = model_card(report, settings.amounts)
    assert all(f"| {name} |" in card for name in names)


def test_services_load_what_is_exported(settings: Settings, tmp_path: Path) -> None:
    networks = Networks.fresh(1)
    with torch.no_grad():
        for codebook in networks.tokenizer.quantizer.codebooks:
            codebook.normal_(generator=torch.Generator().manual_seed(0))
    size = export(networks, tmp_path)
    assert size < 25_000_000
    for module in networks.modules().values():
        round_to_bf16(module)
    options = {"dtype": torch.float32, "device": "cpu"}
    index = CheckpointIndex.open(tmp_path)
    decoder, mtp = load_decoder(index, selector=AttentionSelector("llm"), **options)
    assert mtp is not None
    tower = load_vision_tower(
        index, read_tower_config(index), selector=AttentionSelector("vision"), **options
    )
    audio = AudioCheckpoint.open(tmp_path).load(selector=AttentionSelector("audio"), **options)
    positions, attend = torch.arange(20), FullSequences((20,))
    with torch.inference_mode():
        x = networks.decoder.embed(torch.arange(20))
        hidden = networks.decoder(x, positions, attend)
        served = decoder(decoder.embed(torch.arange(20)), positions, attend)
        assert torch.equal(networks.decoder.logits(hidden), decoder.logits(served))
        for depth in range(3):
            ours = networks.mtp.layer(depth, x, hidden, positions, attend)
            assert torch.equal(ours, mtp.layer(depth, x, served, positions, attend))
        patches = torch.randn(16, 1536, generator=torch.Generator().manual_seed(1))
        assert torch.equal(networks.tower(patches, [(1, 4, 4)]), tower(patches, [(1, 4, 4)]))
        sound = torch.randn(6_000, generator=torch.Generator().manual_seed(2))
        codes = audio.tokenize([sound])[0]
        mel = networks.mel()(sound)
        segments = [Segment(len(mel))]
        assert torch.equal(networks.tokenizer.tokenize(mel, segments), codes)
        ours = networks.embedder(codes, [len(codes)])
        assert torch.equal(ours, audio.embed([codes])[0])


def test_held_out_sets_hold_nothing_of_training(settings: Settings) -> None:
    Pipeline(settings, Console()).data()  # everything is there: only the check runs
    leaked = settings.data / "shapes" / HELD_OUT / "facts.jsonl"
    honest = leaked.read_text()
    leaked.write_text((settings.data / "shapes" / "train" / "facts.jsonl").read_text())
    try:
        with pytest.raises(Exception, match="trained on"):
            Pipeline(settings, Console()).data()
    finally:
        leaked.write_text(honest)


def test_prompts_are_written_with_media_that_can_be_planned(
    settings: Settings, tmp_path: Path
) -> None:
    """From held-out sets alone. A clip drawn whole holds the very frames that the model is trained
    on, and its file has the length and rate that its plan was made for."""
    for name, splits in HELD_OUT_SPLITS.items():
        for split in splits:
            shutil.copytree(settings.data / name / split, tmp_path / "data" / name / split)
    alone = dataclasses.replace(settings, train_dir=str(tmp_path))
    folder = Pipeline(alone, Console()).prompts()
    prompts = read_prompts(folder)
    assert len(prompts) == settings.amounts.evaluated * (len(MIX) + len(WITH_UNSEEN))
    assert {kind for prompt in prompts for kind, _ in prompt.media} == {"image", "audio", "video"}
    assert read_goals(folder) == SKILLS | DRAFTS
    assert not (alone.data / "shapes" / "train").exists()
    videos = [file for prompt in prompts for kind, file in prompt.media if kind == "video"]
    index = int(videos[0].stem.split("-")[2])
    data = Corpus.open(alone.data, HELD_OUT_SPLITS)["videos", HELD_OUT]
    stored, facts = data.arrays[index], data.facts[index]
    rng = stream(settings.seed, "videos", HELD_OUT, index)
    frames, whole = draw_video(rng, processor_config(), every_frame=True)
    taken = sample_frames(whole["num_frames"], whole["rate"], MediaOptions(), processor_config())
    assert whole["num_frames"] == facts["num_frames"] == len(frames)
    assert np.array_equal(frames[list(taken.frame_indices)], stored)
    with av.open(str(videos[0])) as container:
        decoded = list(container.decode(container.streams.video[0]))
        assert float(container.streams.video[0].average_rate) == facts["rate"]
    assert len(decoded) == len(frames)
    error = decoded[0].to_ndarray(format="rgb24").astype(int) - frames[0]
    assert np.abs(error).mean() < 6
