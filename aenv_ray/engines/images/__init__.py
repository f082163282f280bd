"""Container images: references, registries, credentials, builds, and the runtime for them."""
