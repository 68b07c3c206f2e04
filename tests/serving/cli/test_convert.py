import re
from pathlib import Path

import pytest

from glm53.checkpoint import tensor_inventory
from glm53.checkpoint.source import read_config
from serving.cli import main
from tests.helpers.golden import GOLDEN


@pytest.mark.compiles
def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One line for each direction, and a directory that loads, from the built-in model."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["convert", "tiny", str(first)]) == 0
    assert main(["convert", str(first), str(second)]) == 0
    specs = tensor_inventory(read_config(second))
    counts = f"{len(specs):,} tensors, {sum(spec.num_bytes for spec in specs):,} bytes"
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        f"wrote orbax checkpoint {first}: {counts}",
        f"wrote safetensors checkpoint {second}: {counts}",
    ]
    assert captured.err == ""
    assert {file.name for file in second.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Exit code 2, no traceback: a source that is missing or damaged, a place that is taken."""
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "config.json").write_bytes((GOLDEN / "tiny_f32" / "config.json").read_bytes())
    (damaged / "model.safetensors").write_bytes(b"short")
    for source, destination, message in (
        ("nowhere", "new", "model 'nowhere' is neither a directory nor"),
        (str(damaged), "new", "cannot use checkpoint .*damaged:\n.* truncated"),
        (str(damaged), "damaged/new", "lies in the source"),
        ("tiny", "damaged", "damaged exists; choose a new directory"),
    ):
        assert main(["convert", source, str(tmp_path / destination)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.match(f"glm53: .*{message}", captured.err), captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]
