"""A report of episodes as one HTML file, which opens from the disk and loads nothing.

Texts of episodes come from sandboxes and models: every one is escaped, and the file's content
security policy forbids scripts.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any, Final

from aenv_ray.trajectories.conversation import MessagePart, NumberedStep, in_order, used
from aenv_ray.trajectories.schema import Episode, EpisodeStatus, Step
from aenv_ray.trajectories.statistics import (
    by_tool,
    grouped,
    is_refused,
    is_success,
    is_void,
    quantile_ms,
)

EPISODES_SHOWN: Final = 200
_ROWS: Final = 20
"""Rows of a table of tasks or causes."""
_TEXT_SHOWN: Final = 4000
"""Characters of a message, or of a step's text."""
_BINS: Final = 20
_COLOURS: Final = {
    EpisodeStatus.COMPLETED: "#2a78d6",
    EpisodeStatus.DIED_INSIDE: "#b5651d",
    EpisodeStatus.TIMED_OUT: "#c99a06",
    EpisodeStatus.POLICY_FAILED: "#a05195",
    EpisodeStatus.REWARD_FAILED: "#d45087",
    EpisodeStatus.INFRA_FAILED: "#c62828",
    EpisodeStatus.REFUSED: "#8c959f",
}
_STYLE: Final = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff; margin: 2rem auto;
  max-width: 68rem; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .5rem; border-bottom: 1px solid #d8dee4;
  padding-bottom: .25rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem;
  margin: 1.25rem 0; }
.figure { border: 1px solid #d8dee4; border-radius: 6px; padding: .6rem .8rem; }
.figure b { display: block; font-size: 1.3rem; font-weight: 600; }
.figure span, .note, figcaption { color: #59636e; font-size: .875rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { margin-bottom: .25rem; font-weight: 600; }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: #59636e; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .875rem; }
th, td { text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid #eaeef2;
  vertical-align: top; overflow-wrap: anywhere; }
th { color: #59636e; font-weight: 600; white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
details { border-bottom: 1px solid #eaeef2; padding: .35rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; } summary .tag { margin-left: .5rem; }
.tag { display: inline-block; border-radius: 1em; padding: 0 .6em; font-size: .8rem; color: #fff; }
pre { background: #f6f8fa; border-radius: 6px; padding: .5rem .75rem; margin: .3rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font-size: .8rem; max-height: 24rem;
  overflow: auto; }
.said { border-left: 3px solid #d8dee4; padding: .1rem 0 .1rem .75rem; margin: .6rem 0;
  font-size: .875rem; } .said.model { border-color: #2a78d6; }
.said > b { color: #59636e; font-size: .8rem; }
.said > div { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24rem; overflow: auto; }
.error { color: #c62828; }
"""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def report(episodes: Sequence[Episode], title: str) -> str:
    """Return the HTML document.

    Args:
        episodes: All of them are counted; the first `EPISODES_SHOWN` are shown with their steps.
        title: Heading, such as the name of the file.
    """
    body = [
        f"<h1>{_safe(title)}</h1>",
        f'<p class="note">{_safe(_source(episodes))}</p>',
        _figures(episodes),
        _plots(episodes),
        _task_table(episodes),
        _tool_table(episodes),
        _cause_table(episodes),
        _episodes(episodes),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_safe(title)}</title><style>{_STYLE}</style></head>\n<body>"
        + "\n".join(filter(None, body))
        + "</body></html>\n"
    )


def _safe(value: object) -> str:
    """Return text for HTML, with control characters replaced."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))
    return escape(text)


def _number(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _source(episodes: Sequence[Episode]) -> str:
    environments = sorted({one.environment for one in episodes if one.environment})
    policies = sorted({one.policy for one in episodes if one.policy})
    return " · ".join(filter(None, [", ".join(environments), ", ".join(policies)]))


def _figures(episodes: Sequence[Episode]) -> str:
    rewards = [one.reward for one in episodes if one.reward is not None]
    refused = sum(map(is_refused, episodes))
    usages = [one.usage for one in episodes if one.usage is not None]
    tokens = sum(one.prompt_tokens + one.completion_tokens for one in usages)
    p50_ms = quantile_ms([one.duration_s for one in episodes], 0.5)
    figures = {
        "episodes": f"{len(episodes):,}",
        "mean reward": _number(sum(rewards) / len(rewards) if rewards else None),
        "succeeded": f"{sum(map(is_success, episodes)):,}",
        "void, not in the mean": f"{sum(map(is_void, episodes)):,}",
        "refused": f"{refused:,}",
        "tool calls": f"{sum(len(one.steps) for one in episodes):,}",
        "median duration": "–" if p50_ms is None else f"{p50_ms / 1000:,.2f} s",
    } | ({"tokens": f"{tokens:,}"} if tokens else {})
    cells = [
        f'<div class="figure"><b>{value}</b><span>{name}</span></div>'
        for name, value in figures.items()
    ]
    return f'<div class="figures">{"".join(cells)}</div>'


def _plots(episodes: Sequence[Episode]) -> str:
    statuses = Counter(one.status for one in episodes)
    phases: Counter[str] = Counter()
    for one in episodes:
        # The start of an instance overlaps with the wait for it.
        phases.update({name: s for name, s in one.phases.items() if name != "create"})
    plots = [
        _histogram("Reward", [one.reward for one in episodes if one.reward is not None]),
        _bars("Outcome", [(s.value, statuses[s], _COLOURS[s]) for s in _COLOURS if statuses[s]]),
        _histogram("Duration of an episode, seconds", [one.duration_s for one in episodes]),
        _histogram("Tool calls in an episode", [float(len(one.steps)) for one in episodes]),
        _bars("Time by phase, seconds", [(n, s, "#2a78d6") for n, s in phases.most_common(8)]),
    ]
    return f'<h2>Distributions</h2><div class="plots">{"".join(plots)}</div>'


def _histogram(caption: str, values: Sequence[float]) -> str:
    """Return a histogram with counts on the vertical axis; nothing without values."""
    values = [value for value in values if math.isfinite(value)]  # a record may hold anything
    if not values:
        return ""
    low, high = min(values), max(values)
    width = (high - low) / _BINS or 1.0
    counts = Counter(min(_BINS - 1, int((value - low) / width)) for value in values)
    most = max(counts.values())
    bars = []
    for number, count in sorted(counts.items()):
        height = max(1.0, 130 * count / most)
        left, right = low + number * width, low + (number + 1) * width
        bars.append(
            f'<rect x="{40 + 17 * number}" y="{150 - height:.1f}" width="15" height="{height:.1f}" '
            f'fill="#2a78d6"><title>{left:.4g} to {right:.4g}: {count:,}</title></rect>'
        )
    axis = (
        '<line x1="38" y1="150.5" x2="382" y2="150.5" stroke="#8c959f"/>'
        f'<text x="34" y="24" text-anchor="end">{most:,}</text>'
        '<text x="34" y="154" text-anchor="end">0</text>'
        f'<text x="40" y="168">{low:.4g}</text>'
        f'<text x="380" y="168" text-anchor="end">{low + _BINS * width:.4g}</text>'
    )
    return _figure(caption, 400, 175, axis + "".join(bars))


def _bars(caption: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Return horizontal bars of (name, value, colour); nothing without rows."""
    rows = [row for row in rows if math.isfinite(row[1])]
    if not rows:
        return ""
    most = max(value for _, value, _ in rows) or 1.0
    drawn = []
    for number, (name, value, colour) in enumerate(rows):
        y = 6 + 26 * number
        drawn.append(
            f'<text x="104" y="{y + 14}" text-anchor="end">{_safe(name)}</text>'
            f'<rect x="110" y="{y}" width="{max(1.0, 220 * value / most):.1f}" height="18" '
            f'fill="{colour}"/><text x="{116 + 220 * value / most:.1f}" y="{y + 14}">'
            f"{value:,.4g}</text>"
        )
    return _figure(caption, 400, 12 + 26 * len(rows), "".join(drawn))


def _figure(caption: str, width: int, height: int, content: str) -> str:
    return (
        f'<figure><figcaption>{caption}</figcaption><svg viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{caption}">{content}</svg></figure>'
    )


def _table(heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; all columns but the first hold numbers."""
    if not rows:
        return ""
    numeric = ["", *[' class="n"'] * (len(columns) - 1)]
    head = "".join(f"<th{c}>{name}</th>" for c, name in zip(numeric, columns, strict=True))
    lines = [
        "".join(f"<td{c}>{_safe(cell)}</td>" for c, cell in zip(numeric, row, strict=True))
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>{heading}</h2><div class="scroll">{table}</div>'


def _task_table(episodes: Sequence[Episode]) -> str:
    tasks = grouped(episodes, lambda one: one.task_id)
    shown = [
        (t.key, f"{t.episodes:,}", _number(t.reward_mean), f"{t.succeeded:,}", f"{t.void:,}",
         _number(t.steps_mean, 1), _number(t.duration_p50_ms, 0))
        for t in tasks[:_ROWS]
    ]  # fmt: skip
    heading = "Tasks" if len(tasks) <= _ROWS else f"The {_ROWS} worst of {len(tasks):,} tasks"
    return _table(
        heading,
        ["task", "episodes", "mean reward", "succeeded", "void", "steps", "p50 ms"],
        shown,
    )


def _tool_table(episodes: Sequence[Episode]) -> str:
    rows = [
        (t.tool, f"{t.calls:,}", f"{t.errors:,}", _number(t.p50_ms, 1), _number(t.p99_ms, 1))
        for t in by_tool(episodes)[:_ROWS]
    ]
    return _table("Tools", ["tool", "calls", "errors", "p50 ms", "p99 ms"], rows)


def _cause_table(episodes: Sequence[Episode]) -> str:
    causes = Counter(f"{one.status}: {one.error}" for one in episodes if one.error)
    rows = [(cause, f"{count:,}") for cause, count in causes.most_common(_ROWS)]
    return _table("Causes of failures", ["cause", "episodes"], rows)


def _episodes(episodes: Sequence[Episode]) -> str:
    shown = "".join(_episode(one) for one in episodes[:EPISODES_SHOWN])
    more = len(episodes) - EPISODES_SHOWN
    note = f'<p class="note">{more:,} more episodes are in the data.</p>' if more > 0 else ""
    return f"<h2>Episodes</h2>{shown}{note}"


def _episode(one: Episode) -> str:
    facts = (one.policy, used(one.usage), one.start_mode, one.node_id and f"node {one.node_id}")
    about = " · ".join(fact for fact in facts if fact)
    parts = [
        f'<p class="note">{_safe(about)}</p>' if about else "",
        f'<p class="error">{_safe(one.error)}</p>' if one.error else "",
        *(
            _step(part.number, part.step) if isinstance(part, NumberedStep) else _said(part)
            for part in in_order(one)
        ),
        f"<p>Output</p><pre>{_shortened(_text(one.output))}</pre>" if one.output else "",
        f"<p>Reward</p><pre>{_shortened(_text(one.reward_detail))}</pre>"
        if one.reward_detail is not None
        else "",
    ]
    return (
        f"<details><summary>{one.index} · {_safe(one.task_id)}"
        f'<span class="tag" style="background:{_COLOURS[one.status]}">{one.status.value}</span> '
        f'<span class="note">reward {_number(one.reward)} · {len(one.steps)} steps · '
        f"{one.duration_s:.2f} s</span></summary>{''.join(parts)}</details>"
    )


def _said(part: MessagePart) -> str:
    text = _shortened(part.text) if part.text else '<span class="note">(empty)</span>'
    kind = "said model" if part.who.startswith("assistant") else "said"
    return f'<div class="{kind}"><b>{_safe(part.who)}</b><div>{text}</div></div>'


def _step(number: int, step: Step) -> str:
    state = ' <span class="error">error</span>' if step.is_error else ""
    attachments = "".join(
        f'<p class="note">attachment {_safe(one.digest)}, {_safe(one.media_type)}, '
        f"{one.size_bytes:,} bytes</p>"
        for one in step.attachments
    )
    return (
        f'<p><b>{number}. {_safe(step.tool)}</b>{state} <span class="note">'
        f"{1000 * step.duration_s:.1f} ms</span></p>"
        f"<pre>{_shortened(_text(step.arguments))}</pre><pre>{_shortened(step.text)}</pre>"
        f"{attachments}"
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)


def _shortened(text: str) -> str:
    rest = len(text) - _TEXT_SHOWN
    return _safe(text[:_TEXT_SHOWN]) + (f"\n… {rest:,} more characters" if rest > 0 else "")
