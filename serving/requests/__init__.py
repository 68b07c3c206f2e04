"""Requests: prompts and parameters in, outputs and streams out."""
