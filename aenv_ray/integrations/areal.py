"""Workflows for AReaL.

With token ids, by AReaL's inference engine:

    trainer.train(
        workflow="aenv_ray.integrations.areal.AenvWorkflow",
        workflow_kwargs={"environment": "mini-terminal", "gconfig": config.gconfig,
                         "tokenizer": config.tokenizer_path},
    )

or by its OpenAI-compatible proxy, which records the tokens: ``AenvAgent("mini-terminal")``.

A row of the dataset has ``messages``, and the task of the episode under ``aenv``. AReaL rejects a
void trajectory: it is in no batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from aenv_ray.errors import AenvError, ConfigError
from aenv_ray.integrations.episodes import EpisodeOutcome, LiveEpisode, shared_pool
from aenv_ray.integrations.openai import OpenAITools
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.token_loop import (
    MAX_TURNS,
    Parse,
    Tokens,
    Turn,
    hermes_calls,
    played,
    task_of_column,
)
from aenv_ray.integrations.support.token_loop import turns as model_turns

require("areal", "areal", "1.0", "2")

from areal.api import RolloutWorkflow  # noqa: E402

ROW = "aenv"
"""Key of the task in a row."""


class VoidEpisode(Exception):
    """Nothing can be learned from an episode: AReaL rejects its trajectory."""


class AenvWorkflow(RolloutWorkflow):
    """Episodes whose turns AReaL's inference engine writes, as tokens.

    The versions of the weights that wrote each token are in the trajectory and in the record.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        gconfig: ``GenerationHyperparameters``; its ``max_new_tokens`` limits all that follows the
            prompt.
        tokenizer: The tokenizer of the model, or its path.
        max_turns: Maximum number of turns of the model.
        parse: Finds tool calls in its text.
        void_retries: How often a void episode is played again before it is rejected.
        options: The options of the `EpisodePool`.
    """

    def __init__(
        self,
        environment: str,
        gconfig: Any,
        tokenizer: Any,
        *,
        max_turns: int = MAX_TURNS,
        parse: Parse = hermes_calls,
        void_retries: int = 1,
        **options: Any,
    ) -> None:
        if isinstance(tokenizer, str):
            from areal.utils.hf_utils import load_hf_tokenizer

            tokenizer = load_hf_tokenizer(tokenizer)
        self._environment = environment
        self._gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer)
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._parse = parse
        self._void_retries = void_retries
        self._options = options

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Play the episode of a row; return its tensors, or None if it is void.

        Raises:
            ConfigError: The task or an option is wrong.
        """
        request_id = uuid4().hex

        async def generate(ids: list[int], left: int) -> Turn:
            return await self._turn(engine, request_id, ids, left)

        outcome, tokens = await played(
            shared_pool(self._environment, **self._options),
            task_of_column(data.get(ROW)),
            lambda episode: model_turns(
                episode, self._tokenizer, data["messages"], generate,
                max_tokens=self._gconfig.max_new_tokens, max_turns=self._max_turns,
                parse=self._parse,
            ),
            void_retries=self._void_retries,
        )  # fmt: skip
        if outcome.is_void or tokens is None:
            return None
        return _tensors(tokens, outcome)

    async def _turn(self, engine: Any, request_id: str, ids: list[int], left: int) -> Turn:
        from areal.api import ModelRequest

        response = await engine.agenerate(
            ModelRequest(
                rid=request_id, input_ids=ids, tokenizer=self._tokenizer,
                gconfig=self._gconfig.new(n_samples=1, max_new_tokens=left),
            )
        )  # fmt: skip
        return Turn(
            token_ids=response.output_tokens, logprobs=response.output_logprobs,
            versions=response.output_versions, is_truncated=response.stop_reason == "length",
        )  # fmt: skip


def _tensors(tokens: Tokens, outcome: EpisodeOutcome) -> dict[str, Any]:
    """Return a trajectory in the form of AReaL's batches, and log its reward there."""
    import torch
    from areal import workflow_context
    from areal.utils import stats_tracker

    reward = outcome.reward or 0.0  # None: the task has none
    stats_tracker.get(workflow_context.stat_scope()).scalar(
        reward=reward, num_turns=tokens.turn_count
    )
    before = len(tokens.prompt_ids)
    ids = [*tokens.prompt_ids, *tokens.response_ids]
    found = {
        "input_ids": torch.tensor(ids, dtype=torch.int32),
        "logprobs": torch.tensor([0.0] * before + tokens.logprobs, dtype=torch.float32),
        "loss_mask": torch.tensor([0] * before + tokens.mask, dtype=torch.int32),
        "versions": torch.tensor([-1] * before + tokens.versions, dtype=torch.int32),
        "rewards": torch.tensor(reward, dtype=torch.float32),
        "attention_mask": torch.ones(len(ids), dtype=torch.bool),
    }
    return {name: tensor.unsqueeze(0) for name, tensor in found.items()}


class AenvAgent:
    """Episodes by the OpenAI client, which AReaL points at its proxy.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        max_turns: Answers of the model in an episode.
        request: Further fields of each request, for example ``{"temperature": 0.7}``.
        options: The options of the `EpisodePool`. It can be sent to another process, where it has a
            pool.
    """

    def __init__(
        self,
        environment: str,
        *,
        max_turns: int = MAX_TURNS,
        request: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self._environment = environment
        self._max_turns = max_turns
        self._request = dict(request or {})
        self._options = options

    async def run(self, data: dict[str, Any], **given: Any) -> float:
        """Play the episode of a row; return its reward.

        Args:
            data: The row.
            given: ``base_url``, ``api_key`` and ``http_client``; without them, the OpenAI client
                reads its own environment variables.

        Raises:
            VoidEpisode: Nothing can be learned from it.
            ConfigError: The task or an option is wrong, or a schema of a tool contains itself.
        """
        from openai import AsyncOpenAI

        pool = shared_pool(self._environment, **self._options)
        episode = await pool.begin(task_of_column(data.get(ROW)))
        client = AsyncOpenAI(
            base_url=given.get("base_url"), api_key=given.get("api_key"),
            http_client=given.get("http_client"),
        )  # fmt: skip
        try:
            await self._converse(client, episode, data["messages"])
        except ConfigError:
            await episode.abandon()
            raise
        except AenvError:
            pass  # the outcome of the episode says what it is worth
        except BaseException:
            await asyncio.shield(episode.abandon())
            raise
        finally:
            if given.get("http_client") is None:
                await client.close()
        outcome = await episode.finish()
        if outcome.is_void:
            record = outcome.episode
            raise VoidEpisode(f"the episode of task {record.task_id!r} is void: {record.error}")
        return float(outcome.reward or 0.0)

    async def _converse(
        self, client: Any, episode: LiveEpisode, prompt: Sequence[Mapping[str, Any]]
    ) -> None:
        tools = OpenAITools(episode)
        offered = await tools.chat_tools()
        messages = [dict(message) for message in prompt]
        for _ in range(self._max_turns):
            completion = await client.chat.completions.create(
                model="default", messages=messages, tools=offered, **self._request
            )
            answer = completion.choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
            if not answer.tool_calls:
                return
            messages += await tools.answer_chat(answer)
