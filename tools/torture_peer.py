"""The faults of torture.py, done to TRL's GRPOTrainer on the same tiny model: what happens there.

    python tools/torture.py --parts peer        # minutes; pip install --no-deps trl==1.16.0

Each run makes 4 steps of 4 prompts x 4 responses and saves each. A fault comes in the reward
function of step 3 (that is, in mid-step), by a callback or from outside; nothing of TRL is changed.
Rows as in torture.py: survived means what it means there.
"""
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PROMPTS = 4


def worker(out, fault, resume):
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    import data
    torch.set_num_threads(1)
    math, model, calls = data.TASKS["math"], str(ROOT / "data" / "tiny_model"), [0]
    last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", 1)) - 1)

    def reward(completions, answer, **_):
        calls[0] += 1
        if calls[0] == 3 and fault in ("TERM", "KILL", "STOP") and last:
            os.kill(os.getpid(), getattr(signal, f"SIG{fault}"))
        return [math.score(c[0]["content"], a)[0] for c, a in zip(completions, answer, strict=True)]

    class Trainer(GRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            return loss * float("nan") if calls[0] == 3 and fault == "nan" else loss
    world = int(os.environ.get("WORLD_SIZE", 1))
    config = GRPOConfig(
        output_dir=out, per_device_train_batch_size=PROMPTS * 4 // world, num_generations=4,
        max_steps=4, max_completion_length=32, temperature=1.0, top_k=0, learning_rate=1e-3,
        lr_scheduler_type="constant", bf16=False, gradient_checkpointing=False, report_to="none",
        seed=0, save_steps=1, logging_strategy="no", disable_tqdm=True, use_cpu=True,
        ddp_timeout=10, model_init_kwargs={"dtype": torch.float32})  # seconds; TRL's own: 1800
    rows = [{"prompt": row["messages"], "answer": row["answer"]}
            for row in math.load("tiny", "train")[:64]]
    Trainer(model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model)).train(
                resume_from_checkpoint=resume == "resume" or None)


def run(out, fault="none", resume="start", ranks=1, limit=400):
    """(exit code, None where it hung; seconds; last lines of what it said)"""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    began = time.monotonic()
    with open(f"{out}.told", "w") as file:
        process = subprocess.Popen(
            [sys.executable, *launcher * (ranks > 1), __file__, str(out), fault, resume], cwd=ROOT,
            stdout=file, stderr=file, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            subprocess.run(["pkill", "-KILL", "-f", str(out)], check=False)  # ranks of torchrun
            code = None
    said = Path(f"{out}.told").read_text().strip().splitlines()
    return code, time.monotonic() - began, " ".join(said[-1:])[:160]


def saved(out):
    return sorted((int(p.name.split("-")[1]), p) for p in Path(out).glob("checkpoint-*"))


def digest(out):
    step, folder = saved(out)[-1]
    return step, hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def peer(folder, args):
    """Rows; where TRL is not installed, none."""
    from safetensors.torch import load_file
    from torch import isfinite
    code, _, said = run(folder / "whole")
    if code:
        print(f"peer: TRL does not run here: {said}", file=sys.stderr)
        return

    def row(fault, survived, seconds, note):
        return {"fault": f"TRL 1.16: {fault}", "tried": 1, "survived": int(survived),
                "seconds": seconds, "note": note, "peer": True}
    code, seconds, said = run(folder / "again")
    yield row("the same run twice", digest(folder / "again") == digest(folder / "whole"), seconds,
              "same bits" if digest(folder / "again") == digest(folder / "whole") else "other bits")
    code, seconds, said = run(folder / "term", "TERM")
    yield row("SIGTERM in step 3", code == 0 and digest(folder / "term")[0] == 3, seconds,
              f"exit {code}, last checkpoint of step {digest(folder / 'term')[0]}")
    code, seconds, said = run(folder / "kill", "KILL")
    code, more, said = run(folder / "kill", resume="resume")
    same = code == 0 and digest(folder / "kill") == digest(folder / "whole")
    yield row("SIGKILL in step 3, resume_from_checkpoint", same, seconds + more,
              f"exit {code}, {'same' if same else 'other'} bits than the run left alone; {said}")
    code, seconds, said = run(folder / "nan", "nan")
    last, path = saved(folder / "nan")[-1]
    finite = all(isfinite(x).all() for x in load_file(path / "model.safetensors").values())
    yield row("NaN in the loss of step 3", code != 0 and last == 2, seconds, f"exit {code}, last "
              f"checkpoint of step {last}, its weights are {'finite' if finite else 'NaN'}")
    run(folder / "cut")
    path = saved(folder / "cut")[-1][1] / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    code, seconds, said = run(folder / "cut", resume="resume")
    yield row("newest checkpoint's weights cut to half", code == 0, seconds, f"exit {code}: {said}")
    code, seconds, said = run(folder / "hung", "STOP", ranks=2)
    yield row("one of two ranks hung", code not in (0, None), seconds,
              f"exit {code}; ranks wait 10 s here, 30 minutes by default; {said}")


if __name__ == "__main__":
    worker(*sys.argv[1:])
