"""Agent executors for OpenRLHF.

In the file of ``--train.agent_func_path``:

    from aenv_ray.integrations.openrlhf import agent_executor

    AgentExecutor = agent_executor("mini-terminal")

A prompt of the dataset is the text of the first message; it must have no chat template, since that
is applied together with the tools. The label is the task of the episode, as JSON.

A void trajectory has no action, which takes it out of the loss, and ``aenv_void`` among the extra
logs. OpenRLHF's baseline of its group still counts it, with reward 0: so it is played again first.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aenv_ray.errors import ConfigError
from aenv_ray.integrations.episodes import shared_pool
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.token_loop import (
    MAX_TURNS,
    Parse,
    Tokens,
    Turn,
    hermes_calls,
    played,
)
from aenv_ray.integrations.support.token_loop import turns as model_turns
from aenv_ray.trajectories.schema import Task

require("openrlhf", "openrlhf", "0.11", "1")

from openrlhf.utils.agent import AgentExecutorBase  # noqa: E402

TaskOf = Callable[[str, Any], Task | Mapping[str, Any]]


def task_of_label(prompt: str, label: Any) -> Mapping[str, Any]:
    """Return the task that a label is.

    Raises:
        ConfigError: It is no JSON object.
    """
    del prompt
    try:
        found = json.loads(label) if isinstance(label, str) else label
    except ValueError:
        found = None
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"the label {str(label)[:80]!r} is not a task as JSON object",
            hint="give agent_executor a function task=(prompt, label)",
        )
    return found


def agent_executor(
    environment: str | Path,
    *,
    task: TaskOf = task_of_label,
    max_turns: int = MAX_TURNS,
    parse: Parse = hermes_calls,
    void_retries: int = 1,
    **options: Any,
) -> type[AgentExecutorBase]:
    """Return the class ``AgentExecutor`` that OpenRLHF asks for.

    Args:
        environment: ``name@version``, ``name``, or the path of a project.
        task: Makes the task of a prompt and its label.
        max_turns: Maximum number of turns of the model.
        parse: Finds tool calls in its text.
        void_retries: How often a void episode is played again.
        options: The options of the `EpisodePool`.
    """

    class AgentExecutor(AgentExecutorBase):
        """Plays an episode for each sample."""

        async def execute(
            self,
            prompt: str,
            label: Any,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: Any,
            llm_engine: Any,
            images: Any = None,
        ) -> dict[str, Any]:
            """Play an episode; return it as OpenRLHF's own executors do."""

            async def generate(ids: list[int], left: int) -> Turn:
                limited = copy.deepcopy(sampling_params)
                limited.max_tokens = left
                answered = await llm_engine.generate(ids, limited, multi_modal_data=None)
                return _turn(answered.outputs[0], has_logprobs=limited.logprobs is not None)

            outcome, tokens = await played(
                shared_pool(environment, **options),
                task(prompt, label),
                lambda episode: model_turns(
                    episode, hf_tokenizer, [{"role": "user", "content": prompt}], generate,
                    max_tokens=max_length, max_turns=max_turns, parse=parse,
                    max_length=max_length,
                ),
                void_retries=void_retries,
            )  # fmt: skip
            if tokens is None:  # OpenRLHF needs a sequence that is not empty
                end = hf_tokenizer.eos_token_id or 0
                tokens = Tokens([end], [end], [0], [0.0], [-1])
            reward = outcome.reward or 0.0
            return {
                "prompt": prompt,
                "label": label,
                "images": images,
                "mm_train_inputs": None,
                "reward": reward,
                "scores": reward,
                "observation_tokens": [*tokens.prompt_ids, *tokens.response_ids],
                "action_ranges": [] if outcome.is_void else _actions(tokens),
                "rollout_log_probs": None
                if sampling_params.logprobs is None
                else [0.0] * len(tokens.prompt_ids) + tokens.logprobs,
                "truncated": tokens.is_truncated,
                "extra_logs": {"aenv_void": float(outcome.is_void)},
            }

    return AgentExecutor


def _turn(output: Any, *, has_logprobs: bool) -> Turn:
    ids = list(output.token_ids)
    logprobs = [0.0] * len(ids)
    if has_logprobs:
        logprobs = [found[token].logprob for token, found in zip(ids, output.logprobs, strict=True)]
    return Turn(token_ids=ids, logprobs=logprobs, is_truncated=output.finish_reason == "length")


def _actions(tokens: Tokens) -> list[tuple[int, int]]:
    """Return where the model wrote, as ranges of positions in the sequence."""
    ranges = []
    position = len(tokens.prompt_ids)
    for mask, run in itertools.groupby(tokens.mask):
        end = position + len(list(run))
        if mask:
            ranges.append((position, end))
        position = end
    return ranges
