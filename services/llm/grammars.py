"""From the text of a grammar to masks of tokens, off the engine's thread and within limits."""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mimo.errors import InvalidRequest, Overloaded, Reason, Unimplemented
from mimo.guidance import with_options
from mimo.v1 import llm_pb2
from services.llm.engine.grammar import Grammar

MAX_BYTES = 256 << 10
MAX_NESTING = 64
MAX_SYMBOLS = 500_000  # of the compiled grammar
MAX_COMPILED = 256
NUM_THREADS = 2
TIMEOUT_S = 2.0  # for a thread to be free, and then for the grammar

# Words of the library's messages about its own limits.
_TOO_COMPLEX = ("too big", "too complex", "limit")


class GrammarCompiler:
    """Compiles the grammars of one tokenizer and remembers the last of them."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._idle = asyncio.Semaphore(NUM_THREADS)

    @classmethod
    def open(cls, tokenizer: Path, num_ids: int, end_ids: Iterable[int]) -> Self:
        """``tokenizer``: a tokenizer.json; ``end_ids``: what may end a text that is complete."""
        return cls(LLTokenizer(tokenizer.read_text(), n_vocab=num_ids, eos_token=list(end_ids)))

    async def compile(self, grammar: llm_pb2.Grammar) -> Grammar:
        """Raises InvalidRequest for a grammar that is wrong, unsupported or too complex, Overloaded
        when those of others take all the time."""
        form = grammar.WhichOneof("form")
        if form is None:
            raise _invalid("the grammar is empty")
        source: str = getattr(grammar, form)
        if (form, source) not in self._compiled:
            _check_size(form, source)
            await self._add(form, source)
        self._compiled.move_to_end((form, source))
        return Grammar(self._compiled[form, source].deep_copy())

    async def _add(self, form: str, source: str) -> None:
        """Compile a grammar, unless another call did while this one waited for a thread."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._idle.acquire()
        except TimeoutError:
            raise Overloaded(
                "too many grammars are being compiled", retry_after_s=TIMEOUT_S
            ) from None
        if (form, source) in self._compiled:
            self._idle.release()
            return
        compiling = asyncio.get_running_loop().run_in_executor(
            self._threads, functools.partial(_compile, self._tokenizer, form, source)
        )
        try:
            matcher = await asyncio.wait_for(asyncio.shield(compiling), TIMEOUT_S)
            self._compiled[form, source] = matcher
        except TimeoutError:
            raise _too_complex(f"the grammar took longer than {TIMEOUT_S:g} s") from None
        finally:
            compiling.add_done_callback(self._release)
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)

    def _release(self, compiled: asyncio.Future[LLMatcher]) -> None:
        """A thread is idle again, perhaps long after whoever asked has left."""
        self._idle.release()
        compiled.exception()


class NoGrammars:
    """In the place of a compiler where the model has no tokenizer.json."""

    async def compile(self, grammar: llm_pb2.Grammar) -> Grammar:
        raise Unimplemented("the model has no tokenizer.json, so no grammars", field="grammar")


def _compile(tokenizer: LLTokenizer, form: str, source: str) -> LLMatcher:
    limits = LLParserLimits(max_grammar_size=MAX_SYMBOLS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, _translate(form, source), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first one is the slowest
    if matcher.is_error():
        message = matcher.get_error()
        if any(word in message.lower() for word in _TOO_COMPLEX):
            raise _too_complex(message)
        raise _invalid(message)
    return matcher


def _translate(form: str, source: str) -> str:
    match form:
        case "json_schema":
            try:
                return LLMatcher.grammar_from_json_schema(with_options(source))
            except ValueError as error:
                raise _invalid(str(error)) from None
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case _:
            return LLMatcher.grammar_from_lark(source)


def _check_size(form: str, source: str) -> None:
    if len(source.encode()) > MAX_BYTES:
        raise _too_complex(f"the grammar is larger than {MAX_BYTES >> 10} KiB")
    if form == "json_schema" and _nesting(source) > MAX_NESTING:
        raise _too_complex(f"the schema is nested deeper than {MAX_NESTING} levels")


def _nesting(text: str) -> int:
    """Depth of the brackets of a JSON text, without recursion."""
    deepest = depth = 0
    in_string = is_escaped = False
    for character in text:
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(_first_line(message), reason=Reason.GRAMMAR_INVALID, field="grammar")


def _too_complex(message: str) -> InvalidRequest:
    return InvalidRequest(_first_line(message), reason=Reason.GRAMMAR_TOO_COMPLEX, field="grammar")


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:300]
