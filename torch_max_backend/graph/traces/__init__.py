"""Storing compiled Dynamo graphs in the disk cache, and reading them again."""
