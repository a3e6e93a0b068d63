"""What the gateway knows of the served model: everything but its weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gateway.items import MediaTokenIds
from gateway.media.processor import ProcessorConfig
from gateway.prompt.reasoning import ThinkTags
from gateway.prompt.template import ChatTemplate, TemplateSettings
from gateway.prompt.tokenizer import Tokenizer
from mimo.errors import CheckpointError

# Spellings by which media ids are cross-checked where the tokenizer has them.
_MEDIA_TOKENS = {
    "image_pad": "<|image_pad|>",
    "video_pad": "<|video_pad|>",
    "audio_pad": "<|audio_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
    "video_start": "<|mimo_video_start|>",
    "video_end": "<|mimo_video_end|>",
    "audio_start": "<|mimo_audio_start|>",
    "audio_end": "<|mimo_audio_end|>",
}

# Never sampled in a chat, besides media ids: they would break the form of the next turn.
_TURN_TOKENS = ("<|im_start|>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that says nothing gets. ``temperature`` 0 is greedy, ``top_k`` 0 keeps all."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_tokens: int

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingDefaults":
        """As the file's own users read it: greedy unless it asks for sampling or a temperature."""
        temperature = config.get("temperature")
        sampled = config.get("do_sample", temperature is not None)
        return cls(
            temperature=float(1.0 if temperature is None else temperature) if sampled else 0.0,
            top_p=float(config.get("top_p") or 1.0),
            top_k=max(0, int(config.get("top_k") or 0)),
            min_p=float(config.get("min_p") or 0.0),
            repetition_penalty=float(config.get("repetition_penalty") or 1.0),
            max_tokens=int(config.get("max_new_tokens") or 32768),
        )


@dataclass(frozen=True)
class Model:
    """A model directory as the gateway reads it. ``processor`` is None for a text-only model."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    think_tags: ThinkTags
    processor: ProcessorConfig | None
    defaults: SamplingDefaults
    max_context_tokens: int
    stop_token_ids: tuple[int, ...]
    banned_token_ids: tuple[int, ...]

    @classmethod
    def open(cls, directory: Path, name: str = "") -> "Model":
        """Read a model directory. Raises CheckpointError saying what is missing or wrong."""
        config = _read(directory / "config.json")
        generation = _read(directory / "generation_config.json", optional=True)
        tokenizer_config = _read(directory / "tokenizer_config.json", optional=True)
        tokenizer = Tokenizer.open(directory)
        multimodal = bool(config.get("vision_config") and config.get("audio_config"))
        processor = ProcessorConfig.from_checkpoint(config) if multimodal else None
        media_ids = _check_media_ids(processor.token_ids, tokenizer) if processor else ()
        settings = TemplateSettings.from_tokenizer_config(tokenizer_config, multimodal=multimodal)
        turn_ids = (
            tokenizer.control_tokens[text].id
            for text in _TURN_TOKENS
            if text in tokenizer.control_tokens
        )
        return cls(
            name=name or directory.resolve().name,
            tokenizer=tokenizer,
            template=ChatTemplate(settings, tokenizer),
            think_tags=ThinkTags.of(tokenizer),
            processor=processor,
            defaults=SamplingDefaults.from_generation_config(generation),
            max_context_tokens=_context_length(config),
            stop_token_ids=_stop_ids(config, generation),
            banned_token_ids=tuple(sorted({*media_ids, *turn_ids})),
        )

    @property
    def media_token_ids(self) -> MediaTokenIds | None:
        return self.processor.token_ids if self.processor else None


def _read(path: Path, *, optional: bool = False) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        raise CheckpointError(f"{path} does not exist") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return parsed


def _check_media_ids(ids: MediaTokenIds, tokenizer: Tokenizer) -> tuple[int, ...]:
    """All nine ids, each of them a control token and none called by another's name."""
    known = {token.id for token in tokenizer.control_tokens.values()}
    found: list[int] = []
    for field in fields(ids):
        id, text = getattr(ids, field.name), _MEDIA_TOKENS[field.name]
        named = tokenizer.control_tokens.get(text)
        if named is not None and named.id != id:
            raise CheckpointError(
                f"{field.name} is {id} in config.json, but {text} is {named.id} in tokenizer.json"
            )
        if id not in known:
            raise CheckpointError(f"{field.name} {id} of config.json is no token of tokenizer.json")
        found.append(id)
    return tuple(found)


def _stop_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids of both files. Raises CheckpointError when there is none."""
    ids: set[int] = set()
    for source in (config, generation):
        eos = source.get("eos_token_id")
        if eos is not None:
            ids |= set(eos) if isinstance(eos, list) else {eos}
    if not ids:
        raise CheckpointError("neither config.json nor generation_config.json has eos_token_id")
    return tuple(sorted(ids))


def _context_length(config: Mapping[str, Any]) -> int:
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or length < 1:
        raise CheckpointError("config.json has no max_position_embeddings")
    return length
