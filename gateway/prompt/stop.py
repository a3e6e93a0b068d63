"""Stop strings in a stream of text."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is completed first, however the text is cut.

    Text that may still turn out to be the beginning of a stop string is held back. When one
    character completes several stop strings, the longest is the match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that can be shown now. After a match (``matched``) nothing is shown any more."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        hold = max((_overlap(text, stop) for stop in self._stops), default=0)
        shown, self._held = text[: len(text) - hold], text[len(text) - hold :]
        return shown

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)
