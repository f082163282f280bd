"""The functions of `episode_environment`, in an environment whose instances are reused."""

from aenv_ray.runtime import register_function, register_reset, register_reward, register_tool


@register_function
def prepare() -> bool:
    """Prepare nothing."""
    return True


@register_tool
def echo(text: str) -> str:
    """Return the text."""
    return text


@register_reset
def reset() -> None:
    """Clear nothing: there is no state."""


@register_reward
def score() -> float:
    """Return the full reward."""
    return 1.0
