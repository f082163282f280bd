"""Doubles of what adapters for trainers play with: a tokenizer, a model, an episode, a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aenv_ray.errors import SandboxLost, ToolNotFound
from aenv_ray.integrations.episodes import EpisodeOutcome
from aenv_ray.integrations.support.token_loop import Turn
from aenv_ray.models import ToolResult
from aenv_ray.sampling import EpisodeStatus
from aenv_ray.trajectories.schema import Episode, Generation

END = "$"
ADD = {"name": "add", "description": "Add.", "inputSchema": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


class LetterTokenizer:
    """A token for each letter; messages end with `END`."""

    eos_token_id = ord(END)
    pad_token_id = 0

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> list[int]:
        text = "".join(f"{m['role'][0]}:{m['content']}{END}\n" for m in conversation)
        prompt = "a:" if options.get("add_generation_prompt") else ""
        return [ord(letter) for letter in text + prompt]

    def decode(self, token_ids: list[int], **options: Any) -> str:
        del options
        return "".join(map(chr, token_ids))


class FakeEpisode:
    """An episode with one tool, whose sandbox may be lost."""

    env_name = "fake"

    def __init__(
        self, *, is_lost: bool = False, has_begun: bool = True, schema: Any = None
    ) -> None:
        self.listed = [ADD if schema is None else {**ADD, "inputSchema": schema}]
        self.is_lost = is_lost
        self.has_begun = has_begun
        self.generation: Generation | None = None
        self.is_abandoned = False
        self.policy_versions: list[int] = []

    async def list_tools(self) -> list[dict[str, Any]]:
        if not self.has_begun:
            raise SandboxLost("it did not start")
        return self.listed

    async def call_tool(self, name: str, arguments: Any, timeout: float | None = None) -> Any:
        del arguments, timeout
        if self.is_lost:
            raise SandboxLost("the node is gone")
        if name != "add":
            raise ToolNotFound(name)
        return ToolResult([{"type": "text", "text": "2"}])

    async def finish(self, generation: Generation | None = None) -> EpisodeOutcome:
        self.generation = generation
        is_void = self.is_lost or not self.has_begun
        return EpisodeOutcome(
            Episode(
                index=0, task_id="t", reward=None if is_void else 0.5,
                status=EpisodeStatus.INFRA_FAILED if is_void else EpisodeStatus.COMPLETED,
            )
        )  # fmt: skip

    async def record_policy_version(self, version: int) -> None:
        self.policy_versions.append(version)

    async def abandon(self) -> None:
        self.is_abandoned = True


class FakePool:
    """Begins the given episodes, one after the other."""

    def __init__(self, *episodes: FakeEpisode) -> None:
        self.left = list(episodes)

    async def begin(self, task: Any) -> FakeEpisode:
        del task
        return self.left.pop(0)


def model(*texts: str, version: int = 3) -> Callable[[list[int], int], Any]:
    said = iter(texts)

    async def generate(ids: list[int], left: int) -> Turn:
        del ids
        written = [ord(letter) for letter in next(said)][:left]
        versions = [version] * len(written)
        return Turn(written, [-0.5] * len(written), versions, is_truncated=len(written) == left)

    return generate
