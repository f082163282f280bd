"""The daemon's messages about registries, and the progress of transfers."""

from __future__ import annotations

import pytest

from aenv_ray.engines.images.registry import Reason, Transfer, diagnose


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('Head "http://x/v2/a/manifests/1": no basic auth credentials', Reason.UNAUTHORIZED),
        ("unauthorized: authentication required", Reason.UNAUTHORIZED),
        ("pull access denied for a/b, repository does not exist or may require 'docker login': "
         "denied: requested access to the resource is denied", Reason.UNAUTHORIZED),
        ("pulling from host localhost:1 failed with status code [manifests 1]: 401 Unauthorized",
         Reason.UNAUTHORIZED),
        ("manifest for localhost:5000/a:1 not found: manifest unknown: manifest unknown",
         Reason.NOT_FOUND),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries",
         Reason.OTHER_PLATFORM),
        ('Get "https://x/v2/": dial tcp: lookup x on 127.0.0.1:53: no such host',
         Reason.UNREACHABLE),
        ('Get "http://localhost:1/v2/": dial tcp 127.0.0.1:1: connect: connection refused',
         Reason.UNREACHABLE),
        ('Get "https://x/v2/": net/http: TLS handshake timeout', Reason.UNREACHABLE),
        ('Get "https://x/v2/": x509: certificate signed by unknown authority', Reason.UNREACHABLE),
        ('Get "https://x/v2/": http: server gave HTTP response to HTTPS client',
         Reason.UNREACHABLE),
        ("failed to register layer: write /usr/lib/x: no space left on device", Reason.DISK_FULL),
        ("something else", Reason.UNKNOWN),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure_is_recognized(message, reason):
    assert diagnose(message) is reason


def moved(layer: str, status: str, current: int = 0, total: int = 0) -> dict[str, object]:
    detail = {"current": current, "total": total} if total else {}
    return {"id": layer, "status": status, "progressDetail": detail}


def test_the_progress_of_a_pull_counts_layers_and_bytes():
    pull = Transfer()
    pull.feed({"id": "1.0", "status": "Pulling from tests/shell"})  # its id is the tag
    for layer in ("a", "b", "c"):
        pull.feed(moved(layer, "Pulling fs layer"))
    pull.feed(moved("a", "Already exists"))
    pull.feed(moved("b", "Downloading", 2_000_000, 8_000_000))
    assert str(pull) == "1 of 3 layers, 2.0 of 8.0 MB"
    pull.feed(moved("b", "Download complete"))
    pull.feed(moved("b", "Extracting", 100_000, 8_000_000))  # of what is there already
    pull.feed(moved("b", "Pull complete"))
    assert str(pull) == "2 of 3 layers, 8.0 of 8.0 MB"
    pull.feed({"status": "Digest: sha256:00"})
    assert pull.layers == (2, 3)


def test_the_progress_of_a_push_is_never_above_100_percent():
    push = Transfer()
    push.feed(moved("a", "Preparing"))
    push.feed(moved("a", "Pushing", 2_100_000, 2_000_000))
    assert str(push) == "0 of 1 layers, 2.0 of 2.0 MB"
    push.feed(moved("a", "Pushed"))
    push.feed(moved("b", "Layer already exists"))
    push.feed(moved("c", "Mounted from tests/other"))
    assert push.layers == (3, 3)
