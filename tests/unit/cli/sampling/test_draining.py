"""Ctrl-C in `aenv sample`: once drains the run, twice stops it."""

from __future__ import annotations

import os
import signal
from typing import cast

import pytest

from aenv_ray.cli.sampling.rollouts import draining
from aenv_ray.sampling import Sampling


class _FakeSampling:
    def __init__(self) -> None:
        self.drains = 0

    def drain(self) -> None:
        self.drains += 1


def test_the_first_interrupt_drains_and_the_second_stops() -> None:
    """Afterwards Ctrl-C does what it did before."""
    sampling = _FakeSampling()
    before = signal.getsignal(signal.SIGINT)
    with draining(cast("Sampling", sampling)):
        os.kill(os.getpid(), signal.SIGINT)
        assert sampling.drains == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert sampling.drains == 1
    assert signal.getsignal(signal.SIGINT) is before
