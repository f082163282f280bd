"""What a policy is, how each runner makes one, and whether a policy can be sent to runners."""

from __future__ import annotations

import array
import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterator,
    MutableMapping,
    MutableSequence,
    MutableSet,
)
from contextlib import asynccontextmanager
from typing import Any, Final

from aenv_ray.errors import ConfigError
from aenv_ray.trajectories.schema import Task

logger = logging.getLogger("aenv_ray")

AgentPolicy = Callable[[Any, Task], Any]
"""``policy(env, task)``, sync or async, with an `EpisodeEnv` or `SyncEpisodeEnv`; the return value
is recorded as the episode's output. A class is instantiated once for each runner, without
arguments; see `opened`."""


class ForRunner(ABC):
    """A policy that only describes itself, and opens connections in each runner."""

    @abstractmethod
    def for_runner(self) -> AgentPolicy:
        """Return the policy with its connections, for one event loop."""

    @abstractmethod
    async def __call__(self, env: Any, task: Task) -> Any:
        """Play one episode, outside of a runner."""


_MUTABLE: Final = (MutableSequence, MutableMapping, MutableSet, array.array, deque)


def check_policy(policy: Any) -> None:
    """Refuse policies that cannot act, such as generators, which do nothing when called.

    Raises:
        ConfigError: The policy is not callable, is a generator, or is a class whose instances
            cannot be created without arguments or cannot be called.
    """
    if isinstance(policy, type):
        _check_class(policy)
    called = _called(policy)
    yields = inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called)
    if yields or not callable(policy):
        what = "is a generator" if yields else "is not callable"
        raise ConfigError(
            f"the policy {policy!r} {what}",
            hint="write it as a function policy(env, task), sync or async",
        )


def _check_class(cls: type) -> None:
    if not any("__call__" in vars(base) for base in cls.__mro__):
        raise ConfigError(
            f"instances of the policy class {cls.__qualname__} cannot be called",
            hint="give it a method __call__(self, env, task), sync or async",
        )
    try:
        inspect.signature(cls).bind()
    except TypeError as exc:
        raise ConfigError(
            f"the policy class {cls.__qualname__} cannot be created without arguments: {exc}",
            hint="give an instance, or functools.partial(…) of a function",
        ) from None
    except ValueError:  # written in C, it shows no signature
        return


def _called(policy: Any) -> Any:
    """Return the function that runs when a policy is called."""
    while isinstance(policy, functools.partial):
        policy = policy.func
    if isinstance(policy, type):
        return getattr(policy, "__call__", None)  # noqa: B004  # the function, not whether it is
    if inspect.isroutine(policy):
        return policy
    return getattr(type(policy), "__call__", policy)  # noqa: B004


def is_async(policy: AgentPolicy) -> bool:
    """Whether a policy runs on the event loop, rather than in a thread."""
    return inspect.iscoroutinefunction(_called(policy))


def name_of(policy: Any) -> str:
    """Return the name of a policy in records: its attribute `name`, or ``module:function``.

    That is how ``--policy`` names it: the module is left out of a policy of aenv-ray.
    """
    while isinstance(policy, functools.partial):
        policy = policy.func
    given = getattr(policy, "name", None)
    if isinstance(given, str):
        return given
    named = policy if isinstance(policy, type) or inspect.isroutine(policy) else type(policy)
    is_ours = str(named.__module__).partition(".")[0] == "aenv_ray"
    return named.__qualname__ if is_ours else f"{named.__module__}:{named.__qualname__}"


# --- for a runner ---------------------------------------------------------------------------------


@asynccontextmanager
async def opened(policy: AgentPolicy | type) -> AsyncIterator[AgentPolicy]:
    """Make the callable that one runner uses for all its episodes, and close it afterwards.

    A class is instantiated, and its instance closed by its method `aclose` or `close`, if it has
    one. An instance or a function is used as it is, and not closed: it may be used again.

    Raises:
        ConfigError: See `make`.
    """
    made = make(policy)
    try:
        yield made
    finally:
        if made is not policy:
            await _close(made)


def make(policy: AgentPolicy | type) -> AgentPolicy:
    """Return the callable that a runner uses.

    Raises:
        ConfigError: `policy` is a class whose constructor raised, or `check_policy` refuses it.
    """
    check_policy(policy)
    if isinstance(policy, type):
        return _instance(policy)
    return policy.for_runner() if isinstance(policy, ForRunner) else policy


def _instance(cls: type) -> AgentPolicy:
    try:
        made: AgentPolicy = cls()
    except Exception as exc:
        raise ConfigError(
            f"the policy class {cls.__qualname__} raised {type(exc).__name__}: {exc}",
            hint="its constructor must work without arguments; pass an instance if it needs some",
        ) from exc
    return made


async def _close(made: AgentPolicy) -> None:
    """Close a policy; what it raises is logged, because its episodes are finished."""
    closing = getattr(made, "aclose", None) or getattr(made, "close", None)
    if closing is None:
        return
    try:
        result = closing()
        if inspect.isawaitable(result):
            await result
    except Exception as exc:  # noqa: BLE001  # the user's code may raise anything
        logger.warning("the policy did not close: %s: %s", type(exc).__name__, exc)


# --- between processes ----------------------------------------------------------------------------


def portable(policy: AgentPolicy | type) -> bytes | None:
    """Return a policy pickled for runners; None if it must run in this process, which is logged.

    A function that closes over a list, a dict or another mutable container stays here, and so does
    an instance that holds one: its owner may read there what the policy has written. A class always
    travels if it can be pickled.
    """
    from aenv_ray.actors.ray_shell.pickling import pickled

    held = next(_shared(policy), None)
    if held is not None:
        logger.info("the policy runs in the driver, because it holds %s, which is mutable", held)
        return None
    try:
        return pickled(policy)
    except Exception as exc:  # noqa: BLE001  # the user's code, and whatever it holds
        logger.info("the policy runs in the driver, because it cannot be pickled: %s", exc)
        return None


def received(data: bytes) -> AgentPolicy | type:
    """Return the policy that `portable` pickled, on a runner.

    Raises:
        ConfigError: It needs a module that this node does not have, or its code raises.
    """
    from aenv_ray.actors.ray_shell.pickling import unpickled

    try:
        policy: AgentPolicy | type = unpickled(data)
    except ImportError as exc:
        raise ConfigError(
            f"the policy cannot be loaded on a runner: {exc}",
            hint="install the module on every node, or send it with "
            'ray.init(runtime_env={"py_modules": […]})',
        ) from exc
    except Exception as exc:
        raise ConfigError(
            f"the policy cannot be loaded on a runner: {type(exc).__name__}: {exc}",
            hint="pass a class: each runner then creates its own policy from it",
        ) from exc
    return policy


def _shared(policy: Any) -> Iterator[str]:
    """Yield the names of the mutable containers through which a policy could hand out results."""
    if isinstance(policy, type):
        return
    if isinstance(policy, functools.partial):
        yield from (repr(value) for value in policy.args if isinstance(value, _MUTABLE))
        yield from _mutable_in(policy.keywords)
        yield from _shared(policy.func)
    elif inspect.ismethod(policy):
        yield from _shared(policy.__self__)
    elif inspect.isfunction(policy):
        yield from _mutable_in(inspect.getclosurevars(policy).nonlocals)
    else:
        yield from _mutable_in(getattr(policy, "__dict__", {}))


def _mutable_in(values: Any) -> Iterator[str]:
    yield from (name for name, value in values.items() if isinstance(value, _MUTABLE))
