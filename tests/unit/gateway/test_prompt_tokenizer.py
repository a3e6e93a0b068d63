"""The tokenizer: control tokens never come from text."""

import json
import threading
import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.prompt.segments import Control, Text, join_text
from gateway.prompt.tokenizer import Tokenizer
from mimo.errors import CheckpointError
from tests.support import byte_model as ids

TOKENIZER = Tokenizer(json.dumps(ids.tokenizer_definition()))


@pytest.mark.parametrize("marker", ids.CONTROL_TOKENS)
def test_control_strings_of_a_user_are_plain_text(marker: str) -> None:
    assert TOKENIZER.encode(marker) == list(marker.encode())


@given(st.lists(st.sampled_from([*ids.CONTROL_TOKENS, "<", "|>", "a", "b", " ", "\n"]), max_size=8))
def test_no_text_gives_a_control_id(pieces: list[str]) -> None:
    assert all(id < ids.END_OF_TEXT for id in TOKENIZER.encode("".join(pieces)))


@given(st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=("Cs", "Cn")), max_size=40))
def test_bytes_of_ids_are_the_normalised_text(text: str) -> None:
    decoded = b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode(text))).decode()
    assert decoded == unicodedata.normalize("NFC", text)


def test_lone_surrogates_become_replacement_characters() -> None:
    assert TOKENIZER.encode("a\ud800b") == TOKENIZER.encode("a\ufffdb")
    assert TOKENIZER.encode("\ud83d\ude00") == TOKENIZER.encode("😀")


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Or else the event loop stands still, in whatever thread a prompt is encoded."""
    encoder_s = 0.0

    def encode() -> None:
        nonlocal encoder_s
        TOKENIZER.encode("ab " * 400_000)
        encoder_s = time.thread_time()

    began = time.thread_time()
    thread = threading.Thread(target=encode)
    thread.start()
    while thread.is_alive():
        pass
    assert time.thread_time() - began > encoder_s / 10


def test_literals_of_the_server_mean_control_tokens() -> None:
    assert TOKENIZER.literal("a<|im_start|>user\n<think></think>") == [
        Text("a"),
        Control(ids.IM_START),
        Text("user\n"),
        Control(ids.THINK),
        Control(ids.END_THINK),
    ]
    assert TOKENIZER.literal("") == []


def test_special_tokens_vanish_from_output_and_tags_do_not() -> None:
    assert TOKENIZER.token_bytes(ids.IM_END) == b""
    assert TOKENIZER.token_bytes(ids.TOOL_CALL) == b"<tool_call>"
    assert TOKENIZER.spelling(ids.IM_END) == b"<|im_end|>"
    assert TOKENIZER.token_bytes(299) == b""


def test_number_of_ids_counts_control_tokens() -> None:
    assert TOKENIZER.num_ids == ids.END_TOOL_RESPONSE + 1


def test_a_tokenizer_that_cannot_keep_the_border_is_refused() -> None:
    definition = ids.tokenizer_definition()
    # A vocabulary that merges its way to the marker, as a careless training run may leave it.
    definition["model"]["ignore_merges"] = True
    definition["model"]["vocab"]["<think>"] = ids.THINK
    with pytest.raises(CheckpointError, match="still turns '<think>'"):
        Tokenizer(json.dumps(definition))


def test_a_tokenizer_that_is_not_byte_level_is_refused() -> None:
    definition = ids.tokenizer_definition()
    definition["model"]["vocab"]["▁the"] = 258
    with pytest.raises(CheckpointError, match="not byte-level"):
        Tokenizer(json.dumps(definition))


def test_a_missing_control_token_names_itself() -> None:
    with pytest.raises(CheckpointError, match="<nothing>"):
        TOKENIZER.control_id("<nothing>")


def test_joining_keeps_order_and_drops_empty_texts() -> None:
    joined = join_text(
        [Text("a"), Text(""), Text("b"), Control(1), Text(""), Control(2), Text("c")]
    )
    assert joined == [Text("ab"), Control(1), Control(2), Text("c")]
