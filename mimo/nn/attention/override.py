"""The ``--attention`` option: one backend for everything, or one per component."""

from mimo.errors import ConfigError

COMPONENTS = ("vision", "audio", "llm", "video_vae", "audio_vae")


def override_for(component: str, option: str) -> str | None:
    """The backend that ``option`` demands for a component; None leaves the choice to the selector.

    ``option`` is "", a backend's name, or pairs such as "vision=sdpa,llm=reference"; a lone name
    among pairs is for the components that have none. Raises ConfigError for an unknown component
    or a doubled one.
    """
    chosen: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in option.split(","))):
        name, is_pair, backend = part.rpartition("=")
        if is_pair and name not in COMPONENTS:
            raise ConfigError(f"--attention: {name!r} is not one of {', '.join(COMPONENTS)}")
        if name in chosen:
            raise ConfigError(
                f"--attention: more than one backend in {option!r} for {name or 'all'}"
            )
        chosen[name] = backend
    return chosen.get(component, chosen.get(""))
