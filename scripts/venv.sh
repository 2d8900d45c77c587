#!/usr/bin/env bash
# Build the development environment: .venv with Python 3.11, SGLang 0.5.23 on CPU, this project
# (editable) and its CPU test helper, all versions pinned. Safe to call again: what is there stays.
#
# usage: scripts/venv.sh [DIR]          (DIR defaults to .venv)
# PYTHON=/path/to/python3.11            another interpreter to start from
# PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS   the usual variables of pip, for a mirror or a CPU torch
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

say() { echo "venv: $*" >&2; }

works() { # PYTHON: is it a 3.11 that can make a venv and compile extensions?
    "$1" - <<'PY' > /dev/null 2>&1
import ensurepip, pathlib, sys, sysconfig, venv
assert sys.version_info[:2] == (3, 11)
assert pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists()
PY
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 /usr/bin/python3.11 python3; do
        if [ -n "$candidate" ] && works "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

library() { PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -q "$1"; } # NAME: can it be loaded?

debian_packages() { # names of the Debian packages whose purpose is not served yet
    find_python > /dev/null || echo python3.11 python3.11-venv python3.11-dev
    command -v g++ > /dev/null || echo g++
    [ -e /usr/include/openssl/sha.h ] || echo libssl-dev # SGLang compiles its page hash against it
    PATH=$PATH:/usr/sbin:/sbin command -v mkfs.ext4 > /dev/null || echo e2fsprogs # disk-full tests
    command -v redis-server > /dev/null || echo redis-server # tests of the index in Redis
    PATH=$PATH:/usr/sbin:/sbin command -v tc > /dev/null || echo iproute2 # hosts in namespaces
    # Mooncake, which carries KV from prefill to decode servers, is linked against these.
    library libibverbs.so.1 || echo libibverbs1
    library libnuma.so.1 || echo libnuma1
    library libcurl.so.4 || echo libcurl4
}

missing=$(debian_packages | xargs)
if [ -n "$missing" ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        say "installing Debian packages: $missing"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq < /dev/null
        # shellcheck disable=SC2086  # a list of names
        apt-get install -y -qq --no-install-recommends $missing < /dev/null > /dev/null
    else
        say "missing, please install (Debian names): $missing"
        [ -z "$(tr ' ' '\n' <<< "$missing" | grep -vx -e e2fsprogs -e redis-server -e iproute2 \
            -e libibverbs1 -e libnuma1 -e libcurl4)" ] || exit 1
    fi
fi

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python) || { say "no Python 3.11 with venv and headers found"; exit 1; }
    say "creating $venv with $python"
    "$python" -m venv "$venv"
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input -q "$@" < /dev/null; }

say "installing pinned packages (about 3 minutes and 2 GB the first time)"
pip install -c requirements/sglang-cpu.txt -r requirements/torch.txt
pip install --no-deps -r requirements/sglang-cpu.txt
pip install --no-deps -r requirements/dev.txt
pip install --no-deps --no-build-isolation -e .
if [ -f tests/sglang_cpu/pyproject.toml ]; then
    pip install --no-deps --no-build-isolation --force-reinstall ./tests/sglang_cpu
    say "compiling SGLang's page hash"
    SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -m sglang_cpu.prebuild < /dev/null
fi
say "ready: $("$venv/bin/python" --version), sglang $("$venv/bin/python" -c \
    'from importlib.metadata import version; print(version("sglang"))')"
