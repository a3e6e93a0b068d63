"""What this gateway serves, as both faces tell it."""

from dataclasses import dataclass

from gateway.items import Modality
from gateway.model import Model
from mimo.errors import NotFound


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Facts of the served model."""

    name: str
    max_context_tokens: int
    inputs: tuple[Modality, ...]  # besides text
    created: int  # seconds since 1970 when this gateway began to serve it


class Catalog:
    """One model today; the faces ask by name."""

    def __init__(self, model: Model, created: int) -> None:
        self.card = ModelCard(
            name=model.name,
            max_context_tokens=model.max_context_tokens,
            inputs=tuple(Modality) if model.processor else (),
            created=created,
        )

    def check(self, name: str) -> None:
        """Raises NotFound unless ``name`` is empty or the served model's."""
        if name and self.card.name not in (name, name.removeprefix("openai/")):
            raise NotFound(
                f"no model {name[:80]!r} here; this gateway serves {self.card.name!r}",
                field="model",
            )
