#!/bin/sh
# Resolves what the package `amphora` needs (container/pyproject.toml), and dependency groups of the
# root pyproject.toml, into the lock files beside this script.
# `make lock` runs it with uv's path, and options for uv such as --upgrade: without that, only what
# pyproject.toml asks for moves. A lock holds for every Python from its lower bound on. Out of
# all locks stays what an environment owns itself: torch with all it needs, and pip.
#
# No hashes: pip's hash mode would ask for one for each package that a base keeps at its own version,
# and a package index of one's own may serve wheels that were built anew.
set -eu

uv=$1
options=${2:-}
cd "$(dirname "$0")/../.."

lock() {
    name=$1
    python=$2
    shift 2
    groups=
    for group in "$@"; do groups="$groups --group pyproject.toml:$group"; done
    # shellcheck disable=SC2086 # one word for each group and option
    printf 'torch\npip\n' | "$uv" pip compile container/pyproject.toml $groups --universal --python-version "$python" \
        --excludes - --no-annotate --quiet $options \
        ${also_out:+--no-emit-package "$also_out"} \
        --custom-compile-command "make lock" --output-file "container/locks/$name.txt" >/dev/null
    echo "container/locks/$name.txt: $(grep -c == "container/locks/$name.txt") packages, Python $python and later"
}

# The development environment installs sagemaker-training apart, since it needs a C compiler.
also_out=sagemaker-training
lock dev 3.11 recipe image cpu test docs
also_out=
lock gpu 3.11 recipe image gpu
lock cpu 3.11 recipe image gpu cpu
lock gpu-transformers4 3.11 recipe-transformers4 image gpu
lock cpu-transformers4 3.11 recipe-transformers4 image gpu cpu
lock neuron-native 3.11 recipe image
lock neuron-xla 3.10 recipe-xla image

# Environments that hold nothing of ours: the tool that lists an image's packages, and the SDKs.
lock_alone() {
    # shellcheck disable=SC2086 # one word for each option
    "$uv" pip compile --group "pyproject.toml:$1" --universal --python-version "$2" --no-annotate --quiet $options \
        --custom-compile-command "make lock" --output-file "$3" >/dev/null
    echo "$3: $(grep -c == "$3") packages, Python $2 and later"
}
lock_alone sbom 3.10 container/locks/sbom.txt
lock_alone fuzz 3.11 tests/locks/fuzz.txt
lock_alone sdk2 3.11 tests/locks/sdk2.txt
lock_alone sdk3 3.11 tests/locks/sdk3.txt

# That each image's Python and C library have a wheel of all that its lock names, but for those that
# come as source alone: pure Python, except sagemaker-training, for which a base needs a C compiler.
sources="inotify-simple rouge-score sagemaker-inference sagemaker-training seqeval"
check_wheels() {
    as_source=
    for package in $sources; do as_source="$as_source --no-binary $package"; done
    # shellcheck disable=SC2086 # one word for each option
    printf 'torch\npip\n' | "$uv" pip compile "container/locks/$1.txt" --python-version "$2" \
        --python-platform "x86_64-manylinux_$3" --excludes - --only-binary :all: $as_source --quiet >/dev/null
    echo "container/locks/$1.txt: wheels for Python $2, glibc $3"
}
check_wheels gpu 3.12 2_34
check_wheels cpu 3.12 2_34
check_wheels gpu-transformers4 3.12 2_34
check_wheels cpu-transformers4 3.12 2_34
check_wheels neuron-xla 3.10 2_35
check_wheels neuron-xla 3.12 2_39
check_wheels neuron-native 3.12 2_39
check_wheels neuron-native 3.14 2_39
