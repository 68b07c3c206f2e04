import json
import subprocess
import sys
from pathlib import Path

import pytest

import tests.serving.scheduler.soak


def run(policy: str, seed: int, num_steps: int) -> None:
    """Catches rows that are lost, moved or shared wrongly, leaks, and sequences that hang."""
    module = tests.serving.scheduler.soak.__name__
    done = subprocess.run(
        [sys.executable, "-m", module, policy, str(seed), str(num_steps)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["preempted"] > num_steps / 1000, seen
    moved = policy != "resident"
    assert (seen["dropped"] > 0, seen["onloaded"] > 0) == (moved, moved), seen


@pytest.mark.parametrize("policy", ["resident", "swap", "hybrid"])
def test_histories(policy: str) -> None:
    run(policy, seed=0, num_steps=3_000)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["resident", "swap", "hybrid"])
def test_long_histories(policy: str) -> None:
    run(policy, seed=1, num_steps=33_500)
