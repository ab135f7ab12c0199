"""Exact likelihoods against everything that can happen, listed step by step for models of three words."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.families.arm import ArmConfig
from insertlm.families.base import Family, FamilyConfig
from insertlm.families.fill import FillConfig, Filler
from insertlm.families.ilm import ILM, IlmConfig
from insertlm.families.likelihood import insertions
from insertlm.families.likelihood.measure import Effort, Estimate, log_likelihoods
from insertlm.families.sequential import Sequential
from insertlm.inference.score import Completion
from insertlm.inference.settings import DecodeConfig, Prompt
from insertlm.nn.spec import ModelConfig
from insertlm.text.tokenizers import WordTokenizer

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Cell = tuple[int, int | None]  # a token of the text, and the gap behind it that is open
Fills = tuple[tuple[int, ...], ...]
WORDS = WordTokenizer(("0", "1", "2"), reserved=1)
MOST = 3  # tokens
FROM_NOTHING = Prompt([], start=[], open=frozenset({0}))
PROMPTS = [
    FROM_NOTHING,
    Prompt([], start=[1, 0], open=frozenset({2})),
    Prompt([], start=[2, 2], open=frozenset({0, 2})),
    Prompt([], start=[1], open=frozenset({0, 1})),  # 1 1 1 can be written as 1|1 1, 1 1|1 and |1|1
    Prompt([0, 2], start=[1], open=frozenset({1})),
]


def build(config: FamilyConfig, prefix_lm: bool = False) -> Family:
    """In float64, with weights so large that orders matter."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        family = config.build(
            ModelConfig(layers=2, width=8, heads=2, hidden=12, max_length=300, prefix_lm=prefix_lm), WORDS
        )
        for parameter in family.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return family.double().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def ilm() -> ILM:
    family = build(IlmConfig())
    assert isinstance(family, ILM)
    return family


def log_likelihood(
    family: Family, prompt: Prompt, fills: Sequence[Sequence[int]], effort: Effort | None = None
) -> Estimate:
    [estimate] = log_likelihoods(family, [Completion(prompt, fills)], effort or Effort())
    return estimate


class Process:
    """What an ILM may do step by step: at every text it draws whether to end, else a pair of a slot and a word."""

    def __init__(self, family: ILM, prompt: Prompt, attend: Attend) -> None:
        self.family, self.prompt, self.attend = family, prompt, attend
        self.decide = cache(self._decide)
        self.ended: dict[Fills, float] = defaultdict(float)
        self.going = 0.0
        gaps = [gap if gap in prompt.gaps else None for gap in range(len(prompt.start) + 1)]
        self._walk(tuple(zip([family.specials.bos, *prompt.start], gaps, strict=True)), (), 1.0)

    def _walk(self, cells: tuple[Cell, ...], written: tuple[int, ...], reached: float) -> None:
        """written: which cells are"""
        stop, pairs = self.decide(cells)
        self.ended[self._fills(cells, written)] += reached * stop
        if len(written) == MOST:
            self.going += reached * (1 - stop)
            return
        for (slot, token), chance in pairs.items():
            longer = list(cells)
            longer.insert(slot + 1, (token, cells[slot][1]))
            moved = *(place + (place > slot) for place in written), slot + 1
            self._walk(tuple(longer), moved, reached * (1 - stop) * chance)

    def _fills(self, cells: tuple[Cell, ...], written: tuple[int, ...]) -> Fills:
        found: dict[int, list[int]] = {gap: [] for gap in sorted(self.prompt.gaps)}
        for place in sorted(written):
            token, gap = cells[place]
            assert gap is not None
            found[gap].append(token)
        return tuple(map(tuple, found.values()))

    def _decide(self, cells: tuple[Cell, ...]) -> tuple[float, dict[tuple[int, int], float]]:
        """By one row, every pair of rows compared: <stop> stands first, and with prefix_lm the prefix sees itself."""
        family, before = self.family, len(self.prompt.prefix)
        row = torch.tensor([family.specials.stop, *self.prompt.prefix, *(token for token, _ in cells)])
        sees = torch.ones(len(row), len(row), dtype=torch.bool)
        if family.model.prefix_lm:
            sees[1 : 1 + before] = False
            sees[1 : 1 + before, 1 : 1 + before] = True
        hidden = family.backbone(row, torch.arange(len(row)), lambda layer, q, k, v: self.attend(q, k, v, sees))
        slots = [place for place, (_, gap) in enumerate(cells) if gap is not None]
        logits = hidden[[1 + before + slot for slot in slots]] @ family.unembedding.weight[:3].T
        chances = logits.flatten().softmax(0).tolist()
        pairs = dict(zip(itertools.product(slots, range(3)), chances, strict=True))
        return float(family.stop(hidden[:1])[0].softmax(0)[0]), pairs


# --- ILM


@pytest.mark.parametrize("prefix_lm", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_an_ilm_gives_every_text_the_chance_that_it_is_written(
    softmax_attention: Attend, prompt: Prompt, prefix_lm: bool
) -> None:
    """And all that can be written within three steps, with what goes on after them, is everything."""
    ilm = build(IlmConfig(), prefix_lm)
    assert isinstance(ilm, ILM)
    process = Process(ilm, prompt, softmax_attention)
    texts = list(process.ended)
    assert len(texts) > 30
    found = log_likelihoods(ilm, [Completion(prompt, fills) for fills in texts], Effort())
    assert all(each.exact and each.error == 0 for each in found)
    values = [each.value for each in found]
    assert values == pytest.approx([math.log(process.ended[fills]) for fills in texts], abs=1e-9)
    assert sum(map(math.exp, values)) + process.going == pytest.approx(1, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=7), st.integers(0, 7))
def test_a_bound_is_never_above_what_is_exact(ilm: ILM, text: list[int], cut: int) -> None:
    prompt = Prompt([], start=[1], open=frozenset({0, 1}))
    fills = text[:cut], text[cut:]
    every = Effort(exact=0, orders=1 << 10)  # all states, so the bound has no error
    bound, exact = log_likelihood(ilm, prompt, fills, every), log_likelihood(ilm, prompt, fills)
    assert (bound.exact, bound.error, exact.exact) == (False, 0.0, True)
    assert bound.value <= exact.value + 1e-9


def test_states_that_look_the_same_are_computed_once(ilm: ILM, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = list[int]()
    compute = insertions.Insertions._compute

    def counted(self: insertions.Insertions, missing: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        computed.append(len(missing))
        return compute(self, missing)

    monkeypatch.setattr(insertions.Insertions, "_compute", counted)
    texts = [[2] * 6, [0, 1, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2]]
    once = [log_likelihood(ilm, FROM_NOTHING, [text]).value for text in texts]
    assert computed[0] == 7  # none, one … six of them
    # That many different texts come about when some of the tokens are left out.
    assert computed[1:] == [len({tuple(_left(text, state)) for state in range(64)}) for text in texts[1:]]
    monkeypatch.setattr(insertions.Insertions, "_same_texts", lambda self, missing: torch.arange(len(missing)))
    computed.clear()
    each = [log_likelihood(ilm, FROM_NOTHING, [text]).value for text in texts]
    assert computed == [64, 64, 64]
    assert each == pytest.approx(once, abs=1e-9)


def _left(text: Sequence[int], state: int) -> list[int]:
    return [token for place, token in enumerate(text) if state >> place & 1]


def test_equal_tokens_in_two_blanks_are_told_apart(ilm: ILM) -> None:
    """The text is the same, the fills are not."""
    prompt = Prompt([], start=[1], open=frozenset({0, 1}))
    shares = [log_likelihood(ilm, prompt, fills).value for fills in (([1, 1], []), ([1], [1]), ([], [1, 1]))]
    assert len({round(share, 6) for share in shares}) == 3
    assert log_likelihood(ilm, prompt, ([1], [1])).fills is None


def test_up_to_a_length_it_is_exact(ilm: ILM) -> None:
    text = [0, 1, 2, 0, 1, 2, 2, 1, 0, 0, 1, 1, 2]
    assert log_likelihood(ilm, FROM_NOTHING, [text[:12]]).exact
    longer = log_likelihood(ilm, FROM_NOTHING, [text])
    assert not longer.exact and longer.error > 0
    exact = log_likelihood(ilm, FROM_NOTHING, [text], Effort(exact=13))
    assert exact.exact and longer.value < exact.value + 4 * longer.error
    assert not log_likelihood(ilm, FROM_NOTHING, [text[:2]], Effort(exact=1)).exact


def test_a_model_with_other_stops_is_refused() -> None:
    with pytest.raises(InsertlmError, match=r"expected an ilm with one stop for the text \(family.stop: text\)"):
        log_likelihood(build(IlmConfig(stop="slots")), FROM_NOTHING, [[1]])


# --- ARM and filler


@pytest.mark.parametrize(
    ("config", "prompt"),
    [
        *((ArmConfig(), PROMPTS[number]) for number in (0, 1, 4)),
        *((FillConfig(jump=3), prompt) for prompt in PROMPTS),
        (FillConfig(), Prompt([], start=[2, 1], open=frozenset({0, 2}), words={2: 5})),
    ],
)
def test_the_texts_of_a_model_that_writes_from_the_left_add_up(config: FamilyConfig, prompt: Prompt) -> None:
    """Of all texts that begin with two words, the model writes one, as likely as it writes these words."""
    family = build(config)
    assert isinstance(family, Sequential)
    before = [()] * (len(prompt.gaps) - 1)
    for begin in itertools.product(range(3), repeat=2):
        going = family.decisions([Completion(prompt, [*before, begin])])[0][-1]
        longer = [
            [*before, (*begin, *more)] for count in range(3) for more in itertools.product(range(3), repeat=count)
        ]
        found = family.decisions([Completion(prompt, fills) for fills in longer])
        # Two more words at most: those texts, and what goes on behind two more words.
        ended = sum(math.exp(each[-1].value) for each in found)
        open_ = sum(
            math.exp(float(each[-1].tokens.sum())) * (1 - math.exp(float(each[-1].ends[-1])))
            for each, fills in zip(found, longer, strict=True)
            if len(fills[-1]) == 4
        )
        assert ended + open_ == pytest.approx(math.exp(float(going.tokens.sum())), abs=1e-9)


APART = Prompt([1], start=[2] * 3, open=frozenset({0, 1, 3}))  # positions jump behind each blank
SAMPLED = DecodeConfig(temperature=1.0, max_steps=60)


@pytest.mark.parametrize(
    ("config", "prompts"),
    [(ArmConfig(), [PROMPTS[number] for number in (0, 1, 4)]), (FillConfig(), PROMPTS)],
    ids=["arm", "fill"],
)
def test_the_probability_of_what_is_written_is_what_writing_records(
    config: FamilyConfig, prompts: list[Prompt]
) -> None:
    family = build(config)
    assert isinstance(family, Sequential)
    for prompt, text in zip(prompts, family.decode(prompts, SAMPLED), strict=True):
        assert text.complete
        order = sorted(text.events, key=lambda event: (event.step, event.rank))
        [found] = family.decisions([Completion(prompt, _fills(prompt, text.order, text.ids))])
        tokens = torch.cat([fill.tokens for fill in found])
        assert tokens.tolist() == pytest.approx([event.log_probability for event in order], abs=1e-5)
        assert math.exp(sum(float(fill.ends[-1]) for fill in found)) == pytest.approx(text.stop_probability, abs=1e-6)


def _fills(prompt: Prompt, order: Sequence[int], ids: Sequence[int]) -> list[list[int]]:
    given = [-1, *(place for place, event in enumerate(order) if event < 0), len(ids)]
    return [list(ids[given[gap] + 1 : given[gap + 1]]) for gap in sorted(prompt.gaps)]


def test_a_batch_is_as_good_as_one_alone() -> None:
    for config, prompts in ((ArmConfig(), PROMPTS[:2]), (FillConfig(), PROMPTS)):
        family = build(config)
        some = [
            Completion(prompt, [fill] * len(prompt.gaps)) for prompt in prompts for fill in ((), (2,), (0, 1, 1, 2, 0))
        ]
        together = log_likelihoods(family, some, Effort())
        seen = dict[int, Estimate]()
        few = log_likelihoods(family, some, Effort(batch_size=2), seen.__setitem__)
        alone = [log_likelihoods(family, [each], Effort())[0] for each in some]
        assert [seen[number] for number in range(len(some))] == few
        for other in (few, alone):
            assert [each.value for each in other] == pytest.approx([each.value for each in together], abs=1e-9)
        for each in together:
            assert each.exact and each.fills is not None
            assert each.value == pytest.approx(math.fsum(each.fills), abs=1e-12)


def test_a_hint_changes_what_is_likely() -> None:
    family = build(FillConfig())
    values = {
        log_likelihood(family, Prompt([], start=[1], open=frozenset({1}), words=words), [[0, 2]]).value
        for words in ({}, {1: 2}, {1: 9})
    }
    assert len(values) == 3


@pytest.mark.parametrize("config", [ArmConfig(), FillConfig()])
def test_scores_are_the_factors(config: FamilyConfig) -> None:
    family = build(config)
    text = [2, 0, 0, 1]
    for prefix in ([], [1, 1]):
        score = family.score(prefix, text)
        value = log_likelihood(family, Prompt(prefix, start=[], open=frozenset({0})), [text]).value
        assert math.log(math.prod(score.tokens) * score.stop_probability) == pytest.approx(value, abs=1e-9)
        assert (score.ids, score.slots, len(score.stops)) == (text, [0.0, 0.0, 0.0, 0.0, 1.0], 4)
        shorter = family.score(prefix, text[:2])
        assert score.stops[2] == pytest.approx(shorter.stop_probability, abs=1e-9)


# --- What has no answer


def test_words_that_are_never_written_are_impossible_for_all() -> None:
    for config in (ArmConfig(), FillConfig(), IlmConfig()):
        family = build(config)
        for wrong in (WORDS.specials.mask, WORDS.specials.eos, WORDS.specials.unk):
            assert log_likelihood(family, FROM_NOTHING, [[1, wrong]]).value == -math.inf


@pytest.mark.parametrize(
    ("config", "prompt", "fills", "message"),
    [
        (ArmConfig(), PROMPTS[2], [[1], []], r"this family writes at the end of the text alone, expected \[2\]"),
        (FillConfig(), Prompt([], start=[0] * 6), [[]] * 7, "texts with up to 6 blanks; got 7"),
        (FillConfig(), APART, [[0], [1], [0] * 180], "the text and its 3 blanks need 316 positions; the model has 300"),
        (IlmConfig(), FROM_NOTHING, [[WORDS.size]], f"the id {WORDS.size}; the vocabulary has {WORDS.size}"),
        (
            ArmConfig(),
            Prompt([1], open=frozenset({0})),
            [[0] * 300],
            "the text has 301 tokens, its prompt included; the model takes 299",
        ),
    ],
)
def test_what_cannot_be_asked(config: FamilyConfig, prompt: Prompt, fills: list[list[int]], message: str) -> None:
    with pytest.raises(InsertlmError, match=message):
        log_likelihood(build(config), prompt, fills)


def test_a_text_may_fill_all_positions() -> None:
    family = build(FillConfig(jump=29))
    fits = Prompt([1], start=[2] * 238, open=frozenset({0, 100}))  # 1 + 1 + 238 + 2 * 30
    assert log_likelihood(family, fits, [[0] * 7, [1] * 8]).value < 0
    end = Prompt([1], start=[2] * 98, open=frozenset({0, 98}))  # 1 + 1 + 98 + 30, then <fill> and its tokens
    assert log_likelihood(family, end, [[0], [1] * 169]).value < 0
    with pytest.raises(InsertlmError, match="need 301 positions"):
        log_likelihood(family, end, [[0], [1] * 170])


def test_without_a_blank_only_the_end_of_an_ilm_is_left(ilm: ILM) -> None:
    closed = Prompt([], start=[1, 2], open=frozenset())
    assert log_likelihood(build(FillConfig()), closed, []).value == 0
    assert log_likelihood(ilm, closed, []).value == pytest.approx(math.log(ilm.score([], [1, 2]).stop_probability))


def test_every_blank_needs_a_text() -> None:
    with pytest.raises(InsertlmError, match="expected a text for each of 2 blanks, got 1"):
        Completion(PROMPTS[2], [[1]])


def test_a_completion_knows_its_text() -> None:
    whole = Completion(Prompt([], start=[5, 6, 7], open=frozenset({3, 0, 2})), [[1, 2], [], [3]])
    assert whole.text == [1, 2, 5, 6, 7, 3]
    assert (whole.ranges, whole.size) == ([(0, 2), (4, 4), (5, 6)], 3)


def test_the_filler_is_what_it_learns_but_for_words_it_cannot_write() -> None:
    """Its loss is the mean over tokens and ends, with all of the vocabulary in play."""
    family = build(FillConfig())
    assert isinstance(family, Filler)
    hidden = family.predict([Completion(FROM_NOTHING, [[1, 2]])])
    logits = hidden @ family.unembedding.weight[: WORDS.size].T
    barred = [token for token in range(WORDS.size) if token not in (*WORDS.writable, WORDS.specials.eos)]
    share = logits.softmax(-1)[:, barred].sum(-1)
    learnt = -F.cross_entropy(logits, torch.tensor([1, 2, WORDS.specials.eos]), reduction="none")
    assert share.min() > 0.01
    value = log_likelihood(family, FROM_NOTHING, [[1, 2]]).value
    assert value == pytest.approx(float((learnt - (1 - share).log()).sum()), abs=1e-9)
