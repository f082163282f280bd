"""How commands that start something react to signals."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT, SIGTERM and SIGHUP while the block runs.

    Also where a shell started the command with SIGINT ignored; an ignored SIGHUP stays ignored, for
    ``nohup``.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with _handled(numbers, interrupt):
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore the first of these signals while the block cleans up; the second interrupts it."""
    left = 2

    def ignore(number: int, frame: FrameType | None) -> None:
        nonlocal left
        del number, frame
        left -= 1
        if not left:
            raise KeyboardInterrupt

    with _handled([signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ignore):
        yield


@contextlib.contextmanager
def _handled(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old)
