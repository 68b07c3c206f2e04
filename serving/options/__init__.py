"""Options of an engine, and what they come to for a model on a machine."""
