# Sourced by ./quickstart and ./test: finds a Python and has it make .venv.
#
#   bootstrap ROOT [GROUP]...   afterwards ROOT/.venv/bin/python has the project and the dependency
#                               groups; returns at once when it had them already
#   AENV_PYTHON=PYTHON          is what .venv is made from; unset, any Python from 3.11 on

bootstrap() {
    bootstrap_root=$1
    # Isolated: neither PYTHONPATH nor PYTHONHOME of the caller changes what is installed.
    bootstrap_python=$(find_python) || return 1
    "$bootstrap_python" -I "$bootstrap_root/scripts/bootstrap.py" "$@"
}

find_python() {
    if [ -n "${AENV_PYTHON-}" ]; then
        if new_enough "$AENV_PYTHON"; then
            command -v "$AENV_PYTHON"
            return
        fi
        echo "error: AENV_PYTHON=$AENV_PYTHON is no Python 3.11 or newer that runs" >&2
        echo "hint: name one, as a path or a command on PATH; unset, that of .venv or the first on PATH is taken" >&2
        return 1
    fi
    # .venv's own first: a warm start must not search.
    for candidate in "$bootstrap_root/.venv/bin/python" \
        python3 python3.13 python3.12 python3.11 python3.14; do
        if new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    found=$(command -v python3 >/dev/null && python3 --version 2>&1 || true)
    echo "error: aenv-ray needs Python 3.11 or newer, and PATH has none (python3: ${found:-missing})" >&2
    echo "hint: on Debian 12 or Ubuntu 24.04: sudo apt-get install python3" >&2
    return 1
}

# Asked, not only looked for: a shim on PATH may lead nowhere.
new_enough() {
    "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}
