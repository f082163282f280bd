"""Running the caller's code, a policy or an iterator of tasks, which may raise anything.

What is no `Exception`, `SystemExit` say, arrives as a RuntimeError: it would end the loop of all
episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any


async def outcome(awaitable: Awaitable[Any], what: str) -> Any:
    """Return what an awaitable of the caller's gives.

    Cancelled with its episode it is left alone, and so is Ctrl-C, which only the main thread gets.

    Args:
        awaitable: The caller's.
        what: What it is, for the message.
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
    """Call a function of the caller's, in a thread; return its result and what it raised."""
    try:
        return function(), None
    except StopIteration:  # as a future cannot carry
        return None, RuntimeError(f"{what} raised StopIteration")
    except Exception as exc:  # noqa: BLE001  # it belongs to whom the future tells
        return None, exc
    except BaseException as exc:  # noqa: BLE001  # as a future cannot carry: SystemExit and such
        return None, RuntimeError(f"{what} raised {type(exc).__name__}: {exc}")


def hand_over(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    """Settle a future of another thread's loop, unless nobody waits for it any more."""

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop is closed: the sampling has ended
        future.get_loop().call_soon_threadsafe(settle)
