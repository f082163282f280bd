"""For authors of environments: decorators, registry, schemas, loader."""
