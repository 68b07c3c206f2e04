"""Sampling written from its definition, in float64 NumPy, one row at a time and with sorts."""

from collections.abc import Sequence

import numpy as np

from serving.sampling import SlotSampling


def adjust(logits: np.ndarray, values: SlotSampling, output: Sequence[int]) -> np.ndarray:
    """Logits [vocab] after masks, bias and penalties; `output` are the tokens chosen so far."""
    output = list(output)
    logits = logits.astype(np.float64)

    def mask(tokens: set[int]) -> None:
        open_tokens = set(np.flatnonzero(logits > -np.inf).tolist())
        if open_tokens - tokens:
            logits[sorted(tokens)] = -np.inf

    if values.allowed_token_ids is not None:
        mask(set(range(len(logits))) - set(values.allowed_token_ids))
    words = [list(word) for word in values.bad_words if word]
    mask({word[-1] for word in words if (output + word[-1:])[-len(word) :] == word})
    if len(output) < values.min_tokens:
        mask(set(values.stop_ids))
    for token, bias in values.logit_bias.items():
        logits[token] += bias
    for token in set(output) | set(values.prompt_token_ids):
        if logits[token] > 0:
            logits[token] /= values.repetition_penalty
        else:
            logits[token] *= values.repetition_penalty
    for token in set(output):
        logits[token] -= values.frequency_penalty * output.count(token)
        logits[token] -= values.presence_penalty
    return logits


def keep(distances: np.ndarray, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """Whether each token [vocab] is kept, from (largest logit - logit) / temperature."""
    distances = distances.astype(np.float64)
    weights = np.exp(-distances)
    kept = np.isfinite(distances) & (weights >= min_p)
    if 0 < top_k < kept.sum():
        kept &= distances <= np.sort(distances[kept])[top_k - 1]
    if top_p < 1:
        ascending = np.sort(distances[kept])
        mass = np.cumsum(np.exp(-ascending)) / np.exp(-ascending).sum()
        kept &= distances <= ascending[min(np.searchsorted(mass, top_p), len(mass) - 1)]
    return kept


def distribution(logits: np.ndarray, values: SlotSampling, output: Sequence[int]) -> np.ndarray:
    """Probability of each token [vocab]."""
    adjusted = adjust(logits, values, output)
    distances = (adjusted.max() - adjusted) / values.temperature
    weights = np.exp(-distances)
    weights[~keep(distances, values.min_p, values.top_k, values.top_p)] = 0
    return weights / weights.sum()
