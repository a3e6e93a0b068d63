"""A model directory without weights whose text ids can be worked out by hand.

The tokenizer's ids are bytes: "A" is 65. Two merges exist, a double line feed is 256 and "ab" 257.
Control tokens begin at 300.
"""

import json
from pathlib import Path
from typing import Any

LINE_FEEDS = 256  # "\n\n"
AB = 257

END_OF_TEXT = 300
IM_START = 301
IM_END = 302
VISION_START = 303
VISION_END = 304
IMAGE_PAD = 305
VIDEO_PAD = 306
AUDIO_PAD = 307
VIDEO_START = 308
VIDEO_END = 309
AUDIO_START = 310
AUDIO_END = 311
THINK = 312
END_THINK = 313
TOOL_CALL = 314
END_TOOL_CALL = 315
TOOL_RESPONSE = 316
END_TOOL_RESPONSE = 317

# The tag tokens are not "special", as in the published tokenizers.
CONTROL_TOKENS = {
    "<|endoftext|>": (END_OF_TEXT, True),
    "<|im_start|>": (IM_START, True),
    "<|im_end|>": (IM_END, True),
    "<|vision_start|>": (VISION_START, True),
    "<|vision_end|>": (VISION_END, True),
    "<|image_pad|>": (IMAGE_PAD, True),
    "<|video_pad|>": (VIDEO_PAD, True),
    "<|audio_pad|>": (AUDIO_PAD, True),
    "<|mimo_video_start|>": (VIDEO_START, True),
    "<|mimo_video_end|>": (VIDEO_END, True),
    "<|mimo_audio_start|>": (AUDIO_START, True),
    "<|mimo_audio_end|>": (AUDIO_END, True),
    "<think>": (THINK, False),
    "</think>": (END_THINK, False),
    "<tool_call>": (TOOL_CALL, False),
    "</tool_call>": (END_TOOL_CALL, False),
    "<tool_response>": (TOOL_RESPONSE, False),
    "</tool_response>": (END_TOOL_RESPONSE, False),
}


def tokenizer_definition() -> dict[str, Any]:
    symbols = _byte_symbols()
    line_feed = symbols[ord("\n")]
    vocab = {symbol: byte for byte, symbol in enumerate(symbols)}
    vocab |= {line_feed * 2: LINE_FEEDS, "ab": AB}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id, "content": text, "special": special, **flags}
            for text, (id, special) in CONTROL_TOKENS.items()
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [[line_feed, line_feed], ["a", "b"]],
        },
    }


def config() -> dict[str, Any]:
    """config.json of an omni model; only what the gateway reads."""
    return {
        "model_type": "mimo_v2",
        "vision_config": {"depth": 1},
        "audio_config": {"group_size": 4},
        "max_position_embeddings": 4096,
        "eos_token_id": IM_END,
        "processor_config": {
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "image_min_pixels": 1024,
            "image_max_pixels": 65536,
            "video_min_pixels": 1024,
            "video_max_pixels": 65536,
            "fps": 1.0,
            "max_frames": 64,
            "min_frames": 2,
            "image_token_id": IMAGE_PAD,
            "video_token_id": VIDEO_PAD,
            "audio_token_id": AUDIO_PAD,
            "vision_start_token_id": VISION_START,
            "vision_end_token_id": VISION_END,
            "video_start_token_id": VIDEO_START,
            "video_end_token_id": VIDEO_END,
            "audio_start_token_id": AUDIO_START,
            "audio_end_token_id": AUDIO_END,
        },
    }


def write(
    directory: Path, *, default_system: str = "", thinking_default: bool = False, **overrides: Any
) -> Path:
    """Write a model directory; ``overrides`` replace keys of config.json. Returns ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    template = {
        "form": "mimo-v2.5",
        "default_system": default_system,
        "thinking_default": thinking_default,
    }
    files = {
        "config.json": config() | overrides,
        "tokenizer.json": tokenizer_definition(),
        "tokenizer_config.json": {"mimo_template": template},
        "generation_config.json": {
            "do_sample": False,
            "eos_token_id": [IM_END, END_OF_TEXT],
            "max_new_tokens": 256,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return directory


def _byte_symbols() -> list[str]:
    """The printable stand-in of every byte in byte-level BPE."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + hidden.index(byte)) for byte in range(256)]
