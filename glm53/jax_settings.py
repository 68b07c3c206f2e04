"""Settings of jax under which this project's programs run, whatever the process has set.

Whoever embeds a model may have set any of them, by the environment, `jax.config` or a context
manager. They change random bits, roundings and dtypes, or refuse programs that are right.
"""

import contextlib
from collections.abc import Iterator

import jax

# For each name in `jax.config`, what sets it for a thread, and the values that programs are written
# for, the first of which is set where it has another.
_SETTINGS = {
    "jax_enable_x64": (jax.enable_x64, (False,)),
    "jax_numpy_dtype_promotion": (jax.numpy_dtype_promotion, ("standard",)),
    "jax_numpy_rank_promotion": (jax.numpy_rank_promotion, ("allow",)),
    "jax_threefry_partitionable": (jax.threefry_partitionable, (True,)),
    "jax_default_matmul_precision": (jax.default_matmul_precision, (None,)),
    "jax_default_device": (jax.default_device, (None,)),
    # NaN is a value like others here: of padding, and of what is not there.
    "jax_debug_nans": (jax.debug_nans, (False,)),
    "jax_debug_infs": (jax.debug_infs, (False,)),
    "jax_disable_jit": (jax.disable_jit, (False,)),
    "jax_transfer_guard_host_to_device": (jax.transfer_guard_host_to_device, ("allow", None)),
    "jax_transfer_guard_device_to_host": (jax.transfer_guard_device_to_host, ("allow", None)),
    "jax_transfer_guard_device_to_device": (jax.transfer_guard_device_to_device, ("allow", None)),
}


@contextlib.contextmanager
def own_jax_settings() -> Iterator[None]:
    """Context, and decorator, in which jax has its defaults where programs depend on them.

    It holds for the calling thread, and belongs around all that traces or launches a program or
    makes an array. Where nothing is set, it only looks.
    """
    with contextlib.ExitStack() as stack:
        for name, (setting, values) in _SETTINGS.items():
            if getattr(jax.config, name) not in values:
                stack.enter_context(setting(values[0]))
        if not jax.sharding.get_abstract_mesh().empty:
            stack.enter_context(jax.set_mesh(None))
        yield
