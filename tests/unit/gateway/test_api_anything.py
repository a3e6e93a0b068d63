"""Whatever JSON a client sends, it hears what is wrong with it and never of a bug of ours."""

import contextlib
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.api.body import parse_json
from gateway.api.errors import error_response
from gateway.api.request import parse_chat
from gateway.api.schema import UNSUPPORTED, ChatFields
from mimo.errors import InvalidRequest, MimoError

NUMBERS = st.one_of(
    st.integers(-3, 20),
    st.integers(),
    st.just(10**400),
    st.floats(allow_nan=False, allow_infinity=False),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=20))
PART_KEYS = st.sampled_from(
    "type text image_url image video_url video input_audio audio file url data base64 format fps "
    "detail num_frames max_pixels exif start file_id uuid thinking refusal sample_rate".split()
)
PART_TYPES = st.sampled_from(
    "text image_url image video input_audio file refusal thinking image_embeds pcm16 low".split()
)
ANYTHING = st.recursive(
    SCALARS | PART_TYPES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(PART_KEYS | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
PARTS = st.dictionaries(PART_KEYS, ANYTHING, max_size=4) | ANYTHING
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]) | ANYTHING},
    optional={
        "content": st.lists(PARTS, max_size=3) | ANYTHING,
        "reasoning_content": ANYTHING,
        "refusal": ANYTHING,
        "prefix": ANYTHING,
        "tool_calls": ANYTHING,
    },
)
FIELDS = st.dictionaries(
    st.sampled_from([*ChatFields.model_fields, *UNSUPPORTED]) | st.text(max_size=8),
    ANYTHING,
    max_size=4,
)


def check(body: dict[str, Any]) -> None:
    try:
        parse_chat(parse_json(json.dumps(body).encode()), "req_1", 60.0)
    except MimoError as error:
        assert isinstance(error, InvalidRequest)
        assert error.message
        assert 400 <= error_response(error, "req_1").status_code < 500


FAST = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@FAST
@given(FIELDS)
def test_any_fields(fields: dict[str, Any]) -> None:
    check({"messages": [{"role": "user", "content": "hi"}], **fields})


@FAST
@given(st.lists(MESSAGES, min_size=1, max_size=3))
def test_any_messages(messages: list[Any]) -> None:
    check({"messages": messages})


@FAST
@given(st.binary(max_size=60))
def test_any_bytes(body: bytes) -> None:
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse_json(body), dict)
