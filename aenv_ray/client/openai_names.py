"""Tool names that OpenAI and most model servers accept."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

_OPENAI_NAME: Final = re.compile(r"[^a-zA-Z0-9_-]")
_OPENAI_NAME_LENGTH: Final = 64


def openai_name(name: str, taken: Mapping[str, str]) -> str:
    """Return `name` in OpenAI's alphabet, at most 64 characters, distinct from `taken`."""
    legal = _OPENAI_NAME.sub("_", name)[:_OPENAI_NAME_LENGTH] or "tool"
    if legal not in taken:
        return legal
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{legal[: _OPENAI_NAME_LENGTH - 9]}_{digest}"
