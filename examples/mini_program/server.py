"""Describe a small web application, and watch an agent write it: prompt, files, live preview.

    python examples/mini_program/server.py
    OPENAI_API_KEY=… python examples/mini_program/server.py --model MODEL
    python examples/mini_program/server.py --model MODEL --base-url http://localhost:8000/v1
    MY_KEY=… python examples/mini_program/server.py --model MODEL --api-key-env MY_KEY

The page is at http://127.0.0.1:8090. The application is written in an instance of the environment
mini-program; a second port relays it to the preview, so that its scripts have another origin than
the page. Without a model, a scripted agent builds the applications of the environment's tasks. With
AENV_SYSTEM_URL the instance is created at a gateway, otherwise on Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import re
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import aenv_ray
from aenv_ray import Environment
from aenv_ray.errors import AenvError
from aenv_ray.models import ToolResult
from aenv_ray.project import project
from aenv_ray.sampling import OpenAIPolicy, Task, load_tasks

HERE: Final = Path(__file__).parent
PAGE_PORT: Final = 8090
MAX_ENTRIES: Final = 500
"""Entries of the conversation that a page which connects later still gets."""
SHOWN_CHARACTERS: Final = 600
SCRIPT: Final = "scripted"
CHANGES: Final = frozenset({"write_file", "delete_file", "move_file"})
"""Tools that change the application."""
SYSTEM: Final = """\
You write small web applications: HTML, CSS and JavaScript without a build step and without files \
from other hosts. The entry is index.html. Call list_files and read_file before you change an \
existing application. Write files with write_file, then call validate and run, and mend what they \
report. Make it look good, in light and dark, on phones and desktops. At the end answer with one \
or two sentences about what you built."""
PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "frame-src {preview}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PREVIEW_POLICY: Final = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'self'; "
    "frame-ancestors {page}"
)

ASSETS: Final = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
LOCAL: Final = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
"""Refuses the names of other hosts that resolve to this machine."""

Entry = dict[str, Any]
Answer = Callable[[Request], Awaitable[Response]]


class Feed:
    """The conversation, for every page that shows it."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=MAX_ENTRIES)
        self._queues: set[asyncio.Queue[Entry]] = set()

    def say(self, kind: str, **values: Any) -> None:
        """Add an entry."""
        entry = {"kind": kind, **values}
        self.entries.append(entry)
        for queue in list(self._queues):
            if queue.full():  # a page that does not read; it connects again
                self._queues.discard(queue)
            else:
                queue.put_nowait(entry)

    async def follow(self) -> AsyncIterator[Entry]:
        """Yield the entries so far, and those that follow until the page falls behind."""
        queue: asyncio.Queue[Entry] = asyncio.Queue(2 * MAX_ENTRIES)
        for entry in self.entries:
            queue.put_nowait(entry)
        self._queues.add(queue)
        try:
            while queue in self._queues or not queue.empty():
                try:
                    yield await asyncio.wait_for(queue.get(), 15)
                except TimeoutError:
                    yield {"kind": "alive"}
        finally:
            self._queues.discard(queue)


class AgentEnv:
    """What a policy acts on; its calls and messages appear in the feed."""

    def __init__(self, env: Environment, feed: Feed) -> None:
        self._env = env
        self._feed = feed
        self.has_changed_files = False

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools under their own names."""
        tools = await self._env.list_tools()
        return [{**tool, "name": tool["name"].rpartition("/")[2]} for tool in tools]

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, timeout_s: float = 90.0
    ) -> ToolResult:
        """Call a tool and show the call."""
        result = await self._env.call_tool(name, arguments, timeout_s)
        self.has_changed_files |= name in CHANGES and not result.is_error
        self._feed.say(
            "tool",
            name=name,
            target=str((arguments or {}).get("path") or (arguments or {}).get("page") or ""),
            result=_cut(result.text()),
            is_error=result.is_error,
        )
        return result

    def record_message(self, message: Mapping[str, Any]) -> None:
        """Show what the model says."""
        if message.get("role") == "assistant" and message.get("content"):
            self._feed.say("agent", text=str(message["content"]))

    def record_usage(self, **usage: Any) -> None:
        """Show what the answer cost."""
        self._feed.say("usage", **{name: value for name, value in usage.items() if value})


class ScriptedAgent:
    """Builds the application of the environment's task that a prompt resembles.

    Tasks that start with files, to be repaired, are left out.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {
            task.id: task
            for task in tasks
            if task.setup is not None and not task.setup.arguments.get("files")
        }

    @property
    def names(self) -> list[str]:
        """The applications that it can build."""
        return list(self._tasks)

    def choose(self, prompt: str) -> Task | None:
        """Return the task whose name has the most words of the prompt; None if none has any."""
        said = set(re.findall(r"[a-z]+", prompt.lower()))
        matches = {
            name: len(said & {part for part in name.split("-") if len(part) > 2})
            for name in self._tasks
        }
        best = max(matches, key=lambda name: matches[name], default="")
        return self._tasks[best] if matches.get(best) else None

    async def __call__(self, env: AgentEnv, task: Task) -> None:
        """Play one turn."""
        found = self.choose(task.instruction)
        if found is None:
            known = ", ".join(name.replace("-", " ") for name in self.names)
            text = f"I am a script and no model: I can build {known}. Name one of them."
            env.record_message({"role": "assistant", "content": text})
            return
        for entry in (await env.call_tool("list_files")).data:
            await env.call_tool("delete_file", {"path": entry["path"]})
        for call in found.reference:
            await env.call_tool(call.tool, call.arguments)
        await env.call_tool("validate")
        text = f"I built the {found.id.replace('-', ' ')} that I know by heart."
        env.record_message({"role": "assistant", "content": text})


@dataclass
class Studio:
    """One instance, the agents that act on it, and the conversation.

    Attributes:
        env: The instance.
        agents: Policies by name.
        preview_url: Where the page finds the application.
        page_url: Where the page itself is.
        examples: Prompts that the page offers.
    """

    env: Environment
    agents: Mapping[str, Any]
    preview_url: str
    page_url: str
    examples: Sequence[str]
    feed: Feed = field(default_factory=Feed)
    requests: list[str] = field(default_factory=list)
    turn: asyncio.Task[None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether an agent is acting."""
        return self.turn is not None and not self.turn.done()

    def start(self, agent: str, prompt: str) -> None:
        """Have an agent act on a prompt."""
        self.feed.say("user", text=prompt)
        self.turn = asyncio.create_task(self._play(agent, prompt))

    async def _play(self, agent: str, prompt: str) -> None:
        self.feed.say("busy", agent=agent)
        earlier = "".join(f"Earlier request: {text}\n" for text in self.requests[-10:])
        self.requests.append(prompt)
        env = AgentEnv(self.env, self.feed)
        try:
            task = Task(
                id="prompt", instruction=f"{earlier}{prompt}" if agent != SCRIPT else prompt
            )
            await self.agents[agent](env, task)
            if env.has_changed_files:
                await self.check()
            else:
                self.feed.say("unchecked", text="nothing was built: no file was changed")
        except asyncio.CancelledError:
            self.feed.say("failed", text="Stopped.")
            raise
        except AenvError as exc:
            self.feed.say("failed", text=f"{exc.message}\n{exc.hint or ''}".strip())
        except Exception as exc:
            self.feed.say("failed", text=f"{type(exc).__name__}: {exc}")
            raise
        finally:
            self.feed.say("idle")

    async def check(self) -> None:
        """Show the files, what is wrong with them, and what a browser reports."""
        files = (await self.env.call_tool("list_files")).data
        self.feed.say("files", files=files)
        if not files:
            self.feed.say("unchecked", text="nothing was built: there are no files")
            return
        validated = (await self.env.call_tool("validate")).data
        ran = await self.env.call_tool("run", {}, 90)
        report = {} if ran.is_error else dict(ran.data)
        failed = ran.text() if ran.is_error else report.get("failed")
        if failed:
            failure = {"kind": "error", "text": failed}
            report["errors"] = [failure, *report.get("errors", [])]
        self.feed.say("checked", problems=validated["problems"], report=report)

    async def clear(self) -> None:
        """Start over with no files."""
        await self.env.call_function("start_app", {"browser_required": False})
        self.requests.clear()
        self.feed.entries.clear()
        self.feed.say("cleared")


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} … [cut]"


# --- the page -------------------------------------------------------------------------------------


class Page:
    """The routes of the page."""

    def __init__(self, studio: Studio) -> None:
        self._studio = studio
        self._policy = PAGE_POLICY.format(preview=studio.preview_url)

    def app(self) -> Starlette:
        """Return the server."""
        routes = [
            *(Route(path, self._asset(name)) for path, name in ASSETS.items()),
            Route("/about", self.about),
            Route("/events", self.events),
            Route("/file", self.file),
            Route("/prompt", _from_the_page(self.prompt), methods=["POST"]),
            Route("/stop", _from_the_page(self.stop), methods=["POST"]),
            Route("/clear", _from_the_page(self.clear), methods=["POST"]),
        ]
        return Starlette(routes=routes, middleware=[LOCAL])

    def _asset(self, name: str) -> Answer:
        async def answer(_: Request) -> Response:
            headers = {
                "Content-Security-Policy": self._policy,
                "X-Content-Type-Options": "nosniff",
                "Cache-Control": "no-cache",
            }
            return FileResponse(HERE / name, headers=headers)

        return answer

    async def about(self, _: Request) -> Response:
        """Return what does not change."""
        studio = self._studio
        return JSONResponse(
            {
                "agents": list(studio.agents),
                "preview": studio.preview_url,
                "instance": studio.env.instance_id,
                "examples": list(studio.examples),
            }
        )

    async def events(self, _: Request) -> Response:
        """Return the conversation as server-sent events."""

        async def lines() -> AsyncIterator[str]:
            async for entry in self._studio.feed.follow():
                yield f"data: {json.dumps(entry)}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    async def file(self, request: Request) -> Response:
        """Return the content of a file."""
        path = request.query_params.get("path", "")
        result = await self._studio.env.call_tool("read_file", {"path": path})
        return JSONResponse({"text": result.text(), "is_error": result.is_error})

    async def prompt(self, request: Request) -> Response:
        """Have an agent act."""
        given = await request.json()
        text, agent = str(given.get("text", "")).strip(), given.get("agent")
        if not text or agent not in self._studio.agents:
            return JSONResponse({"error": "give a text, and an agent of /about"}, 400)
        if self._studio.is_busy:
            return JSONResponse({"error": "the agent is still at work"}, 409)
        self._studio.start(agent, text)
        return JSONResponse({}, 202)

    async def stop(self, _: Request) -> Response:
        """Stop the agent."""
        if self._studio.turn is not None:
            self._studio.turn.cancel()
        return JSONResponse({})

    async def clear(self, _: Request) -> Response:
        """Start over."""
        if self._studio.is_busy:
            return JSONResponse({"error": "the agent is still at work"}, 409)
        await self._studio.clear()
        return JSONResponse({})


def _from_the_page(answer: Answer) -> Answer:
    """Refuse requests of other pages: their browsers send this header only if they may."""

    async def checked(request: Request) -> Response:
        if "x-mini-program" not in request.headers:
            return JSONResponse({"error": "the header X-Mini-Program is missing"}, 403)
        return await answer(request)

    return checked


# --- the preview ----------------------------------------------------------------------------------


def preview_app(studio: Studio) -> Starlette:
    """Return the server that relays the application from the instance."""
    page = f"{studio.page_url} {studio.page_url.replace('127.0.0.1', 'localhost')}"
    policy = PREVIEW_POLICY.format(page=page)

    async def relay(request: Request) -> Response:
        target = request.url.path
        told = await studio.env.call_function("fetch", {"target": target})
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }
        body = base64.b64decode(told["body"])
        return Response(body, told["status"], headers, media_type=told["media_type"])

    return Starlette(routes=[Route("/{path:path}", relay)], middleware=[LOCAL])


# --- start ----------------------------------------------------------------------------------------


async def serve(options: argparse.Namespace) -> None:
    """Serve page and preview until the process is asked to end."""
    listeners = [_listen(options.port), _listen(options.port + 1 if options.port else 0)]
    page_url, preview_url = (
        f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners
    )
    tasks = load_tasks(project.resolve("mini-program").path / "tasks.jsonl")
    scripted = ScriptedAgent(tasks)
    agents: dict[str, Any] = {}
    if options.model:
        agents[options.model] = OpenAIPolicy(
            options.model, base_url=options.base_url, api_key_env=options.api_key_env,
            system=SYSTEM, prompt="{instruction}",
        )  # fmt: skip
    agents[SCRIPT] = scripted
    examples = [f"Build a {name.replace('-', ' ')}" for name in scripted.names]
    async with Environment("mini-program", actor="shared", ttl="8h", idle_timeout="1h") as env:
        studio = Studio(env, agents, preview_url, page_url, examples)
        await studio.clear()
        apps = (Page(studio).app(), preview_app(studio))
        print(f"open {page_url} (agents: {', '.join(agents)})", flush=True)
        async with asyncio.TaskGroup() as group:
            for app, listener in zip(apps, listeners, strict=True):
                config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
                group.create_task(uvicorn.Server(config).serve([listener]))
        if studio.turn is not None:
            studio.turn.cancel()


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as exc:
        raise SystemExit(
            f"port {port} cannot be used: {exc.strerror}; choose another --port"
        ) from None


def main() -> None:
    parser = argparse.ArgumentParser(description="A page on which an agent writes applications.")
    parser.add_argument(
        "--port", type=int, default=PAGE_PORT, help="the preview gets the next one; 0: free ones"
    )
    parser.add_argument("--model", help="a model behind an OpenAI-compatible endpoint")
    parser.add_argument("--base-url", help="the endpoint; default OPENAI_BASE_URL, else OpenAI's")
    parser.add_argument(
        "--api-key-env", default="OPENAI_API_KEY", metavar="NAME",
        help="variable that holds the API key; default %(default)s",
    )  # fmt: skip
    options = parser.parse_args()
    try:
        asyncio.run(serve(options))
    except KeyboardInterrupt:
        pass
    except AenvError as exc:
        raise SystemExit(f"{exc.message}\n{exc.hint or ''}".strip()) from None
    finally:
        aenv_ray.shutdown()


if __name__ == "__main__":
    main()
