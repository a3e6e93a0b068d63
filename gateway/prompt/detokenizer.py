"""Token ids to text, one token at a time."""

import codecs

from gateway.prompt.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one channel of one choice. An unfinished character waits for its remaining bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, id: int) -> str:
        """The characters that this token completes."""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    @property
    def holds_bytes(self) -> bool:
        """Whether a character is unfinished."""
        return bool(self._decoder.getstate()[0])

    def finish(self) -> str:
        """U+FFFD when the output ended inside a character, else nothing."""
        return self._decoder.decode(b"", final=True)
