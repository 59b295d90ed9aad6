#!/bin/bash
# The shortest start: bash .carry/lab.sh .carry/NAME/script.py [words]   (or a .sh file)
# Bindings 13, the working tree in /root/memra, prebuilt natives. Status: the script's.
OUT=$(readlink -f "$OUT"); export OUT
source .carry/setup.sh || exit 1
case $1 in
    *.sh) source "$@" ;;
    *) python3 "$@" ;;
esac
status=$?
memra_say "$1 ended with $status"
exit $status
