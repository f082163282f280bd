"""What an author of an environment meets: decorators, registry, schemas, loader."""
