"""Runs work on a thread that lives as long as the process.

A local Ray asks the kernel to kill its processes when their parent dies (``PR_SET_PDEATHSIG``), and
for the kernel the parent is the *thread* that started them. A Ray started on a pool thread would
die with that thread, and the driver a minute later.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

_tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
_start_lock = threading.Lock()
_thread: threading.Thread | None = None


def run(work: Callable[[], T]) -> T:
    """Run `work` on the main thread if this is it, else on a thread that never ends; wait for it.

    Raises:
        BaseException: What `work` raises.
    """
    if threading.current_thread() is threading.main_thread():
        return work()
    global _thread
    with _start_lock:
        if _thread is None or not _thread.is_alive():  # a fork does not inherit threads
            # A daemon thread: any other would be joined at exit, before Ray is shut down.
            _thread = threading.Thread(target=_work_on, name="aenv-ray-start", daemon=True)
            _thread.start()
    done: Future[T] = Future()
    _tasks.put((work, done))
    return done.result()


def _work_on() -> None:
    while True:
        work, done = _tasks.get()
        try:
            done.set_result(work())
        except BaseException as exc:  # noqa: BLE001  # raised on the caller's thread
            done.set_exception(exc)
        del work, done
