import os
from pathlib import Path

# Read when jax is imported. Four devices let one CPU stand in for a mesh.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
# Compiling takes most of the time: this saves a third of it, and costs short runs little.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_extra_options=xla_cpu_optimize_for_size,xla_cpu_disable_loop_unrolling"
    # `make test` has it so for what runs the model's steps, which compile in half the time then.
    # Sums may be rounded otherwise, so tests of the model's own arithmetic do without.
    + ",xla_cpu_disable_new_fusion_emitters" * ("FORMER_EMITTERS" in os.environ)
    + " --xla_cpu_parallel_codegen_split_count=1"
)
# Compiled steps are kept between runs; a step is compiled again only when its program changes.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent.parent / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest

# The same examples on every run: a failure belongs to the change that shows it.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")

# Files of tests that take longest, slowest first: they are begun first, so that no process is left
# with one when the others have run out of work.
_SLOWEST = (
    "glm53/test_golden.py",
    "glm53/test_residency_invariance.py",
    "glm53/test_bitwise.py",
    "serving/test_llm.py",
    "glm53/test_needles.py",
    "glm53/test_checkpoint.py",
    "glm53/test_decode_with_kernels.py",
    "pallas_kernels/test_select_topk_kernel.py",
    "serving/test_known_failures.py",
    "kvcache/test_steps_in_place.py",
    "test_docs.py",
    "serving/test_same_answers.py",
    "glm53/test_layer_plan.py",
    "glm53/test_drafts_after_prefix.py",
    "serving/test_long_context.py",
    "glm53/test_convert.py",
    "serving/test_llm_sampling.py",
    "pallas_kernels/test_index_scores_kernel.py",
    "serving/test_warm_up.py",
    "serving/test_batch.py",
    "glm53/test_fingerprint.py",
    "serving/test_engine.py",
    "serving/test_lifetimes.py",
    "serving/test_recovery.py",
    "benchmarks/h200/test_kernels.py",
    "glm53/test_dense_reference.py",
    "pallas_kernels/test_resolve_rows_kernel.py",
    "kvcache/test_selection.py",
    "serving/scheduler/test_soak.py",
    "serving/test_prefix_transfer.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for name in _SLOWEST:
        if not (tests / name).is_file():
            raise pytest.UsageError(f"_SLOWEST of {__file__} names {name}, which is not there")
    place = {tests / name: number for number, name in enumerate(_SLOWEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """Without the type checks of the tests, which would refuse wrong types first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
