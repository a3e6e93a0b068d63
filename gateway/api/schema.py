"""Fields of POST /v1/chat/completions, as clients spell them. Null is absence (see body.py)."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import PydanticCustomError

from gateway import bounds


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PydanticCustomError("number_type", "must be a number")
    return value


def _whole(value: Any) -> Any:
    """A whole number, also when it is spelled 5.0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise PydanticCustomError("integer_type", "must be a whole number")
    return int(value)


def _minus_one_is_absent(value: Any) -> Any:
    return None if value == -1 else value


def _listed(value: Any) -> Any:
    """One string is a list of one; empty strings say nothing."""
    values = [value] if isinstance(value, str) else value
    return [each for each in values if each != ""] if isinstance(values, list) else values


Flag = Annotated[bool, Strict()]
Number = Annotated[float, BeforeValidator(_number)]
Whole = Annotated[int, BeforeValidator(_whole)]
Probability = Annotated[Number, Field(ge=bounds.PROBABILITY[0], le=bounds.PROBABILITY[1])]
Penalty = Annotated[Number, Field(ge=bounds.PENALTY[0], le=bounds.PENALTY[1])]
Bias = Annotated[Number, Field(ge=-bounds.MAX_BIAS, le=bounds.MAX_BIAS)]
TokenId = Annotated[Whole, Field(ge=0, lt=1 << 32)]
Count = Annotated[Whole, Field(ge=0, le=bounds.MAX_TOKENS)]
MaxTokens = Annotated[
    Annotated[Whole, Field(ge=1, le=bounds.MAX_TOKENS)] | None,
    BeforeValidator(_minus_one_is_absent),
]
StopString = Annotated[str, Field(max_length=bounds.MAX_STOP_CHARACTERS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Fields(BaseModel):
    """An object of which unknown keys are kept aside, to be reported as ignored."""

    # Frozen, so that pydantic need not copy defaults for every request.
    model_config = ConfigDict(extra="allow", frozen=True, hide_input_in_errors=True)


class StreamOptions(Fields):
    include_usage: Flag = False


class Speculation(Fields):
    enabled: Flag | None = None
    max_draft_tokens: Annotated[Whole, Field(ge=0, le=bounds.MAX_DRAFT_TOKENS)] | None = None


class Cache(Fields):
    prefix: Flag = True
    embeddings: Literal["use", "bypass"] = "use"


class Thinking(Fields):
    type: Literal["enabled", "disabled"]


class Reasoning(Fields):
    enabled: Flag | None = None
    effort: Effort | None = None
    exclude: Flag = False


class TemplateArguments(Fields):
    enable_thinking: Flag | None = None
    thinking: Flag | None = None
    keep_all_reasoning: Flag = True


class JsonSchema(Fields):
    name: Annotated[str, Field(max_length=64)] = ""
    description: str = ""
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Choices = Annotated[list[str], Field(max_length=bounds.MAX_LITERALS)]


class StructuredOutputs(Fields):
    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: Flag | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class ChatFields(Fields):
    """Everything this endpoint honours."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=bounds.MAX_MESSAGES)]
    model: str = ""
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()
    max_completion_tokens: MaxTokens = None
    max_tokens: MaxTokens = None
    temperature: (
        Annotated[Number, Field(ge=bounds.TEMPERATURE[0], le=bounds.TEMPERATURE[1])] | None
    ) = None
    top_p: Probability | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=bounds.MAX_TOKENS)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: (
        Annotated[Number, Field(ge=bounds.MIN_REPETITION_PENALTY, le=bounds.MAX_REPETITION_PENALTY)]
        | None
    ) = None
    seed: Annotated[Whole, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[Whole, Field(ge=1, le=bounds.MAX_CHOICES)] = 1
    stop: Annotated[
        list[StopString], BeforeValidator(_listed), Field(max_length=bounds.MAX_STOP_STRINGS)
    ] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=bounds.MAX_STOP_IDS)] = []
    min_tokens: Count = 0
    ignore_eos: Flag = False
    logprobs: Flag = False
    top_logprobs: Annotated[Whole, Field(ge=0, le=bounds.MAX_TOP_LOGPROBS)] = 0
    logit_bias: Annotated[dict[str, Bias], Field(max_length=bounds.MAX_BIASES)] = {}
    bad_words: Annotated[list[StopString], Field(max_length=bounds.MAX_BAD_WORDS)] = []
    response_format: ResponseFormat = ResponseFormat(type="text")
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning = Reasoning()
    thinking: Thinking | None = None
    enable_thinking: Flag | None = None
    include_reasoning: Flag = True
    chat_template_kwargs: TemplateArguments = TemplateArguments()
    media: dict[str, Any] = {}
    mm_processor_kwargs: dict[str, Any] = {}
    use_audio_in_video: Flag | None = None
    speculation: Speculation = Speculation()
    cache: Cache = Cache()
    cache_salt: Annotated[str, Field(max_length=bounds.MAX_SALT_CHARACTERS)] = ""
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    priority: Whole = 0
    return_token_ids: Flag = False
    metadata: Annotated[
        dict[
            Annotated[str, Field(max_length=64)],
            Annotated[str, Field(max_length=512)],
        ],
        Field(max_length=16),
    ] = {}
    user: Annotated[str, Field(max_length=512)] = ""
    safety_identifier: Annotated[str, Field(max_length=512)] = ""


# What clients may say without meaning anything by it, and why we refuse everything else: accepting
# it and doing nothing would change what they get without telling them.
_TOOLS = "tool calls are not available yet"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "modalities": ((["text"],), "only text is generated"),
    "audio": ((), "only text is generated"),
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "ebnf": ((), "use structured_outputs.grammar, in Lark"),
    "web_search_options": ((), "there is no web search"),
    "moderation": ((), "there is no moderation, and ignoring it would be silent"),
    "best_of": ((1,), "use n"),
    "use_beam_search": ((False,), "there is no beam search"),
    "length_penalty": ((1,), "there is no beam search"),
    "echo": ((False,), "the prompt is not repeated"),
    "prompt_logprobs": ((0,), "log-probabilities of the prompt are not computed"),
    "logprob_token_ids": (([],), "use top_logprobs"),
    "truncate_prompt_tokens": ((), "prompts are never truncated"),
    "suffix": (("",), "there is no infilling"),
    "thinking_token_budget": ((), "reasoning budgets are not available yet"),
}

FORBIDDEN = frozenset(
    "chat_template custom_logit_processor lora_path kv_transfer_params ec_transfer_params "
    "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank vllm_xargs custom_params "
    "documents".split()
)
