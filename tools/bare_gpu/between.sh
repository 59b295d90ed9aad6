#!/bin/bash
# Here, not on the device, between call 1 and call 2, while the machine is warm: bash .carry/HOST/between.sh FILES_AT
# keeps call 1's result and notes, and adds what the GPU tests asked for to cubins.zip. Ends within
# 22 s; what is not compiled by then stays in the cache, and the older cubins.zip travels.
cd "$(dirname "$0")/../.."
cp "$1"/*-gpu-check.json .carry/HOST/prev/ || exit 1
cat "$1"/notes*.jsonl .carry/HOST12/notes/gpu.jsonl 2>/dev/null | sort -u >.carry/HOST12/notes/gpu.new
mv .carry/HOST12/notes/gpu.new .carry/HOST12/notes/gpu.jsonl
timeout 22 .carry/HOST12/build.sh --keep-all 2>&1 | grep -v '^left out\|^not there'
[ "${PIPESTATUS[0]}" = 0 ] || echo "between: cubins.zip is the older one; run build.sh --keep-all again"
