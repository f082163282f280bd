"""Fetch a wheel of pip from a package index, for a Python without pip.

It uses the standard library only, because it runs before anything is installed.
"""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re
import ssl
import sys
import urllib.parse
import urllib.request
from pathlib import Path

# In isolated mode Python does not search the project.
sys.path.append(str(Path(__file__).parents[1]))

from aenv_ray.engines.node.installer import pip_settings

PYPI = "https://pypi.org/simple"
DOWNLOAD_DEADLINE_S = 60.0


class Links(html.parser.HTMLParser):
    """Collects the links of a simple index's page (PEP 503)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record a link."""
        if tag == "a":
            self.found.append({name: value or "" for name, value in attrs})


def fetch_wheel(directory: Path) -> Path:
    """Download the newest wheel of pip into a directory and return its path.

    Raises:
        OSError: No index has one; the message has a line with the reason for each index.
    """
    settings = pip_settings()
    opener = make_opener(settings)
    indexes = [settings.get("index-url", PYPI), *settings.get("extra-index-url", "").split()]
    reasons = []
    for index in indexes:
        try:
            url, digest = newest_wheel(opener, f"{index.rstrip('/')}/pip/")
            content = download(opener, url)
        except (OSError, ValueError) as exc:
            reasons.append(f"{without_secret(index)}: {exc}")
            continue
        if hashlib.sha256(content).hexdigest() != digest:
            reasons.append(f"{without_secret(index)}: the wheel of pip does not have its checksum")
            continue
        wheel = directory / urllib.parse.unquote(url.rpartition("/")[2])
        wheel.write_bytes(content)
        return wheel
    raise OSError("\n".join(reasons))


def make_opener(settings: dict[str, str]) -> urllib.request.OpenerDirector:
    """Return an opener with pip's proxy and certificates, or else the system's."""
    context = ssl.create_default_context(cafile=settings.get("cert"))
    proxy = settings.get("proxy")
    proxies = urllib.request.ProxyHandler({"http": proxy, "https": proxy} if proxy else None)
    return urllib.request.build_opener(proxies, urllib.request.HTTPSHandler(context=context))


def newest_wheel(opener: urllib.request.OpenerDirector, page: str) -> tuple[str, str]:
    """Return the URL and SHA-256 of the newest wheel of pip for this Python.

    Raises:
        OSError: The page cannot be read.
        ValueError: The page has no such wheel.
    """
    if page.startswith("file:"):
        page += "index.html"
    links = Links()
    links.feed(download(opener, page).decode(errors="replace"))
    best: tuple[tuple[int, ...], str, str] | None = None
    for link in links.found:
        address, _, fragment = urllib.parse.urljoin(page, link.get("href", "")).partition("#")
        match = re.fullmatch(r"pip-(\d+(?:\.\d+)*)-py3-none-any\.whl", address.rpartition("/")[2])
        if match is None or "data-yanked" in link or not fragment.startswith("sha256="):
            continue
        version = tuple(map(int, match[1].split(".")))
        if runs_here(link.get("data-requires-python", "")) and (best is None or version > best[0]):
            best = (version, address, fragment.removeprefix("sha256="))
    if best is None:
        raise ValueError("it has no wheel of pip with a checksum for this Python")
    return best[1], best[2]


def runs_here(requires: str) -> bool:
    """Return whether a ``>=3.9`` is met, the only form that pip's releases use."""
    lower = re.findall(r">=\s*(\d+)\.(\d+)", requires)
    return all((int(major), int(minor)) <= sys.version_info[:2] for major, minor in lower)


def download(opener: urllib.request.OpenerDirector, url: str) -> bytes:
    """Return the content of a URL; a user and password in it are sent as credentials."""
    parts = urllib.parse.urlsplit(url)
    request = urllib.request.Request(without_secret(url))
    if parts.username is not None:
        secret = ":".join(map(urllib.parse.unquote, (parts.username, parts.password or "")))
        encoded = base64.b64encode(secret.encode()).decode()
        # Not forwarded on redirects: an index often keeps its files on another host.
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    with opener.open(request, timeout=DOWNLOAD_DEADLINE_S) as answer:
        return bytes(answer.read())


def without_secret(url: str) -> str:
    """Return a URL without user and password."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
