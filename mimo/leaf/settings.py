"""Options of every model service."""

from dataclasses import dataclass
from typing import Any, ClassVar

from mimo.checkpoint.index import FingerprintMode
from mimo.config import option
from mimo.rpc.server import ServerConfig


@dataclass(frozen=True, kw_only=True)
class LeafSettings(ServerConfig):
    """Where to compute, how, and with which numbers.

    ``switches`` names the options that stand for entries of the checkpoint's ``numeric_profile``.
    """

    switches: ClassVar[tuple[str, ...]] = ()

    device: str = option("auto", help="auto, cpu, cuda or cuda:N")
    dtype: str = option(
        "auto",
        help="compute dtype; auto is float32 on a CPU",
        choices=("auto", "float32", "bfloat16"),
    )
    threads: int = option(
        0, help="CPU threads; 0 is one for a narrow model, else one per core", at_least=0
    )
    attention: str = option("", help="attention backend, for all or as COMPONENT=NAME,...")
    fingerprint_from_index: bool = option(
        False, help="identify weights by names, shapes and sizes instead of reading every byte"
    )

    @property
    def fingerprint_mode(self) -> FingerprintMode:
        return "index" if self.fingerprint_from_index else "content"

    @property
    def numeric_overrides(self) -> dict[str, Any]:
        """Switches that were given; they beat the checkpoint's ``numeric_profile``."""
        return {name: getattr(self, name) for name in self.switches if getattr(self, name)}
