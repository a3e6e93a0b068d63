"""What is known is not computed again: the observables are the processes' own counters."""

from collections import Counter

from tests.support import samples
from tests.support.live import Grpc, Rest, Stack, audio, image, video


def spent(stack: Stack, before: "Counter[str]") -> dict[str, int]:
    """Work since ``before``, without the prompts'."""
    now = stack.work()
    return {name: now[name] - before[name] for name in now if name != "prompt_tokens"}


def test_a_repeated_question_decodes_and_encodes_nothing(stack: Stack, rest: Rest) -> None:
    parts = [
        image(samples.png(21)),
        audio(samples.wav(0.6, 610.0)),
        video(samples.mp4(8, 1.0, 710.0)),
        "what do you see and hear?",
    ]
    before = stack.work()
    first = rest.ask(*parts, max_tokens=12)
    assert first.outcomes == {"miss"}
    # A picture is planned from its header and decoded to be named.
    assert spent(stack, before) == {"items": 4, "encodes": 4, "decodes": 4}
    assert first.timings_ms["encode"] > 0 and first.timings_ms["decode_media"] > 0

    before = stack.work()
    second = rest.ask(*parts, max_tokens=12)
    assert second.outcomes == {"hit"}
    assert spent(stack, before) == {"items": 0, "encodes": 0, "decodes": 0}
    assert second.timings_ms["encode"] == second.timings_ms["decode_media"] == 0
    assert second.choices == first.choices
    assert second.prompt_tokens == first.prompt_tokens


def test_equal_pixels_in_png_and_bmp_share_one_entry(stack: Stack, rest: Rest, rpc: Grpc) -> None:
    first = rest.ask(image(samples.png(22)), "what is it?", max_tokens=8)
    before = stack.work()
    other = rpc.ask(image(samples.bmp(22)), "what is it?", sampling={"max_tokens": 8})
    assert (first.outcomes, other.outcomes) == ({"miss"}, {"hit"})
    assert other.timings_ms["decode_media"] > 0  # its pixels had to be seen
    assert spent(stack, before)["items"] == 0
    assert other.choices == first.choices


def test_an_upload_is_the_same_as_sending_the_file(stack: Stack, rest: Rest, rpc: Grpc) -> None:
    file = samples.png(23)
    inline = rest.ask(image(file), "what is it?", max_tokens=8)
    reference = rpc.upload(file)
    before = stack.work()
    by_grpc = rpc.ask(image(reference), "what is it?", sampling={"max_tokens": 8})
    by_rest = rest.ask(image(reference), "what is it?", max_tokens=8)
    assert spent(stack, before) == {"items": 0, "encodes": 0, "decodes": 0}
    assert by_grpc.choices == by_rest.choices == inline.choices


def test_bypassing_the_cache_encodes_again_and_answers_alike(stack: Stack, rest: Rest) -> None:
    parts = [image(samples.png(24)), "what is it?"]
    first = rest.ask(*parts, max_tokens=8)
    before = stack.work()
    again = rest.ask(*parts, max_tokens=8, cache={"embeddings": "bypass"})
    assert again.outcomes == {"bypass"}
    assert spent(stack, before)["encodes"] == 1
    assert again.choices == first.choices


def test_tenants_do_not_share_entries(stack: Stack, rest: Rest) -> None:
    parts = [image(samples.png(25)), "what is it?"]
    rest.ask(*parts, max_tokens=1)
    before = stack.work()
    assert rest.ask(*parts, max_tokens=1, cache_salt="another").outcomes == {"miss"}
    assert spent(stack, before)["encodes"] == 1
