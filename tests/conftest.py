import os
from pathlib import Path

# Read when jax is imported. Four devices let one CPU stand in for a mesh.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "4"
# Compiling takes most of the time: this saves a third of it, and costs short runs little.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_extra_options=xla_cpu_optimize_for_size,xla_cpu_disable_loop_unrolling"
    " --xla_cpu_parallel_codegen_split_count=1"
)
# Compiled steps are kept between runs; a step is compiled again only when its program changes.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(__file__).parent.parent / ".cache" / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import gc
from collections.abc import Callable, Iterator

import hypothesis
import jaxtyping
import pytest

# What tests share shows the values of what it asserts, as tests do.
pytest.register_assert_rewrite("tests.helpers", "tests.glm53", "tests.kvcache", "tests.serving")

from tests.helpers.type_checks import check_cheaply  # noqa: E402

check_cheaply()  # before any module of the packages is imported

# What jax has traced lives on in its caches: going through it for garbage now and then takes a
# twelfth of the time. Tests collect garbage themselves where they need to.
gc.set_threshold(10_000, 20, 1000)

# The same examples on every run: a failure belongs to the change that shows it.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci")

_PROGRAMS = pytest.StashKey[Callable[[], int]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begins with the files that compile: they take longest, and the others fill the end."""
    compiling = {item.path for item in items if item.get_closest_marker("compiles")}
    items.sort(key=lambda item: item.path not in compiling)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Imported late, since it imports jax, whose settings tests/aot changes.
    from serving.engine.compile_counter import CompileCounter

    counter = CompileCounter()
    item.stash[_PROGRAMS] = lambda: counter.count


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    compiled = item.stash[_PROGRAMS]()
    if compiled and not item.get_closest_marker("compiles"):
        pytest.fail(f"{compiled} programs were compiled: mark the test, or its file, `compiles`")


@pytest.fixture(scope="session", autouse=True)
def host_pages_unlike_device_pages() -> Iterator[None]:
    """No index of a page that is right in place of another by chance."""
    # Imported late, since it imports jax, whose settings tests/aot changes.
    from tests.helpers.free_lists import use_host_list

    with pytest.MonkeyPatch.context() as patch:
        use_host_list(patch)
        yield


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """Without the type checks of the tests, which would refuse wrong types first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
