# Sourced by the scripts beside it, in the repository root: setup on the frozen commit, then parts
# that each have a limit and leave what they wrote in $OUT.
: "${LIMIT:?seconds that the script may take}" "${OUT:?folder for the results}"
export MEMRA_FROZEN=1
OUT=$(readlink -f "$OUT")
source .carry/setup.sh || exit 1
R=$B/results
mkdir -p "$R" "$OUT"
exec > >(tee -a "$OUT/log.txt") 2>&1
python3 - <<'P' || exit 1
import os
from memra_lowlevel import Device
from memra_lowlevel.bench import result
with Device(os.environ.get("MEMRA_DEVICE", "cuda:0")) as device:
    about = result.environment(device)
for name in ("device", "driver", "nvrtc", "python", "machine", "commit", "package", "versions"):
    print(f"{name}: {about[name]}")
P

seconds_left() { echo $((LIMIT - ($(date +%s%N) - MEMRA_T0) / 1000000000)); }

within() {  # within SECONDS COMMAND...: stopped at that limit or at the script's, whichever is first
    local most=$1 left; shift
    left=$(($(seconds_left) - 6))
    [ "$left" -lt 5 ] && { memra_say "no time left for: $*"; return 124; }
    [ "$most" -gt "$left" ] && most=$left
    timeout -k 5 "$most" "$@"
}

keep() {  # what is there so far
    cp -pu "$R"/*.json "$OUT/" 2>/dev/null
    notes "$B/notes13" "$OUT/notes.jsonl"
    notes "$B/notes12" "$OUT/notes12.jsonl"
}
notes() { ls "$1"/*.jsonl >/dev/null 2>&1 && cat "$1"/*.jsonl | sort -u >"$2"; }
trap 'keep; memra_say "end"; sleep 0.3' EXIT
trap 'exit 143' TERM INT

check() {  # check SECONDS WORDS...: gpu_check within its own budget
    local most=$1; shift
    local room=$(($(seconds_left) - 14))
    [ "$most" -gt "$room" ] && most=$room
    within $((most + 8)) python3 tools/gpu_check.py --budget-s "$most" --out "$R" "$@"
    local status=$?
    keep
    memra_say "gpu_check $* ended with $status (0 green, 1 failed, 3 something left)"
    return $status
}

check12() {  # check12 SECONDS: everything but bench, bindings 12.9 and kernels by NVRTC 12.9
    memra_site "$MEMRA_REPO/.whl12" "$B/site12" || return 1
    if [ -n "${STRICT12:-}" ]; then rm -f "$B"/site12/cuda/bindings/nvrtc*; fi  # no compiler at all
    rm -rf "$B/cubins" && python3 -m zipfile -e "$MEMRA_REPO/.carry/HOST12/cubins.zip" "$B/cubins"
    local but=bench status
    memra_model || { echo "no model: parity/e2e is left out"; but=bench,parity/e2e; }
    (
        export PYTHONPATH=$B/site12:$PYTHONPATH MEMRA_CUBINS=$B/cubins MEMRA_RECORD_JOBS=$B/notes12
        python3 -c 'from importlib.metadata import version as v; from cuda.bindings import driver
print("bindings", v("cuda-bindings"), driver.__file__); assert v("cuda-bindings")[:5] == "12.9."' ||
            exit 1
        check "$1" --but $but --name gpu-check-cuda12 ${CHECK_WORDS:-}
        status=$?
        unset MEMRA_RECORD_JOBS
        within 40 python3 tools/build_cubins.py "$B/cubins" --verify --arch sm_90 \
            --recorded "$B/notes12"
        exit $status
    )
    status=$?
    keep
    return $status
}
