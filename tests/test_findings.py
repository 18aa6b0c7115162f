"""The verdicts on the findings: made-up runs with known effects, and the rule at its edges."""
import json

import numpy as np
import pytest

from tools import findings
from tools.findings import SMALLEST, verdict

BENCHMARKS = ["tiny_math", "tiny_science", "tiny_tooluse", "tiny_coding", "tiny_logic",
              "tiny_knowledge"]


def write(folder, name, R, tasks, artifact=0.0, nss=1e-3, kl=1.0, excess=0.0):
    """A run folder as runs/laptop.sh leaves it. R: {benchmark: [scores]}, the rest at its base."""
    out, stages = folder / name, len(tasks)
    out.mkdir()
    scores = {b: R.get(b, [0.4] * (stages + 1)) for b in BENCHMARKS}
    (out / "continual.json").write_text(json.dumps({
        "stages": [{"task": t, "steps": 5, "folder": str(out)} for t in tasks],
        "R": {b: [{"mean": x} for x in row] for b, row in scores.items()}}))
    for k, task in enumerate(tasks, 1):
        lines = [{"step": s, "artifact": artifact if k == stages and s == 5 else 0.0}
                 for s in range(1, 6)]
        (out / f"{k}-{task}.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in lines))
    far = {b: 0.9 for b in BENCHMARKS}
    (out / "drift.json").write_text(json.dumps({
        "mmd": {"mmd2": {b: {**far, b: 0.0, **({"tiny_logic": 0.3} if b == "tiny_math" else {})}
                         for b in BENCHMARKS}},
        "weights": {str(k): {"all": {"nss": {"mean": nss * k / stages}}}
                    for k in range(1, stages + 1)},
        "responses": {str(k): {b: {"sequence_kl": {"mean": kl}, "excess_jackknife": {
            "mean": excess}} for b in BENCHMARKS} for k in range(1, stages + 1)}}))


def rows(text):
    """{(measure, compared, first task): (effect [interval], pairs, by base, verdict)}"""
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    return {(c[2], c[3], c[4]): (c[5], c[6], c[7], c[9]) for c in cells}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder, order = tmp_path_factory.mktemp("results"), ["math", "science", "tooluse", "coding"]
    for base in "01":
        for seed in range(3):
            jitter = 0.01 * (seed - 1)
            write(folder, f"grpo-b{base}-s{seed}", {
                "tiny_math": [0.4, 0.6, 0.6, 0.6, 0.6], "tiny_science": [0.4, 0.4, 0.6, 0.6, 0.6],
                "tiny_tooluse": [0.4, 0.4, 0.4, 0.6, 0.6]}, order, nss=1e-3, kl=0.5)
            # 10 points ahead after math, 20 behind at the end; it loses logic, the middle distance
            write(folder, f"sdpo-b{base}-s{seed}", {
                "tiny_math": [0.4, 0.7 + jitter, 0.7, 0.4, 0.4],
                "tiny_science": [0.4, 0.4, 0.6, 0.6, 0.6],
                "tiny_tooluse": [0.4, 0.4, 0.4, 0.6, 0.6],
                "tiny_logic": [0.4, 0.2, 0.2, 0.2, 0.2]}, order, nss=4e-3, kl=2.0, excess=1.5)
            # better on one base, worse on the other
            write(folder, f"sdpo-ema5-b{base}-s{seed}", {
                "tiny_math": [0.4, 0.7 + (0.3 if base == "1" else -0.6), 0.7, 0.4, 0.4]}, order,
                artifact=0.5)
            for method in ("sdpo", "sdpo-cot"):
                write(folder, f"{method}-b{base}-s{seed}-tooluse", {"tiny_tooluse": [0.4, 0.5]},
                      ["tooluse"])
            write(folder, f"sdpo-ema5-b{base}-s{seed}-tooluse", {"tiny_tooluse": [0.4, 0.0]},
                  ["tooluse"])  # a single stage is no match for a sequence in another order
            write(folder, f"sdpo-ema5-reorder-b{base}-s{seed}", {
                "tiny_math": [0.4, 0.4, 0.4, 0.4, 0.7]}, ["tooluse", "math", "science", "coding"])
    write(folder, "sdpo-b0-s9", {"tiny_math": [0.4, 0.0, 0, 0, 0]}, order)  # no pair, so no part
    return rows(findings.table(folder))


def test_effects_are_paired_differences_with_an_interval_over_runs(table):
    effect, pairs, bases, word = table["gained", "sdpo - grpo", "math"]
    half = 2.571 * 1 * np.sqrt(4 / 5) / np.sqrt(6)  # jitter of -1, 0, 1 points, twice; df 5
    assert effect == f"+10.00 [{10 - half:+.2f}, {10 + half:+.2f}]"
    assert (pairs, bases, word) == ("6", "0: +10.00, 1: +10.00", "reproduced")
    assert table["forgotten", "sdpo - grpo", "math"][0].startswith("+10.00")  # 30 of one in three
    assert table["nss", "sdpo - grpo", "math"][0] == "+2.00 [+2.00, +2.00]"  # a factor of 4
    assert table["kl", "sdpo - grpo", "math"][0].startswith("+2.00")
    assert table["excess", "sdpo - grpo", "math"][0].startswith("+1.50")
    assert table["artifact", "sdpo-ema5 - sdpo", "math"][3] == "reproduced"


def test_nss_is_also_told_per_point_gained(table):
    mean = float(table["nss_per_point", "sdpo - grpo", "math"][0].split()[0])
    assert mean == pytest.approx(2 - np.log2(70 / 60), abs=0.01)  # jitter is symmetric, nearly


def test_one_method_alone_is_told_against_no_change(table):
    effect, pairs, _, word = table["untrained", "sdpo - 0", "math"]
    assert (effect.split()[0], pairs, word) == ("-8.57", "7", "reproduced")
    assert table["untrained", "grpo - 0", "math"][3] == "not seen"
    assert table["middle", "sdpo - 0", "math"][0].startswith("-17.14")  # logic alone is in between


def test_bases_that_disagree_settle_nothing(table):
    _, _, bases, word = table["average", "sdpo - sdpo-ema5", "math"]
    assert bases == "0: +6.67, 1: -8.33" and word == "underpowered"


def test_another_order_is_compared_with_whole_sequences(table):
    assert table["final", "sdpo-ema5-reorder - sdpo-ema5", "any"][0] == "+5.00 [+5.00, +5.00]"


def test_runs_of_one_stage_are_found_by_their_first_task(table):
    assert table["gained", "sdpo-cot - sdpo", "tooluse"][:2] == ("+0.00 [+0.00, +0.00]", "6")
    assert table["gained", "sdpo-cot - sdpo", "tooluse"][3] == "not seen"
    assert table["gained", "sdpo-cot - sdpo", "math"][1:] == ("0", "", "not run")


def test_a_run_of_one_stage_has_no_end_of_a_sequence(tmp_path):
    """What it scores after its only stage is no match for a score after four."""
    write(tmp_path, "sdpo-cot-b0-s0-math", {"tiny_math": [0.4, 0.9]}, ["math"])
    (run,) = findings.draw.read_runs(tmp_path)
    assert findings.measure(run, "average") == pytest.approx((90 + 5 * 40) / 6)
    assert np.isnan([findings.measure(run, name) for name in (
        "final", "current", "forgotten", "untrained")]).all()


@pytest.mark.parametrize("mean, half, bases, sign, expected", [
    (6, 2, (5, 7), 1, "reproduced"), (-6, 2, (-5, -7), -1, "reproduced"),
    (-6, 2, (-5, -7), 1, "opposite"), (6, 2, (13, -1), 1, "underpowered"),
    (6, 7, (6, 6), 1, "underpowered"),   # 0 is not excluded
    (4, 2, (4, 4), 1, "underpowered"),   # above 0, perhaps below what matters
    (2, 1, (2, 2), 1, "not seen"), (-1, 4, (-1, -1), 1, "not seen"),
    (-1, 7, (-1, -1), 1, "underpowered"), (0, 0, (0, 0), 1, "not seen")])
def test_the_rule(mean, half, bases, sign, expected):
    assert verdict(mean, half, bases, sign, 5) == expected


def test_every_row_has_a_measure_with_a_smallest_effect():
    assert {row[2] for row in findings.ROWS} == SMALLEST.keys()
    assert all(row[6] in (-1, 1) for row in findings.ROWS)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder of runs.*none"):
        findings.table(tmp_path / "none")
