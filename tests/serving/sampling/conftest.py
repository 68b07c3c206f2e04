import pytest


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly() -> None:
    """Nothing is: what is tested is arithmetic."""
