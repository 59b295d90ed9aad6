#!/bin/bash
# Call 1: the check with bindings 13, without bench and without the whole model; notes of what its
# tests asked of the compiler. CHECK_S seconds of gpu_check; about CHECK_S + 25 s in all. Again on
# the same machine and package: only what was not green.
CHECK_S=${CHECK_S:-185}
export LIMIT=${LIMIT:-270} MEMRA_BUILD_NATIVES=${MEMRA_BUILD_NATIVES-1}
export MEMRA_WARM=${MEMRA_WARM-torch cupy triton numba.cuda}
source .carry/HOST/common.sh
MEMRA_RECORD_JOBS=$B/notes13 check "$CHECK_S" --but bench,parity/e2e ${CHECK_WORDS:-}
