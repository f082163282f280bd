"""Limits of sandboxes whose projects set none.

This module imports only the standard library, because the launcher imports it.
"""

from __future__ import annotations

from typing import Final

DEFAULT_LIMIT_SHARE: Final = 0.5
"""Memory limit of a sandbox whose project sets none, as a share of the node's memory."""
