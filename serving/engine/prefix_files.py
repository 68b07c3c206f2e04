"""Prefix files into and out of the cache of a model runner."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from glm53.checkpoint.fingerprint import model_fingerprint
from kvcache import OutOfPagesError
from kvcache.prefix.description import PrefixDescription
from kvcache.prefix.file import PrefixFileError, PrefixReader, write_prefix
from kvcache.prefix_transfer import PrefixImport, export_prefix
from serving.engine.compile_notice import compile_notice
from serving.engine.model_runner import ModelRunner


class PrefixTransfer:
    """Writes and reads prefix files.

    Args:
        runner: has the cache and the model.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @functools.cached_property
    def _description(self) -> PrefixDescription:
        runner, geometry = self._runner, self._runner.geometry
        with compile_notice("the digest of the parameters"):
            model = model_fingerprint(runner.config, runner.params)
        return PrefixDescription(
            model=model,
            num_layers=geometry.num_layers,
            num_index_layers=geometry.num_index_layers,
            num_mtp_layers=geometry.num_layers - runner.config.num_hidden_layers,
            row_format=geometry.row_format,
            index_row_format=geometry.index_row_format,
        )

    def write(self, token_ids: Sequence[int], path: Path) -> None:
        """Writes the rows of a cached prefix.

        Raises:
            ValueError: not all of these tokens are cached.
            OSError: the file cannot be written.
        """
        blocks = export_prefix(self._runner.cache, token_ids)
        write_prefix(path, self._description, np.asarray(token_ids, np.int32), blocks)

    def read(self, path: Path) -> int:
        """Puts the rows of a file into the cache, all or none.

        Returns:
            Tokens of the prefix.

        Raises:
            PrefixFileError: the file is refused.
            OutOfPagesError: the cache has too little room.
            OSError: the file cannot be read.
        """
        with PrefixReader(path) as reader:
            reader.check_fits(self._description)
            token_ids = reader.token_ids
            unknown = token_ids[(token_ids < 0) | (token_ids >= self._runner.config.vocab_size)]
            if unknown.size:
                raise PrefixFileError(f"{path} has the token {unknown[0]}, which the model has not")
            try:
                with PrefixImport(self._runner.cache, token_ids.tolist()) as prefix:
                    for rows, keys in reader.blocks(with_mtp=self._description.num_mtp_layers > 0):
                        prefix.write(rows, keys)
                    prefix.finish()
            except OutOfPagesError as error:
                sizes = "device_pages"
                if self._runner.geometry.has_host_tier:
                    sizes += " or host_memory_gib"
                raise OutOfPagesError(
                    f"{path} has {len(token_ids)} tokens, for which the cache has too little room "
                    f"({error}): raise {sizes}"
                ) from error
        return len(token_ids)
