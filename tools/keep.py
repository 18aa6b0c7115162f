"""Copies of a run of continual.py and drift.py what its figures and tables need, a tenth of a MB.

    python tools/keep.py RUN FOLDER      # FOLDER: continual.json, 1-math.jsonl .., drift.json(l)

Numbers keep five digits. Left behind: checkpoints, samples, timings, drift matrix by matrix; of the
similarities the first four of each prompt stay, a list for each model and set of prompts.
"""
import json
import sys
from pathlib import Path

SAMPLES = 4  # similarities of a prompt


def read(text):
    return json.loads(text, parse_float=lambda x: float(f"{float(x):.5g}"))


def pick(spreads, names):
    """Of {key: {"mean", "p10", ..} or None} the names alone."""
    return {key: x and {name: x[name] for name in names} for key, x in spreads.items()
            if key not in ("gap", "seconds")}


def keep(run, folder):
    folder.mkdir(parents=True, exist_ok=True)
    result, drift = (read((run / f"{name}.json").read_text()) for name in ("continual", "drift"))
    for k, stage in enumerate(result["stages"], 1):
        name = f"{k}-{stage['task']}"
        lines = ({key: x for key, x in read(line).items() if x is not None and not key.endswith(
            ("seconds", "per_s", "gb"))} for line in (run / name / "log.jsonl").open())
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    drift["weights"] = {model: {kind: pick(x, ("mean", "p10", "p90")) for kind, x in kinds.items()}
                        for model, kinds in drift["weights"].items()}
    drift["responses"] = {model: {name: pick(x, ("mean", "se")) for name, x in sets.items()}
                          for model, sets in drift["responses"].items()}
    near = {}  # (model, prompts) -> similarities
    for x in (read(line) for line in (run / "drift.jsonl").open()):
        if "similarity" in x:
            near.setdefault((x["model"], x["prompts"]), []).extend(
                round(s, 3) for s in x["similarity"][:SAMPLES])
    (folder / "drift.jsonl").write_text("".join(json.dumps(
        {"model": model, "prompts": prompts, "similarity": x}) + "\n"
        for (model, prompts), x in near.items()))
    for name, x in (("continual", result), ("drift", drift)):
        (folder / f"{name}.json").write_text(json.dumps(x) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("usage: keep.py RUN FOLDER", file=sys.stderr)
        raise SystemExit(2)
    keep(*map(Path, sys.argv[1:]))
