"""GLM-5.3 inference in JAX with a paged KV cache."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from glm53.model.config import GLMConfig
    from serving.errors import EngineDeadError, GenerationError
    from serving.llm import LLM
    from serving.loop import ServingLoop
    from serving.options.engine_options import EngineOptions
    from serving.requests.outputs import RequestOutput
    from serving.requests.sampling_params import SamplingParams
    from serving.requests.stream import RequestStream

    __version__: str

__all__ = [
    "LLM",
    "EngineDeadError",
    "EngineOptions",
    "GLMConfig",
    "GenerationError",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "ServingLoop",
    "__version__",
]

_HOMES = {
    "EngineDeadError": "serving.errors",
    "EngineOptions": "serving.options.engine_options",
    "GLMConfig": "glm53.model.config",
    "GenerationError": "serving.errors",
    "LLM": "serving.llm",
    "RequestOutput": "serving.requests.outputs",
    "RequestStream": "serving.requests.stream",
    "SamplingParams": "serving.requests.sampling_params",
    "ServingLoop": "serving.loop",
}


def __getattr__(name: str) -> Any:
    """Imports public names on first use, so that the model does not import the entry points."""
    if name == "__version__":
        return importlib.metadata.version("glm53")
    if name not in _HOMES:
        raise AttributeError(f"module 'glm53' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
