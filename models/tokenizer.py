"""The tokenizer of mimo-tiny: bytes, the words of its tasks, and the control tokens.

Every digit and every capital within a string is a token of its own, so that reading and copying
text stays a matter of single symbols. Merges are spelled out from a word list instead of trained,
which makes the file the same with every version of the library.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_pad|>",
    "<|mimo_video_start|>",
    "<|mimo_video_end|>",
    "<|mimo_audio_start|>",
    "<|mimo_audio_end|>",
)

# Added tokens, but part of what a model says, as in the published tokenizers.
TAG_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

# Capitalised words at a line's start, then words after a space; each becomes one token.
_OPENING = """
The There In It From What Which How Who Where Yes No On At Is A An I Count Describe Read Transcribe
Write Say Copy Repeat Reverse Sort Add Does Hello
"""
_INNER = """
the is are in it and of to a an at do does there you see hear what which how many image picture
video audio voice sound says say text letters digit digits written handwritten here read count shape
shapes circle square triangle star colour red green blue yellow purple orange black left right above
below up down middle both one two three move moves change changes from happens beep beeps stop go
yes no on off open close but my can me am tiny model help name end stays way reverse other simple
short small look pictures sounds answer questions describe listen comes day thank with not has for
"""
# Lower-case words at a line's start. Their merges come last: "re" or "he" made early would break up
# the words above.
_LOWER = """
user assistant system tool what how who which where describe read count copy reverse sort is hello
"""

# A capitalised word, a capital, a digit, a word with its space, white space, any other symbol.
_PIECES = r"\p{Lu}\p{Ll}+|\p{Lu}|\p{N}| ?\p{Ll}+|\s+|[^\s\p{L}\p{N}]"


def build() -> Tokenizer:
    """Byte ids 0 to 255, then merged pieces, then control and tag tokens."""
    symbols = _byte_symbols()
    vocab = {symbol: byte for byte, symbol in enumerate(symbols)}
    merges: list[tuple[str, str]] = []
    for word in _words():
        pieces = [symbols[byte] for byte in word.encode()]
        prefix = pieces[0]
        for piece in pieces[1:]:
            if prefix + piece not in vocab:
                vocab[prefix + piece] = len(vocab)
                merges.append((prefix, piece))
            prefix += piece
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in TAG_TOKENS])
    return tokenizer


def control_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the control and tag tokens by their text."""
    return {text: tokenizer.token_to_id(text) for text in (*CONTROL_TOKENS, *TAG_TOKENS)}


def readable_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of whole words and printable ASCII: what a random model should be heard saying."""
    symbols = [chr(code) for code in range(0x20, 0x7F)]
    return sorted({id for text in (*symbols, *_words()) for id in tokenizer.encode(text).ids})


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json; ``mimo_template`` is what the chat renderer reads."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mimo_template": {"form": "mimo-v2.5", "default_system": "", "thinking_default": False},
    }


def _words() -> list[str]:
    return [*_OPENING.split(), *(f" {word}" for word in _INNER.split()), *_LOWER.split()]


def _byte_symbols() -> list[str]:
    """The printable stand-in of every byte in byte-level BPE, by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = (byte for byte in range(256) if byte not in printable)
    stand_ins = {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}
    return [stand_ins.get(byte, chr(byte)) for byte in range(256)]
