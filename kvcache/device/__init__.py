"""Device side of the cache: its arrays, what steps do with them, and moves between tiers."""
