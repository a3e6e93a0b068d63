"""From what a request asks for to what the decoder does: defaults, bounds and forbidden ids."""

import secrets
from collections.abc import Iterable
from typing import TypeVar

from gateway.backends.language_model import Sampling
from gateway.generation import GenerationRequest
from gateway.model import Model
from mimo.errors import InvalidRequest

ValueT = TypeVar("ValueT")


def check_sampling(request: GenerationRequest, model: Model) -> None:
    """Raises InvalidRequest for ids the model does not have or must not emit."""
    _check_ids("logit_bias", request.sampling.logit_bias, model)
    _check_ids("stop_token_ids", request.stop_token_ids, model)
    for id in request.sampling.logit_bias:
        if id in model.banned_token_ids:
            raise InvalidRequest(f"logit_bias: token {id} is reserved", field="logit_bias")


def resolve_sampling(request: GenerationRequest, model: Model, room: int) -> Sampling:
    """Fill in the model's defaults. ``room`` is what the context leaves for the output.

    A seed is drawn when none is given, so that a sequence can be continued on another replica.
    Raises InvalidRequest when the output has no room for ``min_tokens``.
    """
    params, defaults = request.sampling, model.defaults
    if params.min_tokens > room:
        raise InvalidRequest(
            f"min_tokens is {params.min_tokens}, and the context has room for {room} after the "
            "prompt",
            field="min_tokens",
            limit=room,
        )
    max_tokens = _first(params.max_tokens, max(defaults.max_tokens, params.min_tokens))
    stop_ids = {*model.stop_token_ids, *request.stop_token_ids}
    return Sampling(
        temperature=_first(params.temperature, defaults.temperature),
        top_p=_first(params.top_p, defaults.top_p),
        top_k=_first(params.top_k, defaults.top_k),
        min_p=_first(params.min_p, defaults.min_p),
        seed=secrets.randbits(64) if params.seed is None else params.seed,
        max_tokens=min(max_tokens, room),
        min_tokens=params.min_tokens,
        stop_token_ids=tuple(sorted(stop_ids)),
        ignore_stop=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=_first(params.repetition_penalty, defaults.repetition_penalty),
        logit_bias=params.logit_bias,
        banned_token_ids=tuple(sorted({*model.banned_token_ids} - stop_ids)),
        bad_words=tuple(_spellings(params.bad_words, model)),
        num_logprobs=request.top_logprobs,
    )


def _spellings(words: Iterable[str], model: Model) -> Iterable[tuple[int, ...]]:
    """A word at the beginning of the output and after a blank are different ids."""
    for word in words:
        yield from {tuple(model.tokenizer.encode(text)) for text in (word, f" {word}") if word}


def _check_ids(field: str, ids: Iterable[int], model: Model) -> None:
    for id in ids:
        if not 0 <= id < model.tokenizer.num_ids:
            raise InvalidRequest(f"{field}: the model has no token {id}", field=field)


def _first(given: ValueT | None, default: ValueT) -> ValueT:
    return default if given is None else given
