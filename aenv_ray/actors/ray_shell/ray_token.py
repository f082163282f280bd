"""The authentication token of Ray, which Ray stores in the user's home directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

_TOKEN_VARIABLE: Final = "RAY_AUTH_TOKEN"
"""Takes precedence over the token file."""


def use_token(*, make: bool = False) -> None:
    """Authenticate with the token of this user, as Ray does for local clusters.

    With `make`, a token is generated if there is none.
    """
    from ray import _raylet
    from ray._private.authentication import authentication_token_setup as setup

    core: Any = _raylet

    if setup.AUTH_MODE_ENV_VAR not in os.environ and (make or _has_token(core)):
        os.environ[setup.AUTH_MODE_ENV_VAR] = "token"
        core.Config.initialize("")  # Ray read its settings at import
    setup.ensure_token_if_auth_enabled(None, create_token_if_missing=make)


def carry_token() -> None:
    """Generate a token for this process and its children if the home directory is not writable.

    A local Ray does not start if it cannot store a token there.
    """
    from ray import _raylet
    from ray._private.authentication import authentication_token_generator as generator

    core: Any = _raylet

    if _has_token(core):
        return
    try:
        directory = Path.home() / ".ray"
        directory.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(directory, os.W_OK)
    except (OSError, RuntimeError):
        is_writable = False
    if not is_writable:
        os.environ[_TOKEN_VARIABLE] = generator.generate_new_authentication_token()


def _has_token(core: Any) -> bool:
    """Return whether Ray finds a token, whatever mode it is in."""
    loader = core.AuthenticationTokenLoader.instance()
    try:
        return bool(loader.has_token(ignore_auth_mode=True))
    except TypeError:  # Ray 2.52 looks for a token only in token mode
        return _TOKEN_VARIABLE in os.environ or any(path.is_file() for path in _token_files())


def _token_files() -> list[Path]:
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        return [Path(named)] if named else [Path.home() / ".ray" / "auth_token"]
    except RuntimeError:  # the user has no home
        return []
