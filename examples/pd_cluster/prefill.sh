#!/usr/bin/env bash
# One prefill server. Run on every prefill node: ./prefill.sh MODEL
# Each flag is explained in README.md. Environment: TP, PORT, BOOTSTRAP_PORT, IB_DEVICES.
set -euo pipefail
model=${1:?usage: prefill.sh MODEL}
here=$(cd "$(dirname "$0")" && pwd)
exec python -m sglang.launch_server \
    --model-path "$model" \
    --tp-size "${TP:-8}" \
    --host 0.0.0.0 --port "${PORT:-30000}" \
    --disaggregation-mode prefill \
    --disaggregation-transfer-backend mooncake \
    --disaggregation-ib-device "${IB_DEVICES:-mlx5_0,mlx5_1,mlx5_2,mlx5_3}" \
    --disaggregation-bootstrap-port "${BOOTSTRAP_PORT:-8998}" \
    --page-size 64 \
    --chunked-prefill-size 16384 \
    --enable-metrics \
    --hicache-storage-backend dualpath \
    --hicache-storage-backend-extra-config "{\"config_file\": \"${DUALPATH_CONFIG:-$here/dualpath.toml}\"}"
