"""What the log says of responses, and the collapse watch that reads it."""
import torch


def measure(rollouts, rewards, task):
    """What a log line says of the responses, as values whose mean it takes."""
    texts = [r.text for r in rollouts]
    return dict(reward=rewards, entropy=torch.cat([r.entropy for r in rollouts]),
                length=[float(len(r.ids)) for r in rollouts],
                artifact=[artifact(r.ids) for r in rollouts],
                boxed=[float(text.count("\\boxed")) for text in texts],
                frac_truncated=[float(not r.finished) for r in rollouts],
                frac_think=[float(any(tag in text for tag in task.THINK_TAGS)) for text in texts])


def artifact(ids):
    """The largest share of a response that one repeated n-gram fills: n * count / T over n = 1..8,
    count being its occurrences without overlap, two or more; 0 where nothing repeats."""
    best = 0.0
    for n in range(1, min(8, len(ids) // 2) + 1):
        count, end = {}, {}
        for i in range(len(ids) - n + 1):
            gram = tuple(ids[i:i + n])
            if i >= end.get(gram, 0):
                count[gram], end[gram] = count.get(gram, 0) + 1, i + n
        most = max(count.values())
        best = max(best, n * most / len(ids) if most > 1 else 0.0)
    return best


def samples(tokenizer, rollouts, rewards, passes, most=2):
    """A few rows as text, for samples.jsonl. passes: the student's prompts and any teacher's."""
    names = ("prompt", "teacher_prompt")
    return [{"row": rollouts[i].row, "reward": rewards[i].item(), "response": rollouts[i].text,
             **{name: column[i] and tokenizer.decode(column[i])
                for name, column in zip(names, passes, strict=False)}}
            for i in range(min(most, len(rollouts)))]


def watch(state, line):
    """Collapse watch: reads a log line, keeps what it needs in `state`, and returns new warnings,
    each kind once a run. It never stops or alters the run."""
    seen = state.setdefault("seen", dict(line, mean=line["reward"], best=0, jsd=0, idle=0, still=0))
    told, jsd, found = state.setdefault("told", set()), line["jsd"] or 0.0, {}
    seen["mean"] += 0.2 * (line["reward"] - seen["mean"])
    seen["best"], seen["jsd"] = max(seen["best"], seen["mean"]), max(seen["jsd"], jsd)
    seen["idle"] = line["skipped"] and seen["idle"] + 1
    seen["still"] = not line["skipped"] and line["grad_norm"] < 1e-4 and seen["still"] + 1
    if seen["mean"] < seen["best"] / 2 and seen["best"] > 0.05:
        found["reward"] = f"running reward {seen['mean']:.3f}, half its best {seen['best']:.3f}"
    if line["artifact"] > max(0.5, 2 * seen["artifact"]):
        found["artifact"] = f"one repeated n-gram fills {line['artifact']:.0%} of a response"
    if line["boxed"] > max(3, 3 * seen["boxed"]):
        found["boxed"] = f"{line['boxed']:.1f} \\boxed a response, {seen['boxed']:.1f} at the start"
    if line["jsd"] is not None and jsd < 0.01 * seen["jsd"]:
        found["jsd"] = f"jsd {jsd:.1e} has gone to 0 from {seen['jsd']:.1e}"
    if line["eval"] is not None:
        rise, seen["eval"] = line["reward"] - seen["reward"], seen["eval"] or line["eval"]
        if rise > 0.1 and line["eval"] < seen["eval"] - 0.05:
            found["gap"] = (f"reward has risen by {rise:.2f}, and fallen on held-out prompts, from "
                            f"{seen['eval']:.3f} to {line['eval']:.3f}")
    if seen["idle"] >= 50:
        found["idle"] = "nothing to learn from in 50 steps"
    if seen["still"] >= 10:
        found["still"] = f"grad_norm under 1e-4 for 10 steps, now {line['grad_norm']:.1e}"
    new = found.keys() - told
    told |= new
    return [f"step {line['step']}: {found[kind]}" for kind in sorted(new)]
