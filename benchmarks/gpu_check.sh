#!/usr/bin/env bash
# The checks that need a GPU, for a machine with one CUDA device and no network; about five minutes.
# Needs torch, transformers, gymnasium, numpy, scipy, tyro, rich and pytest to be importable. Writes to ${OUT:-runs/gpu}.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-runs/gpu}"
mkdir -p "$out"
export PYTHONPATH="$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

python3 - <<'PY'
import importlib.util, sys
missing = [m for m in ("torch", "transformers", "numpy", "scipy", "tyro", "rich", "pytest") if not importlib.util.find_spec(m)]
sys.exit(f"not installed: {', '.join(missing)}" if missing else 0)
PY
python3 -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.cuda.get_device_name(0), torch.__version__)'
python3 -m assc doctor | tee "$out/doctor.txt"
python3 -m pytest -m gpu -p no:cacheprovider tests/test_gpu.py | tee "$out/tests.txt"
# random weights of a realistic shape (about 1.1B and 0.1B parameters): speed is real, acceptance is not
python3 benchmarks/random_pair.py --out "$out/pair"
python3 eval.py --target "$out/pair/target" --draft "$out/pair/draft" --policies ar static:2 static:4 assc \
    --requests 8 --max-new-tokens 64 --device cuda --json "$out/random-weights.json" | tee "$out/eval.txt"
echo "Random weights: the table shows the engine's overheads, not what speculation gains."
