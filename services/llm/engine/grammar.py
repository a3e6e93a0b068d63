"""Which tokens a grammar allows, for one request.

A grammar is advanced only by tokens that were accepted, in order, each exactly once. To see behind
drafts, it is advanced and rolled back in one call, so that no other state can go out of step.
"""

from collections.abc import Sequence

from llguidance import LLMatcher


class Grammar:
    """Where a request stands in its grammar. Not shared between requests.

    Nothing here raises for what a grammar or a token does: a grammar that went beyond its limits
    allows nothing more, and its request ends with an error of its own.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token_id: int) -> bool:
        """Advance. False, and stuck from then on, for a token that is not allowed."""
        return self._matcher.consume_token(token_id)

    def allowed_after(self, draft_ids: Sequence[int]) -> bytes | None:
        """One bit for each token that may follow the drafts, lowest first; None when the drafts
        themselves are not allowed. All bits are zero once the grammar is stuck."""
        matcher = self._matcher
        if matcher.is_error():
            return b""
        num_consumed = matcher.try_consume_tokens(list(draft_ids)) if draft_ids else 0
        allowed = matcher.compute_bitmask() if num_consumed == len(draft_ids) else None
        if num_consumed:
            matcher.rollback(num_consumed)
        return allowed
