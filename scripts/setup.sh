#!/usr/bin/env bash
# Makes .venv, which everything but scripts/setup_aot.sh and the benchmarks' peers runs in.
set -euo pipefail
exec "$BASH" "${BASH_SOURCE[0]%/*}/make_environment.sh" .venv requirements/dev.lock "a minute"
