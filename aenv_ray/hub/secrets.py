"""Finds files that look like secrets by name or content, before they are published by accident.

Examples, such as ``.env.example``, are allowed.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

_NAMES: Final = (
    ".env", ".env.*", "*.env", ".netrc", "_netrc", ".pgpass", ".htpasswd", ".git-credentials",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks",
    "*.keystore", "*.ppk", "*.kdbx", "credentials.json", "client_secret*.json",
    "service-account*.json", "service_account*.json", ".dockercfg", "kubeconfig", "*.kubeconfig",
)  # fmt: skip
_PATHS: Final = (
    ".aws/credentials", ".ssh/*", ".docker/config.json", ".kube/config", ".config/gcloud/*",
    ".huggingface/token", ".config/gh/hosts.yml",
)  # fmt: skip
_EXAMPLES: Final = ("*.example", "*.sample", "*.template", "*.dist", "*.example.*", "*.pub")
_HEAD_BYTES: Final = 256 * 1024
"""How much of a file is searched; tokens and keys are usually in small files."""


class SuspectedSecret(NamedTuple):
    """A file that looks like a secret."""

    path: str
    reason: str
    """Why; never its content (invariant 10)."""


_CONTENTS: Final = (
    (re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----\s+[A-Za-z0-9+/=:]"),
     "it contains a private key"),
    (re.compile(rb'"private_key"\s*:\s*"-----BEGIN'), "it contains a private key"),
    (re.compile(rb"(?m)^\s*(?://[^#\s]*:_(?:authToken|auth|password)|_authToken)\s*=\s*[^\s$]"),
     "it contains an npm token"),
    (re.compile(rb"(?m)^\s*password\s*[:=]\s*pypi-[A-Za-z0-9_-]{16}"), "it contains a PyPI token"),
    (re.compile(rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), "it contains an AWS access key"),
    (re.compile(rb"\bgh[pousr]_[A-Za-z0-9]{36}\b|\bgithub_pat_[A-Za-z0-9_]{40}"),
     "it contains a GitHub token"),
    (re.compile(rb"\bsk-(?:ant-|proj-)[A-Za-z0-9_-]{32}"), "it contains a model server API key"),
    (re.compile(rb"\bhf_[A-Za-z0-9]{34}\b"), "it contains a Hugging Face token"),
    (re.compile(rb"\bxox[abprs]-[A-Za-z0-9-]{20}"), "it contains a Slack token"),
)  # fmt: skip


def looks_secret(path: str, content: bytes) -> SuspectedSecret | None:
    """Return why a file looks like a secret, or None.

    Args:
        path: Relative to the project, with ``/``.
        content: Its content, or at least the beginning.
    """
    name = path.rpartition("/")[2].lower()
    is_example = any(fnmatchcase(name, pattern) for pattern in _EXAMPLES)
    if not is_example:
        by_path = any(fnmatchcase(f"/{path.lower()}", f"*/{pattern}") for pattern in _PATHS)
        by_name = any(fnmatchcase(name, pattern) for pattern in _NAMES)
        if by_path or (by_name and not _is_public(name, content)):
            return SuspectedSecret(path, "files with this name contain secrets")
    head = content[:_HEAD_BYTES]
    for pattern, reason in _CONTENTS:
        if pattern.search(head):
            return SuspectedSecret(path, reason)
    return None


def _is_public(name: str, content: bytes) -> bool:
    """Whether a PEM file contains only public data such as certificates."""
    if not name.endswith((".pem", ".key")):
        return False
    return b"-----BEGIN " in content and b"PRIVATE KEY" not in content
