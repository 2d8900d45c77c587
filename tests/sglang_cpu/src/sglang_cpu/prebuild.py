"""`SGLANG_USE_CPU_ENGINE=1 python -m sglang_cpu.prebuild`: compile SGLang's page hash.

SGLang compiles this C++ extension at the first prefix lookup, which takes 15-25 s. Done once a
virtual environment, the result lies in <sys.prefix>/torch_extensions.
"""

from __future__ import annotations

import hashlib

from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash


def main() -> None:
    tokens = [1, 2, 3, 4]
    digests = get_native_hash(tokens, None, 2)
    first = hashlib.sha256(b"".join(t.to_bytes(4, "little") for t in tokens[:2])).hexdigest()
    if digests[0] != first:
        raise SystemExit(f"SGLang's page hash gives {digests[0]}, expected {first}")


if __name__ == "__main__":
    main()
