#!/bin/sh
# Resolves what the package `amphora` needs (container/pyproject.toml), and dependency groups of the
# root pyproject.toml, into the lock files beside this script.
# `make lock` runs it with uv's path, and options for uv such as --upgrade: without that, only what
# pyproject.toml asks for moves. A lock holds for every Python from its lower bound on. Out of
# all locks stays what an environment owns itself: torch with all it needs, and pip.
#
# What images install has hashes, one line for each package: container/locks/base.sh goes by lines. pip
# then wants a hash of all that it installs, and none of what a base has (--require-hashes). Not
# neuron-xla: whether the legacy bases satisfy all that it takes from them could not be tried.
set -eu

uv=$1
options=${2:-}
cd "$(dirname "$0")/../.."

lock() { # name, lowest Python, dependency groups...
    name=$1
    python=$2
    shift 2
    groups=
    for group in "$@"; do groups="$groups --group pyproject.toml:$group"; done
    # shellcheck disable=SC2086 # one word for each group and option
    printf 'torch\npip\n%s' "$present" | "$uv" pip compile $project $groups --universal --python-version "$python" \
        --excludes - --no-annotate --quiet $with $options \
        --custom-compile-command "make lock" --output-file "container/locks/$name.txt" >/dev/null
    sed -i -E ':next;/\\$/{N;s/ *\\\n */ /;t next}' "container/locks/$name.txt"
    echo "container/locks/$name.txt: $(grep -c == "container/locks/$name.txt") packages, Python $python and later"
}

project=container/pyproject.toml present=
# The development environment installs sagemaker-training apart, since it needs a C compiler.
with="--no-emit-package sagemaker-training"
lock dev 3.11 recipe image cpu test docs
with=
lock neuron-xla 3.10 recipe-xla image
with=--generate-hashes
lock image 3.11 recipe image
lock image-transformers4 3.11 recipe-transformers4 scripts-transformers4 image
# What the images for GPUs and CPUs have beside either.
project='' present=$(sed -n 's/==.*//p' container/locks/image.txt)
lock gpu 3.11 gpu
lock cpu 3.11 cpu
# The tool that lists an image's packages, in a folder of its own.
present=
lock sbom 3.10 sbom

# Environments that hold nothing of ours.
lock_alone() {
    # shellcheck disable=SC2086 # one word for each option
    "$uv" pip compile --group "pyproject.toml:$1" --universal --python-version "$2" --no-annotate --quiet $options \
        --custom-compile-command "make lock" --output-file "$3" >/dev/null
    echo "$3: $(grep -c == "$3") packages, Python $2 and later"
}
lock_alone fuzz 3.11 tests/locks/fuzz.txt
lock_alone sdk2 3.11 tests/locks/sdk2.txt
lock_alone sdk3 3.11 tests/locks/sdk3.txt
lock_alone cloud 3.11 tests/locks/cloud.txt
lock_alone clients 3.11 tests/locks/clients.txt

# That each image's Python and C library have a wheel of all that its lock names, but for those that
# come as source alone: pure Python, except sagemaker-training, for which a base needs a C compiler.
sources="inotify-simple rouge-score sagemaker-inference sagemaker-training seqeval"
check_wheels() { # Python, glibc, locks that are installed together
    python=$1 glibc=$2
    shift 2
    as_source=
    for package in $sources; do as_source="$as_source --no-binary $package"; done
    files=
    for name in "$@"; do files="$files container/locks/$name.txt"; done
    # shellcheck disable=SC2086 # one word for each file and option
    printf 'torch\npip\n' | "$uv" pip compile $files --python-version "$python" \
        --python-platform "x86_64-manylinux_$glibc" --excludes - --only-binary :all: $as_source --quiet >/dev/null
    echo "$*: wheels for Python $python, glibc $glibc"
}
for image in image image-transformers4; do
    check_wheels 3.12 2_34 $image gpu
    check_wheels 3.12 2_34 $image cpu
done
check_wheels 3.10 2_35 neuron-xla
check_wheels 3.12 2_39 neuron-xla
check_wheels 3.12 2_39 image
check_wheels 3.14 2_40 image
