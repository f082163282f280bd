"""A run of episodes on the terminal: a view that is redrawn, or a line every ten seconds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.output import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from aenv_ray.sampling.progress import ProgressView, RewardBar

LINE_EVERY_S: Final = 10.0
_CAUSES_SHOWN: Final = 5
_BAR_WIDTH: Final = 24


@contextlib.contextmanager
def shown(view: Callable[[], ProgressView], *, redraw: bool) -> Iterator[None]:
    """Show a run while the block runs: redrawn on a terminal, elsewhere a line at intervals.

    Args:
        view: Returns where the run stands; called from another thread.
        redraw: Whether to redraw the view if standard error is a terminal.
    """
    from rich.console import Console
    from rich.live import Live

    terminal = Console(stderr=True)
    if not (redraw and terminal.is_terminal):
        with _lines(view):
            yield
        return
    with Live(get_renderable=lambda: screen(view()), console=terminal, refresh_per_second=4):
        yield


@contextlib.contextmanager
def _lines(view: Callable[[], ProgressView]) -> Iterator[None]:
    ended = threading.Event()

    def write() -> None:
        while not ended.wait(LINE_EVERY_S):
            console.say(line(view()))

    thread = threading.Thread(target=write, daemon=True, name="aenv-progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def line(view: ProgressView) -> str:
    """Return where a run stands as one line."""
    parts = [f"{_finished(view)} episodes", *_unfinished(view)]
    parts.append(f"{view.episodes_per_s:.1f}/s")
    parts.append(f"{view.calls_per_s:.0f} calls/s")
    if tokens := view.prompt_tokens + view.completion_tokens:
        parts.append(f"{tokens:,} tokens")
    if view.reward_mean is not None:
        parts.append(f"reward {view.reward_mean:.3f}")
    parts += [f"{code} {count}" for code, count in view.causes[:_CAUSES_SHOWN]]
    if view.eta_s is not None:
        parts.append(f"{duration(view.eta_s)} left")
    return printable(", ".join(parts))


def screen(view: ProgressView) -> RenderableType:
    """Return where a run stands as a block of lines for a terminal."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    head = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=view.total, completed=view.finished, width=_BAR_WIDTH)
    left = "" if view.eta_s is None else f"{duration(view.eta_s)} left"
    head.add_row("run", bar, _finished(view), duration(view.elapsed_s), left)
    rows = Table.grid(padding=(0, 2))
    rows.add_row("episodes", Text(_states(view)))
    rows.add_row("rates", f"{view.episodes_per_s:.1f} episodes/s, {view.calls_per_s:.0f} calls/s")
    create, call = _ms(view.create_p50_ms), _ms(view.call_p50_ms)
    rows.add_row("latency", f"create p50 {create}, call p50 {call}, p99 {_ms(view.call_p99_ms)}")
    if view.prompt_tokens or view.completion_tokens:
        tokens = f"{view.prompt_tokens:,} read, {view.completion_tokens:,} written"
        rows.add_row("tokens", tokens)
    if view.reward_mean is not None:
        rows.add_row("rewards", Text("\n".join(_histogram(view))))
    if view.causes:
        causes = [f"{count} × {code}" for code, count in view.causes[:_CAUSES_SHOWN]]
        rows.add_row("failures", Text(printable(", ".join(causes))))
    return Group(head, rows)


def _finished(view: ProgressView) -> str:
    return f"{view.finished}" if view.total is None else f"{view.finished}/{view.total}"


def _unfinished(view: ProgressView) -> list[str]:
    playing = f"{view.playing} playing"
    return [playing, f"{view.waiting} waiting for room"] if view.waiting else [playing]


def _states(view: ProgressView) -> str:
    counts = sorted(view.by_status.items(), key=lambda item: -item[1])
    return ", ".join([*_unfinished(view), *(f"{count} {status.value}" for status, count in counts)])


def _histogram(view: ProgressView) -> list[str]:
    highest = max(bar.count for bar in view.rewards)
    lines = [f"mean {view.reward_mean:.3f}"]
    for bar in view.rewards:
        cells = max(round(_BAR_WIDTH * bar.count / highest), bar.count > 0)
        lines.append(f"{_span(bar):>13} {'█' * cells} {bar.count}")
    return lines


def _span(bar: RewardBar) -> str:
    return f"{bar.low:.3g}" if bar.low == bar.high else f"{bar.low:.3g}–{bar.high:.3g}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def duration(seconds: float) -> str:
    """Return seconds as ``42 s``, ``3 min 20 s`` or ``5 h 7 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
