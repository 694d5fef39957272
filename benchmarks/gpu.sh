#!/bin/sh
# The whole check of the CUDA path on one GPU, in under 5 minutes: flex attention against the dense
# mask in float32, nothing compiled again after the second step, then time and memory of a step at
# the size of the paper's recipe. Writes gpu.json.
#
#     PYTHON=.venv/bin/python sh benchmarks/gpu.sh
set -eu
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$PYTHON" -m pytest -q -p no:xdist tests/test_gpu.py
"$PYTHON" benchmarks/train_step.py --device cuda --compile true --repeats 5 --out gpu.json \
    --length 3072 --anchors 512 --block_size 16 --layers 5 --hidden_size 2560 --target_vocab 151936
