#!/usr/bin/env bash
# Everything that needs a CUDA GPU, in one command and under nine minutes: build, sanity, GPU tests, attention
# benchmark, single kernels, subblock ablation, copy engines and what they overlap with. Needs python with torch, triton,
# pybind11, setuptools and pytest, a C++ compiler, and no network; what else is installed (xdist, matplotlib, flash-attn)
# is used.
#
#   bash bench/gpu.sh                     results in bench/results/gpu
#   OUT=/some/folder PYTHON=python3.12 bash bench/gpu.sh
#   DRY=1 bash bench/gpu.sh               the same lines on a machine without a GPU, at toy sizes, on the CPU backend
#
# LIMIT            seconds for everything (530)
# PATIENCE         a whole number by which the limit of each phase is multiplied, for a slow or busy machine (1)
# ATTENTION_ARGS   more arguments for bench.attention, such as "--masks multimodal --lengths 65536"
# TESTS=0, SUBBLOCKS=0, COMM=0    leave a phase out, which gives its time to the attention benchmark
#
# TRAINER=1        also bench.gpu_trainer, which takes about 40 minutes (set LIMIT=3000; with DRY=1 a minute or two), and
#                  what the trainer needs: pip install 'transformers>=5' pydantic rich pillow matplotlib tokenizers peft accelerate
#
# Each phase has a time limit of its own and none stops the next. Results are written as they come: attention.json
# after every case. The last lines are a table of the phases and of the results; the exit status is 1 if any failed.

set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

PYTHON=${PYTHON:-python3}
OUT=${OUT:-bench/results/gpu}
LIMIT=${LIMIT:-530}
PATIENCE=${PATIENCE:-1}
DRY=${DRY:-0}
TESTS=${TESTS:-1}
SUBBLOCKS=${SUBBLOCKS:-1}
COMM=${COMM:-1}
TRAINER=${TRAINER:-0}
read -r -a ATTENTION <<< "${ATTENTION_ARGS:-}"

mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)
LOG=$OUT/gpu.log
: > "$LOG"
rm -f "$OUT"/sanity.json "$OUT"/attention.json "$OUT"/attention.png "$OUT"/subblocks.json "$OUT"/kernel_times.json \
    "$OUT"/copy_engines.json "$OUT"/overlap_gpu.json "$OUT"/gpu_trainer.json
export PYTHONPATH="python:.${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
SECONDS=0 # bash counts it up

PRESET=gpu
SUBBLOCK_PRESET=gpu
SANITY=(--masks packed_images causal --lengths 1000 --heads 8:2)
SELECT=()
TOY=()
if [ "$DRY" = 1 ]; then
    export INTERLACE_BENCH_DEVICE=cpu INTERLACE_GPU_TESTS_ON=cpu
    PRESET=smoke
    SUBBLOCK_PRESET=smoke
    SANITY=(--masks packed_images causal --lengths 300)
    SELECT=(-k "(odd_shapes and float32) or lse or devices or refused or cuda or (one_process and plain) or replicas_of_one")
    TOY=(--dry)
fi

phases=()
failed=0

# phase NAME LIMIT COMMAND...: run it under its limit (times PATIENCE, and at most what is left of the whole), log it, show
# the end of its log.
phase() {
    local name=$1 limit=$(($2 * PATIENCE)) left=$((LIMIT - SECONDS)) begin=$SECONDS rc from
    shift 2
    if [ "$limit" -gt "$left" ]; then limit=$left; fi
    if [ "$limit" -lt 5 ]; then
        phases+=("$(printf '%-10s NOT RUN, no time left' "$name")")
        failed=1
        return
    fi
    echo "== $name: $* (at most $limit s)" | tee -a "$LOG"
    from=$(wc -l < "$LOG")
    # To a file and not through a pipe: a process left behind would keep a pipe, and so this script, waiting.
    timeout --signal=INT --kill-after=5 "$limit" "$@" >> "$LOG" 2>&1 < /dev/null
    rc=$?
    tail -n +$((from + 1)) "$LOG" | tail -n "${TAIL:-12}"
    if [ "$rc" = 0 ]; then
        phases+=("$(printf '%-10s ok, %d s' "$name" $((SECONDS - begin)))")
        return
    fi
    failed=1
    if [ "$rc" = 124 ] || [ "$rc" = 137 ]; then
        phases+=("$(printf '%-10s CUT OFF after %d s' "$name" $((SECONDS - begin)))")
    else
        phases+=("$(printf '%-10s FAILED with status %d after %d s' "$name" "$rc" $((SECONDS - begin)))")
    fi
}

phase build 90 bash bench/build_core.sh "$PYTHON"

phase sanity 75 "$PYTHON" -m bench.attention --preset "$PRESET" --check-only "${SANITY[@]}" --peers sdpa_dense \
    --no-memory --out "$OUT/sanity.json"

if [ "$TESTS" = 1 ]; then
    # Kernels compile for most of this phase: several workers do it at once.
    workers=()
    if [ "$DRY" != 1 ] && "$PYTHON" -c 'import xdist' 2> /dev/null; then workers=(-n 6); fi
    # The project's own pytest options name plugins that a bare machine lacks.
    phase tests 180 "$PYTHON" -m pytest tests/gpu -q -o addopts="-ra --import-mode=importlib" -p no:cacheprovider \
        --durations=5 --maxfail=20 "${workers[@]+"${workers[@]}"}" "${SELECT[@]+"${SELECT[@]}"}" \
        --ignore=tests/gpu/test_rehearsal.py
fi

reserve=75
if [ "$SUBBLOCKS" = 1 ]; then reserve=$((reserve + 50)); fi
if [ "$COMM" = 1 ]; then reserve=$((reserve + 60)); fi
if [ "$TRAINER" = 1 ]; then reserve=$((reserve + 2400)); fi
room=$((LIMIT - SECONDS - reserve))
if [ "$room" -lt 30 ]; then room=30; fi
TAIL=40 phase attention "$room" "$PYTHON" -m bench.attention --preset "$PRESET" --budget $((room - 25)) \
    --out "$OUT/attention.json" "${ATTENTION[@]+"${ATTENTION[@]}"}"

TAIL=40 phase kernels 60 "$PYTHON" -m bench.kernel_times --ships "${TOY[@]+"${TOY[@]}"}" --out "$OUT/kernel_times.json"

if [ "$SUBBLOCKS" = 1 ]; then
    TAIL=40 phase subblocks 60 "$PYTHON" -m bench.subblocks --preset "$SUBBLOCK_PRESET" --budget $((40 * PATIENCE)) \
        --out "$OUT/subblocks.json"
fi

if [ "$COMM" = 1 ]; then
    TAIL=30 phase engines 25 "$PYTHON" -m bench.copy_engines "${TOY[@]+"${TOY[@]}"}" --out "$OUT/copy_engines.json"
    TAIL=80 phase overlap 40 "$PYTHON" -m bench.overlap_gpu "${TOY[@]+"${TOY[@]}"}" --out "$OUT/overlap_gpu.json"
fi

if [ "$TRAINER" = 1 ]; then
    REHEARSE=()
    if [ "$DRY" = 1 ]; then REHEARSE=(--rehearse --steps 2); fi
    # What does not fit the GPU's memory is left out by the benchmark, which says so.
    TAIL=40 phase trainer 2400 "$PYTHON" -m bench.gpu_trainer "${REHEARSE[@]+"${REHEARSE[@]}"}" \
        --out "$OUT/gpu_trainer.json"
fi

{
    echo "== results in $OUT, $SECONDS s"
    printf '%s\n' "${phases[@]}"
    reports=("$OUT/attention.json")
    if [ "$SUBBLOCKS" = 1 ]; then reports+=("$OUT/subblocks.json"); fi
    "$PYTHON" -m bench.attention_report "${reports[@]}" 2>&1 || failed=1
} > "$OUT/summary.txt"
cat "$OUT/summary.txt"
exit "$failed"
