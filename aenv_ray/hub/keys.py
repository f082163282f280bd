"""Every key that the hub keeps in Redis: its type, what it holds, how long, and why.

``P`` stands for the prefix in braces, ``{aenv}`` by default: a Redis Cluster then keeps all keys
on one node, where one script may change several at once.

Keys of an environment version live until it is deleted, keys of a lease until `end_leases` or some
time after its end, unless noted.

``P:layout``
    string: `LAYOUT`, and the version of aenv-ray that noted it. Kept forever.
``P:env:entries``
    hash: ``name@version`` -> the entry as JSON, without status; written once (invariant 6).
``P:env:states``
    hash: ``name@version`` -> ``status updated_at``, the mutable part of a version.
``P:env:contents``
    hash: ``name@version`` -> SHA-256 of the content. Kept forever: a deleted version cannot be
    published again with different content.
``P:env:bytes``
    hash: owner -> total size of the owner's entries. Kept forever.
``P:env:owners``
    hash: name -> the owner of the name. Kept forever.
``P:env:grants``
    hash: ``name owner`` -> the granted right; the owner ``*`` is everybody. Lives until revoked.
``P:env:granted``
    sorted set: ``name owner`` of all grants, to find those of a name. Made anew if an earlier
    version has granted or revoked some.
``P:env:archives``
    sorted set: ``digest name@version`` of all versions, to find those of an archive. Made anew if
    an earlier version has published or deleted some.
``P:env:in:all``
    sorted set: versions, sorted by name and then highest version first; listings page through it.
``P:env:in:latest``
    sorted set: the highest version of each name that is not Failed.
``P:env:in:status:<status>``
    sorted set: versions by status.
``P:env:in:tag:<tag>``
    sorted set: versions by tag.
``P:env:in:word:<word>``
    sorted set: versions by lower-case word, for searches.
``P:env:words``
    sorted set: the words that have versions, for searches by the beginning of a word.
``P:artifact:of:<owner>``
    hash: digest -> ``size kept_at`` of an owner's artifacts. Lives until collected.
``P:artifact:held``
    hash: owner -> ``bytes number`` of the owner's artifacts; made anew if the number is wrong.
``P:artifact:leaving:<digest>``
    string: 1 while the collector deletes an artifact, which nobody can keep meanwhile. Lives until
    it is deleted, or its deletion was interrupted for `LEAVING_S`.
``P:artifact:owners``
    set: the owners that had artifacts. Kept forever.
``P:lease:one:<id>``
    hash: ``record`` and ``names`` (JSON), ``status``, ``deadline``, ``reason``, ``engine``.
``P:lease:in:all``
    sorted set: leases, newest first; listings page through it.
``P:lease:in:env:<name>``
    sorted set: leases by environment.
``P:lease:in:ref:<name@version>``
    sorted set: leases by version.
``P:lease:in:status:<status>``
    sorted set: leases by status.
``P:lease:in:<subject>``
    sorted set: leases by ``owner:…`` and ``label:…=…``.
``P:lease:live:<subject>``
    set: ids of leases that are Pending or Running. Quotas count its members, so no counter can
    drift. A lease that counts as n > 1 instances also has the members ``<id>/2`` to ``<id>/n``;
    one that counts as none has no member.
``P:lease:live-ref:<name@version>``
    set: the same ids by version; a version in use cannot be deleted.
``P:lease:capabilities``
    hash: capability -> lease id, for routes without a token.
``P:lease:deadlines``
    sorted set: ids of live leases by deadline; the sweep ends overdue ones.
``P:lease:ended``
    sorted set: ids of ended leases by the time when the sweep deletes them.
``P:quota:limits``
    hash: subject -> number of concurrent instances. Lives until deleted.
``P:quota:waiting:<subject>``
    hash: owner -> ``since until places`` of refused requests, which precede later ones. Expired
    entries are removed at the next refusal.
``P:token:records``
    hash: token id -> record as JSON, without secret. Keys of a token live until it is revoked or
    expires.
``P:token:hashes``
    hash: SHA-256 of the secret -> token id.
``P:token:secrets``
    hash: token id -> SHA-256 of the secret, to revoke a token by its id.
``P:token:expiry``
    sorted set: token ids by expiry, for the sweep.
``P:token:of:<instance id>``
    set: ids of the agent tokens of an instance, which end with its lease.
``P:audit``
    stream: audit records of what administrators and commands on the cluster have done, as JSON;
    earlier versions kept all of what was done here. The latest ones are kept, see `Hub.record`.
``P:audit:publisher``
    stream: audit records of what publishers have done, apart from their tokens.
``P:audit:user``
    stream: audit records of what every owner may do.
``P:audit:refused``
    stream: audit records of attempts that were refused or failed. No id is in two streams.
``P:once:<key>``
    string: the first value stored under an idempotency key, or what has replaced it. Lives for the
    caller's TTL. Under ``audit:<nonce>``, for minutes: this record is in the audit log.
``P:once:group:<name>``
    sorted set: keys of a group whose number is limited -> when each is forgotten, in milliseconds
    since the epoch. Lives as long as the last of them.
``P:doc:<kind>``
    hash: name -> JSON document, such as a service. Lives until deleted. Those of
    `RUNNING_KINDS` describe the gateway that runs, and are not part of backups.
"""

from __future__ import annotations

from typing import Final

DEFAULT_PREFIX: Final = "aenv"
LAYOUT: Final = 1
"""Version of the keys and of what they hold. Raise it with a change that other versions would
misread, and migrate older data in `HubCore.check_layout`."""

GATEWAY_DEPLOYED: Final = "deployed"
"""Kind of the document with the settings of the gateway that runs."""
GATEWAY_REPLICA: Final = "gateway-replica"
"""Kind of the documents that hold the heartbeats of its replicas."""
RUNNING_KINDS: Final = (GATEWAY_DEPLOYED, GATEWAY_REPLICA)
AUDIT_STREAMS: Final = ("audit", "audit:publisher", "audit:user", "audit:refused")


class Keys:
    """The names of the keys that are used outside of scripts, and the root of all."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        self.root = "{" + prefix + "}:"
        self.layout = self.root + "layout"
        self.entries = self.root + "env:entries"
        self.states = self.root + "env:states"
        self.owners = self.root + "env:owners"
        self.grants = self.root + "env:grants"
        self.limits = self.root + "quota:limits"
        self.token_records = self.root + "token:records"
        self.audit = tuple(self.root + name for name in AUDIT_STREAMS)
        self.documents = self.root + "doc:"
