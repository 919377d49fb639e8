#!/bin/sh
# What an image's base brought with it, so that our installs leave it alone. Runs in image builds:
# POSIX sh, pip and coreutils only.
#
#   base.sh keep [NAME...]   `name==version` lines: its torch, what torch stands on, and the NAMEs
#   base.sh keep --all       ... of all that it has from an index
#   base.sh missing LOCK [KEPT]
#                            the lines of a lock file whose package it does not have, or KEPT does not
#   base.sh check FILE       fails, naming each line of FILE that is no longer installed
#   base.sh has NAME REMEDY, base.sh lacks NAME REMEDY
#                            fails where that is not so
set -eu

# Names as the index normalises them: lower case, `-` for `_` and `.`.
installed() {
    python3 -m pip list --format=freeze --disable-pip-version-check | while IFS= read -r line; do
        name=$(echo "${line%%==*}" | tr 'A-Z_.' 'a-z--')
        echo "$name==${line#*==}"
    done
}

keep() {
    # What was built where the base was made is at no index by that version.
    if [ "${1:-}" = --all ]; then installed | grep '^[^ @]*==' ; return; fi
    installed | while IFS= read -r line; do
        case $line in
            torch==* | torch[-a-z]* | triton==* | nvidia-* | cuda-* | neuron* | libneuron* | nki==*) echo "$line" ;;
            *) case " $* " in *" ${line%%==*} "*) echo "$line" ;; esac ;;
        esac
    done
}

missing() {
    if [ -n "${2:-}" ]; then kept=$(cat "$2"); else kept=$(installed); fi
    have=" $(echo "$kept" | while IFS= read -r line; do printf '%s ' "${line%%==*}"; done)"
    while IFS= read -r line; do
        case $have in
            *" ${line%%==*} "*) ;;
            *) echo "$line" ;;
        esac
    done <"$1"
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
    done <"$1"
    [ -z "$moved" ] && return
    echo "The base image's own packages were replaced:$moved." >&2
    echo "Choose versions in pyproject.toml that stand beside them, and run 'make lock'." >&2
    return 1
}

case ${1:-} in
    keep) shift; keep "$@" ;;
    missing) missing "$2" "${3:-}" ;;
    check) check "$2" ;;
    has) has "$2" "$3" ;;
    lacks) lacks "$2" "$3" ;;
    *) echo "base.sh: say keep [NAME...], missing LOCK [KEPT], check FILE, has or lacks NAME REMEDY." >&2; exit 2 ;;
esac
