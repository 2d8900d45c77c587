#!/usr/bin/env bash
# One decode server. Run on every decode node: ./decode.sh MODEL
# Each flag is explained in README.md. Environment: TP, PORT, HOST_GB, IB_DEVICES.
set -euo pipefail
model=${1:?usage: decode.sh MODEL}
here=$(cd "$(dirname "$0")" && pwd)
exec python -m sglang.launch_server \
    --model-path "$model" \
    --tp-size "${TP:-8}" \
    --host 0.0.0.0 --port "${PORT:-30000}" \
    --disaggregation-mode decode \
    --disaggregation-transfer-backend mooncake \
    --disaggregation-ib-device "${IB_DEVICES:-mlx5_0,mlx5_1,mlx5_2,mlx5_3}" \
    --disaggregation-decode-enable-radix-cache \
    --enable-hierarchical-cache \
    --hicache-size "${HOST_GB:-40}" \
    --hicache-storage-prefetch-policy wait_complete \
    --page-size 64 \
    --enable-metrics \
    --hicache-storage-backend dualpath \
    --hicache-storage-backend-extra-config "{\"config_file\": \"${DUALPATH_CONFIG:-$here/dualpath.toml}\"}"
