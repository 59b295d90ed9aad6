#!/bin/bash
# What travels beside the tree, made here: natives of the working tree (.carry/native) and, with
# the word `commit`, HEAD as .carry/HOST/tree.tgz with its name and the digest of its package.
set -e
cd "$(dirname "$0")/.."
stamp=$(cat memra_lowlevel/native/*.[ch] memra_lowlevel/native/build*.py \
    cuda_src/common/elementary.cuh | sha256sum | cut -c1-24)
if [ "$(cat .carry/native/stamp 2>/dev/null)" != "$stamp" ]; then
    scratch=$(mktemp -d)
    cp -r --parents memra_lowlevel cuda_src "$scratch/"
    rm -f "$scratch"/memra_lowlevel/native/*.so
    for name in build build_layer_kv; do
        .venv/bin/python "$scratch/memra_lowlevel/native/$name.py" >/dev/null
    done
    mkdir -p .carry/native
    cp "$scratch"/memra_lowlevel/native/*.so .carry/native/
    echo "$stamp" >.carry/native/stamp
    rm -rf "$scratch"
fi
echo "natives: stamp $stamp"
[ "$1" = commit ] || exit 0
commit=$(git rev-parse HEAD)
head=examples/smollm2/smollm2-head.gguf  # travels once, in the working tree
git diff --quiet HEAD -- $head || { echo "$head is not the commit's" >&2; exit 1; }
git archive --format=tar "$commit" . ":(exclude)$head" | gzip -9n >.carry/HOST/tree.tgz
echo "$commit" >.carry/HOST/commit
echo "commit: $commit, $(stat -c %s .carry/HOST/tree.tgz) bytes"
