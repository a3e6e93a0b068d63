"""Options of the gateway."""

from dataclasses import dataclass

from mimo.config import option
from mimo.rpc.server import ServerConfig


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ServerConfig):
    """The gateway: public REST and gRPC, media decoding, routing.

    TARGET is host:port,… or dns:///name:port (looked up again) or file:PATH (a JSON list, read
    again when it changes).
    """

    rest_address: str = option("127.0.0.1:8080", help="HTTP address of the REST API")
    address: str = option("127.0.0.1:50050", help="gRPC address of the public service")
    hosts: str = option(
        "", help="names by which REST may be addressed besides localhost (a,b; * is any)"
    )
    cors_origins: str = option(
        "", help="origins whose pages may call REST from a browser (https://a,…)"
    )
    vision: str = option("127.0.0.1:50051", help="TARGET of the vision encoders")
    audio: str = option("127.0.0.1:50052", help="TARGET of the audio encoders")
    llm: str = option("127.0.0.1:50053", help="TARGET of the language models")
    request_timeout_seconds: float = option(
        300.0, help="longest time a request may take", at_least=1
    )
    media_workers: int = option(2, help="processes that decode media", at_least=1)
    allow_http_media: bool = option(False, help="fetch media by plain http as well")
    media_domains: str = option(
        "", help="fetch only from these hosts (a,*.b); any public one if empty"
    )
    media_denied_networks: str = option(
        "", help="never fetch from these networks, though they are public (203.0.0.0/8,…)"
    )
