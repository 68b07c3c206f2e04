"""Compiling: keeping programs between processes, and all of them at start-up."""

import logging
import os
from pathlib import Path

import jax
from tqdm import tqdm

from glm53.terminal import terminal_columns
from pallas_kernels.common.jax_internals import keep_programs_whole
from serving.engine.compile_notice import compile_notice, without_compile_notices
from serving.engine.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_LEAST_SECONDS = "jax_persistent_cache_min_compile_time_secs"


def keep_compiled_programs() -> None:
    """Has jax keep all compiled programs between processes.

    What the user has said stands: where (`JAX_COMPILATION_CACHE_DIR`), of which compiling time on
    (`JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS`), and whether at all
    (`JAX_ENABLE_COMPILATION_CACHE=false`).
    """
    if not jax.config.jax_enable_compilation_cache:
        return
    keep_programs_whole()
    if jax.config.jax_compilation_cache_dir is None:
        try:
            directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "glm53"
            directory.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:  # The latter where there is no home.
            logger.warning("compiled programs are not kept: %s", error)
            return
        jax.config.update("jax_compilation_cache_dir", str(directory))
    # A start reads dozens of programs, most of which compile in less than jax's one second.
    if _LEAST_SECONDS.upper() not in os.environ and getattr(jax.config, _LEAST_SECONDS) == 1.0:
        jax.config.update(_LEAST_SECONDS, 0.0)


def warm_up_programs(runner: ModelRunner) -> None:
    """Launches everything that serving may launch, on padding; shows progress on a terminal."""
    launches = runner.programs
    on_terminal = terminal_columns() > 0
    notice = without_compile_notices() if on_terminal else compile_notice(f"{len(launches)} steps")
    with notice, tqdm(launches, desc="Compiling", disable=not on_terminal) as programs:
        for name, launch in programs:
            programs.set_postfix_str(name)
            launch()
    runner.synchronize()
