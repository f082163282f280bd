"""``aenv cluster``: a cluster on Kubernetes with KubeRay, brought up, looked at and taken down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import Output, Yes, confirm, variables
from aenv_ray.cli.terminal.output import show
from aenv_ray.errors import ConfigError

if TYPE_CHECKING:
    from aenv_ray.cluster.api import ClusterApi
    from aenv_ray.cluster.readiness import Look

cluster = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Run a cluster on Kubernetes with KubeRay.\n\n"
    "Example:\n  aenv cluster apply dev",
)  # fmt: skip

_UP_S: Final = 900.0
_DOWN_S: Final = 600.0

Source = Annotated[
    str,
    typer.Argument(
        metavar="[OVERLAY]", help="dev, production, a directory of yours, or rendered YAML."
    ),
]
Values = Annotated[
    Path | None, typer.Option("--values", "-f", help="YAML with values in place of the overlay's.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="One value; see values.yaml. Repeatable."),
]
Image = Annotated[
    str | None, typer.Option("--image", help="Of Ray, and of sandboxes whose project names none.")
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Where the cluster is. Default: aenv.")
]
Context = Annotated[
    str | None, typer.Option("--context", help="Of the kube config. Default: its current one.")
]
Force = Annotated[bool, typer.Option("--force", help="Take over fields that others set.")]


@cluster.command("render")
def render(
    source: Source = "dev",
    values: Values = None,
    setting: Settings = None,
    image: Image = None,
    namespace: Namespace = None,
    copy_to: Annotated[
        Path | None, typer.Option("--copy-to", help="Write the manifests there, to change them.")
    ] = None,
    output: Output = None,
) -> None:
    """Print the manifests of a cluster; speaks with nobody.

    They are those that `kubectl kustomize` makes of the same directory. As YAML,
    or with -o json as a list.

    Example:
      aenv cluster render production --set workers.maxReplicas=100
      aenv cluster render --copy-to my-cluster
    """
    from aenv_ray.cluster import manifests, yaml_files

    if copy_to is not None:
        manifests.copy_to(copy_to)
        console.say(f"written; apply it with: aenv cluster apply {copy_to}/overlays/{source}")
        return
    documents = _documents(source, values, setting, image, namespace)
    show(documents, output, yaml_files.dump(documents).removesuffix("\n"))


@cluster.command("apply")
def apply(
    source: Source = "dev",
    values: Values = None,
    setting: Settings = None,
    image: Image = None,
    namespace: Namespace = None,
    context: Context = None,
    force: Force = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Have the API check it, and change nothing.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Return once everything is ready.")
    ] = True,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds to wait at most.")
    ] = _UP_S,
    output: Output = None,
) -> None:
    """Bring up a cluster, or change it to be as it is written.

    Server-side apply: what runs goes on, and a changed template is for new pods.
    Passwords are made where there are none.

    Example:
      aenv cluster apply dev --image registry.example/aenv-ray:1
      aenv cluster apply my-cluster/overlays/production
    """
    from aenv_ray.cluster import lifecycle, manifests

    documents = _documents(source, values, setting, image, namespace)
    where = manifests.namespace_of(documents)
    with _api(context) as api:
        life = lifecycle.Lifecycle(api, where, console.say)
        life.apply(documents, force=force, dry_run=dry_run)
        if dry_run:
            show({"namespace": where, "objects": len(documents), "dry_run": True}, output)
            return
        look = life.await_ready(timeout) if wait else life.look()
    show(_facts(look, where), output)
    console.say(f"an admin's token: aenv cluster status --namespace {where} --token")


@cluster.command("status")
def status(
    namespace: Namespace = None,
    context: Context = None,
    token: Annotated[
        bool, typer.Option("--token", help="Print the gateway's admin token, and nothing else.")
    ] = False,
    output: Output = None,
) -> None:
    """Show how a cluster is, and what it lacks.

    Exits with 0 when it is ready.

    Example:
      aenv cluster status
      aenv cluster status --token
    """
    from aenv_ray.cluster import lifecycle

    where = namespace or "aenv"
    with _api(context) as api:
        if token:
            show(_token(api, where), output)
            return
        look = lifecycle.Lifecycle(api, where, console.say).look()
    show(_facts(look, where), output)
    if look.lacks():
        raise typer.Exit(1)


@cluster.command("scale")
def scale(
    bounds: Annotated[
        str, typer.Argument(metavar="MIN[:MAX]", help="Workers at least, and at most.")
    ],
    group: Annotated[str, typer.Option("--group", "-g", help="Of workers.")] = "kubernetes",
    namespace: Namespace = None,
    context: Context = None,
    output: Output = None,
) -> None:
    """Bound the workers of a group; between the bounds Ray scales.

    Holds until the next `aenv cluster apply`, which applies values.yaml again.

    Example:
      aenv cluster scale 2:20
      aenv cluster scale 0 --group docker
    """
    from aenv_ray.cluster import lifecycle

    least, colon, most = bounds.partition(":")
    if not least.isdigit() or (colon and not most.isdigit()):
        raise typer.BadParameter("write it as MIN or MIN:MAX, in whole numbers")
    with _api(context) as api:
        life = lifecycle.Lifecycle(api, namespace or "aenv", console.say)
        show(life.scale(group, int(least), int(most) if colon else None), output)


@cluster.command("delete")
def delete(
    namespace: Namespace = None,
    context: Context = None,
    storage: Annotated[
        bool, typer.Option("--delete-storage", help="And what it stored, for ever.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds to wait at most.")
    ] = _DOWN_S,
    yes: Yes = False,
    output: Output = None,
) -> None:
    """Take a cluster down, with every instance; no pod is left.

    What it stored stays, with its passwords: a cluster that is applied again goes
    on with it. The namespace stays.

    Example:
      aenv cluster delete
      aenv cluster delete --delete-storage --yes
    """
    from aenv_ray.cluster import lifecycle

    where = namespace or "aenv"
    what = "cluster and everything that it stored" if storage else "cluster"
    confirm(f"Delete the {what} in namespace {where}?", yes)
    with _api(context) as api:
        kept = lifecycle.Lifecycle(api, where, console.say).delete(timeout, storage=storage)
    show({"namespace": where, "deleted": True, "kept": kept}, output)
    if kept:
        console.say("what is kept goes with: aenv cluster delete --delete-storage")


@cluster.command("doctor")
def doctor(
    source: Source = "dev",
    values: Values = None,
    setting: Settings = None,
    image: Image = None,
    namespace: Namespace = None,
    context: Context = None,
    output: Output = None,
) -> None:
    """Name what is missing: permission, kind, quota, storage, node.

    Asks with your own permissions and changes nothing. Exits with 1 when
    something is missing.

    Example:
      aenv cluster doctor production
    """
    from aenv_ray.cli.checks.printing import show_findings
    from aenv_ray.cluster import checks, manifests

    documents = _documents(source, values, setting, image, namespace)
    with _api(context) as api:
        found = checks.Doctor(api, manifests.namespace_of(documents), documents).findings()
    show_findings(found, output)
    if checks.failed(found):
        raise typer.Exit(1)


def _documents(
    source: str,
    values: Path | None,
    settings: Sequence[str] | None,
    image: str | None,
    namespace: str | None,
) -> list[dict[str, Any]]:
    """Return the objects that options describe."""
    from aenv_ray.cluster import manifests

    named: dict[str, str] = {}
    if image is not None:
        named |= {"image": image, "sandboxes.image": image}
    if namespace is not None:
        named["namespace"] = namespace
    named |= variables(settings or [], "--set", what="NAME=VALUE")
    return manifests.load(source, values, named)


@contextlib.contextmanager
def _api(context: str | None) -> Iterator[ClusterApi]:
    from aenv_ray.cluster.api import ClusterApi

    api = ClusterApi(context)
    try:
        yield api
    finally:
        api.close()


def _facts(look: Look, namespace: str) -> dict[str, Any]:
    """Return what people and programs see of a cluster."""
    from aenv_ray.cluster.objects import GATEWAY

    lacks = look.lacks()
    head = look.head
    return {
        "namespace": namespace,
        "state": "ready" if not lacks else "not there" if look.ray is None else "not ready",
        "gateway": f"http://{GATEWAY}.{namespace}:8080" if look.ray is not None else None,
        "head": head["metadata"]["name"] if head is not None else None,
        "workers": [
            f"{g['group']}: {g['ready']} of {g['pods']} ready, {g['min']} to {g['max']}"
            for g in look.groups
        ],
        "sandboxes": len(look.sandboxes),
        "lacks": lacks,
    }


def _token(api: ClusterApi, namespace: str) -> str:
    import base64

    from aenv_ray.cluster.lifecycle import ADMIN
    from aenv_ray.cluster.objects import KINDS

    secret = api.get(KINDS["Secret"], namespace, ADMIN)
    if secret is None:
        raise ConfigError(
            f"namespace {namespace} has no Secret {ADMIN}", hint="make it with: aenv cluster apply"
        )
    return base64.b64decode(secret["data"]["token"]).decode()
