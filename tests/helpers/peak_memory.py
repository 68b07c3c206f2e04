"""Measures what a script does to the peak memory of a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

MIB = 1 << 20
_SETTLED = {
    # What is freed goes back to the system, however threads take turns.
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
    # Programs written to the cache take memory, and which are depends on the load.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


def peak_memory() -> int:
    """The most memory this process has held, in bytes.

    `getrusage` would not do: a process starts with the figure of the one that started it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise OSError("the kernel does not tell the peak memory of a process")


def run_script(script: str, *args: object, num_devices: int = 1) -> list[float]:
    """Runs a Python script in its own process and returns the numbers that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(num_devices)} | _SETTLED,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return [float(number) for number in done.stdout.split()]
