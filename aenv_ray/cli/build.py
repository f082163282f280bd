"""``aenv build``: build the image of a project and record its digest in config.json."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import OutputOption, ProjectArgument, WorkDirOption, project_of
from aenv_ray.cli.terminal.output import show
from aenv_ray.errors import ConfigError
from aenv_ray.files import write_atomically

if TYPE_CHECKING:
    from aenv_ray.engines.images.build import BuildPlan, BuiltImage
    from aenv_ray.engines.images.registry import Transfer
    from aenv_ray.project.project import Project

_STEP_LENGTH: Final = 60
_PLATFORM: Final = re.compile(r"[a-z0-9_]+(?:/[a-z0-9_.]+){1,2}")


def build(
    path: ProjectArgument = Path(),
    work_dir: WorkDirOption = Path(),
    image_name: Annotated[
        str | None,
        typer.Option(
            "--image-name", "-n", help="Default: buildConfig.image_name, or the project's name."
        ),
    ] = None,
    image_tag: Annotated[
        list[str] | None,
        typer.Option(
            "--image-tag", "-t", help="Repeatable. Default: buildConfig.image_tag, or the version."
        ),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option("--registry", "-r", help="Default: the config file's, or docker.io."),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-s", help="Default: the config file's, or aenv."),
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
        bool, typer.Option("--push/--no-push", help="Push the image to the registry.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Build the image of a project and record it in config.json.

    BuildKit builds the project's Dockerfile, then a layer with aenv-ray's runtime is
    added. Instances in containers run exactly this image, by its digest. Prints the
    image's name and digest.

    Log in to registries with `docker login`.

    Example:
      aenv build ./todo
      aenv build swebench
      aenv build ./todo -t 1.0.0 -t latest --push
    """
    from aenv_ray.cli.terminal import config_file
    from aenv_ray.project import project
    from aenv_ray.project.dockerfile import EXPOSED_HINT, exposes_source

    loaded = project_of(work_dir, path)
    ours = config_file.find().values.build_config.registry
    registry = ours.host if registry is None else registry
    namespace = ours.namespace if namespace is None else namespace
    config = loaded.path / project.CONFIG_NAME
    plan = _plan(loaded, image_name, image_tag or [], registry, namespace, dockerfile, platform,
                 build_arg or [])  # fmt: skip
    check_writable(config)
    if exposed := exposes_source(loaded):
        console.say(f"warning: {exposed}\nhint: {EXPOSED_HINT}")
    reference = plan.references[0]
    image, pushed = asyncio.run(_build(plan, push=push))
    digest = pushed or image.id
    record_image(config, reference, digest)
    if image.runtime_bytes:
        console.say(f"added the runtime, {image.runtime_bytes / 1e6:.1f} MB")
    show({"image": reference, "digest": digest}, output, f"{reference} {digest}")


async def _build(plan: BuildPlan, *, push: bool) -> tuple[BuiltImage, str]:
    """Build and push; return the image, and its name by digest ("" if it was not pushed)."""
    from aenv_ray.config import settings
    from aenv_ray.engines.images.build import ImageBuilder

    chosen = settings()
    with BuildProgress() as progress:
        builder = ImageBuilder(
            chosen.docker_host, chosen.data_dir / "docker", chosen.docker_config,
            say=progress.say, on_step=progress.step, on_output=progress.output,
        )  # fmt: skip
        try:
            image = await builder.build(plan)
            digests = []
            for reference in plan.references if push else ():
                progress.say(f"pushing {reference}")
                digests.append(await builder.push(reference, progress.transfer))
        finally:
            await builder.close()
    return image, digests[0] if digests else ""


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
    from aenv_ray.engines.images.build import BuildPlan
    from aenv_ray.engines.images.reference import compose

    config, root = loaded.config, loaded.path
    name = image_name or config.build.image_name or config.name
    chosen = platform or config.build.platform
    if chosen is not None and not _PLATFORM.fullmatch(chosen):
        raise ConfigError(
            f"platform {chosen!r} is not OS/ARCHITECTURE",
            hint="give one platform, for example linux/arm64: an instance runs one image",
        )
    arguments = dict(config.build.build_args)
    for item in build_args:
        key, equals, value = item.partition("=")
        if not (key and equals):
            raise ConfigError(
                f"build argument {item!r} is not NAME=VALUE",
                hint="for example: --build-arg VERSION=1.2",
            )
        arguments[key] = value
    return BuildPlan(
        dockerfile=(root / dockerfile).resolve()
        if dockerfile
        else _inside(root, config.build.dockerfile, "dockerfile"),
        context=_inside(root, config.build.context, "context"),
        references=[
            compose(registry.strip("/"), namespace.strip("/"), name, tag)
            for tag in tags or [config.build.image_tag or config.version]
        ],
        platform=chosen,
        build_args=arguments,
    )


def _inside(root: Path, name: str, what: str) -> Path:
    """Return a path that config.json names.

    Raises:
        ConfigError: It is outside the project: an author could read files of this machine that way.
    """
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise ConfigError(
            f"config.json: buildConfig.{what} {name!r} is outside the project",
            hint="copy what the build needs into the project"
            + (", or name the file with -f" if what == "dockerfile" else ""),
        )
    return path


class BuildProgress:
    """Progress of a build on standard error: a bar on a terminal, lines otherwise."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )  # fmt: skip

        terminal = Console(stderr=True, highlight=False, markup=False)
        columns: list[Any] = [
            BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
        ]  # fmt: skip
        self._bar = Progress(*columns, console=terminal) if terminal.is_terminal else None
        self._task = self._bar.add_task("", total=None) if self._bar is not None else None
        self._layers_pushed = -1

    def __enter__(self) -> BuildProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bar is None:
            console.say(text)
        else:
            self._bar.console.print(text)

    def step(self, done: int, total: int, text: str) -> None:
        """Show that a step begins."""
        self._show(done - 1, total, text)
        if self._bar is None:
            console.say(f"{done}/{total} {text[:_STEP_LENGTH]}")

    def output(self, text: str) -> None:
        """Show the last line of a step's output, if there is a bar."""
        if self._bar is not None and self._task is not None and text.strip():
            self._bar.update(self._task, description=text.strip()[:_STEP_LENGTH])

    def transfer(self, transfer: Transfer) -> None:
        """Show how much of the image has been pushed."""
        done, layers = transfer.layers
        self._show(done, layers, f"pushing: {transfer}")
        if self._bar is None and done != self._layers_pushed:
            console.say(f"pushing: {transfer}")
        self._layers_pushed = done

    def _show(self, done: int, total: int, text: str) -> None:
        if self._bar is not None and self._task is not None:
            text = text[:_STEP_LENGTH]
            self._bar.update(self._task, completed=done, total=total, description=text)


# --- the record in config.json --------------------------------------------------------------------


def check_writable(config: Path) -> None:
    """Check that `record_image` will be able to write, before a long build.

    Raises:
        ConfigError: The directory of the file is read-only.
    """
    directory = config.resolve().parent
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{directory} is not writable, and the image is recorded in {config.name} there",
            hint="make it writable, or build from a copy",
        )


def record_image(config: Path, reference: str, digest: str) -> None:
    """Record an image in the artifacts of a config.json, in place of an earlier one.

    Args:
        config: The file; replaced atomically, with its permissions.
        reference: The image's name and tag.
        digest: The image's id, or its name by digest in the registry.

    Raises:
        ConfigError: The file cannot be read or written any more; it is unchanged.
    """
    config = config.resolve()  # a symbolic link stays a link
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
        others = [a for a in data.get("artifacts") or [] if a.get("type") != "image"]
        built = {"type": "image", "content": reference, "digest": digest}
        data["artifacts"] = [*others, built]
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        write_atomically(config, text, mode=config.stat().st_mode & 0o777, durable=True)
    except (OSError, ValueError, AttributeError) as exc:
        raise ConfigError(
            f"{reference} was built, but cannot be recorded in {config}: {exc}",
            hint=f'add it to "artifacts" there: {{"type": "image", "content": "{reference}", '
            f'"digest": "{digest}"}}',
        ) from exc
