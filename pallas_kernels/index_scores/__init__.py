"""Lightning-indexer scores of query rows over the paged index keys of their sequences."""

from pallas_kernels.index_scores.operation import batched_index_scores, index_scores
from pallas_kernels.index_scores.plan import MAX_SEQUENCES
from pallas_kernels.index_scores.reference import KEY_BLOCK

__all__ = ["KEY_BLOCK", "MAX_SEQUENCES", "batched_index_scores", "index_scores"]
