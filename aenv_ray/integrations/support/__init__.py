"""What adapters share: tools as frameworks call them, schemas, token loops, projects, versions."""
