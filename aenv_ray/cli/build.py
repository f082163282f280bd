"""``aenv build``: a project's image, with our runtime in it, and its digest in config.json."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli import console
from aenv_ray.cli.options import Output
from aenv_ray.cli.output import show
from aenv_ray.errors import ConfigError

if TYPE_CHECKING:
    from aenv_ray.engines.docker_build import BuildPlan, BuiltImage, OnStep
    from aenv_ray.project import Project

_STEP_LENGTH: Final = 60


def build(
    work_dir: Annotated[
        Path, typer.Option("--work-dir", "-w", help="The project's directory.")
    ] = Path(),
    image_name: Annotated[
        str | None, typer.Option("--image-name", "-n", help="Default: buildConfig, else its name.")
    ] = None,
    image_tag: Annotated[
        list[str] | None,
        typer.Option("--image-tag", "-t", help="Repeatable. Default: buildConfig, else version."),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option("--registry", "-r", help="Default: the config file's, else docker.io."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-s", help="Default: the config file's, else aenv."),
    ] = None,
    dockerfile: Annotated[
        Path | None, typer.Option("--dockerfile", "-f", help="Default: buildConfig.dockerfile.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option("--platform", "-p", help="For example linux/arm64.")
    ] = None,
    build_arg: Annotated[
        list[str] | None, typer.Option("--build-arg", help="NAME=VALUE, repeatable.")
    ] = None,
    push: Annotated[
        bool, typer.Option("--push/--no-push", help="Push it to the registry.")
    ] = False,
    output: Output = None,
) -> None:
    """Build a project's image and note it in config.json.

    The project's own Dockerfile is built, then a layer with aenv-ray's runtime is
    added. Instances in containers run exactly that image, by its digest. Prints
    the image's name and digest.

    Example:
      aenv build -w todo
      aenv build -w todo -t 1.0.0 -t latest --push
    """
    from aenv_ray import project
    from aenv_ray.cli import config_file
    from aenv_ray.config import settings
    from aenv_ray.engines.docker_build import ImageBuilder

    loaded = project.load(work_dir)
    ours = config_file.find().values.build_config.registry
    registry = ours.host if registry is None else registry
    namespace = ours.namespace if namespace is None else namespace
    plan = _plan(loaded, image_name, image_tag or [], registry, namespace, dockerfile, platform,
                 build_arg or [])  # fmt: skip
    tail: list[str] = []
    with _progress(plan.references[0]) as on_step:
        builder = ImageBuilder(
            settings().docker_host, settings().data_dir / "docker", on_step, tail.append
        )
        image = builder.build(plan, push=push)
    _note(loaded.path / project.CONFIG_NAME, plan.references[0], image)
    if image.runtime_bytes:
        console.say(f"added the runtime, {image.runtime_bytes / 1e6:.1f} MB")
    made = {"image": plan.references[0], "digest": image.pushed or image.id}
    show(made, output, f"{made['image']} {made['digest']}")


def _plan(
    loaded: Project,
    image_name: str | None,
    tags: list[str],
    registry: str,
    namespace: str,
    dockerfile: Path | None,
    platform: str | None,
    build_args: list[str],
) -> BuildPlan:
    from aenv_ray.engines.docker_build import BuildPlan

    config, root = loaded.config, loaded.path
    name = image_name or config.build.image_name or config.name
    arguments = dict(config.build.build_args)
    for item in build_args:
        key, equals, value = item.partition("=")
        if not (key and equals):
            raise ConfigError(f"build argument {item!r} is not NAME=VALUE")
        arguments[key] = value
    prefix = "/".join(part for part in (registry.strip("/"), namespace.strip("/")) if part)
    return BuildPlan(
        dockerfile=(root / (dockerfile or config.build.dockerfile)).resolve(),
        context=(root / config.build.context).resolve(),
        references=[
            f"{prefix}/{name}:{tag}" for tag in tags or [config.build.image_tag or config.version]
        ],
        platform=platform or config.build.platform,
        build_args=arguments,
    )


@contextlib.contextmanager
def _progress(what: str) -> Iterator[OnStep]:
    """Show steps as they begin: a bar on a terminal, lines elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield lambda done, total, text: console.say(f"{done}/{total} {text[:_STEP_LENGTH]}")
        return
    columns: list[Any] = [
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
    ]  # fmt: skip
    with Progress(*columns, console=terminal) as bar:
        task = bar.add_task(f"building {what}", total=None)

        def on_step(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done - 1, total=total, description=text[:_STEP_LENGTH])

        yield on_step


def _note(config: Path, reference: str, image: BuiltImage) -> None:
    """Put the image among the artifacts of config.json, in place of an earlier one."""
    data = json.loads(config.read_text(encoding="utf-8"))
    others = [a for a in data.get("artifacts") or [] if a.get("type") != "image"]
    made = {"type": "image", "content": reference, "digest": image.pushed or image.id}
    data["artifacts"] = [*others, made]
    fd, partial = tempfile.mkstemp(dir=config.parent, prefix=f".{config.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=2, ensure_ascii=False)
            file.write("\n")
        os.chmod(partial, config.stat().st_mode & 0o777)
        os.replace(partial, config)
    except BaseException:
        os.unlink(partial)
        raise
