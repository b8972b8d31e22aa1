#!/usr/bin/env bash
# Prepare what bench/gpu.sh would spend a GPU machine's time on, or cannot fetch there without a network.
#
#   bash bench/pack_gpu.sh [FOLDER]            here: fill FOLDER (.dev) anew; some minutes, some GB below build/pack
#   bash bench/pack_gpu.sh unpack FOLDER TO    there: bench/gpu.sh does so where it finds the folder
#
# FOLDER gets interlace._core for that machine's Python, Triton's cache with kernels for sm_90, and wheels of what
# `interlace train` imports and the machine lacks. Whatever does not fit that machine is built or compiled there instead.
#
# PYTHON    an interpreter of that machine's version of Python (python3.12); unpack: that machine's own
# TORCH     its packages, of which Triton has to be the same build ("torch==2.11.0 triton==3.6.0")
# MISSING   packages that it lacks ("pydantic rich resvg_py")

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

suffix() { "$1" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))'; }
# A hash of Triton's compiled part, which is in the key of every kernel.
triton_build() {
    "$1" -c 'import triton._C.libtriton as l, hashlib; print(hashlib.sha256(open(l.__file__, "rb").read()).hexdigest())'
}

# pack_cache CACHE TO: without the whole paths that Triton writes into its cache.
pack_cache() {
    find "$1" -name '__grp__*' -exec sed -i "s|$1|@CACHE@|g" {} +
    tar -cJf "$2/triton.tar.xz" -C "$1" .
    triton_build "${PYTHON:-python3}" > "$2/triton.build"
}

unpack() {
    local from=$1 to=$2 python=${PYTHON:-python3} core
    mkdir -p "$to/triton"
    core=$from/_core$(suffix "$python")
    if [ -f "$core" ]; then cp "$core" python/interlace/; fi
    tar -xJf "$from/triton.tar.xz" -C "$to/triton"
    find "$to/triton" -name '__grp__*' -exec sed -i "s|@CACHE@|$to/triton|g" {} +
    if [ "$(triton_build "$python")" != "$(cat "$from/triton.build")" ]; then
        echo "Triton is another build here: it will find nothing of what was compiled for it"
    fi
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$to/site" "$from"/wheels/*.whl
}

pack() {
    local to=$1 work=build/pack python backend
    python=$work/venv/bin/python
    [ -x "$python" ] || "${PYTHON:-python3.12}" -m venv "$work/venv"
    # shellcheck disable=SC2086
    "$python" -m pip install -q ${TORCH:-torch==2.11.0 triton==3.6.0} numpy pybind11 "setuptools>=77" pytest pytest-xdist
    rm -rf "$to" "$work/triton"
    mkdir -p "$to/wheels" "$work/triton"

    # shellcheck disable=SC2086
    "$python" -m pip download -q -d "$to/wheels" ${MISSING:-pydantic rich resvg_py}
    bash bench/build_core.sh "$python"
    cp "python/interlace/_core$(suffix "$python")" "$to/"
    for backend in triton gluon; do
        PYTHONPATH=python:. TRITON_CACHE_DIR=$PWD/$work/triton TRITON_STORE_BINARY_ONLY=1 \
            "$python" -m bench.warm_cache "$backend" -n "$(nproc)"
    done
    PYTHON=$python pack_cache "$PWD/$work/triton" "$to"
    echo "$(find "$work/triton" -name '__grp__*' | wc -l) kernels; $to: $(du -sh "$to" | cut -f 1)"
}

case "${1:-}" in
    unpack | pack_cache) "$@" ;;
    *) pack "${1:-.dev}" ;;
esac
