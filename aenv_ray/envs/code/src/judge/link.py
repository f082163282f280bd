"""The judge's connection to the process of a solution, and what stands for its objects."""

from __future__ import annotations

import builtins
import os
import select
import struct
from typing import Any

from judge import plain

MOST_BYTES = 16 * 1024 * 1024
"""Size limit of a reply, and of what a program prints."""


class SolutionEnded(BaseException):
    """The process of the solution has ended, or does not answer properly.

    Not an `Exception`, so that a test that expects an exception does not take it for one.
    """


class SolutionError(Exception):
    """Stands for an exception of the solution that is not a builtin one."""


class Link:
    """Requests to the process of a solution.

    Args:
        requests: Descriptor to write to.
        replies: Descriptor to read from.
        process: A pidfd of the process.
    """

    def __init__(self, requests: int, replies: int, process: int) -> None:
        self._requests = requests
        self._replies = replies
        self._process = process
        self.has_failed = False
        """Whether `SolutionEnded` was raised; a test may have caught it."""
        self.ran_out_of_memory = False

    def load(self) -> None:
        """Wait until the code is loaded.

        Raises:
            Exception: What the code raised.
            SolutionEnded: The process has ended.
        """
        self._result(self._reply(), ())

    def ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """Have the solution's process apply an operation, see `solution`.

        Arguments that the solution has changed in place are changed here too.

        Raises:
            Exception: What the solution raised.
            SolutionEnded: The process has ended, or its reply is malformed.
            TypeError: An argument is an object that cannot be passed.
        """
        data = plain.encode((operation, arguments, options), _number_of)
        view = memoryview(struct.pack("Q", len(data)) + data)
        while view:
            _, writable, _ = select.select([self._process], [self._requests], [])
            if not writable:
                raise self._failed("the solution's process has ended")
            view = view[os.write(self._requests, view[: select.PIPE_BUF]) :]
        return self._result(self._reply(), arguments)

    def _result(self, data: bytes, arguments: tuple[Any, ...]) -> Any:
        try:
            kind, *content = plain.decode(data, self._object)
            if kind == "ok":
                value, changes = content
                for index, changed in changes:
                    _change(arguments[index], changed)
                return value
            name, text = content
        except (plain.Malformed, TypeError, ValueError, LookupError, RecursionError) as exc:
            raise self._failed(f"the solution's process sent a malformed reply: {exc}") from None
        self.ran_out_of_memory = name == "MemoryError"
        raise exception(str(name), str(text))

    def _object(self, number: int) -> Remote:
        return Remote(self, number)

    def _reply(self) -> bytes:
        (size,) = struct.unpack("Q", self._exactly(8))
        if size > MOST_BYTES:
            raise self._failed(f"a result has {size} bytes; the limit is {MOST_BYTES}")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            ready, _, _ = select.select([self._replies, self._process], [], [])
            # It may have replied and ended after `select` had looked at the replies.
            if self._replies not in ready and not select.select([self._replies], [], [], 0)[0]:
                raise self._failed("the solution's process has ended")
            part = os.read(self._replies, min(size, 1 << 20))
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _failed(self, reason: str) -> SolutionEnded:
        self.has_failed = True
        return SolutionEnded(reason)


class Remote:
    """An object in the solution's process that is not plain data, such as a function.

    It equals only itself, whatever its own ``__eq__`` would say.
    """

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def _ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        return self._link.ask(operation, self, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call it in the solution's process."""
        return self._ask("call", *arguments, **options)

    def __iter__(self) -> Any:
        return self._ask("iterate")

    def __next__(self) -> Any:
        return self._ask("next")

    def __len__(self) -> int:
        return int(self._ask("length"))

    def __bool__(self) -> bool:
        return bool(self._ask("truth"))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __contains__(self, item: Any) -> bool:
        return bool(self._ask("contains", item))

    def __str__(self) -> str:
        return str(self._ask("text"))

    def __repr__(self) -> str:
        return "<an object of the solution>"


def _number_of(value: Any) -> int:
    if type(value) is not Remote:
        raise TypeError(f"a test cannot pass {type(value).__name__!r} objects to the solution")
    return int(object.__getattribute__(value, "_number"))


def exception(name: str, text: str) -> Exception:
    """Return an exception of the type with a name; `SolutionError` if it is not a builtin one."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text) if text else kind()
        except TypeError:  # such as UnicodeDecodeError
            pass
    return SolutionError(f"{name}: {text}")


def _change(value: Any, changed: Any) -> None:
    kinds = (dict, set, list, bytearray)
    if not any(isinstance(value, kind) and isinstance(changed, kind) for kind in kinds):
        raise ValueError("an argument has become an object of another type")
    if isinstance(value, dict | set):
        value.clear()
        value.update(changed)
    else:
        value[:] = changed
