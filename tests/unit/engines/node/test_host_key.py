"""The keys of hosts, from which those of sandboxes are made."""

from __future__ import annotations

from pathlib import Path

from aenv_ray.engines.node.host_key import HostKey


def test_hosts_of_one_pod_have_one_key_and_others_another(tmp_path: Path) -> None:
    keys = [HostKey(tmp_path / name / "key") for name in ("a", "a", "b")]
    for key in keys:
        key.load()
    first, same, other = (key.secret("pod", "nonce", "boot") for key in keys)
    assert first == same != other
    assert first != keys[0].secret("pod", "nonce", "8070")
    assert (tmp_path / "b" / "key").stat().st_mode & 0o777 == 0o600
