"""An ILM whose slots say what is missing: what its gates learn, and how they end blanks and texts.

The reference is written from the definition: one example at a time, in reading order, in float64.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.data.order import Order
from insertlm.families.base import Noise
from insertlm.families.corruption.blanks import BlanksConfig, cut
from insertlm.families.corruption.packed import corrupt
from insertlm.families.ilm import ILM, IlmConfig
from insertlm.inference.scheduler import Scheduler
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.nn.spec import ModelConfig
from insertlm.recipe import OptimConfig
from insertlm.tasks.base import Examples
from insertlm.text.tokenizers import WordTokenizer
from insertlm.training.step import TrainStep

Fits = Callable[[Tensor, Tensor], bool]
Softmax = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
TinyIlm = Callable[..., ILM]

WORDS = 6
HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # shrinking a failure would take minutes
words = st.integers(0, WORDS - 1)
batches = st.lists(st.tuples(st.lists(words, max_size=4), st.lists(words, max_size=9)), min_size=1, max_size=4).filter(
    lambda batch: any(target for _, target in batch)
)
GATED = IlmConfig(stop="slots")


def as_examples(batch: list[tuple[list[int], list[int]]]) -> Examples:
    def matrix(rows: list[list[int]]) -> tuple[Any, Any]:
        lengths = np.array([len(row) for row in rows], dtype=np.int32)
        padded = [row + [0] * (int(lengths.max()) - len(row)) for row in rows]
        return np.array(padded, dtype=np.int32).reshape(len(rows), -1), lengths

    return Examples(*matrix([prefix for prefix, _ in batch]), *matrix([target for _, target in batch]))


def slot_rows(ilm: ILM, attention: Softmax, prefix: list[int], text: list[int]) -> Tensor:
    """Hidden rows of <bos> and the text, from one whole row in reading order: <stop> prefix <bos> text."""
    row = torch.tensor([ilm.specials.stop, *prefix, ilm.specials.bos, *text])
    place = torch.arange(len(row))
    inside = (place >= 1) & (place <= len(prefix))
    mask = ~inside[:, None] | inside | torch.tensor(not ilm.model.prefix_lm)
    hidden: Tensor = ilm.backbone(row, place, lambda layer, q, k, v: attention(q, k, v, mask))
    return hidden[1 + len(prefix) :]


def closed_odds(ilm: ILM, h: Tensor) -> Tensor:
    """log P(nothing is missing) and log P(something is), of each row."""
    w = dict(ilm.stop.named_parameters())
    normed = F.layer_norm(h, h.shape[-1:], w["norm.weight"], w["norm.bias"], 1e-5)
    inner = torch.tanh(normed @ w["up.weight"].T + w["up.bias"])
    return ((h + inner @ w["down.weight"].T + w["down.bias"]) @ w["out.weight"].T).log_softmax(-1)


# --- Learning


@given(batches, st.integers(0, 2**40), st.booleans(), st.sampled_from([0.0, 0.6, 1.0]), st.none() | st.integers(0, 70))
@settings(HEAVY, max_examples=60)
def test_the_loss_of_gates_and_all_gradients_are_those_of_the_definition(
    tiny_ilm: TinyIlm,
    softmax_attention: Softmax,
    batch: list[tuple[list[int], list[int]]],
    seed: int,
    prefix_lm: bool,
    blanks: float,
    spare: int | None,
) -> None:
    """One minus the chance that each open slot gives to the truth, the mean over the open slots of a text."""
    config = IlmConfig(stop="slots", blanks=blanks, stop_weight=0.7, deletions=2 if prefix_lm else 1)
    ilm = tiny_ilm(prefix_lm=prefix_lm, config=config)
    rows = ilm.rows(as_examples(batch))
    noise = Noise(seed, torch.arange(len(batch)), torch.zeros(len(batch)).long())
    capacity = None if spare is None else int(ilm.visible(rows, noise).sum()) + spare
    found = ilm.losses(rows, noise, capacity)

    texts, each = rows.repeated(config.deletions), noise.repeated(config.deletions)
    deleted = ilm.corruption.deleted(texts, each).tolist()
    gaps = cut(texts.target, texts.target_length, ilm.traits, BlanksConfig(), each) if blanks else None
    expected = torch.zeros((), dtype=torch.float64)
    for n, gone in enumerate(deleted):
        prefix, target = batch[n // config.deletions]
        inside = set(range(len(target) + 1))
        if gaps is not None and not ilm.corruption.open(texts, each)[n].all():
            spans = zip(gaps.begin[n].tolist(), gaps.end[n].tolist(), strict=True)
            inside = {slot for first, last in [*spans][: int(gaps.count[n])] for slot in range(first, last + 1)}
        text, place, missing = list[int](), [0], [False]
        for number, (token, is_gone) in enumerate(zip(target, gone, strict=False), start=1):
            if is_gone:
                missing[-1] = True
            else:
                text.append(token)
                place.append(number)
                missing.append(False)
        odds = closed_odds(ilm, slot_rows(ilm, softmax_attention, prefix, text))
        losses = [-odds[k, int(missing[k])] for k in range(len(place)) if place[k] in inside]
        expected = expected + torch.stack(losses).mean() / len(deleted)
    torch.testing.assert_close(found.parts["stop_loss"], expected.detach(), rtol=1e-9, atol=1e-9)
    plain = tiny_ilm(prefix_lm=prefix_lm, config=msgspec.structs.replace(config, stop="text"))
    token_loss = plain.losses(rows, noise).parts["token_loss"]  # gates change nothing of what is learnt about tokens
    torch.testing.assert_close(found.parts["token_loss"], token_loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.total, (token_loss + 0.7 * expected), rtol=1e-9, atol=1e-9)
    heads = list(ilm.stop.parameters())
    found_grads, grads = torch.autograd.grad(found.total, heads), torch.autograd.grad(0.7 * expected, heads)
    torch.testing.assert_close(found_grads, grads, rtol=1e-8, atol=1e-10)


def test_gates_are_the_same_weights_and_nothing_else_changes(tiny_ilm: TinyIlm) -> None:
    plain, gated = tiny_ilm(), tiny_ilm(config=GATED)
    assert plain.state_dict().keys() == gated.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), gated.state_dict().values(), strict=True))


def test_what_the_host_is_told_needs_nothing_of_the_device(tiny_ilm: TinyIlm) -> None:
    """A thread asks while a graph may be captured."""
    ilm = tiny_ilm(config=IlmConfig(blanks=0.8))
    rows = ilm.rows(as_examples([([1], [2, 3, 4, 5, 1, 2])]))
    noise = Noise(1, torch.arange(1), torch.zeros(1).long())
    expected = corrupt(rows, noise, corruption=ilm.corruption).packing.lengths
    assert torch.equal(ilm.to("meta").visible(rows, noise), expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_losses_are_one_graph_for_every_capacity(tiny_ilm: TinyIlm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the device, and no shape depends on the data. Without torch.compile's code generator, which
    is slow, and without attention, which on a CPU does ask."""
    monkeypatch.setattr("insertlm.nn.attention.attend", lambda q, k, v, *which: v)
    ilm = tiny_ilm(config=IlmConfig(stop="slots", blanks=0.7, targets="first"))
    rows = ilm.rows(as_examples([([1], [*range(6)]), ([2, 3], [4, 5, 1]), ([0], [2] * 9)] * 10))
    noise = Noise(5, torch.arange(30), torch.zeros(30).long())
    expected = ilm.losses(rows, noise)
    traced = torch.compile(ilm.losses, backend="aot_eager", fullgraph=True, dynamic=True)
    torch._dynamo.utils.counters.clear()
    for capacity in (384, 512, 640):
        found = traced(rows, noise, capacity)
        torch.testing.assert_close(found.total, expected.total)
        torch.testing.assert_close(found.parts, expected.parts)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_blanks_end_by_themselves_with_what_belongs_there() -> None:
    """Learnt from numbers that count up, in seconds: blanks of every length, none among them, each with an end of its
    own."""
    most, steps = 10, 300
    spans = [(first, last) for first in range(most) for last in range(first + 1, most + 1)]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model, tokenizer = ModelConfig(layers=2, width=48, heads=3, hidden=96), tuple(map(str, range(most)))
        ilm = IlmConfig(stop="slots", blanks=0.7).build(model, WordTokenizer(tokenizer, reserved=1)).train()
    train = TrainStep(
        ilm,
        ilm.rows(as_examples([([], [*range(*span)]) for span in spans])),
        Order(len(spans), batch_size=64, seed=1),
        optim=OptimConfig(learning_rate=3e-3, warmup=50, cooldown=0.5),
        steps=steps,
        device=torch.device("cpu"),
        compiled=False,
    )
    for number in range(steps):
        train(number)
    prompts, expected = list[Prompt](), list[list[int]]()
    for first, last in spans:
        for middle in range(first + 1, last - 1):  # a blank on both sides of it
            prompts.append(Prompt([], len(prompts), [first, middle, last - 1], frozenset({1, 2})))
            expected.append([*range(first, last)])
    sizes = Counter(len(whole) - 3 for whole in expected)
    assert set(sizes) == set(range(most - 2))
    for temperature, least in ((0.0, 0.9), (1.0, 0.7)):
        for parallel in (1, 0):
            settings = DecodeConfig(temperature=temperature, parallel=parallel, max_steps=30)
            written = ilm.eval().decode(prompts, settings)
            assert all(text.complete for text in written)
            right = [text.ids == whole for text, whole in zip(written, expected, strict=True)]
            assert sum(right) >= least * len(right)
            if parallel == 0:
                both = [text for text, whole in zip(written, expected, strict=True) if len(whole) - 3 >= 2]
                assert sum(len(text.events) for text in both) > 1.2 * sum(len(text.steps) for text in both)


# --- Writing


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    prefix, start = draw(st.lists(words, min_size=1, max_size=3)), draw(st.lists(words, max_size=4))
    gaps = draw(st.none() | st.frozensets(st.integers(0, len(start))))
    return Prompt(prefix, draw(st.integers(0, 2**40)), start, gaps)


@given(st.lists(prompts(), min_size=1, max_size=4), st.floats(0.4, 0.6), st.booleans(), st.integers(0, 2))
@settings(HEAVY, max_examples=60)
def test_greedy_writing_by_hand(
    tiny_ilm: TinyIlm, softmax_attention: Softmax, batch: list[Prompt], threshold: float, prefix_lm: bool, many: int
) -> None:
    """Which slots are closed, which of the others is written to, and when it ends; one token a step, one in every
    blank, or two."""
    ilm = tiny_ilm(prefix_lm=prefix_lm, config=GATED)
    config = DecodeConfig(stop_threshold=threshold, max_steps=5, parallel=[1, 0, 2][many])
    for prompt, written in zip(batch, ilm.decode(batch, config), strict=True):
        text, open_ = [*prompt.start], [gap in prompt.gaps for gap in range(len(prompt.start) + 1)]
        gap_of = list(range(len(open_)))
        events, complete = list[Any](), False
        for number in range(config.max_steps + 1):
            with torch.no_grad():
                hidden = slot_rows(ilm, softmax_attention, prompt.prefix, text)
                odds = closed_odds(ilm, hidden)[:, 0].exp().tolist()
                logits = hidden @ ilm.unembedding.weight[:WORDS].T
            asked = [slot for slot, is_open in enumerate(open_) if is_open]
            stop = math.prod(odds[slot] for slot in asked) if asked else None
            unsettled = [slot for slot in asked if odds[slot] < threshold]
            complete = bool(asked) and not unsettled
            if not unsettled or number == config.max_steps:
                break
            mass = logits.logsumexp(1).tolist()
            best = sorted(unsettled, key=lambda slot: -mass[slot])
            if config.parallel == 0:
                best = [slot for k, slot in enumerate(best) if gap_of[slot] not in [gap_of[b] for b in best[:k]]]
            tokens = {slot: int(logits[slot].argmax()) for slot in best[: config.parallel or len(best)]}
            twice = {slot for slot in tokens if slot + 1 in tokens and tokens[slot] == tokens[slot + 1] == text[slot]}
            total = logits[unsettled].logsumexp((0, 1))
            for shift, slot in enumerate(sorted(tokens.keys() - twice)):
                sure = float(logits[slot, tokens[slot]] - total)
                events.append((number, slot + shift, tokens[slot], pytest.approx(sure), pytest.approx(stop)))
                text.insert(slot + shift, tokens[slot])
                open_.insert(slot + shift + 1, True)
                gap_of.insert(slot + shift + 1, gap_of[slot + shift])
        assert [tuple(event) for event in written.events] == events
        assert written.ids == text
        assert written.complete == complete
        assert written.stop_probability == (None if stop is None else pytest.approx(stop))


def indifferent(ilm: ILM, closed: float) -> ILM:
    """Every gate says so, and every word is as likely as any other."""
    ilm.stop.register_forward_hook(
        lambda module, inputs, output: torch.tensor([closed, 1 - closed], dtype=output.dtype).log().expand_as(output)
    )
    ilm.unembedding.weight.data.zero_()
    return ilm


@pytest.mark.parametrize("ruled", [False, True])
@pytest.mark.parametrize("parallel", [1, 3])
def test_every_slot_is_drawn_once(tiny_ilm: TinyIlm, fits: Fits, parallel: int, ruled: bool) -> None:
    """An insertion makes two slots of one. So if each closes with chance p, a text has n tokens with the chance that
    such a tree has n inner nodes, Catalan(n) (1 - p)^n p^(n + 1). Were slots drawn anew in every step, texts would be
    longer."""
    ilm, p, longest = indifferent(tiny_ilm(config=GATED), 0.65), 0.65, 40
    bounds = {0: Bounds(0, longest)} if ruled else {}
    settings = DecodeConfig(temperature=1.0, parallel=parallel, max_steps=60, max_tokens=longest)
    lengths = [len(text.ids) for text in ilm.decode([Prompt([1], k, bounds=bounds) for k in range(3000)], settings)]
    catalan = [math.comb(2 * n, n) // (n + 1) for n in range(5)]
    chances = torch.tensor([c * (1 - p) ** n * p ** (n + 1) for n, c in enumerate(catalan)])
    counts = torch.bincount(torch.tensor(lengths).clamp(max=5), minlength=6)
    assert fits(counts, torch.cat([chances, 1 - chances.sum(0, keepdim=True)]))


def test_ends_do_not_depend_on_what_else_is_written_even_with_other_settings(tiny_ilm: TinyIlm) -> None:
    ilm = tiny_ilm(config=GATED)
    ways = [DecodeConfig(temperature=t, stop_threshold=s, max_steps=6) for t in (0.0, 1.0) for s in (0.3, 0.5, 0.6)]
    prompts = [[Prompt([1, 2][:k], 7 + k, [3], bounds={1: Bounds(1, 3)} if k else {})] for k in range(2)]
    for of_a_kind in prompts:
        scheduler = Scheduler(ilm, 99, watched=True)
        keys = {scheduler.submit(of_a_kind, way)[0]: way for way in ways}
        ended = dict[int, Any]()
        while len(scheduler):
            ended |= {each.key: each.ended for each in scheduler.advance() if each.ended is not None}
        for key, way in keys.items():
            [alone] = ilm.decode(of_a_kind, way)
            assert [event[:3] for event in ended[key].events] == [event[:3] for event in alone.events]
            assert ended[key].complete == alone.complete
    assert len({(*alone.ids,) for way in ways for alone in ilm.decode(prompts[0], way)}) > 1


def test_scores_are_those_of_the_gates(tiny_ilm: TinyIlm, softmax_attention: Softmax) -> None:
    ilm, text = tiny_ilm(config=GATED), [1, 2, 3]
    score = ilm.score([4], text)

    @torch.no_grad()
    def stop(text: list[int]) -> float:
        return float(closed_odds(ilm, slot_rows(ilm, softmax_attention, [4], text))[:, 0].sum().exp())

    assert score.stop_probability == pytest.approx(stop(text))
    assert score.stops == pytest.approx([stop([*text[:k], *text[k + 1 :]]) for k in range(3)])
    assert sum(score.slots) == pytest.approx(1)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"parallel": 2, "joint": True}, "decode.parallel: expected 1 where places are drawn (decode.joint, "),
        ({"parallel": 0, "position_top_k": 3}, "decode.parallel: expected 1 where places are drawn (decode.joint, "),
        ({"confidence": 0.5}, "decode.confidence: expected 0 with one token a step (decode.parallel 1), got 0.5"),
    ],
)
def test_settings_that_do_not_go_together(tiny_ilm: TinyIlm, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        tiny_ilm().decode([Prompt([1])], DecodeConfig(**changes))
    assert str(caught.value).startswith(line)
