#!/bin/bash
# Call 2: parity/e2e with bindings 13 into the result file of call 1 (on this machine, else in
# .carry/HOST/prev); the whole check with bindings 12.9; the benchmark; a second run of it without
# peers, a third one of a few groups, and whether they agree. PARTS leaves out what is not named.
PARTS=${PARTS:-e2e check12 bench second third}
CHECK12_S=${CHECK12_S:-190} BENCH_S=${BENCH_S:-190} SECOND_S=${SECOND_S:-90} THIRD_S=${THIRD_S:-60}
GROUPS13=${GROUPS13:-ceilings,append,attend,rows,launch,replay,model,recur,latent,round,compile}
SECOND=${SECOND:-ceilings append attend rows launch replay model recur latent round}
THIRD=${THIRD:-ceilings append launch replay recur latent}
DEVICE=${MEMRA_DEVICE:-cuda:0}
export LIMIT=${LIMIT:-585}
source .carry/HOST/common.sh
ls "$R"/*-gpu-check.json >/dev/null 2>&1 || cp -p "$MEMRA_REPO"/.carry/HOST/prev/*.json "$R/" ||
    echo "no result of call 1: parity/e2e will stand alone"
status=0
memra_model || echo "no model (part00 comes with call 1, part01 with this one)"  # the benchmark wants it too
for part in $PARTS; do
    memra_say "--- $part, $(seconds_left) s left"
    case $part in
    e2e)
        if memra_model; then
            MEMRA_RECORD_JOBS=$B/notes13 check 60 --only parity/e2e ${CHECK_WORDS:-}
        else
            echo "no model: e2e is not run"; false
        fi
        ;;
    check12) check12 "$CHECK12_S" ;;
    bench) check "$BENCH_S" --bench --groups "$GROUPS13" --device "$DEVICE" ;;
    second | third)
        most=$SECOND_S names=$SECOND
        [ "$part" = third ] && most=$THIRD_S names=$THIRD
        within "$most" python3 tools/bench.py $names --no-peers --device "$DEVICE" \
            --json "$R/$part-run.json"
        memra_say "$part run ended with $?"
        keep
        within 20 python3 -m memra_lowlevel.bench.agree "$R"/*-gpu-check-bench.json "$R"/second-run.json \
            $([ "$part" = third ] && echo "$R/third-run.json")
        ;;
    *) echo "no part is called $part"; false ;;
    esac
    now=$?
    memra_say "--- $part: status $now"
    [ $now -gt $status ] && status=$now
done
exit $status
