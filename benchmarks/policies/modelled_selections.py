"""Selections by a random model of scores, with the miss rates published for a real model."""

import numpy as np

from benchmarks.policies.recorded_selections import Selections


def modelled_selections(
    num_caches: int, num_steps: int, top_k: int, warm_up: int, seed: int = 0
) -> Selections:
    """Returns the positions with the highest of random scores that change slowly between steps.

    The score of a position is the sum of a standard normal constant; two first-order autoregressive
    processes with deviations 1 and 0.5 and correlations 0.992 and 0.7 between steps; and Student's
    t with two degrees of freedom times 0.08, drawn anew at each step. One in 32 positions is
    selected. The numbers were chosen so that the miss rates of LRU, FIFO, random replacement and
    Belady's bound come near the published ones.
    """
    generator = np.random.default_rng(seed)
    shape, kept = (num_caches, 32 * top_k), 8 * top_k
    constant, slow, fast = generator.standard_normal((3, *shape))
    ranked = np.empty((num_caches, num_steps, kept), np.int32)
    scores = np.empty(ranked.shape, np.float32)
    for step in range(num_steps):
        slow = 0.992 * slow + (1 - 0.992**2) ** 0.5 * generator.standard_normal(shape)
        fast = 0.7 * fast + (1 - 0.7**2) ** 0.5 * generator.standard_normal(shape)
        score = constant + slow + 0.5 * fast + 0.08 * generator.standard_t(2, shape)
        best = np.argpartition(-score, kept, axis=1)[:, :kept]
        order = np.argsort(-np.take_along_axis(score, best, axis=1), axis=1)
        ranked[:, step] = np.take_along_axis(best, order, axis=1)
        scores[:, step] = np.take_along_axis(score, ranked[:, step].astype(int), axis=1)
    return Selections(ranked, scores, top_k, warm_up)
