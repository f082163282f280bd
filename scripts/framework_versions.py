"""Print, as a Markdown table, which versions of frameworks resolve together with aenv-ray.

    python scripts/framework_versions.py [FRAMEWORK]...

Run it again when requirements change, and replace the table in docs/integrations.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from aenv_ray.engines.node.installer import uv_options, uv_variables
from aenv_ray.engines.process.virtual_environment import find_uv

ROOT = Path(__file__).resolve().parents[1]
PYTHON = "3.12"
RESOLVE_S = 300
FRAMEWORKS = (
    "openai-agents", "langchain-core", "langgraph", "langchain-mcp-adapters", "camel-ai",
    "google-adk", "smolagents", "pydantic-ai-slim", "autogen-core", "crewai", "anthropic", "openai",
    "verl", "trl", "areal", "skyrl-gym", "gem-llm", "openrlhf", "nemo-gym", "verifiers",
    "gymnasium", "stable-baselines3", "openenv-core", "openenv", "inspect-ai", "a2a-sdk", "sglang",
)  # fmt: skip


def main(frameworks: list[str]) -> int:
    """Print the table."""
    say("| framework | newest | together with aenv-ray |\n|---|---|---|")
    for framework in frameworks or FRAMEWORKS:
        newest, _ = resolved(framework, beside_ours=False)
        together, refusal = resolved(framework, beside_ours=True)
        say(f"| {framework} | {newest or '–'} | {together or f'no: {refusal}'} |")
    return 0


def say(text: str) -> None:
    """Write a line of the table."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def resolved(framework: str, *, beside_ours: bool) -> tuple[str, str]:
    """Return the version that uv chooses; empty, and why, if there is none."""
    wanted = [framework, *([f"aenv-ray @ {ROOT.as_uri()}"] if beside_ours else [])]
    done = subprocess.run(
        [find_uv(), "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate",
         "--python-version", PYTHON, *uv_options()],
        env={**os.environ, **uv_variables()}, input="\n".join(wanted),
        capture_output=True, text=True, check=False, timeout=RESOLVE_S,
    )  # fmt: skip
    if done.returncode:
        return "", " ".join(re.sub(r"\S*file://\S+", "", done.stderr).split())[:200]
    found = re.search(rf"^{re.escape(framework)}==(\S+)", done.stdout, re.MULTILINE)
    return (found[1] if found else ""), ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
