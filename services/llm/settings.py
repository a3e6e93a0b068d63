"""Options of the decoder process."""

from dataclasses import dataclass

from mimo.config import option
from mimo.rpc.server import ServerConfig


@dataclass(frozen=True, kw_only=True)
class LlmSettings(ServerConfig):
    """Generates tokens from tokens and stored embeddings."""

    model: str = option("", help="checkpoint directory; models/mimo-tiny of the checkout if there")
    served_model_name: str = option("", help="name in answers; the directory's name by default")
    address: str = option("127.0.0.1:50053", help="gRPC address of the service")
    store: str = option("redis://127.0.0.1:6379", help="URL of the embedding store")
    device: str = option("auto", help="auto, cpu, cuda or cuda:N")
    dtype: str = option(
        "auto",
        help="compute dtype; auto is float32 on a CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    threads: int = option(0, help="CPU threads; 0 is one for a narrow model, else one per core")
    attention: str = option("", help="attention backend, for all or as llm=NAME")
    block_size: int = option(16, help="tokens in a block of the KV cache")
    kv_memory_mib: int = option(0, help="memory of the KV cache; 0 is a share of what is free")
    max_running: int = option(0, help="requests that run at once; 0 is 32 on a CPU, else 256")
    max_step_tokens: int = option(0, help="rows of one step; 0 is 512 on a CPU, else 8192")
    max_context: int = option(0, help="tokens of one request; 0 is what the model was made for")
    max_waiting: int = option(4096, help="requests that may wait")
    max_draft_tokens: int = option(3, help="tokens drafted per step at most; 0 turns drafts off")
    embedding_pool_mib: int = option(512, help="host memory of embeddings in use")
    fingerprint_from_index: bool = option(
        False, help="identify weights by names, shapes and sizes instead of reading every byte"
    )
    swa_visible: int = option(
        0, help="keys a sliding layer sees, its own included; 0 is the checkpoint's"
    )
    qkv_rows: str = option(
        "", help="row order of fused projections", choices=("", "interleaved", "plain")
    )

    def __post_init__(self) -> None:
        for name in ("block_size", "max_waiting", "embedding_pool_mib"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be positive")
        for name in ("kv_memory_mib", "max_running", "max_step_tokens", "max_context"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative")

    @property
    def numeric_overrides(self) -> dict[str, object]:
        """Switches that were given; they beat the checkpoint's ``numeric_profile``."""
        given: dict[str, object] = {"swa_visible": self.swa_visible, "qkv_rows": self.qkv_rows}
        return {name: value for name, value in given.items() if value}
