"""Parts that operations share: row formats, copies, and the choice of an implementation."""
