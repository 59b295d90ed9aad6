#!/bin/bash
# The check with bindings 12.9 on kernels of NVRTC 12.9 alone. About CHECK12_S + 20 s.
CHECK12_S=${CHECK12_S:-190}
export LIMIT=${LIMIT:-270}
source .carry/HOST/common.sh
check12 "$CHECK12_S"
