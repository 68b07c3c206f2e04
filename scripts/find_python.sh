#!/usr/bin/env bash
# Prints the path of a Python that the lock files install on, or says what to install.
set -uo pipefail

# Each candidate is run: a pyenv shim may exist and still fail, and Debian's python3 lacks
# ensurepip until python3-venv is installed. Free-threaded builds ("3.13t") have no wheels.
version() {
    "$1" -c '
import ensurepip, sys, sysconfig, venv
free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED")
print("%d.%d%s" % (*sys.version_info[:2], "t" if free_threaded else ""))' 2>/dev/null
}

suits() {
    case $(version "$1") in
    3.12 | 3.13) return 0 ;;
    *) return 1 ;;
    esac
}

if [[ -n ${PYTHON:-} ]]; then
    if path=$(command -v "$PYTHON") && suits "$path"; then
        echo "$path"
        exit
    fi
    echo "error: PYTHON=$PYTHON is no Python 3.12 or 3.13 with venv." >&2
else
    for candidate in python3.13 python3.12 python3 python \
        "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[23]*/bin/python; do
        if path=$(command -v "$candidate") && suits "$path"; then
            echo "$path"
            exit
        fi
    done
    echo "error: found no Python 3.12 or 3.13 with venv on PATH or under pyenv." >&2
fi
echo "Install one, for example 'apt-get install python3.12 python3.12-venv' or" \
    "'pyenv install 3.12'; if it is not on PATH, set PYTHON=/path/to/python3.12." >&2
exit 1
