#!/usr/bin/env bash
# Writes requirements/*.lock from pyproject.toml. Keeps the versions that are locked and still
# fit; pass --upgrade (or --upgrade-package NAME) to move on.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

compile() {
    .venv/bin/uv pip compile --quiet --universal --python-version 3.12 --generate-hashes \
        --no-header --no-annotate --no-emit-index-url "$@" pyproject.toml
}

compile --extra test --extra dev --output-file requirements/dev.lock "$@"
# The GPU runs the versions that the tests ran, and what compiles for it without one does too.
compile --extra gpu --constraints requirements/dev.lock --output-file requirements/gpu.lock "$@"
compile --extra test --extra aot --constraints requirements/dev.lock \
    --output-file requirements/aot.lock "$@"
