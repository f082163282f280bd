"""Parts that several engines use on a node."""
