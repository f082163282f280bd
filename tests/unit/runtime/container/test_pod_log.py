"""The log of a pod."""

from __future__ import annotations

import threading

from aenv_ray.runtime.container.pod_log import KEEP_BYTES, LIMIT_BYTES, PodLog


def test_a_log_keeps_its_end_and_says_what_is_gone() -> None:
    """Invariant 12."""
    log = PodLog()
    log.add(b"x" * LIMIT_BYTES)
    log.add(b"end\n")
    log.end()
    first, content = log.read(None, follow=False)
    gone = LIMIT_BYTES + 4 - KEEP_BYTES
    assert first == f"[log cut: the first {gone} bytes are gone]\n".encode()
    assert len(content) == KEEP_BYTES
    assert b"".join(log.read(1, follow=False)).endswith(b"end\n")


def test_a_reader_that_is_too_slow_is_told_what_it_missed() -> None:
    """Invariant 12."""
    log = PodLog()
    log.add(b"first\n")
    pieces = log.read(None, follow=True)
    assert next(pieces) == b"first\n"
    writer = threading.Thread(target=lambda: (log.add(b"y" * (LIMIT_BYTES + 1)), log.end()))
    writer.start()
    writer.join()
    rest = b"".join(pieces)
    assert rest.startswith(b"[log cut: ")
    assert len(rest) > KEEP_BYTES
