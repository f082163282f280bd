"""The templates of a launcher: started when wanted, ended when they hang or nobody uses them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from aenv_ray.engines.process.launcher_logs import Logs
from aenv_ray.engines.process.launcher_peers import Peer, Peers
from aenv_ray.engines.process.launcher_records import (
    PACKET_BYTES,
    Template,
    cause_of,
    log_of_template,
    start_template,
)

IDLE_TEMPLATE_S: Final = 600.0
"""A template nobody used for this long is ended; making it again costs about half a second."""
MAX_TEMPLATES: Final = 32
_DIED: Final = "its template process died"
_EXIT_CODE_S: Final = 0.1
TEMPLATE_DEADLINE_S: Final = 180.0
"""A template has loaded the project's code within this, or is ended."""


class Templates:
    """The template processes.

    Args:
        directory: The launcher's.
        selector: The launcher's.
        peers: Who asked for templates.
        logs: Where templates print to.
        clock: Seconds since the epoch.
        on_spare: Told ``(template, number, channel)`` of a process that waits for an instance.
        on_message: Told what a template says of its processes.
        on_end: Told ``(key, why)`` of a template that ended; its instances ended with it.
        in_use: Returns the keys of the templates that have instances.
    """

    def __init__(
        self,
        directory: Path,
        selector: selectors.BaseSelector,
        peers: Peers,
        logs: Logs,
        clock: Callable[[], float],
        *,
        on_spare: Callable[[Template, int, socket.socket], None],
        on_message: Callable[[Template, dict[str, Any]], None],
        on_end: Callable[[str, str], None],
        in_use: Callable[[], set[str]],
    ) -> None:
        self._directory = directory
        self._selector = selector
        self._peers = peers
        self._logs = logs
        self._clock = clock
        self._on_spare = on_spare
        self._on_message = on_message
        self._on_end = on_end
        self._in_use = in_use
        self._templates: dict[str, Template] = {}
        self._jail_refusal = ""

    def get(self, key: str) -> Template | None:
        """Return a template, also one that is not ready yet."""
        return self._templates.get(key)

    def present(self) -> list[Template]:
        """Return all there are."""
        return list(self._templates.values())

    def order_due(self, longest_s: float) -> float:
        """Order the spares that are due; return the seconds until others are, at most as given."""
        wait_s, now = longest_s, self._clock()
        for template in self._templates.values():
            if template.order_at:
                if template.order_at <= now:
                    template.order(now)
                else:
                    wait_s = min(wait_s, template.order_at - now)
        return wait_s

    def sweep(self, now: float) -> None:
        """End those that hang, and those that nobody used for long."""
        in_use = self._in_use()
        for template in self.present():
            template.order(now)
            if template.hangs():
                self._end(template, "it hung, and did not end what it was told to")
                continue
            if template.ready is None and now - template.launched_at > TEMPLATE_DEADLINE_S:
                self._end(template, f"not loaded after {TEMPLATE_DEADLINE_S:g} s")
                continue
            idle = template.key not in in_use and template.ready is not None
            if idle and now - template.used_at > IDLE_TEMPLATE_S:
                self._end(template, "idle")

    def kill(self) -> None:
        """End all of them, and with them what they forked."""
        for template in self.present():
            template.process.kill()
        for template in self.present():
            template.process.wait()

    def want(self, peer: Peer, seq: int, key: str, setup: dict[str, Any]) -> None:
        """Answer a host when the template is there; start it if it is not."""
        template = self._templates.get(key)
        if template is None:
            self._make_room()
            try:
                template = self._launch(key, setup)
            except (OSError, ValueError) as exc:  # its variables are too long, its Python is gone
                failed = f"its template cannot be started: {exc}"
                self._peers.send(peer, {"seq": seq, "failed": failed, "env_reads": []})
                return
        template.used_at = self._clock()
        if template.ready is not None:
            self._peers.send(peer, {"seq": seq, "ready": template.ready})
        else:
            template.waiting.append((peer, seq))

    def _launch(self, key: str, setup: dict[str, Any]) -> Template:
        first = {
            "jail": setup["jail"],
            "preload": setup["preload"],
            "isolated": setup["isolation"] != "none" and not self._jail_refusal,
            "reason": self._jail_refusal or "switched off by AENV_ISOLATION=none",
            "scratch": str(self._directory / "root"),
        }
        output = self._logs.open(log_of_template(key))
        try:
            template = start_template(key, setup, first, output, self._clock())
        except (OSError, ValueError):
            self._logs.discard(log_of_template(key))
            raise
        finally:
            os.close(output)
        self._templates[key] = template
        control = template.control
        self._selector.register(
            control, selectors.EVENT_READ, lambda *_: self._on_readable(template)
        )
        return template

    def _make_room(self) -> None:
        """End the longest unused template when there are too many."""
        in_use = self._in_use()
        idle = [t for t in self._templates.values() if t.key not in in_use and t.ready]
        if len(self._templates) >= MAX_TEMPLATES and idle:
            self._end(min(idle, key=lambda t: t.used_at), "made room")

    def _on_readable(self, template: Template) -> None:
        while True:
            fds: list[int] = []
            try:
                data, fds, _, _ = socket.recv_fds(template.control, PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end(template, _DIED)
                return
            try:
                self._on_packet(template, json.loads(data), fds)
            except (ValueError, KeyError, TypeError, AttributeError) as exc:
                # The project's code ran beside this socket: what it wrote there is its own end.
                self._end(template, f"its template process said what is no report: {exc!r}")
            if template.control.fileno() < 0:
                return

    def _on_packet(self, template: Template, message: dict[str, Any], fds: list[int]) -> None:
        template.unheard = 0
        if "spare" in message and not fds:  # the kernel drops what there is no room for
            message = {"no_spare": "the launcher has as many open files as it may"}
        if fds:
            self._on_spare(template, message["spare"], socket.socket(fileno=fds[0]))
        else:
            self._on_report(template, message)

    def _on_report(self, template: Template, message: dict[str, Any]) -> None:
        if "ready" in message:
            template.ready = message["ready"]
            template.order(self._clock())
            for peer, seq in template.waiting:
                self._peers.send(peer, {"seq": seq, "ready": template.ready})
            template.waiting.clear()
        elif "failed" in message:
            template.env_reads = message.get("env_reads", [])
            template.has_raised = True
            self._end(template, message["failed"])
        elif "jail_unavailable" in message:
            self._without_jail(template, message["jail_unavailable"])
        else:
            self._on_message(template, message)

    def _without_jail(self, template: Template, reason: str) -> None:
        """Make the template again without namespaces; the facts of its instances will say so."""
        waiting, setup = list(template.waiting), template.setup
        template.waiting.clear()
        if setup["isolation"] == "required":
            template.waiting = waiting
            self._end(template, f"namespaces are required, but: {reason}")
            return
        self._end(template, reason)
        self._jail_refusal = reason
        for peer, seq in waiting:
            self.want(peer, seq, template.key, setup)

    def _end(self, template: Template, why: str) -> None:
        if self._templates.get(template.key) is template:
            del self._templates[template.key]
        if template.control.fileno() >= 0:
            self._selector.unregister(template.control)
            template.control.close()
        for channel in template.spares.values():
            channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # A closed socket comes a moment before the exit code, which says more.
            template.process.wait(_EXIT_CODE_S if why is _DIED else 0)
        is_killed_here = template.process.poll() is None
        template.process.kill()
        status = template.process.wait()
        words = self._logs.close(template.log)
        if why is _DIED and not is_killed_here:
            why = f"its template process ended: {cause_of(status)}"
        elif why is not _DIED:
            words = ""
        failed = {
            "failed": f"{why}\n{words}".strip(),
            "env_reads": template.env_reads,
            "raised": template.has_raised,
        }
        for peer, seq in template.waiting:
            self._peers.send(peer, {"seq": seq, **failed})
        self._on_end(template.key, why)
