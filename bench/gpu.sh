#!/usr/bin/env bash
# Tests and benchmarks on a machine with a CUDA GPU, in two calls that each end within a fixed time.
#
#   bash bench/gpu.sh first     240 s at most. Correctness: attention in bf16 with every backend, collectives of two
#                               processes. Then timings: single kernels, tiles, copy engines, Nsight Compute
#   bash bench/gpu.sh second    330 s at most. All GPU tests, compute-sanitizer. Then timings: attention beside its
#                               peers, overlap of copies and products, six training steps of a 2B model
#
# Needs python with torch, triton and pytest, and no network; what else is there (xdist, ncu, compute-sanitizer) is used.
# `bash bench/pack_gpu.sh` prepares elsewhere what such a machine may lack; without it, csrc/ is compiled first.
#
# Checks that mostly compile run together, then timings run alone. Each has a time limit and prints one line when it
# ends: "ok NAME seconds", "FAIL NAME status, last line of its output" or "CUT OFF NAME after seconds"; none stops the
# next. The last lines are a table. The exit status is 1 if any check failed, was cut off, or had no time left.
#
# OUT       folder of the results: gpu_first.log or gpu_second.log and a JSON per benchmark (bench/results/gpu)
# PYTHON    the interpreter (python3)
# PACK      the folder that bench/pack_gpu.sh made (.dev)
# EXTRA     further checks, one a line: NAME SECONDS COMMAND. They run alone, before the timings
# DRY=1     rehearsal on a CPU, at toy sizes
# PATIENCE  a whole number that multiplies all limits, for a slow machine (1)

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

RUN=${1:-}
PYTHON=${PYTHON:-python3}
OUT=${OUT:-bench/results/gpu}
PACK=${PACK:-.dev}
DRY=${DRY:-0}
PATIENCE=${PATIENCE:-1}
case "$RUN" in
    first) LIMIT=$((235 * PATIENCE)) ;;
    second) LIMIT=$((325 * PATIENCE)) ;;
    *) echo "usage: bash bench/gpu.sh first|second" >&2 && exit 2 ;;
esac
SECONDS=0 # bash counts it up

mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)
LOG=$OUT/gpu_$RUN.log
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
: > "$LOG"
: > "$WORK/results"
export PYTHONPATH="python:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [ "$DRY" = 1 ]; then export INTERLACE_BENCH_DEVICE=cpu INTERLACE_GPU_TESTS_ON=cpu; fi

# check NAME SECONDS COMMAND...: run it under its limit, print its line, add its output to the log.
check() {
    local name=$1 limit=$(($2 * PATIENCE)) left=$((LIMIT - SECONDS)) begin=$SECONDS status line
    shift 2
    if [ "$limit" -gt "$left" ]; then limit=$left; fi
    if [ "$limit" -lt 5 ]; then
        report "NOT RUN $name, no time left" 1
        return
    fi
    # To a file and not through a pipe: a process left behind would keep a pipe, and so this script, waiting. A shell
    # ignores SIGINT in its background jobs; pytest needs it for its summary.
    env --default-signal=INT timeout --signal=INT --kill-after=5 "$limit" "$@" > "$WORK/$name.log" 2>&1 < /dev/null
    status=$?
    line=$(grep -v '^[[:space:]]*$' "$WORK/$name.log" | tail -n 1 | cut -c 1-160)
    case "$status" in
        0) line="ok $name $((SECONDS - begin)) s" ;;
        124 | 137) line="CUT OFF $name after $((SECONDS - begin)) s" ;;
        *) line="FAIL $name $status, $line" ;;
    esac
    { # one at a time; the end is enough where a check says more than a megabyte
        flock 9
        printf '\n== %s: %s\n' "$line" "$*" >> "$LOG"
        tail -c 1000000 "$WORK/$name.log" >> "$LOG"
    } 9> "$WORK/lock"
    report "$line" "$status"
}

report() {
    echo "$1"
    printf '%s\t%s\t%s\n' "$SECONDS" "$2" "$1" >> "$WORK/results"
}

# tests NAME SECONDS ARGUMENTS...: pytest, without the project's options, which name plugins that a bare machine lacks.
tests() {
    local name=$1 limit=$2
    shift 2
    check "$name" "$limit" "$PYTHON" -m pytest -v --tb=short -o addopts="-ra --import-mode=importlib" -p no:cacheprovider \
        --durations=5 --ignore=tests/gpu/test_rehearsal.py "$@"
}

has() { command -v "$1" > /dev/null; }
kernels_in_cache() { find "${TRITON_CACHE_DIR:-$WORK/none}" -name '__grp__*' 2> /dev/null | wc -l; }

# ---------------------------------------------------------------------- what is needed

if [ -d "$PACK" ]; then check unpack 30 bash bench/pack_gpu.sh unpack "$PACK" "$WORK/pack"; fi
if [ -d "$WORK/pack/site" ]; then export PYTHONPATH="$PYTHONPATH:$WORK/pack/site"; fi
if [ -d "$WORK/pack/triton" ]; then export TRITON_CACHE_DIR=$WORK/pack/triton; fi
carried=$(kernels_in_cache)
"$PYTHON" -c 'import interlace._core' 2> /dev/null || check build 90 bash bench/build_core.sh "$PYTHON"

workers() { # xdist with this many processes
    if [ "$DRY" != 1 ] && "$PYTHON" -c 'import xdist' 2> /dev/null; then echo "-n $1"; fi
}
TOY=()
TWO="cuda_ipc-2 or symm_mem-2"
BF16="not by_backend and not torch.float16 and not float32 and not 31_bits"
GLUON="by_backend and gluon"
TRITON="by_backend and triton"
ALL=()
SHAPES=(--preset gpu --masks full causal packed_images cornstarch_mp gemma3_images video --lengths 8192 32768
    --heads "32:8" --peers sdpa_causal sdpa_full flex)
if [ "$DRY" = 1 ]; then
    TOY=(--dry)
    TWO=shm-2
    BF16="softcap or refused"
    GLUON="head_dimensions_by_backend and cpu"
    TRITON="masks_by_backend and causal"
    ALL=(-k "(odd_shapes and float32) or (one_process and plain) or replicas_of_one")
    SHAPES=(--preset smoke --no-memory)
fi

extra() {
    local name limit command
    while read -r name limit command; do
        if [ -n "$name" ]; then check "$name" "$limit" bash -c "$command"; fi
    done <<< "${EXTRA:-}"
}

# ---------------------------------------------------------------------- the two runs

first() {
    local tiles=(causal:8192:128 causal:16384:64 gemma3_images:8192:256) kernel
    check sanity 20 "$PYTHON" -m bench.sanity
    # shellcheck disable=SC2046
    tests tests 60 $(workers 6) tests/gpu/test_attention.py -k "$BF16" &
    # shellcheck disable=SC2046
    tests triton 60 $(workers 3) tests/gpu/test_attention.py -k "$TRITON" &
    # In processes of its own: a wrong barrier in a warp-specialized kernel hangs.
    # shellcheck disable=SC2046
    tests gluon 60 $(workers 3) tests/gpu/test_attention.py -k "$GLUON" &
    tests ranks 60 tests/gpu/test_comm.py -k "$TWO" &
    if [ "$DRY" != 1 ]; then
        # What is timed below is compiled now, by two calls of the same benchmark.
        check compile 60 "$PYTHON" -m bench.kernel_times --compile --workers 4 --cases "${tiles[@]}" &
        check flex 60 "$PYTHON" -m bench.kernel_times --ships --flex 2 --repeats 1 \
            --cases full:32768:128 causal:8192:128 --out "$WORK/flex.json" &
    fi
    wait
    extra
    check kernels 60 "$PYTHON" -m bench.kernel_times --ships --flex 2 "${TOY[@]+"${TOY[@]}"}" \
        --out "$OUT/kernel_times.json"
    check tiles 35 "$PYTHON" -m bench.kernel_times --cases "${tiles[@]}" "${TOY[@]+"${TOY[@]}"}" \
        --out "$OUT/kernel_tiles.json"
    check engines 25 "$PYTHON" -m bench.copy_engines "${TOY[@]+"${TOY[@]}"}" --out "$OUT/copy_engines.json"
    if has ncu; then
        for kernel in forward key_gradient gluon_forward gluon_key_gradient gluon_query_gradient; do
            check "ncu_$kernel" 20 ncu --clock-control none -c 1 -k "regex:^${kernel}_kernel$" --set detailed \
                "$PYTHON" -m bench.kernel_times --ships --cases causal:8192:128 --repeats 1 --out "$WORK/profiled.json"
        done
    fi
}

second() {
    local small=(-m bench.attention --preset smoke --check-only --masks packed_images gemma3_images --lengths 300
        --dtype bfloat16 --heads "4:2" --head-dim 128 --no-memory --peers)
    # shellcheck disable=SC2046
    tests tests 110 $(workers 8) tests/gpu "${ALL[@]+"${ALL[@]}"}" &
    tests repeats 110 tests/gpu/test_attention.py -k "repeats" &
    if has compute-sanitizer; then
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 check memcheck 110 compute-sanitizer --tool memcheck --error-exitcode 9 \
            "$PYTHON" "${small[@]}" --out "$WORK/memcheck.json" &
        PYTORCH_NO_CUDA_MEMORY_CACHING=1 check memcheck_gluon 110 compute-sanitizer --tool memcheck --error-exitcode 9 \
            "$PYTHON" "${small[@]}" --backend gluon --out "$WORK/memcheck_gluon.json" &
        # Triton's kernels alone: in Gluon's it reports what Triton itself does where it hands arguments to warps.
        check racecheck 110 compute-sanitizer --tool racecheck --error-exitcode 9 \
            "$PYTHON" "${small[@]}" --backend triton --out "$WORK/racecheck.json" &
    fi
    wait
    extra
    check attention 75 "$PYTHON" -m bench.attention "${SHAPES[@]}" --budget $((55 * PATIENCE)) \
        --out "$OUT/attention.json"
    check overlap 30 "$PYTHON" -m bench.overlap_gpu --rows 2048 8192 --chunks 1 4 8 "${TOY[@]+"${TOY[@]}"}" \
        --out "$OUT/overlap_gpu.json"
    check trainer 90 "$PYTHON" -m bench.gpu_trainer --short "${TOY[@]+--rehearse}" --out "$OUT/gpu_trainer.json"
}

"$RUN"
{
    printf '\n== %s run: %s s, results in %s\n' "$RUN" "$SECONDS" "$OUT"
    printf 'ended at  result\n'
    awk -F '\t' '{ printf "%6s s  %s\n", $1, $3 }' "$WORK/results"
    echo "kernels for the GPU: $carried carried, $(($(kernels_in_cache) - carried)) compiled here"
} | tee -a "$LOG"
! awk -F '\t' '$2 != 0 { found = 1 } END { exit !found }' "$WORK/results"
