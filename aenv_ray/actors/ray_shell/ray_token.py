"""The authentication token of Ray, which Ray stores in the user's home directory."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Final

from aenv_ray.files import make_private

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
    if make:
        _make_private_home()
    setup.ensure_token_if_auth_enabled(None, create_token_if_missing=make)
    protect_token()


def carry_token() -> None:
    """Generate a token for this process and its children if the home directory is not writable.

    A local Ray does not start if it cannot store a token there.
    """
    from ray import _raylet
    from ray._private.authentication import authentication_token_generator as generator

    core: Any = _raylet

    if _has_token(core):
        return
    if not _make_private_home():
        os.environ[_TOKEN_VARIABLE] = generator.generate_new_authentication_token()


def protect_token() -> None:
    """Close the token file to other users: Ray creates it with the umask of the process."""
    if "RAY_AUTH_TOKEN_PATH" in os.environ:
        return  # the user who chose the path chooses its mode
    for path in _token_files():
        with contextlib.suppress(OSError):  # there is none, or it belongs to another user
            if path.stat().st_mode & 0o077:
                path.chmod(0o600)


def _make_private_home() -> bool:
    """Create Ray's directory for the token; return whether this user may write there.

    It is private, so that nobody reads the token between its creation and `protect_token`.
    """
    try:
        directory = Path.home() / ".ray"
        make_private(directory, close=True)
    except (OSError, RuntimeError):  # the user has no home, or may not write to it
        return False
    return os.access(directory, os.W_OK)


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
