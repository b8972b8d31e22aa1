#!/usr/bin/env bash
# Build csrc/ into python/interlace in place: by setup.py, or by the compiler alone where that fails (setuptools before 77
# cannot read pyproject.toml, and a machine without network cannot get another).
#
#   bash bench/build_core.sh [PYTHON]

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${1:-python3}

if [ "${BUILD_DIRECTLY:-0}" != 1 ] && "$PYTHON" setup.py --quiet build_ext --inplace; then exit 0; fi
echo "setup.py did not build it; compiling directly"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
suffix=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
flags="${INTERLACE_OPTIMIZE:--O3} -std=c++17 -fPIC -fvisibility=hidden -fopenmp -Icsrc $("$PYTHON" -m pybind11 --includes)"
export folder flags CXX="${CXX:-g++}"
# shellcheck disable=SC2016
find csrc -name '*.cpp' -print0 | xargs -0 -P "$(nproc)" -I{} bash -c '$CXX $flags -c "$1" -o "$folder/${1//\//_}.o"' _ {}
$CXX -shared -fopenmp -o "${CORE:-python/interlace/_core$suffix}" "$folder"/*.o
