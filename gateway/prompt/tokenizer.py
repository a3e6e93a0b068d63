"""Text to token ids and back, with control tokens kept out of reach of text.

A chat format is only as safe as the border between what the server writes and what a user writes.
``Tokenizer.encode`` therefore knows no control token at all: whatever string a user sends, it comes
out as ordinary pieces. Control ids enter a prompt in one way only, by id, from the renderer.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers

from gateway.prompt.segments import Control, Segment, Text
from mimo.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ControlToken:
    """An added token. Only ``special`` ones vanish from generated text."""

    id: int
    text: str
    special: bool


class Tokenizer:
    """A byte-level BPE tokenizer. Raises CheckpointError when it cannot keep the border."""

    def __init__(self, definition: str) -> None:
        """``definition`` is the content of tokenizer.json."""
        parsed = json.loads(definition)
        self.control_tokens = {
            token["content"]: ControlToken(token["id"], token["content"], token["special"])
            for token in parsed.get("added_tokens", ())
        }
        parsed["added_tokens"] = []
        # Post-processors and padding refer to added tokens; prompts are assembled here instead.
        parsed["post_processor"] = parsed["padding"] = parsed["truncation"] = None
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(parsed))
        self._control_by_id = {token.id: token for token in self.control_tokens.values()}
        self._vocabulary = {id: piece for piece, id in self._plain.get_vocab().items()}
        self._spellings: dict[int, bytes] = {}  # of ids that were generated
        self._check_byte_level()
        self._check_no_control_token_from_text()

    @classmethod
    def open(cls, model_dir: Path) -> "Tokenizer":
        path = model_dir / "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is not a tokenizer: {error}") from None

    def encode(self, text: str) -> list[int]:
        """Ids of text as ordinary pieces. Lone surrogates become U+FFFD.

        Other threads run meanwhile, which they do not while the library encodes a single text.
        """
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        (encoding,) = self._plain.encode_batch_fast([clean], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def control_id(self, text: str) -> int:
        """Id of a control token that the model must have. Raises CheckpointError."""
        token = self.control_tokens.get(text)
        if token is None:
            raise CheckpointError(f"tokenizer.json has no token {text!r}")
        return token.id

    def literal(self, text: str) -> list[Segment]:
        """Segments of text written by the server, in which control strings mean control tokens."""
        segments: list[Segment] = []
        rest = text
        while rest:
            start, token = min(
                (
                    (rest.find(token.text), token)
                    for token in self.control_tokens.values()
                    if token.text in rest
                ),
                key=lambda found: (found[0], -len(found[1].text)),
                default=(len(rest), None),
            )
            if start:
                segments.append(Text(rest[:start]))
            if token is None:
                break
            segments.append(Control(token.id))
            rest = rest[start + len(token.text) :]
        return segments

    def token_bytes(self, id: int) -> bytes:
        """What a generated id adds to the output. Empty for special tokens and unknown ids."""
        control = self._control_by_id.get(id)
        return b"" if control is not None and control.special else self.spelling(id)

    def spelling(self, id: int) -> bytes:
        """The bytes of any id, special tokens included. Empty for unknown ids."""
        spelled = self._spellings.get(id)
        if spelled is None:
            spelled = self._spell(id)
            if spelled:  # ids that mean nothing are without number
                self._spellings[id] = spelled
        return spelled

    def _spell(self, id: int) -> bytes:
        control = self._control_by_id.get(id)
        if control is not None:
            return control.text.encode()
        piece = self._vocabulary.get(id, "")
        return bytes(self._byte_of[symbol] for symbol in piece)

    @property
    def num_ids(self) -> int:
        """One more than the largest id that means anything."""
        return max(max(self._vocabulary, default=-1), max(self._control_by_id, default=-1)) + 1

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The byte behind each symbol of the byte-level alphabet.

        Printable Latin-1 bytes stand for themselves; the others take the code points from 256 on,
        in order, so that no piece holds white space or control characters.
        """
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in set(printable)]
        alphabet = {chr(byte): byte for byte in printable}
        return alphabet | {chr(256 + rank): byte for rank, byte in enumerate(hidden)}

    def _check_byte_level(self) -> None:
        for id, piece in self._vocabulary.items():
            if id not in self._control_by_id and not self._byte_of.keys() >= set(piece):
                raise CheckpointError(
                    f"tokenizer.json is not byte-level BPE: piece {piece!r} (id {id})"
                )

    def _check_no_control_token_from_text(self) -> None:
        for token in self.control_tokens.values():
            # Neighbours matter: some pre-tokenizers glue a mark to the word before it.
            for text in (token.text, f"a{token.text}b", f" {token.text}\n"):
                if self._control_by_id.keys() & set(self.encode(text)):
                    raise CheckpointError(
                        f"the plain tokenizer still turns {token.text!r} into a control token"
                    )
