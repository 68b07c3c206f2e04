"""Routed and shared experts of a sparse layer."""

from pallas_kernels.experts.operation import StepKind, route, run_experts
from pallas_kernels.experts.parameters import ExpertMatrices, GatedStack

__all__ = ["ExpertMatrices", "GatedStack", "StepKind", "route", "run_experts"]
