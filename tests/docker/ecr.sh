#!/bin/sh
# Makes sure that there are the AWS CLI and a Docker registry, and prints the path of each.
#
# Exit code 3, with one line that says why, where that cannot be: the registry is Debian's package
# docker-registry, and answering under ECR's name takes root.
set -eu

cd "$(dirname "$0")/../.."

cannot() {
    echo "ecr: no registry under ECR's name: $*" >&2
    exit 3
}

[ "$(id -u)" = 0 ] || cannot "it takes root."
if ! command -v docker-registry >/dev/null 2>&1; then
    command -v apt-get >/dev/null 2>&1 || cannot "there is no apt-get to install docker-registry."
    { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker-registry || {
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends docker-registry; }; } >&2 </dev/null ||
        cannot "Debian's package docker-registry could not be installed."
fi
venv=build/venvs/aws
if ! [ -x "$venv/bin/aws" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check awscli==1.46.3 >&2
fi
echo "$PWD/$venv/bin/aws"
command -v docker-registry
