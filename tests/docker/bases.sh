#!/bin/sh
# Makes the stand-in base images that the Docker tests build on, and prints their names.
#
#   tests/docker/bases.sh [torch] [xla]
#
#   torch   Debian 12 with torch 2.13.0 (CPU): for Dockerfile.gpu, and Dockerfile.neuron's `native`
#   xla     Debian 12 with torch 2.9.0 and torch-xla 2.9.0 (7 GB): for Dockerfile.neuron's `xla`
#
# They stand in for AWS's Deep Learning Containers where no image registry can be reached: Python,
# pip, gcc and torch, with the same foreign ENTRYPOINT, SAGEMAKER_TRAINING_MODULE and empty folders
# under /opt/ml. An image that exists already is used as it is. Needs root and Debian's archive.
# TORCH_PIP_ARGS goes to the pip that fetches torch's wheel, as in the Makefile.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
work=$here/../../build/docker
docker=$("$here/engine.sh")
export DOCKER_BUILDKIT=1

# The name carries what the image is made of, so that a change of this script makes a new one.
key=$( { cat "$0"; cat /usr/local/share/ca-certificates/*.crt 2>/dev/null || true; } | sha256sum | cut -c1-12)
debian=amphora-stand-in/debian:$key

exists() { "$docker" image inspect "$1" >/dev/null 2>&1; }

# pip in a build trusts what this machine trusts (a proxy may answer for the package index).
trust_host() {
    mkdir -p "$1/usr/local/share/ca-certificates"
    cp /usr/local/share/ca-certificates/*.crt "$1/usr/local/share/ca-certificates/" 2>/dev/null || true
    chroot "$1" update-ca-certificates >/dev/null
}

make_root() {
    command -v debootstrap >/dev/null 2>&1 ||
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap
    debootstrap --variant=minbase \
        --include=python3.11,python3-venv,python3-pip,python3-dev,gcc,ca-certificates,procps,iproute2 \
        bookworm "$1" >"$work/debootstrap.log" 2>&1 </dev/null || { tail "$work/debootstrap.log"; exit 1; }
    trust_host "$1"
    rm -f "$1"/usr/lib/python3.11/EXTERNALLY-MANAGED "$1"/var/cache/apt/archives/*.deb
    ln -s python3 "$1/usr/bin/python"
    # As all distributions' own images: where it is missing, each step of a build dates /etc anew.
    echo "127.0.0.1 localhost" >"$1/etc/hosts"
    mkdir -p "$1/opt/ml/input/data" "$1/opt/ml/model" "$1/opt/ml/output" "$1/opt/ml/code" "$1/workspace"
}

make_debian() {
    root=$work/root
    bundle=/etc/ssl/certs/ca-certificates.crt
    rm -rf "$root"
    make_root "$root"
    tar -C "$root" -c . | "$docker" import \
        -c "ENV PIP_CERT=$bundle SSL_CERT_FILE=$bundle REQUESTS_CA_BUNDLE=$bundle AWS_CA_BUNDLE=$bundle" \
        -c "ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore" \
        -c "ENV SAGEMAKER_TRAINING_MODULE=sagemaker_pytorch_container.training:main" \
        -c "WORKDIR /workspace" \
        -c 'ENTRYPOINT ["bash", "-m", "start_with_right_hostname.sh"]' \
        -c 'CMD ["/bin/bash"]' - "$debian"
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
FROM $debian
RUN --mount=type=bind,target=/wheels --mount=type=cache,target=/root/.cache/pip \
    python3 -m pip install /wheels/torch-2.13.0*.whl
DOCKERFILE
}

make_xla() {
    mkdir -p "$work/empty"
    "$docker" build -t "$1" -f - "$work/empty" <<DOCKERFILE
FROM $debian
RUN python3 -m pip install --no-cache-dir torch==2.9.0 torch-xla==2.9.0
DOCKERFILE
}

mkdir -p "$work"
if ! exists "$debian"; then
    make_debian >&2
fi
for kind in "${@:-torch}"; do
    case $kind in
        torch | xla) ;;
        *) echo "bases: unknown stand-in '$kind'. Use torch or xla." >&2; exit 2 ;;
    esac
    image=amphora-stand-in/$kind:$key
    if ! exists "$image"; then
        "make_$kind" "$image" >&2
    fi
    echo "$image"
done
