#!/bin/sh
# Installs packages by uv, in a quarter of pip's time; by pip where there is no uv, or where only pip's
# settings, which uv does not read, name an index.
#
#   tests/install.sh PYTHON ARGUMENTS...     those of `pip install`
set -eu

python=$1
shift
uv=$(dirname "$0")/../.venv/bin/uv
if [ -x "$uv" ] && "$uv" pip install --quiet --python "$python" "$@"; then exit; fi
exec "$python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"
