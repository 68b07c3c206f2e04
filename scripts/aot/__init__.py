"""Compilation for H200s on a machine without one, and reports of what the programs do."""
