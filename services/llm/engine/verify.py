"""Which drafts hold. Pure.

The token after every row is already known: it is the argmax of the target's logits plus the noise
of its output position, drafts or not. A draft is right exactly when it is that token, so checking
costs nothing in distribution, and what comes out is what plain decoding would have produced.
"""

from collections.abc import Sequence


def num_accepted(draft_ids: Sequence[int], target_ids: Sequence[int | None]) -> int:
    """How many drafts hold, from the first on.

    ``target_ids[j]`` follows the first j drafts, so there is one more of them than drafts; the one
    after the last accepted draft is the bonus token. None, a row without a token, accepts nothing.
    """
    for count, draft_id in enumerate(draft_ids):
        if draft_id != target_ids[count]:
            return count
    return len(draft_ids)
