"""What can go wrong, and what the caller should do about it.

Every error that may cross a process border is a :class:`MimoError`; ``mimo.rpc.status`` carries it
over gRPC as a status with ``google.rpc.ErrorInfo`` and builds the same type on the other side.

* MimoError
  x InvalidRequest      INVALID_ARGUMENT     the caller's fault; never retry
  x NotFound            NOT_FOUND            no such model or upload; never retry
  x Unauthenticated     UNAUTHENTICATED      no or bad credentials; never retry
  x PermissionDenied    PERMISSION_DENIED    credentials do not allow it; never retry
  x Unimplemented       UNIMPLEMENTED        this build or model cannot do it; never retry
  x Overloaded          RESOURCE_EXHAUSTED   a queue is full or a quota spent; retry after a pause
  x Unavailable         UNAVAILABLE          a peer is down or draining; retry elsewhere
  x DeadlineExceeded    DEADLINE_EXCEEDED    time ran out; never retry with the same budget
  x Cancelled           CANCELLED            the caller went away; nobody is left to retry for
  x EmbeddingMissing    FAILED_PRECONDITION  the store forgot an entry; encode it again, then retry
  x EmbeddingMismatch   FAILED_PRECONDITION  an entry disagrees with the plan; encode it again
  x Internal            INTERNAL             a bug or a broken device; do not retry
* StartupError          a process cannot start; says why in one line and exits non-zero
  x ConfigError         a flag, an environment variable or their combination
  x CheckpointError     a model directory that is incomplete or contradicts itself
"""

from enum import Enum, StrEnum
from typing import ClassVar


class Reason(StrEnum):
    """The closed list of machine-readable reasons (``ErrorInfo.reason``)."""

    INVALID_JSON = "INVALID_JSON"
    MISSING_FIELD = "MISSING_FIELD"
    INVALID_TYPE = "INVALID_TYPE"
    INVALID_VALUE = "INVALID_VALUE"
    UNSUPPORTED_PARAMETER = "UNSUPPORTED_PARAMETER"
    FORBIDDEN_PARAMETER = "FORBIDDEN_PARAMETER"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    GRAMMAR_INVALID = "GRAMMAR_INVALID"
    GRAMMAR_TOO_COMPLEX = "GRAMMAR_TOO_COMPLEX"
    TOO_MANY_MEDIA = "TOO_MANY_MEDIA"
    MEDIA_ENCODING = "MEDIA_ENCODING"
    MEDIA_UNSUPPORTED = "MEDIA_UNSUPPORTED"
    MEDIA_MODALITY = "MEDIA_MODALITY"
    MEDIA_CORRUPT = "MEDIA_CORRUPT"
    MEDIA_EMPTY = "MEDIA_EMPTY"
    MEDIA_LIMIT = "MEDIA_LIMIT"
    MEDIA_ENCRYPTED = "MEDIA_ENCRYPTED"
    MEDIA_DECODE_FAILED = "MEDIA_DECODE_FAILED"
    MEDIA_NOT_FOUND = "MEDIA_NOT_FOUND"
    URL_INVALID = "URL_INVALID"
    URL_BLOCKED = "URL_BLOCKED"
    URL_FETCH_FAILED = "URL_FETCH_FAILED"
    URL_FETCH_TIMEOUT = "URL_FETCH_TIMEOUT"
    MODEL_ENDPOINT = "MODEL_ENDPOINT"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    QUOTA = "QUOTA"
    QUOTA_HARD = "QUOTA_HARD"
    CONCURRENCY = "CONCURRENCY"
    OVERLOADED = "OVERLOADED"
    CAPACITY = "CAPACITY"
    DRAINING = "DRAINING"
    UPSTREAM_LOST = "UPSTREAM_LOST"
    EMBEDDING_MISSING = "EMBEDDING_MISSING"
    EMBEDDING_MISMATCH = "EMBEDDING_MISMATCH"
    DEADLINE = "DEADLINE"
    CANCELLED = "CANCELLED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION = "PERMISSION"
    POLICY = "POLICY"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"


class Retry(Enum):
    """What a caller may do after an error."""

    NEVER = "never"
    LATER = "later"  # the same peer, after ``retry_after_s``
    ELSEWHERE = "elsewhere"  # another replica, at once
    REPAIR = "repair"  # encode the embedding again, then once more


class MimoError(Exception):
    """An error with a machine-readable reason. Use a subclass.

    ``field`` is the dotted path of the offending request field; ``metadata`` are short facts such
    as the limit that was exceeded. Nothing in an error may hold media, prompts or addresses.
    """

    code: ClassVar[str] = "INTERNAL"
    default_reason: ClassVar[Reason] = Reason.INTERNAL
    retry: ClassVar[Retry] = Retry.NEVER

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
        **metadata: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = {name: str(value) for name, value in metadata.items()}


class InvalidRequest(MimoError):
    code = "INVALID_ARGUMENT"
    default_reason = Reason.INVALID_VALUE


class NotFound(MimoError):
    code = "NOT_FOUND"
    default_reason = Reason.MODEL_NOT_FOUND


class Unauthenticated(MimoError):
    code = "UNAUTHENTICATED"
    default_reason = Reason.UNAUTHENTICATED


class PermissionDenied(MimoError):
    code = "PERMISSION_DENIED"
    default_reason = Reason.PERMISSION


class Unimplemented(MimoError):
    code = "UNIMPLEMENTED"
    default_reason = Reason.UNIMPLEMENTED


class Overloaded(MimoError):
    code = "RESOURCE_EXHAUSTED"
    default_reason = Reason.OVERLOADED
    retry = Retry.LATER


class Unavailable(MimoError):
    code = "UNAVAILABLE"
    default_reason = Reason.UPSTREAM_LOST
    retry = Retry.ELSEWHERE


class DeadlineExceeded(MimoError):
    code = "DEADLINE_EXCEEDED"
    default_reason = Reason.DEADLINE


class Cancelled(MimoError):
    code = "CANCELLED"
    default_reason = Reason.CANCELLED


class EmbeddingMissing(MimoError):
    code = "FAILED_PRECONDITION"
    default_reason = Reason.EMBEDDING_MISSING
    retry = Retry.REPAIR


class EmbeddingMismatch(MimoError):
    code = "FAILED_PRECONDITION"
    default_reason = Reason.EMBEDDING_MISMATCH
    retry = Retry.REPAIR


class Internal(MimoError):
    code = "INTERNAL"
    default_reason = Reason.INTERNAL


class StartupError(Exception):
    """A process cannot start. The message is one line that says what to do."""


class ConfigError(StartupError):
    """A flag or an environment variable is unknown, malformed or contradicts another."""


class CheckpointError(StartupError):
    """A model directory is incomplete, unreadable or contradicts its own configuration."""
