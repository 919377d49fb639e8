#!/bin/sh
# Makes one virtual environment for each SageMaker SDK that tests drive, beside the development
# environment, which cannot hold two of them, and one (`cloud`) for the linters of examples/aws. Prints
# the Python of each.
#
#   tests/sdk_venvs.sh [sdk2] [sdk3] [cloud]     default: all
#
# They lie in build/venvs and are made anew when their lock in tests/locks (`make lock`) has changed.
# PYTHON names the Python to make them with, 3.11 or later (default: python3).
set -eu

cd "$(dirname "$0")/.."

make_venv() {
    venv=build/venvs/$1
    lock=tests/locks/$1.txt
    if ! cmp -s "$lock" "$venv/made-from.txt"; then
        rm -rf "$venv"
        "${PYTHON:-python3}" -m venv "$venv"
        sh tests/install.sh "$venv/bin/python" --no-deps --requirement "$lock" >&2
        cp "$lock" "$venv/made-from.txt"
    fi
    echo "$PWD/$venv/bin/python"
}

if [ $# -eq 0 ]; then set -- sdk2 sdk3 cloud; fi
for name in "$@"; do
    case $name in
        sdk2 | sdk3 | cloud) make_venv "$name" ;;
        *) echo "sdk_venvs: unknown environment '$name'. Use sdk2, sdk3 or cloud." >&2; exit 2 ;;
    esac
done
