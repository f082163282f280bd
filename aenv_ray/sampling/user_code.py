"""Runs the user's code, policies and task iterators, which may raise anything and never return.

Exceptions that are not an `Exception`, such as `SystemExit`, become a RuntimeError: they would end
the event loop of all episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sysconfig
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import aenv_ray

T = TypeVar("T")

CHECK_S: Final = 60.0
"""Interval at which the instance of a running policy is checked."""
GRACE_S: Final = 5.0
"""Time for a cancelled policy to end; after it the policy is abandoned."""

_NOT_OF_USERS: Final = (
    *Path(aenv_ray.__file__).parents[:1],
    *(Path(path) for path in sysconfig.get_paths().values()),
)
"""Directories of aenv-ray, of Python and of installed packages."""


def place_of(exc: BaseException) -> str | None:
    """Return where the user's code raised an exception, as ``file.py:12, in act``.

    None if no line of it was running: only those of libraries.
    """
    cause: BaseException | None = exc
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:  # an exception may be its own cause
        seen.add(id(cause))
        for frame, line in reversed(list(traceback.walk_tb(cause.__traceback__))):
            path = Path(frame.f_code.co_filename)
            if not any(path.is_relative_to(directory) for directory in _NOT_OF_USERS):
                return f"{path.name}:{line}, in {frame.f_code.co_name}"
        cause = cause.__cause__
    return None


async def outcome(awaitable: Awaitable[Any], what: str) -> Any:
    """Return the result of the user's awaitable.

    Cancelling its episode and Ctrl-C, which reaches only the main thread, pass unchanged.
    """
    try:
        return await awaitable
    except (Exception, GeneratorExit):
        raise
    except BaseException as exc:
        is_cancelled = isinstance(exc, asyncio.CancelledError)
        if is_cancelled and (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        is_main = threading.current_thread() is threading.main_thread()
        if isinstance(exc, KeyboardInterrupt) and is_main:
            raise
        raise RuntimeError(f"{what} raised {type(exc).__name__}: {exc}") from exc


def call(function: Callable[[], Any], what: str) -> tuple[Any, Exception | None]:
    """Call the user's function, in a thread; return its result and what it raised."""
    try:
        return function(), None
    except StopIteration:  # a future cannot carry it
        return None, RuntimeError(f"{what} raised StopIteration")
    except Exception as exc:  # noqa: BLE001  # passed on to the waiter of the future
        return None, exc
    except BaseException as exc:  # noqa: BLE001  # a future cannot carry SystemExit
        return None, RuntimeError(f"{what} raised {type(exc).__name__}: {exc}")


def hand_over(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Settle a future that belongs to another thread's loop, unless it is done."""

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed: the sampling has ended
        future.get_loop().call_soon_threadsafe(settle)


# --- time limits ----------------------------------------------------------------------------------


class PolicyTimedOut(Exception):
    """The policy did not end within its limit."""


async def within(
    acting: Coroutine[Any, Any, T],
    limit_s: float | None,
    check_instance: Callable[[], Awaitable[Any]],
    check_s: float | None = None,
    grace_s: float = GRACE_S,
) -> T:
    """Return the result of a policy; whatever ends the wait, the policy is cancelled.

    Args:
        acting: The running policy.
        limit_s: Limit in seconds; None: as long as the instance lives.
        check_instance: Raises if the instance has ended, which ends the policy.
        check_s: Interval of that check in seconds; None: `CHECK_S`.
        grace_s: Seconds for a cancelled policy to end.

    Raises:
        PolicyTimedOut: `limit_s` passed.
        AenvError: Raised by `check_instance`.
        Exception: Raised by the policy.
    """
    policy = asyncio.ensure_future(acting)
    watch = asyncio.ensure_future(_watch(check_instance, check_s or CHECK_S))
    both = {policy, watch}
    try:
        await asyncio.wait(both, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if policy.done():
            return policy.result()
        if watch.done():
            watch.result()
        raise PolicyTimedOut(f"the policy did not end within {limit_s:g} s")
    finally:
        for task in both:
            task.add_done_callback(_retrieve)
            task.cancel()
        if not policy.done():
            await asyncio.wait({policy}, timeout=grace_s)


async def _watch(check_instance: Callable[[], Awaitable[Any]], check_s: float) -> None:
    while True:
        await asyncio.sleep(check_s)
        await check_instance()


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned task, which asyncio would log otherwise."""
    if not task.cancelled():
        task.exception()
