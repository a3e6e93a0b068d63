"""How much one request may ask for, through whichever face."""

from mimo.errors import InvalidRequest, Reason

MAX_MESSAGES = 2048
MAX_PARTS = 1 << 14  # of all messages: even empty ones take time
MAX_CHOICES = 8
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_BIAS = 100
MAX_BAD_WORDS = 64
MAX_LITERALS = 2000  # texts to choose the answer from
MAX_DRAFT_TOKENS = 16
MAX_PRIORITY = 100
MAX_SALT_CHARACTERS = 1024
MAX_TOKENS = (1 << 31) - 1  # of a count on the wire, far above any context
MAX_STRING_CHARACTERS = 4 << 20
MAX_TEXT_CHARACTERS = 8 << 20

TEMPERATURE = (0.0, 2.0)
PROBABILITY = (0.0, 1.0)
PENALTY = (-2.0, 2.0)
MIN_REPETITION_PENALTY = 2.0**-149  # what is smaller is 0 as a float of the wire
MAX_REPETITION_PENALTY = 10.0


def check_parts(num_parts: int) -> None:
    """Raises InvalidRequest for more parts than all messages of a request may have."""
    if num_parts > MAX_PARTS:
        raise InvalidRequest(
            f"{num_parts} content parts; the limit is {MAX_PARTS}",
            reason=Reason.TOO_MANY_MEDIA,
            field="messages",
            limit=MAX_PARTS,
        )
