"""Environments for NeMo RL.

    register_env("aenv", "aenv_ray.integrations.nemo_rl.AenvEnvironment")

    env:
      aenv: {environment: mini-terminal, max_turns: 16}

A row's ``extra_env_info`` has the task of the episode under ``aenv``; its ``task_name`` is
``aenv``. Actions are texts, see `aenv_ray.integrations.support.text_actions`: put `instructions`
into the prompts. A void episode has reward 0, and ``loss_multiplier`` 0, which takes it out of the
loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from aenv_ray.actors.ray_shell import ray_api
from aenv_ray.integrations.episodes import EpisodePool
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.text_actions import MAX_TURNS, TextEpisode, tool_instructions
from aenv_ray.integrations.support.tools import framework_tools

require(
    "nemo-rl", "", "0.1", "2",  # the package of this name on PyPI is empty
    way_out="install NeMo RL from its repository, github.com/NVIDIA-NeMo/RL",
)  # fmt: skip

from nemo_rl.environments.interfaces import (  # noqa: E402
    EnvironmentInterface,
    EnvironmentReturn,
)

ROW: Final = "aenv"
"""Key of the task in ``extra_env_info``."""
_EPISODE: Final = "aenv_episode"
_VOID: Final = "aenv_void"
_THREADS: Final = 256


class EpisodeBatches(EnvironmentInterface):
    """Plays the episodes of batches.

    Args:
        cfg: ``environment``, and, if you like, ``only``, ``max_turns``, ``timeout_s``, and ``pool``
            with options of the `EpisodePool`.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._pool = EpisodePool(cfg["environment"], **dict(cfg.get("pool") or {}))
        self._only = cfg.get("only")
        self._max_turns = int(cfg.get("max_turns", MAX_TURNS))
        self._timeout_s = cfg.get("timeout_s")
        self._playing: dict[int, TextEpisode] = {}
        self._numbers = itertools.count(1)
        self._threads = ThreadPoolExecutor(_THREADS, "aenv-nemo-rl")

    def step(
        self, message_log_batch: Sequence[Sequence[Mapping[str, Any]]], metadata: list[Any]
    ) -> EnvironmentReturn:
        """Act with the last message of each conversation, at the same time.

        An episode begins with its first message. What identifies it is in the metadata.
        """
        import torch

        turns = list(self._threads.map(self._turn, message_log_batch, metadata))
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": turn["text"]} for turn in turns],
            metadata=[turn["metadata"] for turn in turns],
            next_stop_strings=[None] * len(turns),
            rewards=torch.tensor([turn["reward"] for turn in turns], dtype=torch.float32),
            terminateds=torch.tensor([turn["ended"] for turn in turns], dtype=torch.bool),
            answers=None,
        )

    def _turn(self, messages: Sequence[Mapping[str, Any]], metadata: Any) -> dict[str, Any]:
        known = dict(metadata or {})
        playing = self._playing.get(known.get(_EPISODE, -1))
        if playing is None:
            known[_EPISODE] = next(self._numbers)
            episode = self._pool.begin_blocking(dict(known.get(ROW) or {}))
            playing = TextEpisode(
                episode, only=self._only, max_turns=self._max_turns, timeout_s=self._timeout_s
            )
            playing.instructions()  # the tools become callable
            self._playing[known[_EPISODE]] = playing
        turn = playing.act(str(messages[-1].get("content", "")))
        if turn.outcome is None:
            return {"text": turn.observation, "metadata": known, "reward": 0.0, "ended": False}
        del self._playing[known[_EPISODE]]
        known[_VOID] = turn.outcome.is_void
        reward = turn.outcome.reward or 0.0
        return {"text": turn.observation, "metadata": known, "reward": reward, "ended": True}

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Take void episodes out of the loss; return the batch, and how many there were."""
        import torch

        found = [bool((info or {}).get(_VOID)) for info in batch["extra_env_info"]]
        kept = torch.tensor([0.0 if is_void else 1.0 for is_void in found])
        multiplier = batch.get("loss_multiplier")
        batch["loss_multiplier"] = kept if multiplier is None else multiplier * kept
        rate = sum(found) / len(found) if found else 0.0
        return batch, {"aenv/void": rate}

    def shutdown(self) -> None:
        """End the episodes and their instances."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()


AenvEnvironment: Any = ray_api.environment_actor(EpisodeBatches)
"""`EpisodeBatches` as the Ray actor that NeMo RL makes."""


def instructions(
    environment: str | Path, *, only: Collection[str] | None = None, **options: Any
) -> str:
    """Return what a prompt has to say about the tools of an environment.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        only: Names of the tools to offer. None: all.
        options: Options of the `EpisodePool` whose instance is asked.
    """
    with EpisodePool(environment, **options) as pool:
        return tool_instructions(framework_tools(pool.list_tools(), pool.env_name, only=only))
