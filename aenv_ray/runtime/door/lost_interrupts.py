"""Interrupts of calls that Python drops: those that hit a destructor or a collector's callback.

What is raised there goes nowhere but to `sys.unraisablehook`, and a function that was to be stopped
would go on.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from aenv_ray.runtime.door.calls import CallInterrupted, current_call

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def catch() -> None:
    """Have them raised again; everything else goes to the hook that was there before."""
    before = sys.unraisablehook

    def hook(unraisable: UnraisableHookArgs) -> None:
        if unraisable.exc_type is CallInterrupted:
            current_call().interrupt_again()  # Python calls this in the thread that it hit
        else:
            before(unraisable)

    sys.unraisablehook = hook
