# Sourced by ./quickstart and ./test: finds a Python and creates .venv with it.
#
#   bootstrap ROOT [GROUP]...   install the project and the dependency groups into ROOT/.venv;
#                               return at once if they are installed
#   AENV_PYTHON=PYTHON          the Python for .venv; by default any Python from 3.11 on

bootstrap() {
    bootstrap_root=$1
    # Isolated, so that the caller's PYTHONPATH and PYTHONHOME have no effect.
    bootstrap_python=$(find_python) || return 1
    "$bootstrap_python" -I "$bootstrap_root/scripts/bootstrap.py" "$@"
}

find_python() {
    if [ -n "${AENV_PYTHON-}" ]; then
        if new_enough "$AENV_PYTHON"; then
            command -v "$AENV_PYTHON"
            return
        fi
        echo "error: AENV_PYTHON=$AENV_PYTHON is not a working Python 3.11 or newer" >&2
        echo "hint: set it to a path or a command on PATH, or unset it to use the one of .venv or the first on PATH" >&2
        return 1
    fi
    # The one of .venv first: a warm start must not search.
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

# Run it: a shim on PATH may lead nowhere.
new_enough() {
    "$1" -I -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}
