#!/usr/bin/env bash
# Makes .venv with every locked dependency and the project itself, editable.
# Does nothing when it is up to date. Set PYTHON to choose the interpreter.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

root=$PWD
lock=requirements/dev.lock
stamp=.venv/setup-stamp

# An activated .venv must not be picked to build itself anew.
PATH=${PATH//"$root/.venv/bin:"/}

# Holds the folder too: the scripts in a moved .venv name the old one.
fingerprint() {
    "$1" - "$root" "$lock" pyproject.toml <<'END' 2>/dev/null
import hashlib, pathlib, sys
root, *files = sys.argv[1:]
digest = hashlib.sha256(repr((root, sys.version)).encode())
for file in files:
    digest.update(pathlib.Path(file).read_bytes())
print(digest.hexdigest())
END
}

up_to_date() {
    [[ -s $stamp ]] && .venv/bin/python -c "" 2>/dev/null &&
        [[ $(fingerprint "$1") == "$(<"$stamp")" ]]
}

if [[ -n ${PYTHON:-} ]]; then
    python=$("$BASH" scripts/find_python.sh)
    if up_to_date "$python"; then exit; fi
else
    # An up-to-date .venv is kept, whichever interpreter it was made with.
    if up_to_date .venv/bin/python; then exit; fi
    python=$("$BASH" scripts/find_python.sh)
fi

# Made anew on any change, so that nothing of an older lock or a broken run stays behind.
echo "setup: making .venv with $("$python" --version), about a minute"
rm -rf .venv
"$python" -m venv .venv
# Without --no-compile this takes three times as long; Python compiles what gets imported.
pip=(.venv/bin/python -m pip install -qq --no-input --no-compile --disable-pip-version-check)
"${pip[@]}" --require-hashes --only-binary :all: -r "$lock"
"${pip[@]}" --no-deps --no-build-isolation --editable .

# Last, so that an interrupted run leaves no stamp.
fingerprint "$python" >"$stamp"
echo "setup: done in ${SECONDS} s"
