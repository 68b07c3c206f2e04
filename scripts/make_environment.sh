#!/usr/bin/env bash
# Makes an environment with every dependency of a lock file and the project itself, editable.
# Does nothing when it is up to date. Set PYTHON to choose the interpreter.
# Usage: make_environment.sh FOLDER LOCK TIME, with the time that it is said to take.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

root=$PWD
folder=$1
lock=$2
stamp=$folder/setup-stamp

# An activated environment must not be picked to build itself anew.
PATH=${PATH//"$root/$folder/bin:"/}

# Holds the folder too: the scripts in a moved environment name the old one.
fingerprint() {
    "$1" - "$root" "$lock" pyproject.toml <<'END_OF_PYTHON' 2>/dev/null
import hashlib, pathlib, sys
root, *files = sys.argv[1:]
digest = hashlib.sha256(repr((root, sys.version)).encode())
for file in files:
    digest.update(pathlib.Path(file).read_bytes())
print(digest.hexdigest())
END_OF_PYTHON
}

up_to_date() {
    [[ -s $stamp ]] && "$folder/bin/python" -c "" 2>/dev/null &&
        [[ $(fingerprint "$1") == "$(<"$stamp")" ]]
}

if [[ -n ${PYTHON:-} ]]; then
    python=$("$BASH" scripts/find_python.sh)
    if up_to_date "$python"; then exit; fi
else
    # An up-to-date environment is kept, whichever interpreter it was made with.
    if up_to_date "$folder/bin/python"; then exit; fi
    python=$("$BASH" scripts/find_python.sh)
fi

# Made anew on any change, so that nothing of an older lock or a broken run stays behind.
printf 'setup: making %s with %s, about %s ... ' "$folder" "$("$python" --version)" "$3"
rm -rf "$folder"
"$python" -m venv "$folder"
# Without --no-compile this takes three times as long; Python compiles what gets imported.
pip=("$folder/bin/python" -m pip install -qq --no-input --no-compile --disable-pip-version-check)
"${pip[@]}" --require-hashes --only-binary :all: -r "$lock"
"${pip[@]}" --no-deps --no-build-isolation --editable .

# Last, so that an interrupted run leaves no stamp.
fingerprint "$python" >"$stamp"
echo "done in ${SECONDS} s"
