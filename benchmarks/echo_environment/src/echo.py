"""The tool that the benchmarks call."""

from aenv_ray.runtime import register_tool


@register_tool
def echo(text: str) -> str:
    """Return the text."""
    return text
