"""Redis: connections to it, and the bundled server of a data directory."""
