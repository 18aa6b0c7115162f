"""teacher.py: how the teacher moves, in closed form; what it sees; which tokens are reasoning."""

import itertools
import json
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import loading
import losses
import teacher as T
from data.thinking import THINK_TAGS

CASES = {case["id"]: case for case in
         map(json.loads, (Path(__file__).parent / "rows" / "cases.jsonl").open())}
FAST = settings(max_examples=80, deadline=None, derandomize=True)
THINK, REASON = THINK_TAGS


class Tied(nn.Module):
    """A language model in miniature: tied head, a float buffer, an integer counter, a memory."""

    def __init__(self, v=11, d=6, dtype=torch.float32):
        super().__init__()
        self.embed, self.body = nn.Embedding(v, d, dtype=dtype), nn.GRU(d, d, dtype=dtype)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(d, v, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("running", torch.tensor([0.5], dtype=dtype))

    def forward(self, ids):                                       # (T,) -> (T, V)
        return self.head(self.drop(self.body(self.embed(ids))[0]))


def one(value, dtype=torch.float64):
    """A module with one number in it."""
    module = nn.Linear(1, 1, bias=False, dtype=dtype)
    module.weight.data.fill_(value)
    return module


def number(module):
    return module.weight.item()


# ---- how it moves --------------------------------------------------------------------------------

def test_matched_mix():
    assert T.matched_mix(0.05, 10) == pytest.approx(0.4013, abs=5e-5)
    assert T.matched_mix(0.3, 1) == pytest.approx(0.3)
    assert T.matched_mix(0.0, 10) == 0 and T.matched_mix(1.0, 10) == 1


def drive(teacher_args, steps=25, seed=0):
    """A student on a random walk, theta_0 .. theta_n, and the teacher after each step."""
    walk = random.Random(seed)
    theta, phi, changed = [walk.gauss(0, 1)], [], []
    student = one(theta[0])
    teacher = T.Teacher(student, *teacher_args)
    model, phi = teacher.model, [number(teacher.model)]
    for step in range(1, steps + 1):
        theta.append(theta[-1] + walk.gauss(0, 1))
        student.weight.data.fill_(theta[-1])
        teacher.update(student, step)
        phi.append(number(teacher.model))
        changed.append(teacher.last_changed)
    assert teacher.model is model                                 # one module, updated in place
    return theta, phi, changed, teacher


def test_frozen_stays():
    theta, phi, changed, teacher = drive((0.0,))
    assert phi == [theta[0]] * 26 and changed == [0] * 25 and teacher.frozen


def test_ema_trajectory_in_closed_form():
    a = 0.1
    theta, phi, changed, teacher = drive((a,))
    for n in range(26):
        want = (1 - a) ** n * theta[0] + math.fsum(
            a * (1 - a) ** (n - i) * theta[i] for i in range(1, n + 1))
        assert phi[n] == pytest.approx(want, rel=1e-12)
    assert changed == list(range(1, 26)) and not teacher.frozen
    theta, phi, *_ = drive((1.0,))                                # rate 1 is the student, exactly
    assert phi == theta


@pytest.mark.parametrize("args", [(0.0, 10), (0.05, 10, 1.0)], ids=["plain", "ema_is_not_read"])
def test_restart_trajectory(args):
    theta, phi, changed, teacher = drive(args)
    assert phi == [theta[n // 10 * 10] for n in range(26)]        # steps 10, 20: never step 1 or 11
    assert changed == [n // 10 * 10 for n in range(1, 26)] and not teacher.frozen
    assert drive((0.0, 10, 0.0))[3].frozen


def test_matched_trajectory_in_closed_form():
    g = T.matched_mix(0.05, 10)
    theta, phi, *_ = drive((0.05, 10, g), steps=39)
    for n in range(40):
        k = n // 10
        want = (1 - g) ** k * theta[0] + math.fsum(
            g * (1 - g) ** (k - i) * theta[10 * i] for i in range(1, k + 1))
        assert phi[n] == pytest.approx(want, rel=1e-12)
    # What "matched" means: of the starting weights as much is left as under the moving average.
    assert (1 - g) ** 3 == pytest.approx((1 - 0.05) ** 30)


def test_bf16_student_has_a_float32_average():
    """The average of a bf16 student moves exactly as that of the same numbers in float32."""
    torch.manual_seed(0)
    low = Tied(dtype=torch.bfloat16)
    high = Tied()
    teachers = T.Teacher(low, 0.01), T.Teacher(high, 0.01)
    assert {p.dtype for p in teachers[0].model.parameters()} == {torch.float32}
    assert teachers[0].model.running.dtype == torch.float32
    assert T.Teacher(Tied(dtype=torch.float64)).model.embed.weight.dtype == torch.float64
    for step in range(1, 30):
        with torch.no_grad():
            for p in low.parameters():
                p += 0.004 * torch.randn_like(p)
        for teacher in teachers:  # the twin: same values, wider type
            high.load_state_dict(low.state_dict())
            if step == 1:
                teacher.model.load_state_dict(low.state_dict())
        teachers[0].update(low, step), teachers[1].update(high, step)
    for a, b in zip(teachers[0].model.parameters(), teachers[1].model.parameters(), strict=True):
        assert torch.equal(a, b)
    moved = teachers[0].model.embed.weight
    assert not torch.equal(moved, moved.bfloat16().float())       # it holds more than bf16 can


def test_the_copy_is_the_weights_in_memory_and_nobody_elses():
    torch.manual_seed(0)
    student = Tied()
    student.train()
    student(torch.tensor([1, 2])).sum().backward()
    with torch.no_grad():
        student.embed.weight.mul_(3)                              # trained since it was loaded
    teacher = T.Teacher(student)                                  # the teacher of the next stage
    for mine, theirs in zip(teacher.model.parameters(), student.parameters(), strict=True):
        assert torch.equal(mine, theirs) and mine.data_ptr() != theirs.data_ptr()
        assert not mine.requires_grad and mine.grad is None
    assert not any(m.training for m in teacher.model.modules())
    assert student.training and student.embed.weight.requires_grad
    assert student.embed.weight.grad is not None


def test_teacher_refuses_rates_outside_0_1_and_other_architectures():
    for bad in ((1.5,), (-0.1,), (0.0, 10, 1.5), (0.0, -1)):
        with pytest.raises(ValueError):
            T.Teacher(one(0.0), *bad)
    with pytest.raises(ValueError):
        T.Teacher(one(0.0), 0.1).update(nn.Linear(1, 1), 1)


def test_mix_weights(tmp_path, capsys):
    torch.manual_seed(0)
    start, other = Tied(), Tied()
    other.half()
    weights = other.state_dict()
    want = 0.7 * start.embed.weight + 0.3 * other.embed.weight.float()
    teacher = T.Teacher(start)
    T.mix_weights(teacher.model, weights, 0.3)
    assert torch.allclose(teacher.model.embed.weight, want)   # a tied weight: mixed once
    assert teacher.model.head.weight is teacher.model.embed.weight
    untouched = T.Teacher(start)
    T.mix_weights(untouched.model, weights, 0.0)
    assert torch.equal(untouched.model.embed.weight, start.embed.weight)
    T.mix_weights(untouched.model, weights, 1.0)
    assert torch.equal(untouched.model.embed.weight, other.embed.weight.float())


def test_weights_of_another_model_are_refused(tmp_path, capsys):
    path = str(tmp_path / "teacher.safetensors")
    weights = {name: p.detach().clone() for name, p in Tied().named_parameters()}
    save_file(weights, path)
    assert loading.load_weights(path, Tied()).keys() == weights.keys()
    for change, said in (({"embed.weight": torch.zeros(12, 6)}, "embed.weight is (12, 6)"),
                         ({"body.weight_hh_l0": None}, "body.weight_hh_l0 is missing")):
        save_file({k: v for k, v in {**weights, **change}.items() if v is not None}, path)
        with pytest.raises(SystemExit) as stop:
            loading.load_weights(path, Tied())
        assert stop.value.code == 2 and said in capsys.readouterr().err


def test_sharded_weights_are_averaged_in_place(tmp_path):
    """The same update on FSDP2's DTensor parameters, here a world of one."""
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    student = Tied()
    teacher, plain = T.Teacher(student, 0.25), T.Teacher(student, 0.25)
    other = Tied()
    plain.update(other, 1)
    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        fully_shard(other, mesh=mesh)
        fully_shard(teacher.model, mesh=mesh)
        teacher.update(other, 1)
        for mine, want in zip(teacher.model.parameters(), plain.model.parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), want)
        with pytest.raises(AssertionError, match="deepcopy"):     # why it is built before sharding
            T.Teacher(other)
    finally:
        destroy_process_group()


# ---- demonstrations ------------------------------------------------------------------------------

def keyed(seed=0):
    return torch.Generator().manual_seed(seed)


@FAST
@given(st.integers(1, 6), st.data())
def test_picks_are_other_successes_of_the_same_group(size, data):
    groups = data.draw(st.integers(1, 4))
    rewards = data.draw(st.lists(st.sampled_from((0.0, 0.5, 1.0)), min_size=size * groups,
                                 max_size=size * groups))
    picks = T.pick_demonstrations(torch.tensor(rewards), size, 1.0, keyed())
    assert len(picks) == len(rewards)
    for i, pick in enumerate(picks):
        others = [j for j in range(len(rewards))
                  if j // size == i // size and j != i and rewards[j] >= 1]
        assert (pick in others) if others else pick is None
    # Whatever happens in the other groups, this one's picks stay.
    g = data.draw(st.integers(0, groups - 1))
    changed = [r if i // size == g else 1.0 - r for i, r in enumerate(rewards)]
    again = T.pick_demonstrations(torch.tensor(changed), size, 1.0, keyed())
    assert picks[g * size:(g + 1) * size] == again[g * size:(g + 1) * size]


def test_picks_are_uniform_and_keyed_by_the_generator():
    rewards, counts = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), [0] * 5
    for seed in range(1500):
        counts[T.pick_demonstrations(rewards, 5, 1.0, keyed(seed))[1]] += 1
    assert counts[1] == counts[2] == 0
    assert all(abs(counts[j] - 500) < 5 * math.sqrt(1500 * 2 / 9) for j in (0, 3, 4))
    many = torch.ones(64)
    first = T.pick_demonstrations(many, 8, 1.0, keyed(1))
    assert first == T.pick_demonstrations(many, 8, 1.0, keyed(1))
    assert first != T.pick_demonstrations(many, 8, 1.0, keyed(2))
    assert len(set(first[:8])) > 1                                # siblings do not copy one text
    with pytest.raises(ValueError):
        T.pick_demonstrations(many, 7, 1.0, keyed())


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "5"}, {"role": "user", "content": "Are you sure?"}]


def test_teacher_messages_in_order_on_the_last_user_turn():
    before = json.dumps(CHAT)
    out = T.teacher_messages(CHAT, "It is {4}.", "5 is wrong, {not} {0} close.")
    assert json.dumps(CHAT) == before and out is not CHAT
    assert out[:3] == CHAT[:3] and out[3]["role"] == "user"
    assert out[3]["content"].split("\n\n") == [
        "Are you sure?", T.DEMONSTRATION_HEADING, "It is {4}.", T.FEEDBACK_HEADING,
        "5 is wrong, {not} {0} close.", T.CLOSING]
    assert "correct solution" in T.DEMONSTRATION_HEADING
    only = T.teacher_messages(CHAT, feedback="wrong")[3]["content"]
    assert T.DEMONSTRATION_HEADING not in only and T.FEEDBACK_HEADING in only
    only = T.teacher_messages(CHAT, "It is 4.")[3]["content"]
    assert T.FEEDBACK_HEADING not in only and only.endswith(T.CLOSING)
    for nothing in ((None, None), ("", ""), (" \n", None)):       # white space is no demonstration
        same = T.teacher_messages(CHAT, *nothing)
        assert same == CHAT and same is not CHAT and same[3] is not CHAT[3]
    with pytest.raises(ValueError, match="no user message"):
        T.teacher_messages(CHAT[:1], "demo")


def encode(messages):
    """Characters as tokens, in a chat template with a header at the end."""
    return [ord(c) for m in messages for c in f"[{m['role']}]{m['content']}"] + [1, 2, 3]


@FAST
@given(st.text(max_size=60), st.text(max_size=30), st.integers(-5, 90))
def test_teacher_prompt_cuts_the_demonstration_alone(demo, feedback, excess):
    question = [{"role": "user", "content": "Q? {x}"}]
    full = encode(T.teacher_messages(question, demo.strip(), feedback.strip()))
    limit = len(full) - excess
    bare, shown = len(encode(question)), bool(demo.strip() or feedback.strip())
    ids, cut = T.teacher_prompt_ids(encode, question, demo, feedback, limit)
    if ids is None:                                               # no room for one character more
        last = T.FEEDBACK_HEADING if feedback.strip() else T.DEMONSTRATION_HEADING
        assert bare + (len(last) + 1 + len(T.CLOSING) + 3 * 2) * shown > limit
        assert cut and len(full) > limit
        return
    text = "".join(map(chr, ids))
    assert len(ids) <= limit and cut == (len(full) > limit)
    assert text.startswith("[user]Q? {x}") and ids[-3:] == [1, 2, 3]
    if not cut:
        assert ids == full
        return
    assert T.CLOSING in text
    if T.DEMONSTRATION_HEADING in text:                           # then the feedback is whole
        body = text[len("[user]Q? {x}\n\n"):].split("\n\n" + (
            T.FEEDBACK_HEADING if feedback.strip() else T.CLOSING))[0]
        kept = body[len(T.DEMONSTRATION_HEADING) + 2:]
        assert kept and demo.strip().startswith(kept) and kept != demo.strip()
        assert feedback.strip() in text
        longer = T.teacher_messages(question, demo.strip()[:len(kept) + 1], feedback.strip())
        assert len(encode(longer)) > limit                        # the longest prefix that fits
    else:
        assert T.FEEDBACK_HEADING in text


def test_teacher_prompt_without_room_is_none():
    question = [{"role": "user", "content": "x" * 11}]
    assert T.teacher_prompt_ids(encode, question, "demo", None, 15) == (None, True)


# ---- thinking ------------------------------------------------------------------------------------

STRIPS = [  # text, opened, what is left
    ("Answer 4", False, "Answer 4"),
    ("<think>long</think>Answer 4", False, "Answer 4"),
    ("Before. <think>a</think>Mid <think>b</think> after", False, "Before. Mid  after"),
    ("lost its opening</think>Answer 4", False, "Answer 4"),
    ("<think>a</think>x</think>Answer", False, "Answer"),  # a lone closing tag: all before it
    ("<think>long Answer 4", False, ""),
    ("Answer 4 <think>and on and on", False, ""),                 # unclosed: nothing to distil
    ("<think>only</think>", False, ""),
    ("reasoning</think>\n\nAnswer 4", True, "Answer 4"),
    ("Answer 4", True, ""),  # opened by the prompt, never closed
    ("<think>again</think>Answer", True, "Answer"),
    ("", False, ""),
]


@pytest.mark.parametrize("text,opened,left", STRIPS)
def test_thinking_is_stripped_from_text_and_masked_in_tokens(text, opened, left):
    assert T.strip_thinking(text, THINK, opened) == left
    assert T.response_for_demo(text, THINK, opened=opened) == (left or None)
    keep = T.think_mask(list(text) + [""], THINK, opened)         # a token a character, and EOS
    kept = "".join(c for c, k in zip(text, keep, strict=False) if k)
    assert kept.strip() == left
    assert keep[-1] == bool(left or not text or text.endswith(THINK[1]))  # EOS: unless unclosed
    science = text.replace("think>", "reasoning>")
    assert T.strip_thinking(science, REASON, opened) == left
    if not opened:
        assert T.strip_thinking(science) == left                  # default: any of the known tags
        assert T.strip_thinking(text, REASON) == text.strip()     # named: only those


def test_tokens_that_straddle_a_tag_are_left_out():
    pieces = ["Hi <", "think", ">so", " deep", "</", "think", ">\n\n", "The", " answer", "<eos>"]
    assert T.think_mask(pieces, THINK, False) == [False] * 7 + [True] * 3
    assert T.think_mask(pieces[3:], THINK, True) == [False] * 4 + [True] * 3
    assert T.think_mask(pieces[3:], THINK, False) == [False] * 4 + [True] * 3
    assert T.think_mask(pieces[:6], THINK, False) == [False] * 6
    assert T.think_mask([], THINK, True) == []


def closing_positions(text, tags, opened):
    """Oracle: which characters are reasoning, one state machine over positions."""
    hidden, state, i, since = [False] * len(text), opened, 0, 0
    while i < len(text):
        if text.startswith(tags[0], i):
            if not state:
                state, since = True, i
            i += len(tags[0])
        elif text.startswith(tags[1], i):
            i += len(tags[1])
            for j in range(since if state else 0, i):
                hidden[j] = True
            state = False
        else:
            i += 1
    return [True] * len(text) if state else hidden


@FAST
@given(st.lists(st.sampled_from(["<think>", "</think>", "a", "<", "think>", " b "]), max_size=9),
       st.booleans(), st.data())
def test_think_mask_against_a_state_machine(parts, opened, data):
    text, pieces, at = "".join(parts), [], 0
    while at < len(text):                                         # an arbitrary tokenization
        size = data.draw(st.integers(0, 5))
        pieces.append(text[at:at + size])
        at += size
    hidden = closing_positions(text, THINK, opened)
    keep, at = T.think_mask(pieces, THINK, opened), 0
    for piece, kept in zip(pieces, keep, strict=True):
        if piece:
            assert kept == (not any(hidden[at:at + len(piece)]))
        at += len(piece)
    assert T.strip_thinking(text, THINK, opened) == "".join(
        c for c, h in zip(text, hidden, strict=True) if not h).strip()


def test_demonstrations_are_clean():
    special = ("<|im_end|>", "<eos>", "")
    clean = T.response_for_demo("Answer 4<|im_<|im_end|>end|><eos>", THINK, special=iter(special))
    assert clean == "Answer 4"                                    # also what removing would join
    assert T.response_for_demo(" <eos>\n", THINK, special=special) is None
    kept = "<think>why</think>Answer 4"
    assert T.response_for_demo(kept + "<eos>", THINK, True, special=special) == kept  # --demo_cot
    assert T.response_for_demo("why</think>Answer 4", THINK, True, opened=True) == \
        "<think>\nwhy</think>Answer 4"
    assert T.response_for_demo("  ", THINK, True, opened=True) is None


# ---- the shared cases, by id ---------------------------------------------------------------------

def s02(given, expected):
    student = one(given["student"])
    teacher = T.Teacher(one(given["teacher"]), given["rate"])
    distance = [1.0]
    for step in range(1, given["steps"] + 1):
        teacher.update(student, step)
        distance.append(abs(number(student) - number(teacher.model)))
    assert number(teacher.model) == pytest.approx(expected["teacher"], abs=1e-4)
    assert all(b < a for a, b in itertools.pairwise(distance))


def s03(given, expected):
    student = one(given["student"], torch.bfloat16)
    teacher = T.Teacher(one(given["teacher"], torch.bfloat16), given["rate"])
    naive = torch.tensor(given["teacher"], dtype=torch.bfloat16)
    for step in range(1, given["steps"] + 1):
        teacher.update(student, step)
        naive.lerp_(student.weight.data.view(()), given["rate"])
    assert number(teacher.model) == pytest.approx(expected["teacher_fp32"], abs=1e-5)
    assert naive.item() == expected["pure_bf16_gives"]  # the fault is real on this machine


def s04(given, expected):
    student = Tied()
    with torch.no_grad():
        student.embed.weight.zero_()
    teacher = T.Teacher(student, 0.1)
    with torch.no_grad():
        student.embed.weight.fill_(1.0)
        student.seen.fill_(9), student.running.fill_(2.5)
    teacher.update(student, 1)
    assert teacher.model.embed.weight.unique().tolist() == pytest.approx([0.1])   # not 0.19
    assert teacher.model.head.weight is teacher.model.embed.weight
    assert teacher.model.seen.item() == 9 and teacher.model.running.item() == 2.5
    assert teacher.model.seen.dtype == torch.int64


def s12(given, expected):
    torch.manual_seed(0)
    student = Tied().eval()
    teacher = T.Teacher(student)
    prompt, response = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6, 7])

    def divergence(teacher_prompt):                               # both at the response's positions
        logits = [m(torch.cat([p, response]))[len(p) - 1:-1] for m, p in
                  ((student, prompt), (teacher.model, teacher_prompt))]
        return losses.generalized_jsd(*logits)                    # (T,)

    student.zero_grad()
    loss = divergence(prompt)
    loss.sum().backward()
    assert loss.max().item() <= 1e-6 and loss.shape == response.shape
    assert max(p.grad.abs().max() for p in student.parameters()).item() <= 1e-6
    longer = divergence(torch.cat([prompt, torch.tensor([8, 9, 10])]))
    assert longer.shape == response.shape and (longer > 1e-6).all()


def s13(given, expected):
    picks = T.pick_demonstrations(torch.tensor(given["rewards"]), 4, 1.0, keyed())
    assert [int(p is not None) for p in picks] == expected["has_teacher"]
    assert None not in T.pick_demonstrations(torch.tensor([1.0, 1, 0, 0]), 4, 1.0, keyed())


def s17(given, expected):
    problem = given["problem"]
    out = T.teacher_messages([{"role": "user", "content": problem}], r"\frac{1}{2} {feedback}",
                             "{solution} {0} {} }{")
    assert out[0]["content"].startswith(problem) and r"\frac{1}{2} {feedback}" in out[0]["content"]
    assert "{solution} {0} {} }{" in out[0]["content"]


def s18(given, expected):
    assert T.strip_thinking(given["demo"]) == expected["demo_used"]
    assert T.response_for_demo(given["demo"], THINK) == expected["demo_used"]
    # Decided: an unclosed demonstration is not used; with --demo_cot it is kept whole.
    assert T.response_for_demo(given["unclosed_demo"], THINK) is None
    assert T.response_for_demo(given["unclosed_demo"], THINK, True) == given["unclosed_demo"]


def s19(given, expected):
    rewards = torch.tensor(given["rewards"])
    picks = T.pick_demonstrations(rewards, 4, given["threshold"], keyed())
    assert sum(p is not None for p in picks) == expected["successes"]
    assert T.pick_demonstrations(rewards, 4, 0.9, keyed()) == [None, 0, 0, 0]


CHECKS = {name.upper(): check for name, check in list(globals().items())
          if name.upper() in CASES and callable(check)}


@pytest.mark.parametrize("case", CHECKS)
def test_case(case):
    CHECKS[case](CASES[case]["input"], CASES[case]["expected"])
