#!/bin/bash
# Kernels by NVRTC 12.9 for the check with bindings 12.9: .carry/HOST12/cubins.zip of HEAD.
#   build.sh               freezes HEAD, records its host twins (notes/host.jsonl), builds
#   build.sh --keep-notes  freezes HEAD, builds from the notes that are there
#   build.sh --keep-all    the same for the commit that is frozen already
# notes/gpu.jsonl, where there is one, is notes.jsonl (or notes12.jsonl) of a call on the device.
# Works on a tree of its own, so edits beside it do not matter. Incremental: compiled code is cached.
set -e
cd "$(dirname "$0")/../.."
main=$PWD here=$PWD/.carry/HOST12 python=$PWD/.venv/bin/python tree=/tmp/memra12/tree
began=$(date +%s)
[ "$1" = --keep-all ] || .carry/freeze.sh commit
rm -rf $tree /tmp/memra12/site /tmp/memra12/notes && mkdir -p $tree /tmp/memra12/site /tmp/memra12/notes
tar xzf .carry/HOST/tree.tgz -C $tree
cp .carry/native/*.so $tree/memra_lowlevel/native/
# The package is that tree's, not the editable installation's.
sed -n '/^import os, sys$/,/^P$/p' .carry/setup.sh | sed '$d' >/tmp/memra12/site/sitecustomize.py
export PYTHONPATH=/tmp/memra12/site:$tree MEMRA_ROOT=$tree PYTHONDONTWRITEBYTECODE=1
cd $tree
nice -n 10 $python -c 'import memra_lowlevel, memra_lowlevel.examples as e, sys
for m in (memra_lowlevel, e): assert m.__file__.startswith(sys.argv[1]), m.__file__
from memra_lowlevel.compile import nvrtc
from memra_lowlevel.bench import sources
assert nvrtc.library().version == (12, 9), nvrtc.library()
print(nvrtc.library().name, "package", sources.package_digest())' $tree
if [ "${1#--keep}" = "$1" ] || [ ! -s $here/notes/host.jsonl ]; then
    rm -rf /tmp/memra12/record
    nice -n 10 $python tools/record_jobs.py /tmp/memra12/record || echo "record_jobs: status $?"
    cat /tmp/memra12/record/*.jsonl | sort -u >$here/notes/host.jsonl
    echo "recorded in $(($(date +%s) - began)) s"
fi
for name in host gpu; do  # paths of the machine that noted; only what an H200 can load
    [ -s $here/notes/$name.jsonl ] || { echo "no notes/$name.jsonl"; continue; }
    sed "s#\"/root/memra/#\"$tree/#g" $here/notes/$name.jsonl |
        grep -E '"arch": "(host|sm_90a?|compute_90)"' >/tmp/memra12/notes/$name.jsonl || true
    echo "notes/$name.jsonl: $(wc -l <$here/notes/$name.jsonl) noted," \
        "$(wc -l </tmp/memra12/notes/$name.jsonl) for this GPU"
done
nice -n 10 $python tools/build_cubins.py $here/cubins.new.zip --arch sm_90 \
    --recorded /tmp/memra12/notes
mv $here/cubins.new.zip $here/cubins.zip
cp $main/.carry/HOST/commit $here/cubins.commit
nice -n 10 $python tools/build_cubins.py $here/cubins.zip --verify --arch sm_90 \
    --recorded /tmp/memra12/notes || true
echo "cubins.zip: $(stat -c %s $here/cubins.zip) bytes, commit $(cat $here/cubins.commit)," \
    "$(($(date +%s) - began)) s in all"
