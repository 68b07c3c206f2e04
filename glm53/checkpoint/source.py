"""Recognises what kind of checkpoint a directory holds."""

from pathlib import Path

from flax import nnx
from jax.sharding import Mesh

from glm53.checkpoint.hugging_face import load_hugging_face
from glm53.checkpoint.orbax import CONFIG_FILE, load_orbax, read_orbax_config
from glm53.jax_settings import own_jax_settings
from glm53.model.config import GLMConfig


def read_config(path: str | Path) -> GLMConfig:
    """The config of a checkpoint directory of either kind.

    Raises:
        FileNotFoundError: no such directory, or no config in it.
        ValueError: the config is refused.
    """
    path = Path(path)
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint directory {path}")
    if (path / CONFIG_FILE).is_file():
        return read_orbax_config(path)
    return GLMConfig.from_pretrained(path)


@own_jax_settings()
def load_checkpoint(
    path: str | Path, config: GLMConfig, mesh: Mesh, *, use_tqdm: bool = False
) -> nnx.State:
    """Loads a checkpoint directory of either kind, sharded over `mesh`.

    Raises:
        FileNotFoundError: no weights there.
        CheckpointError: the weights are damaged or of another model; all problems are named.
    """
    if (Path(path) / CONFIG_FILE).is_file():
        return load_orbax(path, config, mesh)
    return load_hugging_face(path, config, mesh, use_tqdm=use_tqdm)
