"""Every key that the hub keeps in Redis: its type, what it holds, how long, and why.

``P`` stands for the prefix in braces, ``{aenv}`` by default: a Redis Cluster then keeps all keys
on one node, where one script may change several at once.

``P:env:entries``
    hash: ``name@version`` -> the entry as JSON, without status. Lives: until deleted. For:
    written once, never changed (invariant 6).
``P:env:states``
    hash: ``name@version`` -> ``status updated_at``. Lives: as the entry. For: what of a version
    does change.
``P:env:contents``
    hash: ``name@version`` -> SHA-256 of the content. Lives: for ever. For: a deleted version's
    name takes no other content.
``P:env:in:all``
    sorted set: members that sort by name, then highest version. Lives: as the entry. For:
    listings page through it.
``P:env:in:latest``
    sorted set: of each name the highest version that is not Failed. Lives: as the entry. For:
    ``name`` alone; listings.
``P:env:in:status:<status>``
    sorted set: the same members, by status. Lives: as the entry. For: filter.
``P:env:in:tag:<tag>``
    sorted set: the same members, by tag. Lives: as the entry. For: filter.
``P:env:in:word:<word>``
    sorted set: the same members, by lower-case word. Lives: as the entry. For: search.
``P:env:words``
    sorted set: the words that have members. Lives: as the entry. For: search for beginnings of
    words.
``P:lease:one:<id>``
    hash: ``record`` and ``names`` (JSON), ``status``, ``deadline``, ``reason``, ``engine``.
    Lives: until `end_leases`, or some time after its end. For: what an instance is accounted
    as.
``P:lease:in:all``
    sorted set: members that sort newest first. Lives: as the lease. For: listings page through
    it.
``P:lease:in:env:<name>``
    sorted set: the same members, by environment. Lives: as the lease. For: filter.
``P:lease:in:ref:<name@version>``
    sorted set: the same members, by version. Lives: as the lease. For: filter.
``P:lease:in:status:<status>``
    sorted set: the same members, by status. Lives: as the lease. For: filter.
``P:lease:in:<subject>``
    sorted set: the same members, by ``owner:…`` and ``label:…=…``. Lives: as the lease. For:
    filter.
``P:lease:live:<subject>``
    set: ids of leases that are Pending or Running. Lives: while they are. For: its size is what
    a quota counts: no counter can drift.
``P:lease:live-ref:<name@version>``
    set: the same ids, by version. Lives: while they are. For: a version in use is not deleted.
``P:lease:capabilities``
    hash: capability -> lease id. Lives: as the lease. For: routes without a token.
``P:lease:deadlines``
    sorted set: ids of the live leases, score: deadline. Lives: while they are. For: the sweep
    ends them.
``P:lease:ended``
    sorted set: ids of the others, score: when to forget them. Lives: until then. For: the sweep
    forgets them.
``P:quota:limits``
    hash: subject -> instances at once. Lives: until deleted. For: quotas.
``P:quota:waiting:<subject>``
    hash: owner -> ``since until places``. Lives: swept at the next refusal. For: owners that
    were refused come before those that ask later.
``P:token:records``
    hash: token id -> its record as JSON, without secret. Lives: until revoked or expired. For:
    listings.
``P:token:hashes``
    hash: SHA-256 of the secret -> token id. Lives: as the record. For: one look-up a request.
``P:token:secrets``
    hash: token id -> SHA-256 of the secret. Lives: as the record. For: to revoke by id.
``P:token:expiry``
    sorted set: token id, score: when it ends. Lives: as the record. For: the sweep.
``P:token:of:<instance id>``
    set: ids of the agent tokens of an instance. Lives: as the lease. For: they end with it.
``P:once:<key>``
    string: what was first kept under the key. Lives: the caller's TTL. For: idempotency keys.
``P:doc:<kind>``
    hash: name -> JSON document. Lives: until deleted. For: services and their storage.
"""

from __future__ import annotations

from typing import Final

DEFAULT_PREFIX: Final = "aenv"


class Keys:
    """The names of the keys that are used outside of scripts, and the root of all.

    Args:
        prefix: Tells hubs that share a Redis from each other.
    """

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        self.root = "{" + prefix + "}:"
        self.entries = self.root + "env:entries"
        self.states = self.root + "env:states"
        self.limits = self.root + "quota:limits"
        self.token_records = self.root + "token:records"
        self.documents = self.root + "doc:"
