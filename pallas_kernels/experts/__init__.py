"""Routed and shared experts of a sparse layer."""

from pallas_kernels.experts.operation import StepKind, route, run_experts
from pallas_kernels.experts.parameters import GatedStack, MatrixStack

__all__ = ["GatedStack", "MatrixStack", "StepKind", "route", "run_experts"]
