#!/usr/bin/env bash
# The engine's suites on the tested torch releases other than the one that 'make test' uses.
#   scripts/test_versions.sh [release ...]      for instance 2.8 2.15; all of the list without arguments
# Each release has an environment of its own, .venv-torch-<release>, of several gigabytes. A release whose wheel cannot be
# had here is named, and fails the run. Exit status: 0 when all passed, else 1.
set -uo pipefail
cd "$(dirname "$0")/.."
main_release=2.13 # .venv has it, and `make test` runs on it
suites=${SUITES:-tests/unit tests/integration/far tests/integration/activation}
releases=("$@")
if [ ${#releases[@]} = 0 ]; then
    read -r -a releases <<<"$(python3 -c 'exec(open("hyper_parallel/_version.py").read()); print(*TESTED_TORCH)')"
fi
failed=0
for release in "${releases[@]}"; do
    [ "$release" = "$main_release" ] && continue
    folder=.venv-torch-$release
    if [ ! -f "$folder/.installed" ]; then
        "${PYTHON:-python3}" -m venv "$folder"
        pip=("$folder/bin/python" -m pip --disable-pip-version-check install --quiet)
        "${pip[@]}" "torch==$release.*" && "${pip[@]}" -r requirements/versions.txt && touch "$folder/.installed" || {
            echo "test-versions: torch $release: cannot install it (see above); no test ran on it" >&2
            failed=1
            continue
        }
    fi
    start=$SECONDS
    # shellcheck disable=SC2086 -- the suites are several words
    if PYTHONPATH=$PWD OMP_NUM_THREADS=1 HYPER_PARALLEL_PLATFORM=torch "$folder/bin/python" -m pytest $suites -q -m "not long" -p no:cacheprovider -n 2; then
        word=passed
    else
        word=FAILED failed=1
    fi
    echo "test-versions: torch $release: $word in $((SECONDS - start)) s"
done
exit $failed
