"""``aenv cluster``: clusters on Kubernetes with KubeRay, and the nodes of any cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aenv_ray.cli import nodes
from aenv_ray.cli.terminal import console
from aenv_ray.cli.terminal.options import (
    OutputOption,
    YesOption,
    confirm,
    variables,
    with_options,
)
from aenv_ray.cli.terminal.output import show, show_findings
from aenv_ray.errors import ConfigError

if TYPE_CHECKING:
    from aenv_ray.cluster.api import ClusterApi
    from aenv_ray.cluster.readiness import Snapshot

cluster = typer.Typer(
    add_completion=False, rich_markup_mode=None, no_args_is_help=True,
    help="Run a cluster on Kubernetes; drain nodes of any cluster.\n\n"
    "Example:\n  aenv cluster apply dev",
)  # fmt: skip
cluster.command("nodes")(nodes.nodes)
cluster.command("drain")(nodes.drain)
cluster.command("undrain")(nodes.undrain)

_UP_S: Final = 900.0
_DOWN_S: Final = 600.0

OverlayArgument = Annotated[
    str,
    typer.Argument(
        metavar="[OVERLAY]", help="dev, production, your own directory, or rendered YAML."
    ),
]
ValuesOption = Annotated[
    Path | None,
    typer.Option("--values", "-f", help="YAML with values that override the overlay's."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set one value of values.yaml. Repeatable."),
]
ClusterImageOption = Annotated[
    str | None,
    typer.Option("--image", help="Image of Ray, and of sandboxes whose project names none."),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the cluster. Default: aenv.")
]
ContextOption = Annotated[
    str | None,
    typer.Option("--context", help="Context of the kube config. Default: the current one."),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1, help="Maximum seconds to wait.")]
TakeOverOption = Annotated[
    bool, typer.Option("--force", help="Take over fields that other managers own.")
]


class ManifestOptions:
    """The options that describe a cluster: where its manifests are, and what to change in them."""

    def __init__(
        self,
        *,
        source: OverlayArgument = "dev",
        values: ValuesOption = None,
        setting: SetOption = None,
        image: ClusterImageOption = None,
        namespace: NamespaceOption = None,
    ) -> None:
        self.source = source
        self.namespace = namespace
        self._values = values
        self._settings: dict[str, str] = {}
        if image is not None:
            self._settings |= {"image": image, "sandboxes.image": image}
        if namespace is not None:
            self._settings["namespace"] = namespace
        self._settings |= variables(setting or [], "--set", what="NAME=VALUE")

    def documents(self) -> list[dict[str, Any]]:
        """Return the objects of the cluster.

        Raises:
            ConfigError: A manifest or value is invalid, or cannot be read.
        """
        from aenv_ray.cluster import manifests

        return manifests.load(self.source, self._values, self._settings)


@cluster.command("render")
@with_options(ManifestOptions)
def render(
    chosen: ManifestOptions,
    copy_to: Annotated[
        Path | None,
        typer.Option("--copy-to", help="Copy the manifests to a new directory, to change them."),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Print the manifests of a cluster, without connecting to it.

    The output equals that of `kubectl kustomize` for the same directory, as YAML,
    or as a list with -o json.

    Example:
      aenv cluster render production --set workers.maxReplicas=100
      aenv cluster render --copy-to my-cluster
    """
    from aenv_ray.cluster import manifests, yaml_files

    if copy_to is not None:
        manifests.copy_to(copy_to)
        console.say(f"copied; apply it with: aenv cluster apply {copy_to}/overlays/{chosen.source}")
        return
    documents = chosen.documents()
    show(documents, output, yaml_files.dump(documents).removesuffix("\n"))


@cluster.command("apply")
@with_options(ManifestOptions)
def apply(
    chosen: ManifestOptions,
    context: ContextOption = None,
    force: TakeOverOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Have the API check everything without changing it.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until everything is ready.")
    ] = True,
    timeout: TimeoutOption = _UP_S,
    output: OutputOption = None,
) -> None:
    """Create a cluster, or change it, by server-side apply.

    Running pods are unaffected: a changed template applies to new pods. Missing
    passwords are generated.

    Example:
      aenv cluster apply dev --image registry.example/aenv-ray:1
      aenv cluster apply my-cluster/overlays/production
    """
    from aenv_ray.cluster import lifecycle, manifests

    documents = chosen.documents()
    where = manifests.namespace_of(documents)
    with _api(context) as api:
        life = lifecycle.Lifecycle(api, where, console.say)
        life.apply(documents, force=force, dry_run=dry_run)
        if dry_run:
            show({"namespace": where, "objects": len(documents), "dry_run": True}, output)
            return
        found = life.await_ready(timeout) if wait else life.snapshot()
    show(_facts(found, where), output)
    console.say(f"print an admin token with: aenv cluster status --namespace {where} --token")


@cluster.command("upgrade")
@with_options(ManifestOptions)
def upgrade(
    chosen: ManifestOptions,
    context: ContextOption = None,
    force: TakeOverOption = False,
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, help="Workers that may be missing at a time.")
    ] = 1,
    everything: Annotated[
        bool, typer.Option("--all", help="Replace every pod, not only those with another image.")
    ] = False,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=1,
            help="Maximum seconds to wait. Default: workers.drainSeconds and 5 minutes for each "
            "batch of workers, and an hour.",
        ),
    ] = None,
    output: OutputOption = None,
) -> None:
    """Apply a new version, and replace the pods of the old one.

    Workers drain before they end: they take no new instances, and their present
    instances may continue for at most workers.drainSeconds. The head comes last.
    An interrupted upgrade is continued by running the command again; with --all, it
    begins with all pods again.

    Example:
      aenv cluster upgrade production --image registry.example/aenv-ray:2
      aenv cluster upgrade production --all --at-once 5
    """
    from aenv_ray.cluster import lifecycle, manifests

    documents = chosen.documents()
    where = manifests.namespace_of(documents)
    with _api(context) as api:
        life = lifecycle.Lifecycle(api, where, console.say)
        found = life.upgrade(
            documents, timeout, at_once=at_once, everything=everything, force=force
        )
    show(_facts(found, where), output)


@cluster.command("status")
def status(
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    token: Annotated[
        bool, typer.Option("--token", help="Print only the gateway's admin token.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Show the state of a cluster, and what is not ready.

    Exits with 0 if it is ready, else with 1.

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
        found = lifecycle.Lifecycle(api, where, console.say).snapshot()
    show(_facts(found, where), output)
    if found.problems():
        raise typer.Exit(1)


@cluster.command("scale")
def scale(
    bounds: Annotated[
        str, typer.Argument(metavar="MIN[:MAX]", help="Minimum and maximum number of workers.")
    ],
    group: Annotated[str, typer.Option("--group", "-g", help="Worker group.")] = "kubernetes",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = None,
) -> None:
    """Set the minimum and maximum of a worker group.

    Between them, Ray scales by demand.

    The next `aenv cluster apply` restores the bounds in values.yaml.

    Example:
      aenv cluster scale 2:20
      aenv cluster scale 0 --group docker
    """
    from aenv_ray.cluster import lifecycle

    least, colon, most = bounds.partition(":")
    if not least.isdigit() or (colon and not most.isdigit()):
        raise typer.BadParameter(
            f"invalid bounds {bounds!r}: expected MIN or MIN:MAX, such as 2:20"
        )
    with _api(context) as api:
        life = lifecycle.Lifecycle(api, namespace or "aenv", console.say)
        show(life.scale(group, int(least), int(most) if colon else None), output)


@cluster.command("delete")
def delete(
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    storage: Annotated[
        bool,
        typer.Option("--delete-storage", help="Also delete all volumes and Secrets, irrevocably."),
    ] = False,
    timeout: TimeoutOption = _DOWN_S,
    yes: YesOption = False,
    output: OutputOption = None,
) -> None:
    """Delete a cluster with all its instances.

    Waits until no pod is left. Volumes and passwords remain, and applying the
    cluster again reuses them. The namespace remains.

    Example:
      aenv cluster delete
      aenv cluster delete --delete-storage --yes
    """
    from aenv_ray.cluster import lifecycle

    where = namespace or "aenv"
    what = "cluster with all its stored data" if storage else "cluster"
    confirm(f"Delete the {what} in namespace {where}?", yes)
    with _api(context) as api:
        kept = lifecycle.Lifecycle(api, where, console.say).delete(timeout, storage=storage)
    show({"namespace": where, "deleted": True, "kept": kept}, output)
    if kept:
        console.say("delete what remains with: aenv cluster delete --delete-storage")


@cluster.command("doctor")
@with_options(ManifestOptions)
def doctor(
    chosen: ManifestOptions,
    context: ContextOption = None,
    alerts: Annotated[
        bool,
        typer.Option("--alerts", help="Only name the first step for each alert, offline."),
    ] = False,
    output: OutputOption = None,
) -> None:
    """Check permissions, resource kinds, quota, storage and nodes.

    Uses your own permissions and changes nothing. Exits with 1 if a check fails.
    With --alerts, lists the alerts in clusters/kuberay/monitoring with their first
    steps; docs/operations.md has the further steps.

    Example:
      aenv cluster doctor production
      aenv cluster doctor --alerts
    """
    from aenv_ray.cluster import checks, manifests

    if alerts:
        found = manifests.alerts(chosen.namespace or "aenv")
        text = "\n".join(f"{a.name}: {a.summary}\n  {a.first_step}" for a in found)
        show([alert._asdict() for alert in found], output, text)
        return
    documents = chosen.documents()
    with _api(context) as api:
        findings = checks.Doctor(api, manifests.namespace_of(documents), documents).findings()
    show_findings(findings, output)
    if checks.failed(findings):
        raise typer.Exit(1)


@contextlib.contextmanager
def _api(context: str | None) -> Iterator[ClusterApi]:
    from aenv_ray.cluster.api import ClusterApi

    api = ClusterApi(context)
    try:
        yield api
    finally:
        api.close()


def _facts(found: Snapshot, namespace: str) -> dict[str, Any]:
    """Return the state of a cluster as it is shown."""
    from aenv_ray.cluster.objects import GATEWAY

    problems = found.problems()
    head = found.head
    return {
        "namespace": namespace,
        "state": "ready" if not problems else "not there" if found.ray is None else "not ready",
        "gateway": f"http://{GATEWAY}.{namespace}:8080" if found.ray is not None else None,
        "head": head["metadata"]["name"] if head is not None else None,
        "workers": [
            f"{g['group']}: {g['ready']} of {g['pods']} ready, {g['min']} to {g['max']}"
            for g in found.groups
        ],
        "sandboxes": len(found.sandboxes),
        "lacks": problems,
    }


def _token(api: ClusterApi, namespace: str) -> str:
    import base64

    from aenv_ray.cluster.lifecycle import ADMIN
    from aenv_ray.cluster.objects import KINDS

    secret = api.get(KINDS["Secret"], namespace, ADMIN)
    if secret is None:
        raise ConfigError(
            f"namespace {namespace} has no Secret {ADMIN}",
            hint="create it with: aenv cluster apply",
        )
    token = (secret.get("data") or {}).get("token")
    if not token:
        raise ConfigError(
            f"Secret {ADMIN} in namespace {namespace} has no key `token`",
            hint="set the key, or delete the Secret and have `aenv cluster apply` create it: "
            f"kubectl --namespace {namespace} delete secret {ADMIN}; then restart the head",
        )
    return base64.b64decode(token).decode()
