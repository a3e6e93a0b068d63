"""What a reader gets who has fallen behind."""

from gateway.generation import Delta, TextKind, TokenLogprob, joined
from tests.support.faces import STARTED, SUMMARY, said, stopped, thought


def test_neighbouring_text_of_a_choice_is_one_event() -> None:
    first, second = TokenLogprob(1, b"a", -0.5), TokenLogprob(2, b"b", -0.7)
    events = [
        Delta(0, TextKind.CONTENT, "a", (first,), (1,), 1),
        Delta(0, TextKind.CONTENT, "b", (second,), (2, 3), 2),
    ]
    (both,) = joined(events)
    assert both == Delta(0, TextKind.CONTENT, "ab", (first, second), (1, 2, 3))
    assert isinstance(both, Delta) and both.num_tokens == 3


def test_choices_kinds_and_other_events_stay_apart_and_in_order() -> None:
    events = [
        *(STARTED, thought("a"), said("b"), said("c", 1), said("d", 1), said("e")),
        *(stopped(1), said("f"), stopped(), SUMMARY),
    ]
    assert joined(events) == [
        *(STARTED, thought("a"), said("b"), said("cd", 1), said("e")),
        *(stopped(1), said("f"), stopped(), SUMMARY),
    ]
