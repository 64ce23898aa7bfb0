"""Record text once, train a policy on the recording, compare it on held-out requests: the whole way, on a tiny pair.

python examples/record_train_evaluate.py [FOLDER]

Less than a minute on one core. The pair `tiny` is two random models built in code, so the numbers mean nothing; with
`--pair smollm2`, or models of your own, the same four steps are a study.
"""

# %% Where everything goes
import json
import sys
from pathlib import Path

import eval as evaluation
import train_policy
from assc.__main__ import main as assc
from assc.trace_io import read_trace

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/example")
recording, costs, run, result = folder / "recording", folder / "costs.json", folder / "run", folder / "out.json"

# %% 1. Prompts, and a recording of what the target writes and of what each drafter would have proposed
folder.mkdir(parents=True, exist_ok=True)
prompts = [{"id": f"p{i}", "prompt": f"one two {i} three one two {i}", "category": "ab"[i % 2]} for i in range(16)]
workload = folder / "prompts.jsonl"
workload.write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
options = "--pair tiny --temperatures 0 1 --max-new-tokens 24 --resume".split()
assert assc(["record", *options, "--workload", str(workload), "--out", str(recording)]) == 0
trace = read_trace(recording / "trace.npz")
print(f"{len(trace)} requests, {trace.positions} positions, drafters {', '.join(trace.drafters)}")

# %% 2. What a round costs: here computed for a 1.7B target and a 135M draft; `calibrate` measures your machine
assert assc(["roofline", "--profile", "smollm2-1.7b-135m-rtx4090", "--out", str(costs)]) == 0

# %% 3. Train: no model is needed from here on
common = ["--traces", str(recording / "trace.npz"), "--cost", str(costs)]
assert train_policy.main([*common, "--total-timesteps", "2048", "--run-dir", str(run)]) == 0

# %% 4. Compare, with the rounds of two requests kept for `python -m assc report`
policies = ["ar", "static:tuned", "assc", "cascade", str(run / "policy.zip"), "oracle"]
words = ["--backend", "replay", *common, "--policies", *policies, "--rounds", "2", "--json", str(result)]
assert evaluation.main(words) == 0

# %% 5. The numbers, as Python
for row in json.loads(result.read_text(encoding="utf-8"))["rows"]:
    print(f"{row['policy']:<40} {row['speedup']:.2f}x  {row['tokens_per_round']:.2f} tokens/round")
