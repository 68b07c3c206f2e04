"""Generation: requests in, tokens out, and the entry points."""
