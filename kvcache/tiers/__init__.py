"""Tiers of the cache: where each page lies, and the policy that moves pages between them."""
