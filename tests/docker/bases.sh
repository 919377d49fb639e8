#!/bin/sh
# Makes the stand-in base images that the Docker tests build on, and prints their names.
#
#   tests/docker/bases.sh [torch] [vllm] [native] [native-3.12] [xla]
#
#   torch        Debian 12, Python 3.11, torch 2.13.0 (CPU): for Dockerfile.gpu, and a small native stack
#   vllm         the same with the unofficial CPU build of vLLM: for Dockerfile.gpu's `vllm`
#   native       Ubuntu 26.04, Python 3.14, torch 2.13.0: for Dockerfile.neuron's `native` (7 GB)
#   native-3.12  Ubuntu 24.04, Python 3.12, torch 2.13.0
#   xla          Ubuntu 24.04, Python 3.12, torch 2.9.0, torch-xla 2.9.0: for its `xla` (7 GB)
#
# They stand in for AWS's Deep Learning Containers if no image registry can be reached: the system
# and Python of the real ones, pip, gcc and torch (no torch-neuronx, which no public index has), with
# the same foreign ENTRYPOINT, SAGEMAKER_TRAINING_MODULE and empty folders under /opt/ml. An image
# that exists already is used unchanged. Needs root and the distributions' archives.
# TORCH_PIP_ARGS goes to the pip that fetches torch's wheel, as in the Makefile.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
work=$here/../../build/docker
docker=$("$here/engine.sh")
export DOCKER_BUILDKIT=1

# The name carries what the image is made of, so that a change of this script makes a new one.
key=$( { cat "$0"; cat /usr/local/share/ca-certificates/*.crt 2>/dev/null || true; } | sha256sum | cut -c1-12)
mirror=http://archive.ubuntu.com/ubuntu
# Debian's archive has no keys of Ubuntu's.
keyring=ubuntu-keyring_2023.11.28.1_all.deb
keyring_sha256=36de43b15853ccae0028e9a767613770c704833f82586f28eb262f0311adb8a8

exists() { "$docker" image inspect "$1" >/dev/null 2>&1; }

# pip in a build trusts what this machine trusts (a proxy may answer for the package index).
trust_host() {
    mkdir -p "$1/usr/local/share/ca-certificates"
    cp /usr/local/share/ca-certificates/*.crt "$1/usr/local/share/ca-certificates/" 2>/dev/null || true
    chroot "$1" update-ca-certificates >/dev/null
}

make_root() { # suite folder
    command -v debootstrap >/dev/null 2>&1 ||
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap
    suite=$1 folder=$2
    set -- "$suite" "$folder"
    if [ "$suite" != bookworm ]; then
        python3 -c 'import sys, urllib.request as of; of.urlretrieve(*sys.argv[1:])' \
            "$mirror/pool/main/u/ubuntu-keyring/$keyring" "$work/$keyring"
        echo "$keyring_sha256  $work/$keyring" | sha256sum --check --quiet
        dpkg-deb -x "$work/$keyring" "$work/keyring"
        # gutsy: debootstrap's script for every Ubuntu, also one that it does not know by name.
        set -- --components=main,universe \
            "--keyring=$work/keyring/usr/share/keyrings/ubuntu-archive-keyring.gpg" "$@" "$mirror" gutsy
    fi
    debootstrap --variant=minbase \
        --include=python3,python3-venv,python3-pip,python3-dev,gcc,ca-certificates,procps,iproute2,libnuma1 \
        "$@" >"$work/debootstrap.log" 2>&1 </dev/null || { tail "$work/debootstrap.log"; exit 1; }
    trust_host "$folder"
    rm -f "$folder"/usr/lib/python3.*/EXTERNALLY-MANAGED "$folder"/var/cache/apt/archives/*.deb
    ln -sf python3 "$folder/usr/bin/python"
    # As all distributions' own images: where it is missing, each step of a build dates /etc anew.
    echo "127.0.0.1 localhost" >"$folder/etc/hosts"
    mkdir -p "$folder/opt/ml/input/data" "$folder/opt/ml/model" "$folder/opt/ml/output" "$folder/opt/ml/code" \
        "$folder/workspace"
}

make_system() { # suite
    root=$work/root
    bundle=/etc/ssl/certs/ca-certificates.crt
    rm -rf "$root"
    make_root "$1" "$root"
    tar -C "$root" -c . | "$docker" import \
        -c "ENV PIP_CERT=$bundle SSL_CERT_FILE=$bundle REQUESTS_CA_BUNDLE=$bundle AWS_CA_BUNDLE=$bundle" \
        -c "ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore" \
        -c "ENV SAGEMAKER_TRAINING_MODULE=sagemaker_pytorch_container.training:main" \
        -c "WORKDIR /workspace" \
        -c 'ENTRYPOINT ["bash", "-m", "start_with_right_hostname.sh"]' \
        -c 'CMD ["/bin/bash"]' - "amphora-stand-in/$1:$key"
    rm -rf "$root"
}

# The wheel comes from wherever this machine's pip finds it; its own dependencies from the index.
make_torch() {
    wheels=$work/torch
    mkdir -p "$wheels"
    # shellcheck disable=SC2086 # TORCH_PIP_ARGS is several words
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.11 -d "$wheels" \
        ${TORCH_PIP_ARGS:-} torch==2.13.0
    "$docker" build -t "$1" -f - "$wheels" <<DOCKERFILE
FROM amphora-stand-in/bookworm:$key
RUN --mount=type=bind,target=/wheels --mount=type=cache,target=/root/.cache/pip \
    python3 -m pip install /wheels/torch-2.13.0*.whl
DOCKERFILE
}

make_vllm() {
    "$docker" build -t "$1" -f - "$here/../vllm" <<DOCKERFILE
FROM $("$0" torch)
RUN --mount=type=bind,target=/vllm --mount=type=cache,target=/root/.cache/pip sh /vllm/install.sh python3
DOCKERFILE
}

# packaging anew: pip cannot replace what Ubuntu's own pip has brought.
make_of_index() { # image suite packages...
    image=$1 suite=$2
    shift 2
    mkdir -p "$work/empty"
    "$docker" build -t "$image" -f - "$work/empty" <<DOCKERFILE
FROM amphora-stand-in/$suite:$key
RUN python3 -m pip install --no-cache-dir --ignore-installed packaging && python3 -m pip install --no-cache-dir $*
DOCKERFILE
}

mkdir -p "$work"
for kind in "${@:-torch}"; do
    case $kind in
        torch | vllm) suite=bookworm ;;
        native) suite=resolute ;;
        native-3.12 | xla) suite=noble ;;
        *) echo "bases: unknown stand-in '$kind'. Give one of those in the header." >&2; exit 2 ;;
    esac
    image=amphora-stand-in/$kind:$key
    if ! exists "$image"; then
        exists "amphora-stand-in/$suite:$key" || make_system "$suite" >&2
        case $kind in
            torch) make_torch "$image" ;;
            vllm) make_vllm "$image" ;;
            native | native-3.12) make_of_index "$image" "$suite" torch==2.13.0 ;;
            xla) make_of_index "$image" "$suite" torch==2.9.0 torch-xla==2.9.0 ;;
        esac >&2
    fi
    echo "$image"
done
