"""What daemons say of registries: what it means, and how far an image is."""

from __future__ import annotations

import pytest

from aenv_ray.engines.images.registry import Transfer, Trouble, diagnose


@pytest.mark.parametrize(
    ("words", "trouble"),
    [
        ('Head "http://x/v2/a/manifests/1": no basic auth credentials', Trouble.UNAUTHORIZED),
        ("unauthorized: authentication required", Trouble.UNAUTHORIZED),
        ("pull access denied for a/b, repository does not exist or may require 'docker login': "
         "denied: requested access to the resource is denied", Trouble.UNAUTHORIZED),
        ("pulling from host localhost:1 failed with status code [manifests 1]: 401 Unauthorized",
         Trouble.UNAUTHORIZED),
        ("manifest for localhost:5000/a:1 not found: manifest unknown: manifest unknown",
         Trouble.NOT_FOUND),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries",
         Trouble.OTHER_PLATFORM),
        ('Get "https://x/v2/": dial tcp: lookup x on 127.0.0.1:53: no such host',
         Trouble.UNREACHABLE),
        ('Get "http://localhost:1/v2/": dial tcp 127.0.0.1:1: connect: connection refused',
         Trouble.UNREACHABLE),
        ('Get "https://x/v2/": net/http: TLS handshake timeout', Trouble.UNREACHABLE),
        ('Get "https://x/v2/": x509: certificate signed by unknown authority', Trouble.UNREACHABLE),
        ('Get "https://x/v2/": http: server gave HTTP response to HTTPS client',
         Trouble.UNREACHABLE),
        ("failed to register layer: write /usr/lib/x: no space left on device", Trouble.DISK_FULL),
        ("something else", Trouble.UNKNOWN),
    ],
)  # fmt: skip
def test_a_daemons_words_are_understood(words, trouble):
    assert diagnose(words) is trouble


def moved(layer: str, status: str, current: int = 0, total: int = 0) -> dict[str, object]:
    detail = {"current": current, "total": total} if total else {}
    return {"id": layer, "status": status, "progressDetail": detail}


def test_a_pull_is_summed_up_by_layers_and_bytes():
    pull = Transfer()
    pull.take({"id": "1.0", "status": "Pulling from tests/shell"})  # its id is the tag
    for layer in ("a", "b", "c"):
        pull.take(moved(layer, "Pulling fs layer"))
    pull.take(moved("a", "Already exists"))
    pull.take(moved("b", "Downloading", 2_000_000, 8_000_000))
    assert str(pull) == "1 of 3 layers, 2.0 of 8.0 MB"
    pull.take(moved("b", "Download complete"))
    pull.take(moved("b", "Extracting", 100_000, 8_000_000))  # of what is there already
    pull.take(moved("b", "Pull complete"))
    assert str(pull) == "2 of 3 layers, 8.0 of 8.0 MB"
    pull.take({"status": "Digest: sha256:00"})
    assert pull.layers == (2, 3)


def test_a_push_is_summed_up_and_may_tell_more_than_all():
    push = Transfer()
    push.take(moved("a", "Preparing"))
    push.take(moved("a", "Pushing", 2_100_000, 2_000_000))
    assert str(push) == "0 of 1 layers, 2.0 of 2.0 MB"
    push.take(moved("a", "Pushed"))
    push.take(moved("b", "Layer already exists"))
    push.take(moved("c", "Mounted from tests/other"))
    assert push.layers == (3, 3)
