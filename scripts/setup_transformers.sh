#!/usr/bin/env bash
# Makes .cache/transformers, the environment that benchmarks/cpu/against_transformers.py compares with.
# Does nothing when it is up to date. Set PYTHON to choose the interpreter: the project's own is the
# default, and any that has a build of torch will do.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

packages=(torch==2.13.0 transformers==5.24.0)
folder=.cache/transformers
stamp=$folder/setup-stamp

if [[ -s $stamp && $(<"$stamp") == "${packages[*]}" ]] && "$folder/bin/python" -c ""; then
    exit
fi
python=${PYTHON:-$("$BASH" scripts/find_python.sh)}
echo "setup_transformers: making $folder with $("$python" --version), some minutes"
rm -rf "$folder"
"$python" -m venv "$folder"
# Builds of torch for the CPU alone fit too (2.13.0+cpu), where pip finds one.
"$folder/bin/python" -m pip install -qq --no-input --disable-pip-version-check "${packages[@]}"

# Last, so that an interrupted run leaves no stamp.
echo "${packages[*]}" >"$stamp"
echo "setup_transformers: done in ${SECONDS} s"
