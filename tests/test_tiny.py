"""The laptop tier: generated rows, the tokenizer, and the committed base, at their word."""
import random

import pytest
import torch

import data
import loading
import rollout
import teacher
from data import thinking, tiny_base
from data.hub import DataError

NAMES = sorted(data.TASKS)


@pytest.fixture(scope="module")
def base():
    return loading.load_model("tiny")


def questions(rows):
    return {row["messages"][0]["content"] for row in rows}


# ---- rows ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_rows_are_many_and_disjoint_over_splits_and_seeds(name):
    task = data.TASKS[name]
    parts = [task.tiny("train", 2000, 0), task.tiny("train", 500, 1), task.tiny("test", 600, 0),
             task.tiny("test", 300, 1)]
    assert [len(part) for part in parts] == [2000, 500, 600, 300]
    asked = [questions(part) for part in parts]
    assert sum(map(len, asked)) == 3400 == len(set.union(*asked)), "a question was asked twice"
    assert len({row["id"] for part in parts for row in part}) == 3400
    assert task.tiny("train", 20, 0) == parts[0][:20] == task.load("tiny", "train", 20)
    assert len(task.load("tiny", "test")) == 600
    with pytest.raises(DataError, match="split 'validation'"):
        task.tiny("validation", 5, 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_verifier_takes_right_responses_and_refuses_wrong_ones(name):
    task = data.TASKS[name]
    rows = task.tiny("test", 8 if name == "coding" else 200, 3)
    for row in rows:
        for think in (False, True):
            for key, reward in (("response", 1.0), ("also", 1.0), ("wrong", 0.0)):
                text = tiny_base.thought(row[key], task.THINK_TAGS, think)
                assert task.score(text, row["answer"])[0] == reward, (key, text, row["answer"])
        assert row["response"] != row["also"]
    noisy = [task.score(row["noisy"], row["answer"])[0] for row in rows]
    assert name == "coding" or .3 < sum(noisy) / len(noisy) < .6, "what the base is taught"
    if name != "coding":  # nor does one row's answer fit another's question
        pairs = zip(rows, rows[1:], strict=False)
        crossed = [task.score(a["response"], b["answer"])[0] for a, b in pairs]
        assert sum(crossed) < (0.6 if name == "logic" else 0.4) * len(crossed)


# ---- tokenizer -----------------------------------------------------------------------------------

def test_any_text_comes_back_exactly(base):
    """Any but ASCII's control characters, for which 512 tokens have no room."""
    _, tokenizer = base
    rng = random.Random(0)
    texts = ["", " ", "  two  spaces\n\n\ttab", 'Zürich 水 🙂 \\frac{1} {"a": [1, -2]}', "\r",
             teacher.teacher_messages([{"role": "user", "content": "q"}], "d", "f")[0]["content"]]
    texts += ["".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(128, 0xD800),
                                      rng.randrange(0xE000, 0x110000)))) for _ in range(30))
              for _ in range(50)]
    for name, task in data.TASKS.items():
        for row in task.tiny("test", 100, 2):
            texts += [row["messages"][0]["content"], row["response"], row["wrong"]]
            ids = tokenizer(row["response"]).input_ids
            assert len(ids) <= 60, f"{name}: {len(ids)} tokens, {row['response']}"
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.pad_token_id not in ids, f"unknown characters in {text!r}"
        assert tokenizer.decode(ids) == text


def test_the_template_has_roles_and_a_thinking_switch(base):
    _, tokenizer = base
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    off, on = (tokenizer.decode(rollout.encode(tokenizer, messages, think)) for think in (0, 1))
    assert off == "<|system|>s<|user|>u<|assistant|>a<|end|><|user|>v<|assistant|>"
    assert on == off.replace("v<|assistant|>", "v<|think|><|assistant|>")
    assert not on.endswith("<think>"), "the response opens it itself"
    assert all(len(tokenizer(tag).input_ids) == 1 for pair in thinking.THINK_TAGS for tag in pair)


# ---- what the base is taught with ----------------------------------------------------------------

def test_labels_of_a_wrong_response_lead_back_to_the_right_one():
    own, right = list("34-8=26,ok26."), list("34+8=42,ok42.")
    labels = tiny_base.aligned(own, [list("zzzzzzz"), right])
    assert set(labels) <= {tiny_base.IGNORED, *right}
    assert labels[0] == "3" and labels[2] == "+" and labels[5] == "4" and labels[10] == "4"
    assert len(labels) == len(own) and tiny_base.aligned(own, [own]) == own


def test_examples_learn_the_response_alone_once_there_is_noise(base):
    _, tokenizer = base
    rows, seen = data.math.tiny("train", 12, 0), set()
    for seed in range(120):
        rng = random.Random(seed)
        row = rows[seed % 12] | {"task": "math", "tags": data.math.THINK_TAGS}
        ids, labels = tiny_base.example(row, row["tags"], tokenizer, rng, noise=True)
        assert len(ids) == len(labels)
        start = len(ids) - ids[::-1].index(tokenizer.convert_tokens_to_ids("<|assistant|>"))
        assert all(label == tiny_base.IGNORED for label in labels[:start])
        conflict = ids[start:] != labels[start:]
        shown = teacher.DEMONSTRATION_HEADING in tokenizer.decode(ids[:start])
        assert shown or not conflict, "without a demonstration nothing tells right from wrong"
        text = tokenizer.decode(ids[start:-1])
        seen.add((shown, conflict, "<think>" in text, data.math.score(text, row["answer"])[0]))
    assert {(False, False, False, 0.0), (False, False, False, 1.0), (True, True, False, 0.0),
            (True, False, False, 1.0), (True, False, True, 1.0)} <= seen


# ---- the committed base --------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_the_base_is_often_right_and_uses_a_demonstration(base, name):
    model, tokenizer = base
    task, group = data.TASKS[name], 4
    rows = task.tiny("test", 12 if name == "coding" else 48, 0)
    with torch.inference_mode():
        for shown, low, high in ((False, .15, .7), (True, .6 if name == "coding" else .8, 1.0)):
            prompts = [rollout.encode(tokenizer, teacher.teacher_messages(
                row["messages"], row["also"] if shown else None)) for row in rows]
            found = rollout.sample(
                model, tokenizer, prompts, range(len(rows)), group, 64, key=(0, 0))
            right = [task.score(r.text, rows[i // group]["answer"])[0] for i, r in enumerate(found)]
            assert low <= sum(right) / len(right) <= high, (name, shown, sum(right) / len(right))
            assert sum(r.finished for r in found) >= .98 * len(found)
