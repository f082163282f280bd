"""A setup, a tool and a reward that do nothing: an episode costs only what the fabric costs."""

from aenv_ray.runtime import register_function, register_reward, register_tool


@register_function
def prepare() -> bool:
    """Prepare nothing."""
    return True


@register_tool
def echo(text: str) -> str:
    """Return the text."""
    return text


@register_reward
def score() -> float:
    """Return the full reward."""
    return 1.0
