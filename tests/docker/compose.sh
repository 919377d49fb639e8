#!/bin/sh
# Makes sure that SageMaker's local mode finds docker and docker-compose, and prints the folder to
# put first on PATH for it: build/docker/bin. Needs the engine (engine.sh), named in DOCKER.
#
# Exit code 3, with one line that says why, where there is no Docker Compose and none can be had:
# installing it takes root and Debian's packages.
set -eu

bin=$(cd "$(dirname "$0")/../.." && pwd)/build/docker/bin
docker=${DOCKER:-$("$(dirname "$0")/engine.sh")}

no_compose() {
    echo "compose: no Docker Compose: $*" >&2
    exit 3
}

install_compose() {
    [ "$(id -u)" = 0 ] || no_compose "installing it needs root."
    command -v apt-get >/dev/null 2>&1 || no_compose "there is no apt-get to install it."
    { DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker-compose || {
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -qq --no-install-recommends docker-compose; }; } >&2 </dev/null ||
        no_compose "Debian's package docker-compose could not be installed."
}

mkdir -p "$bin"
ln -sf "$docker" "$bin/docker"
if ! "$docker" compose version >/dev/null 2>&1 && ! command -v docker-compose >/dev/null 2>&1; then
    install_compose
fi
# The SDK looks for the text "v2" in what `docker compose version` prints, which Debian's lacks.
if "$docker" compose version >/dev/null 2>&1; then
    printf '#!/bin/sh\nexec %s compose "$@"\n' "$docker" >"$bin/docker-compose"
    chmod +x "$bin/docker-compose"
fi
echo "$bin"
