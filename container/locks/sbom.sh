#!/bin/sh
# Writes what an environment's Python has installed as a software bill of materials: CycloneDX 1.6,
# JSON, on standard output. Runs in image builds: POSIX sh, pip and coreutils only.
#
#   sbom.sh LOCK > sbom.cdx.json
#
# cyclonedx-bom, from the LOCK, stands in a folder that goes again, so that neither the environment nor
# the list holds it. It knows licences and what needs what, which a loop of our own would not. Packages
# of the operating system are not in the list.
set -eu

tool=$(mktemp -d)
trap 'rm -rf "$tool"' EXIT
python3 -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --target "$tool" --requirement "$1" >&2
# Not by PYTHONPATH: the Python that is listed would inherit it.
python3 -c 'import runpy, sys
sys.path.insert(0, sys.argv[1])
sys.argv = ["cyclonedx-py", "environment", "--spec-version", "1.6", "--output-reproducible", sys.executable]
runpy.run_module("cyclonedx_py", run_name="__main__")' "$tool"
