"""Ranks of a decoder as threads of this process, which meet over gloo as processes would."""

import threading
from collections.abc import Callable
from typing import TypeVar

from torch import distributed

from services.llm.model.parallel import GroupShard, gloo

ResultT = TypeVar("ResultT")


def on_ranks(size: int, work: Callable[[GroupShard], ResultT]) -> list[ResultT]:
    """Run ``work`` once for each rank, at the same time. Raises the first error of any."""
    store = distributed.HashStore()
    results: dict[int, ResultT] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(GroupShard(rank, size, gloo(store, rank, size)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
