#!/bin/sh
# Makes sure that a Docker engine answers, and prints the client to use with it.
#
#   tests/docker/engine.sh        use the engine that runs, else install and start one
#   tests/docker/engine.sh stop   stop the engine that this script started, if it did
#
# Exit code 3, with one line that says why, where no engine can run. Starting one needs root and,
# where dockerd is missing, Debian's packages. The engine's log is build/docker/dockerd.log.
set -eu

work=$(cd "$(dirname "$0")/../.." && pwd)/build/docker
log=$work/dockerd.log
pid_file=$work/dockerd.pid

say() { echo "engine: $*" >&2; }
no_engine() {
    say "no Docker engine: $*"
    exit 3
}

# A client builds with BuildKit when it has buildx, or is older than 23 (BuildKit built in).
can_build() {
    "$1" buildx version >/dev/null 2>&1 && return
    major=$("$1" --version 2>/dev/null | sed -n 's/^Docker version \([0-9]*\).*/\1/p')
    [ "${major:-99}" -lt 23 ]
}

client() {
    for candidate in ${DOCKER:+"$DOCKER"} docker /usr/bin/docker; do
        if command -v "$candidate" >/dev/null 2>&1 && can_build "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

install_engine() {
    [ "$(id -u)" = 0 ] || no_engine "none runs, and installing one needs root."
    command -v apt-get >/dev/null 2>&1 || no_engine "none runs, and there is no apt-get to install one."
    say "installing docker.io"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
        apt-get install -o DPkg::Lock::Timeout=300 -y -qq --no-install-recommends docker.io iptables; } >&2 </dev/null ||
        no_engine "Debian's package docker.io could not be installed."
}

start_engine() {
    [ "$(id -u)" = 0 ] || no_engine "none runs, and starting one needs root."
    mkdir -p "$work"
    say "starting dockerd (log: $log)"
    setsid dockerd >"$log" 2>&1 </dev/null &
    echo $! >"$pid_file"
    waited=0
    until "$docker" info >/dev/null 2>&1; do
        waited=$((waited + 1))
        if [ "$waited" -gt 60 ] || ! kill -0 "$(cat "$pid_file")" 2>/dev/null; then
            no_engine "dockerd does not start here: $(sed -n 's/^failed to start daemon: //p' "$log") (see $log)"
        fi
        sleep 1
    done
}

stop_engine() {
    [ -f "$pid_file" ] || return 0
    kill "$(cat "$pid_file")" 2>/dev/null || true
    rm -f "$pid_file"
}

if [ "${1:-}" = stop ]; then
    stop_engine
    exit 0
fi
docker=$(client) || docker=
if [ -n "$docker" ] && "$docker" info >/dev/null 2>&1; then
    echo "$docker"
    exit 0
fi
if [ -z "$docker" ] || ! command -v dockerd >/dev/null 2>&1; then
    install_engine
fi
docker=$(client) || no_engine "no docker client here builds with BuildKit: install docker-buildx."
"$docker" info >/dev/null 2>&1 || start_engine
echo "$docker"
