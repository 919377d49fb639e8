#!/bin/sh
# Installs locked packages on a base image, and leaves the base's own packages alone. Runs in image
# builds: POSIX sh, pip and coreutils only.
#
#   base.sh keep [NAME...]     list torch, what it stands on, and the NAMEs as `name==version` in
#                              /opt/amphora/base.txt
#   base.sh keep --all         ... everything that the base has from an index
#   base.sh install LOCK [-NAME...]
#                              install the LOCK without what is kept and without the NAMEs; fail,
#                              naming each kept package, if one was replaced
#   base.sh add CONTAINER      install the package amphora, and list all packages (sbom.sh)
#   base.sh neuronx            install torch-neuronx for the base's torch, unless the base has it
#   base.sh has NAME REMEDY, base.sh lacks NAME REMEDY
#                              fail with the remedy unless that is so
set -eu

kept=${KEPT:-/opt/amphora/base.txt}
# The builds mount a cache here: nothing under /dev is in a layer.
if [ -d /dev/pip ]; then export PIP_CACHE_DIR=/dev/pip; fi

# Names as the index normalises them: lower case, `-` for `_` and `.`.
installed() {
    python3 -m pip list --format=freeze --disable-pip-version-check | sed '/==/!d; h; s/==.*//
        y/ABCDEFGHIJKLMNOPQRSTUVWXYZ_./abcdefghijklmnopqrstuvwxyz--/; G; s/\n[^=]*//'
}

keep() {
    mkdir -p "$(dirname "$kept")"
    # What was built where the base was made is at no index by that version.
    if [ "${1:-}" = --all ]; then installed | grep '^[^ @]*==' >"$kept"; return; fi
    installed | while IFS= read -r line; do
        case $line in
            torch==* | torch[-a-z]* | triton==* | nvidia-* | cuda-* | neuron* | libneuron* | nki==*) echo "$line" ;;
            *) case " $* " in *" ${line%%==*} "*) echo "$line" ;; esac ;;
        esac
    done >"$kept"
}

# --no-compile: dated.py does, at the end of the step. -g0: debugging information names a random folder.
# --use-pep517: packages that come as source are built with the tools that they name, not the base's.
install() {
    lock=$1
    shift
    leave=" $* $(sed 's/^\([^=]*\)==.*/-\1/' "$kept" | tr '\n' ' ')"
    wanted=$(mktemp)
    while IFS= read -r line; do
        case $leave in
            *" -${line%%==*} "*) ;;
            *) echo "$line" ;;
        esac
    done <"$lock" >"$wanted"
    CFLAGS=-g0 python3 -m pip install --use-pep517 --disable-pip-version-check -r "$wanted" -c "$kept" --no-compile
    rm "$wanted"
    check
}

# The versions of Neuron SDK 2.33, from AWS's own index (the package index has placeholders). Nothing
# that the base has is replaced.
neuronx() {
    if is_installed torch-neuronx; then return; fi
    torch=$(installed | sed -n 's/^torch==//p')
    remedy="Find the tag of AWS's TorchNeuron training image at github.com/aws-neuron/deep-learning-containers and pass --base-image ...; for trn1: --stack xla."
    case $torch in
        2.13.* | 2.14.*) wanted=torch-neuronx==${torch%"${torch#*.*.}"}3.0 ;;
        *) echo "The base has no torch-neuronx, and torch ${torch:-is missing}: torch-neuronx is for 2.13 and 2.14. $remedy" >&2; return 1 ;;
    esac
    now=$(mktemp)
    installed | grep '^[^ @]*==' >"$now"
    python3 -m pip install --disable-pip-version-check "$wanted" 'neuronx-cc==2.*' nki -c "$now" --no-compile \
        --extra-index-url "${NEURON_INDEX:-https://pip.repos.neuron.amazonaws.com}" || {
        echo "$wanted cannot be added to the base with torch $torch; pip says why above. $remedy" >&2
        return 1
    }
    rm "$now"
}

add() {
    python3 -m pip install --no-deps --disable-pip-version-check "$1" --no-compile
    sh "$1/locks/sbom.sh" "$1/locks/sbom.txt" >/opt/amphora/sbom.cdx.json
    cp "$1/amphora/hook/bash_env.sh" /opt/amphora
    chmod 644 /opt/amphora/bash_env.sh
}

check() {
    now=$(installed)
    moved=
    while IFS= read -r line; do
        case "
$now
" in
            *"
$line
"*) ;;
            *) moved="$moved $line" ;;
        esac
    done <"$kept"
    [ -z "$moved" ] && return
    echo "The base image's own packages were replaced:$moved." >&2
    echo "Choose versions in pyproject.toml that stand beside them, and run 'make lock'." >&2
    return 1
}

is_installed() {
    case "
$(installed)" in
        *"
$1=="*) return 0 ;;
        *) return 1 ;;
    esac
}

has() {
    is_installed "$1" && return
    echo "The image has no $1. $2" >&2
    return 1
}

lacks() {
    is_installed "$1" || return 0
    echo "The image has $1. $2" >&2
    return 1
}

command=${1:-}
case $command in
    keep | install | neuronx | add | has | lacks) shift; "$command" "$@" ;;
    *) echo "base.sh: give keep [NAME...], install LOCK [-NAME...], neuronx, add CONTAINER, has or lacks NAME REMEDY." >&2; exit 2 ;;
esac
