#!/bin/sh
# Makes an environment with other versions of transformers and what goes with it: those that the file
# names are its own, everything else (torch above all) it borrows from the development environment.
#
#   tests/versions/environment.sh DEVELOPMENT_PYTHON REQUIREMENTS FOLDER
set -eu

lender=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$1" -m venv "$3"
own=$("$3/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$lender" >"$own/borrowed.pth"
if ! sh "$(dirname "$0")/../install.sh" "$3/bin/python" --no-deps --requirement "$2" >"$3/pip.log" 2>&1; then
    cat "$3/pip.log" >&2
    exit 1
fi
touch "$3/.made"
