#!/usr/bin/env bash
# Build .venv-bench: everything of .venv, and the peers that `make bench` compares with. A peer that
# does not install here is left out; the bench says so.
#
# usage: scripts/bench_venv.sh BASE DIR     (.venv and .venv-bench)
set -euo pipefail
cd "$(dirname "$0")/.."
base=$1
venv=$2

"$base/bin/python" -m venv --clear "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
echo "import site; site.addsitedir('$(site "$base")')" > "$(site "$venv")/base_environment.pth"
grep -v '^#' bench/peers.txt | while read -r package; do
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input -q install \
        --no-deps "$package" < /dev/null || echo "bench: $package does not install here" >&2
done
