#!/usr/bin/env bash
# Makes .venv-aot, which has jax's CUDA plugin and so compiles for GPUs without one. It takes 1.1 GB.
set -euo pipefail
exec "$BASH" "${BASH_SOURCE[0]%/*}/make_environment.sh" .venv-aot requirements/aot.lock "a minute"
