"""Compiling at start-up, so that nothing is compiled while requests wait."""

import os
import sys
from pathlib import Path

import jax
from tqdm import tqdm

from serving.model_runner import ModelRunner


def keep_compiled_programs() -> None:
    """Has jax keep compiled programs between processes, unless the user has said where, or that it
    shall not (`JAX_ENABLE_COMPILATION_CACHE=false`)."""
    if jax.config.jax_compilation_cache_dir is None:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(caches) / "glm53"))


def warm_up_programs(runner: ModelRunner) -> None:
    """Launches everything that serving may launch, on padding; shows progress on a terminal."""
    hidden = not sys.stderr.isatty()
    with tqdm(runner.programs, desc="Compiling", disable=hidden) as programs:
        for name, launch in programs:
            programs.set_postfix_str(name)
            launch()
    runner.synchronize()
