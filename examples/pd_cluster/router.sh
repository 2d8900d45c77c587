#!/usr/bin/env bash
# One router. Run one or more, anywhere that reaches Redis and the servers: ./router.sh
# Each flag is explained in README.md. Environment: PORT, DUALPATH_CONFIG, ADMIN_KEY_FILE.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec dualpath router \
    --config "${DUALPATH_CONFIG:-$here/dualpath.toml}" \
    --host 0.0.0.0 --port "${PORT:-8000}" \
    --path shorter_queue \
    ${ADMIN_KEY_FILE:+--admin-key-file "$ADMIN_KEY_FILE"}
