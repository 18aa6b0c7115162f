"""runs/gpu_check.py on small shapes: what a lent GPU will run is known to run."""
import json
import math
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def check(*flags):
    return subprocess.run([sys.executable, "runs/gpu_check.py", *flags], cwd=ROOT, text=True,
                          capture_output=True, timeout=300, check=False)


def test_smoke(tmp_path):
    done = check("--smoke", "--out", str(tmp_path / "check.json"))
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    found = json.loads((tmp_path / "check.json").read_text())
    assert found["failed"] == [] and found["matmul_tflops"] > 0
    assert found["models"].keys() == {"tiny", "small"}
    for model in found["models"].values():
        assert len(model["invariances"]) == 3
        for change, gradient in model["invariances"].values():
            assert 0 <= change < 1e-4 and 0 < gradient < 1e-4  # another path was taken
        for script in ("train_grpo", "train_sdpo"):
            one = model[script]
            assert math.isfinite(one["loss"]) and one["grad_norm"] > 0 and 0 < one["mfu"] < 1.5
            assert one["sample_tokens_per_s"] > 0 and 0 < one["planned_gb"] < one["peak_gb"]
