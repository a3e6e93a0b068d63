"""Transcripts: commands and their expected output as text, so that policy is reviewed as a diff.

A transcript is a list of cases separated by blank lines. A case is one or more commands, a line of
four dashes, and the output. ``#`` starts a comment line. ``check`` replays a file against a fresh
:class:`PlannerScript`; with ``REWRITE_TRANSCRIPTS=1`` it writes the actual output instead.

Commands of the planner
    pool full=8 [window=6 retention=7 [reach=5]] block_size=4 [running=4] [budget=64] [context=999]
    add NAME prompt=8 [max_tokens=9] [priority=1] [prior=2] [item=OFFSET:LENGTH ...] [same=5]
        [drafts=3]
    ready NAME ITEM
    draft NAME COUNT
    verified NAME DRAFTED ACCEPTED TIMES    prints how many tokens are drafted next
    plan
    commit [NAME+COUNT | NAME+stop ...]     drafts accepted plus one, by request
    abort NAME

A request with ``same`` uses the prefix cache; so many tokens at its beginning are those of others.
"""

import os
from collections.abc import Callable
from pathlib import Path

from services.llm.engine.block_manager import NO_BLOCK, BlockGroup, BlockManager
from services.llm.engine.request import Request, SamplingParams, Span
from services.llm.engine.scheduler import Plan, ScheduledRequest, Scheduler

STOP_ID = 0


def check(path: Path) -> None:
    """Replay a transcript. Raises AssertionError with both texts where they differ."""
    expected = path.read_text()
    actual = replay(expected, PlannerScript())
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(actual)
        return
    assert actual == expected


def replay(text: str, script: "PlannerScript") -> str:
    """The transcript with every output replaced by what ``script`` answers."""
    lines: list[str] = []
    commands: list[str] = []
    in_output = False
    for line in text.splitlines():
        if in_output and line:
            continue
        in_output = False
        lines.append(line)
        if line == "----":
            for command in commands:
                lines.extend(script.run(command))
            commands, in_output = [], True
        elif line and not line.startswith("#"):
            commands.append(line)
    return "\n".join(lines) + "\n"


class PlannerScript:
    """Drives a scheduler by the words of a transcript."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._current = Plan((), ())
        self.scheduler: Scheduler

    def run(self, command: str) -> list[str]:
        verb, *words = command.split()
        run: Callable[..., list[str]] = getattr(self, f"_{verb}")
        return run(*words)

    def _pool(self, *words: str) -> list[str]:
        option = {name: int(value) for name, value in (word.split("=") for word in words)}
        groups = [BlockGroup("full", option["full"])]
        if "window" in option:
            retention = option["retention"]
            reach = option.get("reach", retention)
            groups.append(BlockGroup("window", option["window"], retention, reach))
        self.scheduler = Scheduler(
            BlockManager(groups, option["block_size"]),
            max_running=option.get("running", 4),
            max_step_tokens=option.get("budget", 64),
            max_context=option.get("context", 999),
        )
        return []

    def _add(self, name: str, *words: str) -> list[str]:
        options = [word.split("=") for word in words]
        option = {key: int(value) for key, value in options if key != "item"}
        offsets = [value.split(":") for key, value in options if key == "item"]
        spans = tuple(
            Span(index, offset=int(offset), length=int(length), row_offset=0)
            for index, (offset, length) in enumerate(offsets)
        )
        num_tokens = option["prompt"] + option.get("prior", 0)
        num_same = option.get("same", num_tokens)
        request = Request(
            request_id=name,
            token_ids=[1] * num_same + [ord(name)] * (num_tokens - num_same),
            num_prompt_tokens=option["prompt"],
            params=SamplingParams(
                max_tokens=option.get("max_tokens", 999), stop_ids=frozenset([STOP_ID])
            ),
            priority=option.get("priority", 0),
            spans=spans,
            pending_items=set(range(len(spans))),
            use_prefix_cache="same" in option,
            max_draft_tokens=option.get("drafts", 0),
        )
        self.scheduler.check(request)
        self.scheduler.add(request)
        self._requests[name] = request
        return []

    def _ready(self, name: str, item: str) -> list[str]:
        self._requests[name].pending_items.remove(int(item))
        return []

    def _draft(self, name: str, count: str) -> list[str]:
        self._requests[name].draft_ids = [1] * int(count)
        return []

    def _verified(self, name: str, drafted: str, accepted: str, times: str) -> list[str]:
        request = self._requests[name]
        for _ in range(int(times)):
            request.acceptance.record(int(drafted), int(accepted))
        return [f"{name} drafts {self.scheduler.num_draft_tokens(request)}"]

    def _plan(self) -> list[str]:
        self._current = self.scheduler.plan()
        lines = [f"preempt {request.request_id}" for request in self._current.preempted]
        lines += [self._describe(scheduled) for scheduled in self._current.scheduled]
        return [*lines, self._free()]

    def _commit(self, *words: str) -> list[str]:
        sampled = {}
        for word in words:
            name, count = word.split("+")
            tokens = [STOP_ID] if count == "stop" else [1] * int(count)
            sampled[self._requests[name]] = tokens
        lines = []
        for advance in self.scheduler.commit(self._current, sampled):
            request = advance.request
            line = f"{request.request_id} +{len(advance.token_ids)}"
            line += f" tokens={request.num_tokens} cached={request.num_cached_tokens}"
            lines.append(line + (f" {advance.finish_reason}" if advance.finish_reason else ""))
        return [*lines, self._free()]

    def _abort(self, name: str) -> list[str]:
        self.scheduler.remove(self._requests.pop(name))
        return [self._free()]

    def _describe(self, scheduled: ScheduledRequest) -> str:
        request = scheduled.request
        phase = "decode" if scheduled.is_decode else "prefill"
        drafts = f"+{len(scheduled.draft_ids)}" if scheduled.draft_ids else ""
        tables = [
            f"{name}=[{' '.join('.' if block == NO_BLOCK else str(block) for block in table)}]"
            for name, table in request.block_tables.items()
        ]
        rows = f"{request.request_id}[{scheduled.start}:{scheduled.stop}]{drafts}"
        return " ".join([phase, rows, *tables])

    def _free(self) -> str:
        blocks = self.scheduler.blocks
        words = ["free", *(f"{g.name}={blocks.num_free(g.name)}" for g in blocks.groups)]
        cached = [f"{g.name}={n}" for g in blocks.groups if (n := blocks.num_cached(g.name))]
        return " ".join([*words, *(["cached"] if cached else []), *cached])
