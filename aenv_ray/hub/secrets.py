"""What looks like a secret in a project: published by accident, it cannot be taken back.

Found by name where the name says it all, else by content. What is only an example, such as
``.env.example``, is none.
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
"""So much of a file is looked at; tokens and keys lie in small files."""


class Finding(NamedTuple):
    """One file that should not be published."""

    path: str
    reason: str
    """What about it; never what is in it (invariant 10)."""


_CONTENTS: Final = (
    (re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----\s+[A-Za-z0-9+/=:]"),
     "it holds a private key"),
    (re.compile(rb'"private_key"\s*:\s*"-----BEGIN'), "it holds a private key"),
    (re.compile(rb"(?m)^\s*(?://[^#\s]*:_(?:authToken|auth|password)|_authToken)\s*=\s*[^\s$]"),
     "it holds an npm token"),
    (re.compile(rb"(?m)^\s*password\s*[:=]\s*pypi-[A-Za-z0-9_-]{16}"), "it holds a PyPI token"),
    (re.compile(rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"), "it holds an AWS access key"),
    (re.compile(rb"\bgh[pousr]_[A-Za-z0-9]{36}\b|\bgithub_pat_[A-Za-z0-9_]{40}"),
     "it holds a GitHub token"),
    (re.compile(rb"\bsk-(?:ant-|proj-)[A-Za-z0-9_-]{32}"), "it holds an API key of a model server"),
    (re.compile(rb"\bhf_[A-Za-z0-9]{34}\b"), "it holds a Hugging Face token"),
    (re.compile(rb"\bxox[abprs]-[A-Za-z0-9-]{20}"), "it holds a Slack token"),
)  # fmt: skip


def looks_secret(path: str, content: bytes) -> Finding | None:
    """Return why a file looks like a secret; None when it does not.

    Args:
        path: In the project, with ``/``.
        content: All of it; its beginning is enough.
    """
    name = path.rpartition("/")[2].lower()
    is_example = any(fnmatchcase(name, pattern) for pattern in _EXAMPLES)
    if not is_example:
        by_path = any(fnmatchcase(f"/{path.lower()}", f"*/{pattern}") for pattern in _PATHS)
        by_name = any(fnmatchcase(name, pattern) for pattern in _NAMES)
        if by_path or (by_name and not _is_public(name, content)):
            return Finding(path, "files of this name hold secrets")
    head = content[:_HEAD_BYTES]
    for pattern, reason in _CONTENTS:
        if pattern.search(head):
            return Finding(path, reason)
    return None


def _is_public(name: str, content: bytes) -> bool:
    """Whether a file is of a kind that also holds certificates, and holds nothing else."""
    if not name.endswith((".pem", ".key")):
        return False
    return b"-----BEGIN " in content and b"PRIVATE KEY" not in content
