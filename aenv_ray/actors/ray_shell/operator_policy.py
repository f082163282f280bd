"""The operator's policy of a cluster: the gateway's deployer stores it with Ray."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from typing import Final

from pydantic import ValidationError

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.config import settings
from aenv_ray.errors import FabricUnavailable
from aenv_ray.policy import STRICT, Policy, policy_of

FRESH_S: Final = 2.0
"""A changed policy takes effect on all nodes within this time."""
_KEY: Final = "policy"
_PATIENCE_S: Final = 0.25
_FIRST_S: Final = 30.0


def announce() -> tuple[Policy | None, Policy]:
    """Make this process's settings the policy of the cluster, because a gateway starts.

    Returns:
        The policy that it replaces, None if no gateway ran; and the new one.

    Raises:
        ConfigError: A setting is malformed.
    """
    policy = policy_of(settings(), behind_gateway=True)
    before = ray_api.stored_value(_KEY)
    ray_api.store(_KEY, policy.model_dump_json())
    _reader.forget()
    return _parsed(before) if before else None, policy


def withdraw() -> None:
    """Let each node follow its own settings again, because no gateway runs any more."""
    ray_api.store(_KEY, "")
    _reader.forget()


def current() -> Policy:
    """Return the cluster's policy, at most `FRESH_S` old; without a gateway this node's own.

    While Ray does not answer, the last known policy holds; this call blocks for `_PATIENCE_S` once.

    Raises:
        ConfigError: A setting is malformed.
        FabricUnavailable: Ray does not answer, and no policy is known yet.
    """
    return _reader.current()


class _Reader:
    """Reads the policy in a daemon thread: an unreachable Ray must not delay the program's end."""

    def __init__(self) -> None:
        self._reading: Future[Policy] | None = None
        self._known: Policy | None = None
        self._fresh_until = 0.0

    def current(self) -> Policy:
        if time.monotonic() < self._fresh_until and self._known is not None:
            return self._known
        is_new = self._reading is None
        reading = self._reading or _begin_to_read()
        patience_s = _FIRST_S if self._known is None else _PATIENCE_S if is_new else 0.0
        done, _ = wait([reading], patience_s)
        self._reading = None if done else reading
        try:
            if not done:
                raise FabricUnavailable(
                    "Ray's head did not return the operator's policy in time",
                    hint="check the head with: aenv status",
                )
            self._known = reading.result()
            self._fresh_until = time.monotonic() + FRESH_S
        except FabricUnavailable:
            if self._known is None:
                raise
        return self._known

    def forget(self) -> None:
        self._fresh_until = 0.0


_reader: Final = _Reader()


def _begin_to_read() -> Future[Policy]:
    reading: Future[Policy] = Future()

    def read() -> None:
        try:
            reading.set_result(_read())
        except BaseException as exc:  # noqa: BLE001  # raised where it is awaited
            reading.set_exception(exc)

    threading.Thread(target=read, name="aenv-policy", daemon=True).start()
    return reading


def _read() -> Policy:
    text = ray_api.stored_value(_KEY)
    return _parsed(text) if text else policy_of(settings(), behind_gateway=False)


def _parsed(text: str) -> Policy:
    try:
        return Policy.model_validate_json(text)
    except ValidationError:
        return STRICT  # written by another version
