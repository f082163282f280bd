"""Backups of a hub: what Redis holds and the archives of its versions, in one tar file.

Redis is read by one script, so that the file shows one moment. Archives are stored before the
version that names them, and are named by their content, so they may be read afterwards. If one was
deleted meanwhile, a second snapshot, which no longer has its version, replaces the first.

    header.json           format, layout of the keys, who wrote it and when; always first
    artifacts/<digest>    an archive
    hub.jsonl             one line for each key: name, type, content
    summary.json          counts and the SHA-256 of hub.jsonl; always last

Leases are not part of it, because they belong to instances that run now; neither are idempotency
keys, the tokens of agents, and what the gateway notes about itself while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import itertools
import json
import math
import re
import tarfile
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import IO, Any, Final, Literal

from pydantic import ValidationError

import aenv_ray
from aenv_ray.clock import Clock, SystemClock
from aenv_ray.config import Settings
from aenv_ray.errors import (
    ArtifactDamaged,
    ArtifactNotFound,
    BackupInvalid,
    CatalogConflict,
    ConfigError,
    FabricUnavailable,
)
from aenv_ray.hub.artifacts import ArtifactStore, open_artifact_store
from aenv_ray.hub.base import to_json
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.keys import AUDIT_STREAMS, LAYOUT, RUNNING_KINDS
from aenv_ray.hub.records import AuditRecord, TokenRecord
from aenv_ray.hub.redis.connection import connect, redacted
from aenv_ray.hub.redis.server import RedisServer
from aenv_ray.models import Frozen

FORMAT: Final = 1
"""Version of the file format; a file with a higher one is refused."""
ANSWER_S: Final = 120.0
"""Deadline of reading or writing all keys."""
_HEADER: Final = "header.json"
_KEYS: Final = "hub.jsonl"
_SUMMARY: Final = "summary.json"
_ARTIFACTS: Final = "artifacts/"
_PIECE_BYTES: Final = 1 << 20
_KINDS: Final = frozenset({"hash", "set", "zset", "stream"})
_STREAM_ID: Final = re.compile(r"(\d{1,19})-(\d{1,19})", re.ASCII)
_NEVER: Final = ("artifact:leaving:", "lease:", "once:", "quota:waiting:", "token:of:")
"""Beginnings of names that no backup has, see `_NAMES`."""
_MERGED: Final = ("token:", "artifact:")
"""Beginnings of names of hashes, but for those in `_MERGED_KINDS`, which `LOAD` does not delete."""
_MERGED_KINDS: Final = {"token:expiry": "zset", "artifact:owners": "set"}
_MARK_MS: Final = 3_600_000
_LOOK_S: Final = 0.5

_NAMES: Final = (
    "local of_gateway = {"
    + "".join(f"['doc:{kind}']=true," for kind in RUNNING_KINDS)
    + """}
local root = KEYS[1]
local pattern = string.gsub(root, '[%*%?%[%]%^%\\\\]', '\\\\%0')..'*'
local function begins(name, word) return string.sub(name, 1, #word) == word end
local function is_of_now(name)
    return begins(name, 'lease:') or begins(name, 'once:') or begins(name, 'quota:waiting:')
        or begins(name, 'token:of:') or begins(name, 'artifact:leaving:')
        or name == 'layout' or of_gateway[name]
end
local function is_merged(name)
    return begins(name, 'token:') or begins(name, 'audit') or begins(name, 'artifact:')
end
local names = {}
for _, key in ipairs(redis.call('KEYS', pattern)) do
    local name = string.sub(key, #root + 1)
    if not is_of_now(name) then names[#names + 1] = name end
end
"""
)

SNAPSHOT: Final = (
    _NAMES
    + """
local found = {}
for _, name in ipairs(names) do
    local key = root..name
    local kind, items = redis.call('TYPE', key).ok, nil
    if kind == 'hash' then items = redis.call('HGETALL', key)
    elseif kind == 'set' then items = redis.call('SMEMBERS', key)
    elseif kind == 'zset' then items = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
    elseif kind == 'stream' then
        items = {}
        for _, row in ipairs(redis.call('XRANGE', key, '-', '+')) do
            items[#items + 1] = row[1]
            items[#items + 1] = row[2][2]
        end
    else return redis.error_reply('unexpected type '..kind..' of '..name) end
    found[#found + 1] = {name, kind, items}
end
return found
"""
)
"""Returns the name, type and content of each key of a backup."""

LOAD: Final = (
    _NAMES
    + """
local is_replaced, mark = ARGV[1] == '1', root..'once:'..ARGV[2]
if redis.call('EXISTS', mark) == 1 then return 1 end
local old = {}
for _, name in ipairs(names) do
    if not is_merged(name) then old[#old + 1] = name end
end
if #old > 0 and not is_replaced then return 0 end
for _, name in ipairs(old) do redis.call('DEL', root..name) end
local later = {}
for _, name in ipairs({"""
    + ",".join(f"'{name}'" for name in AUDIT_STREAMS)
    + """}) do
    later[name] = redis.call('XRANGE', root..name, '-', '+')
    redis.call('DEL', root..name)
end
for i = 3, #ARGV do
    local name, kind, items = unpack(cjson.decode(ARGV[i]))
    local key = root..name
    if kind == 'set' then
        for _, item in ipairs(items) do redis.call('SADD', key, item) end
    else
        for j = 1, #items, 2 do
            -- An artifact that is kept here was used later.
            if begins(name, 'artifact:of:') then redis.call('HSETNX', key, items[j], items[j + 1])
            elseif kind == 'hash' then redis.call('HSET', key, items[j], items[j + 1])
            elseif kind == 'zset' then redis.call('ZADD', key, items[j + 1], items[j])
            else redis.call('XADD', key, items[j], 'record', items[j + 1]) end
        end
    end
end
redis.call('DEL', root..'artifact:held')  -- it is made anew
-- Records that the backup has are refused here, because ids of a stream only grow.
for name, rows in pairs(later) do
    for _, row in ipairs(rows) do redis.pcall('XADD', root..name, row[1], 'record', row[2][2]) end
end
redis.call('SET', mark, '1', 'PX', '"""
    + str(_MARK_MS)
    + """')
return 1
"""
)
"""Arguments: "1" to replace what is there, an id of this restore, the lines of hub.jsonl. Returns 0
if the hub is not empty. Tokens, the audit log and the accounts of artifacts are merged with those
of the hub."""


class BackupHeader(Frozen):
    """The first member of a backup."""

    format: Literal["aenv-ray hub backup"] = "aenv-ray hub backup"
    version: int
    """See `FORMAT`."""
    layout: int
    """See `aenv_ray.hub.keys.LAYOUT`."""
    software: str
    """Version of aenv-ray that wrote it."""
    created_at: float
    """Seconds since the epoch."""


class BackupSummary(Frozen):
    """The last member of a backup."""

    keys_sha256: str
    versions: int
    tokens: int
    audit_records: int
    artifacts: int
    artifact_bytes: int
    missing: tuple[str, ...]
    """Versions whose archive the artifact store does not have, or only damaged."""


class StoredHub(HubCore):
    """A hub that can be read and written as a whole."""

    async def snapshot(self) -> dict[str, tuple[str, list[str]]]:
        """Return the type and content of each key at one moment, by name without the root.

        Raises:
            FabricUnavailable: Redis does not answer.
        """
        rows = await self._run(SNAPSHOT)
        found = {name: (kind, items) for name, kind, items in sorted(rows)}
        gone = {
            number
            for number, text in _pairs(found.get("token:records"))
            if TokenRecord.model_validate_json(text).instance_id is not None
        }
        for name, index in (
            ("token:records", 0), ("token:secrets", 0), ("token:hashes", 1), ("token:expiry", 0),
        ):  # fmt: skip
            if name in found:
                kept = [pair for pair in _pairs(found[name]) if pair[index] not in gone]
                found[name] = (found[name][0], [text for pair in kept for text in pair])
        return found

    async def load(self, lines: list[str], *, replace: bool) -> None:
        """Write the lines of `hub.jsonl` at once.

        Raises:
            CatalogConflict: The hub is not empty, and is not to be replaced; nothing is changed.
            FabricUnavailable: Redis does not answer; try again.
        """
        if not await self._run(LOAD, str(int(replace)), f"restore:{uuid.uuid4()}", *lines):
            raise CatalogConflict(
                f"the hub in Redis at {self._where} is not empty",
                hint="restore into an empty hub, or pass --replace to delete what it has",
            )

    async def deletion_over(self, digest: str) -> None:
        """Wait until the collector has deleted an artifact, if it is about to.

        If the collector died meanwhile, this takes up to `LEAVING_S`.
        """
        mark = f"{self._keys.root}artifact:leaving:{digest}"
        while await self._ask("exists", mark):  # noqa: ASYNC110  # another process deletes it
            await asyncio.sleep(_LOOK_S)


def _pairs(content: tuple[str, list[str]] | None) -> Iterator[tuple[str, str]]:
    items = content[1] if content is not None else []
    return zip(items[::2], items[1::2], strict=True)


@contextlib.asynccontextmanager
async def opened(settings: Settings, *, create: bool) -> AsyncIterator[StoredHub]:
    """Connect to the hub's Redis without Ray, and start the bundled one while it is used.

    Args:
        settings: They name the Redis.
        create: Whether a bundled Redis that has no data yet may be started.

    Raises:
        ConfigError: There is no data on this machine, or another version wrote it.
        FabricUnavailable: Redis does not answer.
    """
    server: RedisServer | None = None
    if settings.redis_url is not None:
        client = connect(settings.redis_url, ANSWER_S, password=settings.redis_password)
        where = redacted(settings.redis_url)
    else:
        server = RedisServer(settings.data_dir, settings.runtime_dir)
        if not (create or server.directory.exists()):
            raise ConfigError(
                f"this machine has no hub: {server.directory} does not exist",
                hint="run this where the hub runs, or set AENV_REDIS_URL or AENV_DATA_DIR",
            )
        await server.ensure()
        client, where = server.connect(ANSWER_S), str(server.directory)
    hub = StoredHub(client, prefix=settings.redis_prefix, where=where)
    try:
        await hub.check_layout()
        yield hub
    finally:
        await hub.close()
        if server is not None:
            await server.end()


async def backup(
    hub: StoredHub, store: ArtifactStore, file: IO[bytes], clock: Clock
) -> BackupSummary:
    """Write a backup to a file, which need not be seekable, and return its summary.

    Raises:
        FabricUnavailable: Redis or the artifact store does not answer; the file is incomplete.
    """
    header = BackupHeader(
        version=FORMAT, layout=LAYOUT, software=aenv_ray.__version__, created_at=clock.now()
    )
    sizes: dict[str, int] = {}
    with tarfile.open(fileobj=file, mode="w|") as tar:
        _add(tar, _HEADER, header.model_dump_json().encode(), header.created_at)
        found = await hub.snapshot()
        for is_last in (False, True):
            for digest in sorted(_archives(found).keys() - sizes.keys()):
                with contextlib.suppress(ArtifactNotFound, ArtifactDamaged):
                    content = await store.read(digest)
                    _add(tar, _ARTIFACTS + digest, content, header.created_at)
                    sizes[digest] = len(content)
            if not is_last and not _archives(found).keys() <= sizes.keys():
                found = await hub.snapshot()
        archives = _archives(found)
        lines = [to_json([name, *content]) for name, content in found.items()]
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
        _add(tar, _KEYS, data, header.created_at)
        summary = BackupSummary(
            keys_sha256=hashlib.sha256(data).hexdigest(),
            versions=len(found.get("env:entries", ("", []))[1]) // 2,
            tokens=len(found.get("token:records", ("", []))[1]) // 2,
            audit_records=sum(len(found.get(name, ("", []))[1]) // 2 for name in AUDIT_STREAMS),
            artifacts=len(sizes),
            artifact_bytes=sum(sizes.values()),
            missing=tuple(sorted(v for d in archives.keys() - sizes.keys() for v in archives[d])),
        )
        _add(tar, _SUMMARY, summary.model_dump_json().encode(), header.created_at)
    return summary


def _archives(found: dict[str, tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Return the versions that a snapshot has of each archive, by digest."""
    versions: dict[str, list[str]] = {}
    for reference, text in _pairs(found.get("env:entries")):
        digest = json.loads(text)["archive"]
        if digest:
            versions.setdefault(digest, []).append(reference)
    return versions


def _add(tar: tarfile.TarFile, name: str, content: bytes, at: float) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(content), 0o600, int(at)
    tar.addfile(info, io.BytesIO(content))


async def restore(
    hub: StoredHub, store: ArtifactStore, file: IO[bytes], *, replace: bool
) -> BackupSummary:
    """Check a whole backup, then store its archives, then write its keys at once.

    Args:
        hub: Must be empty but for tokens, leases, the audit log, documents of `RUNNING_KINDS` and
            the accounts of artifacts, unless `replace`.
        store: Where the archives go; a gateway deletes those that it has and no version refers to.
        file: Seekable.
        replace: Delete what the hub has and the backup lacks, except for tokens, leases and the
            accounts of artifacts.

    Raises:
        BackupInvalid: The file is not a backup, is damaged or truncated, or was written by a newer
            version.
        CatalogConflict: The hub is not empty.
        FabricUnavailable: Redis or the artifact store does not answer; try again.
    """
    lines, summary = check(file)
    if not replace:
        await hub.load([], replace=False)
    for digest, content in _artifacts(file):
        await store.put(content.read(), digest=digest)
    await hub.load(lines, replace=replace)
    detail = {"versions": str(summary.versions), "replace": str(replace).lower()}
    try:
        await hub.record(AuditRecord(actor="operator", action="hub.restore", detail=detail))
        # Until now, the collector of a gateway that runs went by the old versions.
        for digest, content in _artifacts(file):
            await hub.deletion_over(digest)
            if await hub.versions_of_archive(digest) and not await store.exists(digest):
                await store.put(content.read(), digest=digest)
    except FabricUnavailable as exc:
        raise FabricUnavailable(
            f"the hub is restored, but archives of its versions may be missing: {exc.message}",
            hint="restore once more, with --replace",
        ) from exc
    return summary


def _artifacts(file: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the digest and the content of each archive of a backup."""
    file.seek(0)
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for info in tar:
            if info.name.startswith(_ARTIFACTS):
                content = tar.extractfile(info)
                assert content is not None
                yield info.name.removeprefix(_ARTIFACTS), content


def check(file: IO[bytes]) -> tuple[list[str], BackupSummary]:
    """Return the lines of `hub.jsonl` and the summary after checking each byte of a backup.

    Raises:
        BackupInvalid: The file is not a backup, is damaged or truncated, or was written by a newer
            version.
    """
    members: dict[str, bytes] = {}
    file.seek(0)
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for number, info in enumerate(tar):
                content: Any = tar.extractfile(info)
                if content is None or info.issparse():  # which can be larger than the file
                    raise _foreign()
                if number == 0:
                    if info.name != _HEADER:
                        raise _foreign()
                    _check_header(content.read())
                elif info.name.startswith(_ARTIFACTS):
                    _check_artifact(info, content)
                else:
                    members[info.name] = content.read()
    except (tarfile.TarError, ValueError, OverflowError, EOFError) as exc:
        raise (_truncated() if "unexpected end" in str(exc) else _foreign()) from exc
    if _SUMMARY not in members or _KEYS not in members:
        raise _truncated()
    try:
        summary = BackupSummary.model_validate_json(members[_SUMMARY])
    except ValidationError as exc:
        raise _damaged(_SUMMARY) from exc
    if hashlib.sha256(members[_KEYS]).hexdigest() != summary.keys_sha256:
        raise _damaged(_KEYS)
    try:
        lines = members[_KEYS].decode("utf-8", "surrogatepass").split("\n")[:-1]
        _check_keys(lines)
    except (ValueError, RecursionError) as exc:
        raise _foreign() from exc
    return lines, summary


def _check_keys(lines: list[str]) -> None:
    """Check that `LOAD` can write these keys: it deletes the old ones first.

    Raises:
        ValueError: It cannot, or no backup has such keys.
    """
    names = set()
    for line in lines:
        match json.loads(line):
            case [str(name), str(kind), list(items)] if kind in _KINDS and name not in names:
                names.add(name)
            case _:
                raise ValueError("not a key with its content")
        is_possible = name != "layout" and not name.startswith(_NEVER)
        if name.startswith(_MERGED):
            is_possible &= kind == _MERGED_KINDS.get(name, "hash")
        if not is_possible or not _is_content(kind, items):
            raise ValueError(f"not a key of a backup: {name[:100]!r}")


def _is_content(kind: str, items: list[Any]) -> bool:
    """Return whether Redis accepts the content of a key, as `SNAPSHOT` returns it."""
    if kind == "set":
        return all(isinstance(item, str) for item in items)
    firsts, seconds = items[::2], items[1::2]
    if len(firsts) != len(seconds) or not all(isinstance(item, str) for item in items):
        return False
    if kind == "zset":
        return all(not math.isnan(float(score)) for score in seconds)
    if kind == "stream":
        found = [_STREAM_ID.fullmatch(one) for one in firsts]
        ids = [(int(one[1]), int(one[2])) for one in found if one is not None]
        return len(ids) == len(firsts) and all(a < b for a, b in itertools.pairwise([(0, 0), *ids]))
    return True


def _check_header(data: bytes) -> None:
    try:
        header = BackupHeader.model_validate_json(data)
    except ValidationError as exc:
        raise _foreign() from exc
    if header.version > FORMAT or header.layout != LAYOUT:
        raise BackupInvalid(
            f"aenv-ray {header.software} wrote this backup in format {header.version} with layout "
            f"{header.layout}; aenv-ray {aenv_ray.__version__} reads formats up to {FORMAT} and "
            f"layout {LAYOUT}",
            hint=f"restore it with aenv-ray {header.software}",
        )


def _check_artifact(info: tarfile.TarInfo, content: IO[bytes]) -> None:
    found = hashlib.sha256()
    while piece := content.read(_PIECE_BYTES):
        found.update(piece)
    if found.hexdigest() != info.name.removeprefix(_ARTIFACTS):
        raise _damaged(info.name)


def _foreign() -> BackupInvalid:
    return BackupInvalid(
        "the file is not a backup of a hub", hint="pass a file that aenv hub backup has written"
    )


def _truncated() -> BackupInvalid:
    return BackupInvalid(
        "the backup is truncated", hint="copy the file again, or use an earlier backup"
    )


def _damaged(name: str) -> BackupInvalid:
    return BackupInvalid(
        f"the backup is damaged: {name} has another checksum",
        hint="copy the file again, or use an earlier backup",
    )


async def write_backup(settings: Settings, file: IO[bytes]) -> BackupSummary:
    """Write a backup of the hub that the settings name; see `opened` and `backup`."""
    async with opened(settings, create=False) as hub:
        with contextlib.closing(open_artifact_store(settings)) as store:
            return await backup(hub, store, file, SystemClock())


async def read_backup(settings: Settings, file: IO[bytes], *, replace: bool) -> BackupSummary:
    """Restore a backup into the hub that the settings name; see `opened` and `restore`."""
    async with opened(settings, create=True) as hub:
        with contextlib.closing(open_artifact_store(settings)) as store:
            return await restore(hub, store, file, replace=replace)
