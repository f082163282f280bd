"""Tools of an environment for OpenAI's chat completions and responses, as plain JSON data.

    tools = OpenAITools(env)
    response = client.chat.completions.create(
        model=…, messages=messages, tools=await tools.chat_tools()
    )
    messages += [response.choices[0].message, *await tools.answer_chat(response…)]

Needs no package of OpenAI's: calls may be objects of it, or mappings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from aenv_ray.integrations.support.tools import (
    AnyEnvironment,
    EnvironmentTools,
    at_once,
    field_of,
    images,
    model_text,
)
from aenv_ray.models import ToolResult


class OpenAITools:
    """The tools of one environment for a loop over OpenAI's API.

    Args:
        environment: The environment whose tools the model may call.
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: the environment's.
    """

    def __init__(
        self,
        environment: AnyEnvironment,
        *,
        only: Collection[str] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._tools = EnvironmentTools(environment, only=only, timeout_s=timeout_s)

    async def chat_tools(self) -> list[dict[str, Any]]:
        """Return the value of ``tools`` of a chat completion."""
        return [{"type": "function", "function": tool} for tool in await self._functions()]

    async def responses_tools(self) -> list[dict[str, Any]]:
        """Return the value of ``tools`` of a response."""
        return [{"type": "function", "strict": False, **tool} for tool in await self._functions()]

    async def _functions(self) -> list[dict[str, Any]]:
        return [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in await self._tools.load()
        ]

    async def answer_chat(self, message: Any) -> list[dict[str, Any]]:
        """Run the tool calls of an assistant message, all at once.

        Args:
            message: ``response.choices[0].message``, or such a mapping.

        Returns:
            The messages to append after it: one with the role ``tool`` for each call, in order,
            and one of the user with the images of the results, since tool messages have none.

        Raises:
            AenvError: The infrastructure failed; the episode is void.
        """
        calls = list(field_of(message, "tool_calls") or [])
        functions = [field_of(call, "function") for call in calls]
        results = await self._run(
            (field_of(function, "name"), field_of(function, "arguments")) for function in functions
        )
        answers: list[dict[str, Any]] = [
            {"role": "tool", "tool_call_id": field_of(call, "id"), "content": model_text(result)}
            for call, result in zip(calls, results, strict=True)
        ]
        shown = [image for result in results for image in images(result)]
        if shown:
            content = [
                {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
                for kind, data in shown
            ]
            answers.append({"role": "user", "content": content})
        return answers

    async def answer_response(self, output: Iterable[Any]) -> list[dict[str, Any]]:
        """Run the function calls among the output items of a response, all at once.

        Returns:
            A ``function_call_output`` for each, in order: the next request's input.

        Raises:
            AenvError: The infrastructure failed; the episode is void.
        """
        calls = [item for item in output if field_of(item, "type") == "function_call"]
        results = await self._run(
            (field_of(call, "name"), field_of(call, "arguments")) for call in calls
        )
        return [
            {
                "type": "function_call_output",
                "call_id": field_of(call, "call_id"),
                "output": _response_output(result),
            }
            for call, result in zip(calls, results, strict=True)
        ]

    async def _run(self, calls: Iterable[tuple[str, Any]]) -> list[ToolResult]:
        return await at_once(self._tools.call(name, arguments) for name, arguments in calls)


def _response_output(result: ToolResult) -> str | list[dict[str, Any]]:
    shown = images(result)
    if not shown:
        return model_text(result)
    text = [{"type": "input_text", "text": result.text()}] if result.text() else []
    return [
        *text,
        *(
            {"type": "input_image", "image_url": f"data:{kind};base64,{data}"}
            for kind, data in shown
        ),
    ]
