"""Texts that are watched while they are written, scores of given texts, and several threads at once."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lettering import FREE, Few, Letters, build, free, infill, text_model
from torch import Tensor

from insertlm.core.errors import InsertlmError
from insertlm.families.base import Family
from insertlm.families.fill import FillConfig
from insertlm.families.ilm import ILM
from insertlm.families.it import ItConfig
from insertlm.inference.scheduler import Progress
from insertlm.inference.score import restoring_gaps
from insertlm.inference.settings import Prompt
from insertlm.inference.trajectory import Insertion
from insertlm.infill.drafts import Event, InfillDraft, PlainDraft, begin
from insertlm.infill.requests import Request
from insertlm.infill.results import spell
from insertlm.infill.stream import Stream

HEAVY = settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])


def watched(family: Family, request: Request, seed: int = 0, samples: int = 1, batch: int = 8) -> Any:
    drafts = begin(family, Letters(), [request] * samples, free(family), seed)
    stream = Stream(family, drafts, free(family), batch)
    return drafts, list(stream), stream.results


def replay(draft: InfillDraft, events: list[Event]) -> list[str]:
    cells = [*draft.cells]
    for event in events:
        cells.insert(event.at, event.text)
    return cells


# --- Watching

texts = st.sampled_from(["a ___ b", "___", "a___", "é ___ the ___ x", "a ___ ___.", " ___ a\n___"])


@given(texts, st.booleans(), st.integers(0, 99), st.sampled_from([(), ("cat",), ("o", "dog")]))
@settings(HEAVY, max_examples=40)
def test_events_put_together_are_the_text(
    few: Family, text: str, anywhere: bool, seed: int, banned: tuple[str, ...]
) -> None:
    request = Request(text, anywhere=anywhere, max_length=4, banned=banned)
    [draft], events, [result] = watched(few, request, seed)
    [alone] = infill(few, Letters(), [request], FREE, seed)
    assert result.text == alone.text
    assert [event.order for event in events] == list(range(len(alone.trajectory.events)))
    assert [event.token for event in events] == [event.token for event in alone.trajectory.events]
    assert "".join(piece.text for piece in result.pieces) == result.text
    assert {piece.order for piece in result.pieces} - {None} <= {event.order for event in events}
    assert all(events[piece.order].text.endswith(piece.text) for piece in result.pieces if piece.order is not None)
    assert "".join(replay(draft, events)) == result.text  # all that is written here is ASCII


@pytest.mark.parametrize("text", ['"___," he said. ___', "a (___) ___-___"])
def test_what_a_filler_shows_is_the_text(text: str) -> None:
    filler = build(FillConfig(jump=8), Few)
    for seed in range(10):
        [draft], events, [result] = watched(filler, Request(text, max_length=3), seed)
        assert "".join(replay(draft, events)) == result.text


def test_a_stream_can_be_stopped(few: Family) -> None:
    """Two samples run and one waits; they end with the insertions that were seen."""
    request = Request("a ___ b", min_length=9, max_length=9, banned=())
    drafts = begin(few, Letters(), [request] * 3, FREE, 0)
    stream, seen = Stream(few, drafts, FREE, 2), list[Event]()
    for event in stream:
        seen.append(event)
        if event.order == 3:
            stream.stop()
    assert {event.sample for event in seen} == {0, 1}
    assert max(event.order for event in seen) == 3
    results = stream.results
    assert [len(result.trajectory.events) for result in results] == [4, 4, 0]
    assert not any(result.complete for result in results)
    assert results[0].note == "it was stopped after 4 tokens"
    assert results[2].fills == [""]
    whole = infill(few, Letters(), [request], FREE, 0)[0]
    first = [(event.rank, event.token) for event in whole.trajectory.events[:4]]
    assert [(event.rank, event.token) for event in results[0].trajectory.events] == first
    assert stream.results == results


def test_a_stopped_text_is_not_written_again_for_a_banned_word(few: Family) -> None:
    """Nothing of it was shown yet: that comes with its end."""
    drafts = begin(few, Letters(), [Request("a ___ b", min_length=9, max_length=9, banned=("cat",))], FREE, 0)
    stream = Stream(few, drafts, FREE, 2)
    stream.stop()
    assert list(stream) == []
    assert stream.results[0].fills == [""]


def test_samples_are_shown_side_by_side_and_no_more_than_asked(few: Family) -> None:
    request = Request("a ___ b ___", min_length=2, max_length=3)
    _, events, results = watched(few, request, samples=5, batch=2)
    assert [result.text for result in results] == [r.text for r in infill(few, Letters(), [request] * 5, FREE)]
    first = [event.sample for event in events]
    assert {*first[:2]} == {0, 1}
    assert sum(a != b for a, b in pairwise(first)) > 5
    for sample, result in enumerate(results):
        assert first.count(sample) == len(result.trajectory.events)
    spans = [(first.index(sample), len(first) - 1 - first[::-1].index(sample)) for sample in range(5)]
    assert max(sum(begun <= place <= ended for begun, ended in spans) for place in range(len(first))) == 2


def test_results_come_in_the_order_asked_for(few: Family) -> None:
    requests = [Request("a ___", min_length=5, max_length=5), Request("b ___", max_length=1)]
    stream = Stream(few, begin(few, Letters(), requests, FREE, 0), FREE, 8)
    assert [result.text[0] for result in stream.results] == ["a", "b"]


def test_an_event_tells_all_of_its_insertion() -> None:
    insertions = [Insertion(2, 0, ord("a"), -0.5, 0.25), Insertion(2, 0, ord("b"), -1.0, None)]
    events, result, _ = PlainDraft(Prompt([]), Letters()).see(Progress(7, insertions, None), 3)
    assert result is None
    assert events == [
        Event(3, 0, 2, 0, 97, "a", math.exp(-0.5), 0.25),
        Event(3, 1, 2, 0, 98, "b", math.exp(-1.0), None),
    ]


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    assert spell(Letters(), Letters().encode("aé🙂")) == ["a", "", "é", "", "", "", "🙂"]


def test_what_tokens_spell_adds_up_if_more_of_them_read_otherwise() -> None:
    """As with tokenizers that tidy up behind themselves."""
    odd = SimpleNamespace(decode=lambda ids: {1: "ab", 2: "x", 3: "abc"}[len(ids)])
    assert spell(cast(Any, odd), [0, 1, 2]) == ["ab", "", "c"]


def test_banned_words_hold_a_text_back_until_it_is_right(few: Family) -> None:
    """Else an attempt that is thrown away would be seen."""
    request, attempts = Request("x do___", max_length=2, banned=["dog"]), []
    for seed in range(40):
        [draft], events, [result] = watched(few, request, seed)
        attempts.append(draft.attempts)
        assert "".join(replay(draft, events)) == result.text
    assert max(attempts) > 0


@given(st.lists(st.sampled_from(["é", "🙂", "a", " the", " "]), max_size=6), st.booleans())
def test_what_tokens_spell_adds_up_whatever_they_split(words: list[str], spaced: bool) -> None:
    ids = Letters().encode("".join(words))
    parts = spell(Letters(), ids, " " if spaced else "")
    assert len(parts) == len(ids)
    assert "".join(parts) == ("".join(words).removeprefix(" ") if spaced else "".join(words))


# --- Scores


def test_a_score_is_what_the_model_says_of_each_decision(few: Family) -> None:
    """By hand: one variant of the text at a time, and all pairs of slot and token."""
    assert isinstance(few, ILM)
    text = Letters().encode("cat aat")
    score = few.score([], text, batch_size=3)
    table, stop = _ask(few, text)
    assert score.stop_probability == pytest.approx(stop)
    assert score.slots == pytest.approx(table.sum(1).tolist())
    assert sum(score.slots) == pytest.approx(1)
    for k, token in enumerate(text):
        rest = [*text[:k], *text[k + 1 :]]
        table, stop = _ask(few, rest)
        back = [gap for gap in range(len(rest) + 1) if [*rest[:gap], token, *rest[gap:]] == text]
        assert [*restoring_gaps(text, k)] == back
        column = few.writable.tolist().index(token)
        assert score.tokens[k] == pytest.approx(float(table[back, column].sum()))
        assert score.stops[k] == pytest.approx(stop)


@torch.no_grad()
def _ask(ilm: ILM, text: list[int]) -> tuple[Tensor, float]:
    """P(slot, token) over all, [n + 1, words], and the chance to stop."""
    row = torch.tensor([ilm.specials.stop, ilm.specials.bos, *text])

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1)

    hidden = ilm.backbone(row, torch.arange(len(row)), attention)
    logits = hidden[1:] @ ilm.unembedding.weight[ilm.writable].T
    return logits.flatten().softmax(0).view_as(logits), float(ilm.stop(hidden[:1]).softmax(-1)[0, 0])


def test_a_token_can_go_back_anywhere_among_its_equals() -> None:
    assert [[*restoring_gaps([5, 5, 6, 6], k)] for k in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_scores_of_odd_texts(few: Family) -> None:
    empty = few.score([], [])
    assert (empty.slots, empty.tokens, empty.stops) == ([1.0], [], [])
    assert few.score([], Letters().encode("z")).tokens == [0.0]  # a letter that is never written
    with pytest.raises(InsertlmError, match="a prompt has 202 tokens"):
        few.score([], [97] * 200)


def test_families_that_cannot_score_say_so() -> None:
    with pytest.raises(
        InsertlmError, match=r"^score: this family gives no probabilities to single tokens; expected an ilm"
    ):
        build(ItConfig()).score([], [97])


# --- The door


def test_the_methods_of_a_model(few: Family) -> None:
    model = text_model(few)
    stream = model.infill("a ___ b", samples=2, seed=3, max_length=3, stream=True)
    assert sum(1 for _ in stream) == sum(len(result.trajectory.events) for result in stream.results)
    again = model.infill("a ___ b", samples=2, seed=3, max_length=3)
    assert [result.text for result in stream.results] == [result.text for result in again]
    assert model.score("cat").ids == Letters().encode("cat")
    with pytest.raises(InsertlmError, match=r"^batch_size: expected a whole number of at least 1, got 0$"):
        model.score("cat", batch_size=0)
    with pytest.raises(InsertlmError, match="the text has no blank"):  # at once, not when the first event is asked for
        model.infill("a b", stream=True)


def test_threads_do_not_get_into_each_others_way(few: Family) -> None:
    model = text_model(few)

    def one(seed: int) -> str:
        if seed % 2:
            return model.infill("a ___ b ___ c", seed=seed, max_length=4, stream=True).results[0].text
        return model.infill("a ___ b ___ c", seed=seed, max_length=4)[0].text

    alone = [one(seed) for seed in range(12)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(12))) == alone


@pytest.mark.parametrize(
    ("arguments", "most"),
    [(["-c", "import insertlm"], 0.3), (["-m", "insertlm", "--help"], 0.5)],
    ids=["import", "help"],
)
def test_what_must_be_quick_is(arguments: list[str], most: float) -> None:
    """The best of a few: the machine may be busy. Without starting Python itself, which is not ours."""

    def seconds(*line: str) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, *line], check=True, capture_output=True)
        return time.perf_counter() - started

    assert min(seconds(*arguments) for _ in range(5)) < most
