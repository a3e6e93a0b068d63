"""How well drafts hold after a prefix hit.

    python -m tests.bench.prefix_acceptance

The last MTP rows of a cached prefix were computed with the tokens that followed there, not here.
Conversations of one beginning and many different next questions are asked of a running system with
the bundled model twice: without the prefix cache, and with it after another question has left the
beginning there. Acceptance of drafts by position, and the tokens of a step.
"""

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from mimo.v1 import gateway_pb2, gateway_pb2_grpc
from models.training import text_skills
from models.training.questions import Exchange
from tests.support.live import start_stack

EXCHANGES = 2  # before the question


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--conversations", type=int, default=40)
    parser.add_argument("--questions", type=int, default=8, help="of each conversation")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        stack = start_stack(Path(home))
        try:
            with grpc.insecure_channel(stack.grpc_address) as channel:
                stub = gateway_pb2_grpc.GatewayStub(channel)
                for temperature in (0.0, 0.7):
                    counts = _ask_all(stub, options.conversations, options.questions, temperature)
                    for name, count in counts.items():
                        print(f"temperature {temperature}, {name}: {_shown(count)}")
        finally:
            stack.stop()
    return 0


def _ask_all(
    stub: Any, num_conversations: int, num_questions: int, temperature: float
) -> dict[str, "Counter[str]"]:
    chance = random.Random(0)
    counts: dict[str, Counter[str]] = {"without hits": Counter(), "with hits": Counter()}
    for number in range(num_conversations):
        beginning = [_exchange(chance) for _ in range(EXCHANGES)]
        salt = f"{temperature} {number}"
        _ask(stub, beginning, _exchange(chance), temperature, salt, prefix=True)
        for _ in range(num_questions):
            last = _exchange(chance)
            without = _ask(stub, beginning, last, temperature, salt, prefix=False)
            counts["without hits"].update(without)
            counts["with hits"].update(_ask(stub, beginning, last, temperature, salt, prefix=True))
    return counts


def _exchange(chance: random.Random) -> Exchange:
    makers = (
        lambda: text_skills.copy(chance, held_out=True),
        lambda: text_skills.reverse(chance, held_out=True),
        lambda: text_skills.sort(chance, held_out=True),
        lambda: text_skills.sums(chance),
        lambda: text_skills.chat(chance),
    )
    return chance.choice(makers)()


def _ask(
    stub: Any,
    beginning: Sequence[Exchange],
    last: Exchange,
    temperature: float,
    salt: str,
    *,
    prefix: bool,
) -> dict[str, int]:
    """Drafted and accepted tokens by position, prompt tokens, and those found in the cache."""
    said = [(gateway_pb2.ROLE_USER, last.question)]
    for exchange in reversed(beginning):
        said[:0] = [
            (gateway_pb2.ROLE_USER, exchange.question),
            (gateway_pb2.ROLE_ASSISTANT, exchange.answer),
        ]
    request = gateway_pb2.GenerateRequest(
        messages=[
            gateway_pb2.Message(role=role, parts=[gateway_pb2.ContentPart(text=text)])
            for role, text in said
        ],
        sampling=gateway_pb2.SamplingParams(temperature=temperature, seed=1, max_tokens=64),
        cache=gateway_pb2.CacheOptions(prefix=prefix),
        cache_salt=salt,
    )
    *_, ended = stub.Generate(request)
    summary = ended.summary
    counts = {"prompt": summary.prompt.prompt_tokens, "cached": summary.prompt.cached_tokens}
    for position, drafted in enumerate(summary.speculation.drafted):
        counts[f"drafted {position}"] = drafted
        counts[f"accepted {position}"] = summary.speculation.accepted[position]
    return counts


def _shown(count: "Counter[str]") -> str:
    depth = sum(1 for name in count if name.startswith("drafted"))
    shares = [count[f"accepted {n}"] / count[f"drafted {n}"] for n in range(depth)]
    length = 1 + sum(count[f"accepted {n}"] for n in range(depth)) / count["drafted 0"]
    return (
        f"{', '.join(f'{share:.1%}' for share in shares)} of {count['drafted 0']} drafts; "
        f"{length:.3f} tokens a step; {count['cached'] / count['prompt']:.0%} of the prompts cached"
    )


if __name__ == "__main__":
    sys.exit(main())
