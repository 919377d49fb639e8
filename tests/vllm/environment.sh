#!/bin/sh
# Makes an environment with the CPU build of vLLM.
#
#   tests/vllm/environment.sh PYTHON FOLDER      (TORCH_PIP_ARGS as in the Makefile)
set -eu

rm -rf "$2"
"$1" -m venv "$2"
export PIP_DISABLE_PIP_VERSION_CHECK=1
# shellcheck disable=SC2086
if ! { "$2/bin/python" -m pip install --quiet --no-compile ${TORCH_PIP_ARGS:-} torch==2.13.0 &&
    sh "$(dirname "$0")/install.sh" "$2/bin/python" \
        ${TORCH_PIP_ARGS:+--extra-index-url https://pypi.org/simple}; } >"$2/pip.log" 2>&1; then
    cat "$2/pip.log" >&2
    exit 1
fi
echo "$(pwd)/container" >"$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/amphora.pth"
touch "$2/.made"
