"""Sampling of the next token on the device, one row of logits a sequence."""

from serving.sampling.logprobs import TopLogprobs, top_logprobs
from serving.sampling.sampler import Sampler
from serving.sampling.state import SamplingState, SlotSampling

__all__ = ["Sampler", "SamplingState", "SlotSampling", "TopLogprobs", "top_logprobs"]
