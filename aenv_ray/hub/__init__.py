"""The hub: versioned environments, leases, tokens, quotas and services, kept in Redis."""
