"""The process of a rank above 0: loads its share of the model and takes part in rank 0's passes.

It serves nothing and is started by rank 0 alone, at the other end of a socket. When that closes,
rank 0 is gone, and with it the reason to be there.
"""

import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import msgpack

from mimo import logs
from mimo.errors import StartupError
from mimo.metrics import LLM
from services.llm import channel
from services.llm.engine.ranks import follow
from services.llm.loading import load_share
from services.llm.model.parallel import GroupShard, RankLost
from services.llm.ranks import HEARTBEAT_S
from services.llm.settings import LlmSettings

logger = logging.getLogger(__name__)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 says when to end
    leader = socket.socket(fileno=int(sys.argv[1]))
    commands = channel.messages(leader)
    setup = msgpack.unpackb(next(commands))
    settings = LlmSettings(**setup["settings"])
    shard = GroupShard(setup["rank"], setup["size"])
    rendezvous = Path(setup["rendezvous"])
    logs.configure(f"{LLM}-{shard.rank}", level=settings.log_level, form=settings.log_format)
    try:
        share = load_share(settings, shard, setup["cache_bytes"])
        beat = threading.Thread(target=_beat, args=(leader, rendezvous), daemon=True)
        beat.start()
        shard.join(rendezvous, share.compute.device_type)
        follow(share.runner, commands, share.hidden_size, share.compute)
    except (StartupError, RankLost) as error:
        logger.error("rank %d ends: %s", shard.rank, error)
        return 1
    _clean_up(rendezvous)
    return 0


def _beat(leader: socket.socket, rendezvous: Path) -> None:
    """Tell rank 0 that this process lives; end with it, whatever the main thread waits for."""
    try:
        while True:
            leader.send(b".")
            time.sleep(HEARTBEAT_S)
    except OSError:
        _clean_up(rendezvous)
        os._exit(1)


def _clean_up(rendezvous: Path) -> None:
    """Rank 0 does it, unless it was killed."""
    shutil.rmtree(rendezvous.parent, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
