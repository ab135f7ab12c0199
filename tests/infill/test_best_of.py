"""decode.best_of: several drafts of a text are written side by side, and the likeliest as a whole is kept."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from lettering import Few, Letters, build, infill, text_model

from insertlm.core.errors import InsertlmError
from insertlm.families.abilities import Abilities
from insertlm.families.arm import ArmConfig
from insertlm.families.base import Family
from insertlm.families.fill import FillConfig
from insertlm.families.ilm import IlmConfig
from insertlm.families.it import ItConfig
from insertlm.families.likelihood.measure import Effort, log_likelihoods
from insertlm.families.mdm import MdmConfig
from insertlm.inference.score import Completion
from insertlm.inference.settings import DecodeConfig
from insertlm.inference.trajectory import Insertion, Trajectory
from insertlm.infill.drafts import BestOf, begin
from insertlm.infill.requests import Given, Request
from insertlm.infill.results import Infilling
from insertlm.infill.stream import Stream
from insertlm.infill.weighing import echoes

TEXT = "the ___ was ___."
FOUR = DecodeConfig(temperature=1.0, best_of=4, max_steps=60)


@pytest.fixture(scope="module")
def filler() -> Family:
    return build(FillConfig(), Few, max_length=600)


def drafts_of(family: Family, seed: int, text: str = TEXT) -> list[Infilling]:
    """What is written with each of the four seeds, alone."""
    one = msgspec.structs.replace(FOUR, best_of=1)
    return [infill(family, Few(), [Request(text)], one, seed + (k << 40))[0] for k in range(4)]


def weight(family: Family, draft: Infilling) -> float:
    """From its definition, one text at a time."""
    text = Completion.behind([], Few().encode(draft.text))
    fills = draft.given.completed(draft.fills, Few())
    whole, written = (log_likelihoods(family, [each], Effort())[0].value for each in (text, fills))
    return whole - 0.95 * written - echoes(draft)


@pytest.mark.parametrize("seed", range(4))
def test_the_draft_with_the_greatest_weight_is_kept(filler: Family, seed: int) -> None:
    [kept] = infill(filler, Few(), [Request(TEXT)], FOUR, seed)
    drafts = drafts_of(filler, seed)
    weights = [weight(filler, draft) for draft in drafts]
    assert len({draft.text for draft in drafts}) > 1
    assert kept.text == drafts[max(range(4), key=weights.__getitem__)].text


@pytest.mark.parametrize(
    ("given", "fills", "count"),
    [
        ("She ___.", ["went home to sleep"], 0),
        ('"___" "That is too expensive for me."', ["It is too expensive."], 1),
        ("___ The bridge was old.", ["The bridge was old. The bridge was old."], 6),
        ("the cat sat and the cat sat ___", ["down"], 0),  # the text itself says it twice
        ("the cat sat, ___ sat ___.", ["the cat", "the cat, sat the"], 5),
    ],
)
def test_what_is_said_again_is_counted(given: str, fills: list[str], count: int) -> None:
    ids = Letters().encode
    whole = Given.of(given.split("___"), Letters(), Abilities())
    events, rank = list[Insertion](), 0
    for gap, fill in zip(whole.blanks, fills, strict=True):
        spaced = f" {fill}" if gap in whole.spaces else fill
        for token in ids(spaced):
            events.append(Insertion(len(events), gap + rank, token, -0.5, 0.5))
            rank += 1
    assert echoes(Infilling(Trajectory([], whole.ids, events, 0.5), whole, Letters())) == count


def test_an_arm_chooses_too() -> None:
    arm = build(ArmConfig(), Few, max_length=300)
    [kept] = infill(arm, Few(), [Request("the ___")], FOUR, 0)
    drafts = drafts_of(arm, 0, "the ___")
    assert kept.text == max(drafts, key=lambda draft: weight(arm, draft)).text


def test_company_changes_nothing(filler: Family) -> None:
    requests = [Request(TEXT), Request("a ___"), Request("___ b", banned=["cat"])]
    alone = [infill(filler, Few(), [request], FOUR, seed)[0].text for seed, request in enumerate(requests)]
    for size in (1, 3, 12):
        assert [each.text for each in infill(filler, Few(), requests, FOUR, 0, size)] == alone


def test_events_are_those_of_the_kept_draft_and_come_at_the_end(filler: Family) -> None:
    [draft] = begin(filler, Few(), [Request(TEXT)], FOUR, 1)
    assert isinstance(draft, BestOf)
    assert len(draft.prompts) == 4
    stream = Stream(filler, [draft], FOUR, 2)
    events = list(stream)
    [result] = stream.results
    assert [event.token for event in events] == [event.token for event in result.trajectory.events]
    cells = [*draft.cells]
    for event in events:
        cells.insert(event.at, event.text)
    assert "".join(cells) == result.text


@pytest.mark.parametrize("steps", [0, 3])
def test_drafts_can_be_stopped(filler: Family, steps: int) -> None:
    """A stream that is stopped from the start, and one whose drafts are stopped while they are written."""
    stream: Stream[Infilling]

    def stop(done: int) -> None:
        stream.stop()

    long = Request(TEXT, min_length=9)
    drafts = begin(filler, Few(), [Request("___", max_length=steps), long] if steps else [long], FOUR, 1)
    stream = Stream(filler, drafts, FOUR, 8, progress=stop)
    if not steps:
        stream.stop()
    result = stream.results[-1]
    assert not result.complete and result.trajectory.stopped
    assert bool(result.trajectory.events) == bool(steps)


def test_banned_words_stay_out_of_every_draft(filler: Family) -> None:
    plain = [infill(filler, Few(), [Request(TEXT)], FOUR, seed)[0] for seed in range(6)]
    words = [word for each in plain for fill in each.fills for word in fill.split() if word.isalpha()]
    banned = sorted(set(words))[:2]
    assert banned, "the model writes words"
    for seed in range(6):
        [kept] = infill(filler, Few(), [Request(TEXT, banned=banned)], FOUR, seed)
        assert not {word for fill in kept.fills for word in fill.split()} & {*banned}


@pytest.mark.parametrize("config", [IlmConfig(), ItConfig(), MdmConfig(block=20)])
def test_families_without_exact_likelihoods_say_so(config: Any) -> None:
    family = build(config)
    settings = msgspec.structs.replace(family_settings(family), best_of=2)
    line = r"decode.best_of: this family has no exact likelihoods to choose by; expected 1, got 2"
    with pytest.raises(InsertlmError, match=line):
        infill(family, Letters(), [Request("a ___", min_length=1, max_length=1)], settings, 0)


def family_settings(family: Family) -> DecodeConfig:
    return DecodeConfig(max_steps=8) if family.abilities.schedules_steps else DecodeConfig(max_steps=30)


def test_python_takes_it_as_a_setting(filler: Family) -> None:
    model = text_model(filler, "filler")
    [one], [best] = (model.infill(TEXT, seed=2, best_of=count, max_steps=60) for count in (1, 8))
    assert all(math.isfinite(event.log_probability) for event in best.trajectory.events)
    assert one.text.startswith("the ") and best.text.startswith("the ")
    with pytest.raises(InsertlmError, match=r"decode\.best_of: expected .*int"):
        model.infill(TEXT, best_of=0)
