"""The only package that uses Ray's API, including its private parts and version differences."""
