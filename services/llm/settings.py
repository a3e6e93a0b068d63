"""Options of the decoder process."""

from dataclasses import dataclass

from mimo.config import option
from mimo.leaf.settings import LeafSettings


@dataclass(frozen=True, kw_only=True)
class LlmSettings(LeafSettings):
    """Generates tokens from tokens and stored embeddings."""

    switches = ("swa_visible", "qkv_rows")

    address: str = option("127.0.0.1:50053", help="gRPC address of the service")
    block_size: int = option(16, help="tokens in a block of the KV cache", at_least=1)
    tensor_parallel: int = option(
        1, help="processes that share the model, each with a GPU of its own, or the CPU", at_least=1
    )
    kv_memory_mib: int = option(
        0, help="memory of the KV cache of a process; 0 is a share of what is free", at_least=0
    )
    max_running: int = option(
        0, help="requests that run at once; 0 is 32 on a CPU, else 256", at_least=0
    )
    max_step_tokens: int = option(
        0, help="rows of one step; 0 is 512 on a CPU, else 8192", at_least=0
    )
    max_context: int = option(
        0, help="tokens of one request; 0 is what the model was made for", at_least=0
    )
    max_waiting: int = option(4096, help="requests that may wait", at_least=1)
    # A step takes seconds on whatever is fit for the model. Longer than ranks wait for each other,
    # so that they are the first to say what is wrong.
    max_step_seconds: float = option(
        90.0, help="time after which a step is taken for a hang and ends the process", at_least=1
    )
    max_draft_tokens: int = option(
        3, help="tokens drafted per step at most; 0 turns drafts off", at_least=0
    )
    embedding_pool_mib: int = option(512, help="host memory of embeddings in use", at_least=1)
    swa_visible: int = option(
        0, help="keys a sliding layer sees, its own included; 0 is the checkpoint's", at_least=0
    )
    qkv_rows: str = option(
        "", help="row order of fused projections", choices=("", "interleaved", "plain")
    )
