"""Lightning-indexer scores of query rows over one sequence's paged index keys."""

from pallas_kernels.index_scores.reference import KEY_BLOCK, index_scores

__all__ = ["KEY_BLOCK", "index_scores"]
