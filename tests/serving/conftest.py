from pathlib import Path

import pytest

from glm53 import LLM


@pytest.fixture(scope="session")
def tiny_llm() -> LLM:
    """The built-in model, for all files: steps of other sizes would be compiled anew."""
    return LLM(max_model_len=512, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the toy model is, for all files: `toy_options` writes it."""
    return tmp_path_factory.mktemp("toy")
