#!/bin/sh
# Makes one virtual environment for each SageMaker SDK that tests drive, beside the development
# environment, which cannot hold two of them, one (`cloud`) for the linters of examples/aws, and one for
# other clients, which has Node.js and JavaScript's clients, too, in node_modules. Prints the Python of
# each.
#
#   tests/sdk_venvs.sh [sdk2] [sdk3] [cloud] [clients]     default: all
#
# They lie in build/venvs and are made anew when their lock in tests/locks (`make lock`) has changed, or
# tests/clients/package-lock.json (`npm install --package-lock-only --omit-lockfile-registry-resolved`).
# PYTHON names the Python to make them with, 3.11 or later (default: python3).
set -eu

cd "$(dirname "$0")/.."

make_venv() {
    venv=build/venvs/$1
    locks=tests/locks/$1.txt
    if [ "$1" = clients ]; then locks="$locks tests/clients/package-lock.json"; fi
    # shellcheck disable=SC2086 # one word for each file
    if ! cat $locks | cmp -s - "$venv/made-from.txt"; then
        rm -rf "$venv"
        "${PYTHON:-python3}" -m venv "$venv"
        sh tests/install.sh "$venv/bin/python" --no-deps --requirement "tests/locks/$1.txt" >&2
        if [ "$1" = clients ]; then
            cp tests/clients/package*.json "$venv"
            PATH="$PWD/$venv/bin:$PATH" npm ci --prefix "$venv" --ignore-scripts --no-audit --no-fund >&2
        fi
        # shellcheck disable=SC2086
        cat $locks >"$venv/made-from.txt"
    fi
    echo "$PWD/$venv/bin/python"
}

if [ $# -eq 0 ]; then set -- sdk2 sdk3 cloud clients; fi
for name in "$@"; do
    case $name in
        sdk2 | sdk3 | cloud | clients) make_venv "$name" ;;
        *) echo "sdk_venvs: unknown environment '$name'. Use sdk2, sdk3, cloud or clients." >&2; exit 2 ;;
    esac
done
