#!/usr/bin/env bash
# The suites that judge numbers, under every choice of kernels and threads that can be made on one machine.
#   PYTHON=.venv/bin/python scripts/test_machines.sh [pytest arguments]
# MKL_CBWR chooses MKL's kernels, ATEN_CPU_CAPABILITY those of torch, OMP_NUM_THREADS in how many pieces a sum is made.
# Every choice is run, also after a failure. Exit status: 0 when all passed, else 1.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
suites=${SUITES:-tests/fuzz tests/integration/activation tests/integration/planner tests/contract tests/property}
failed=0
for kernels in unset COMPATIBLE; do
    for capability in default avx2; do
        for threads in 1 4; do
            choice=(env -u MKL_CBWR "ATEN_CPU_CAPABILITY=$capability" "OMP_NUM_THREADS=$threads" HYPER_PARALLEL_PLATFORM=torch)
            [ "$kernels" = unset ] || choice+=("MKL_CBWR=$kernels")
            start=$SECONDS
            # shellcheck disable=SC2086 -- the suites are several words
            if "${choice[@]}" "$python" -m pytest $suites -q -m "not long" -p no:cacheprovider "$@"; then word=passed; else word=FAILED failed=1; fi
            echo "test-machines: MKL_CBWR=$kernels ATEN_CPU_CAPABILITY=$capability OMP_NUM_THREADS=$threads: $word in $((SECONDS - start)) s"
        done
    done
done
exit $failed
