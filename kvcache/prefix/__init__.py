"""Prefix cache: the tree of cached pages, their order of eviction, and files of prefixes."""
