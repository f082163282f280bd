"""The token by which the processes of a Ray know each other; Ray keeps it in the user's home."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

_TOKEN_VARIABLE: Final = "RAY_AUTH_TOKEN"
"""Where Ray looks first."""


def use_token(*, make: bool = False) -> None:
    """Speak to Ray with the token of this user, as Ray's own drivers do on a local cluster.

    Args:
        make: Make the token where there is none.
    """
    from ray import _raylet
    from ray._private.authentication import authentication_token_setup as setup

    core: Any = _raylet

    has_token = core.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True)
    if setup.AUTH_MODE_ENV_VAR not in os.environ and (make or has_token):
        os.environ[setup.AUTH_MODE_ENV_VAR] = "token"
        core.Config.initialize("")  # Ray read its settings when it was imported
    setup.ensure_token_if_auth_enabled(None, create_token_if_missing=make)


def carry_token() -> None:
    """Make a token for this process and those that it starts, if its user has no home to keep one.

    A local Ray does not start where it cannot write one there.
    """
    from ray import _raylet
    from ray._private.authentication import authentication_token_generator as generator

    core: Any = _raylet

    if core.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        return
    try:
        directory = Path.home() / ".ray"
        directory.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(directory, os.W_OK)
    except (OSError, RuntimeError):
        is_writable = False
    if not is_writable:
        os.environ[_TOKEN_VARIABLE] = generator.generate_new_authentication_token()
