"""Work on a thread that lasts as long as the process.

Ray has the kernel kill the processes of a local Ray when their parent dies (``PR_SET_PDEATHSIG``),
and for the kernel the parent is the *thread* that started them. Started on a thread of a pool or of
a sampling, that Ray would be killed when the thread ends, and the driver with it a minute later.
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
    """Run `work` on this thread if it is the main one, else on one that never ends; wait for it.

    Raises:
        Whatever `work` raises.
    """
    if threading.current_thread() is threading.main_thread():
        return work()
    global _thread
    with _start_lock:
        if _thread is None or not _thread.is_alive():  # a forked process has none
            # A daemon: one that is joined at exit would end before Ray is shut down.
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
        except BaseException as exc:  # noqa: BLE001  # the caller's, on its own thread
            done.set_exception(exc)
        del work, done
