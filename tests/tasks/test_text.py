"""A corpus as a task: splits, examples and what is said when there is nothing to learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from insertlm.core.errors import InsertlmError
from insertlm.recipe import Recipe, parse_recipe, to_yaml
from insertlm.tasks.base import Example, Split
from insertlm.tasks.text import Text
from insertlm.text.subwords import train_bpe

STORIES = [f"The cat number {i} sat" for i in range(400)]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSERTLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("\n".join(STORIES))
    (tmp_path / "b.txt").write_text("A dog ran.\nA dog slept.\n")
    train_bpe(STORIES, 300).save(tmp_path / "tokenizer.json")
    return tmp_path


def text_task(folder: Path, **keys: Any) -> Text:
    return Text(train=str(folder / "a.txt"), vocabulary=str(folder / "tokenizer.json"), **{"block": 40, **keys})


def read(task: Text, split: Split, **how: Any) -> list[str]:
    return [task.render(example) for example in task.examples(split, **how)]


def test_splits_are_shares_of_the_training_files(folder: Path) -> None:
    task = text_task(folder, share=0.1)
    parts = [read(task, split) for split in SPLITS]
    assert sorted(text for part in parts for text in part) == sorted(STORIES)
    assert all(20 <= len(part) <= 70 for part in parts[1:])


def test_a_split_may_have_files(folder: Path) -> None:
    task = text_task(folder, share=0.1, validation=(str(folder / "b.txt"),))
    assert read(task, "validation") == ["A dog ran.", "A dog slept."]
    assert sorted(read(task, "train") + read(task, "test")) == sorted(STORIES)


def test_files_for_every_split_leave_the_training_files_whole(folder: Path) -> None:
    task = text_task(folder, validation=str(folder / "b.txt"), test=str(folder / "b.txt"))
    assert read(task, "train") == STORIES


def test_examples_have_no_prefix(folder: Path) -> None:
    examples = text_task(folder).examples("train", 3)
    assert examples.prefix.shape == (3, 0)
    assert examples.target.shape == (3, 40)
    assert examples[0].prefix == []
    assert text_task(folder).longest_prefix == 0
    assert text_task(folder).longest_target == 40


def test_a_seed_chooses_others_and_never_one_twice(folder: Path) -> None:
    task = text_task(folder)
    plain, one, two = (read(task, "train", count=50, seed=seed) for seed in (None, 1, 2))
    assert plain != one != two
    assert one == read(task, "train", count=50, seed=1)
    assert len(set(one)) == 50
    assert len(task.examples("train", 10_000, seed=3)) == len(task.stored("train"))


def test_a_sample_is_what_is_looked_at(folder: Path) -> None:
    assert len(text_task(folder, sample=7).examples("train")) == 7


def test_documents_are_read_by_number(folder: Path) -> None:
    stored = text_task(folder).training_set()
    both = stored.take(np.array([5, 2]))
    assert (both[0], both[1]) == (stored.take(np.array([5]))[0], stored.take(np.array([2]))[0])
    assert both.target.shape == (2, 40)


def test_prompts_are_empty(folder: Path) -> None:
    assert text_task(folder).parse_prompt("") == []
    with pytest.raises(InsertlmError, match="a text model writes from nothing"):
        text_task(folder).parse_prompt("Once")


def test_render_is_the_text(folder: Path) -> None:
    task = text_task(folder)
    assert task.render(Example([], task.tokenizer.encode("The cat"))) == "The cat"


def test_too_few_documents_for_a_split_are_one_line(folder: Path) -> None:
    (folder / "a.txt").write_text("one\n")
    with pytest.raises(InsertlmError, match="no document for the validation split; expected more"):
        text_task(folder).examples("validation")
    with pytest.raises(InsertlmError, match=r"task\.train: expected one or more files"):
        Text(train=(), vocabulary=str(folder / "tokenizer.json"), block=9).examples("train")


def recipe(folder: Path, **task: Any) -> Recipe:
    keys = {"name": "text", "train": str(folder / "a.txt"), "tokenizer": str(folder / "tokenizer.json"), "block": 40}
    sections = {"model": {"preset": "mini"}, "train": {"steps": 3}}
    return parse_recipe({"task": {**keys, **task}, **sections}, "r.yaml")


def test_a_recipe_names_files_and_tokenizer(folder: Path) -> None:
    ours = recipe(folder)
    assert isinstance(ours.task, Text)
    assert ours.task.vocabulary == str(folder / "tokenizer.json")
    assert f"tokenizer: {folder / 'tokenizer.json'}" in to_yaml(ours)
    assert isinstance(hash(ours), int)
    several = recipe(folder, train=["a.txt", "b.txt"])
    assert isinstance(several.task, Text)
    assert several.task.train == ("a.txt", "b.txt")


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ({"longer": "cut"}, "task.longer: expected one of truncate, skip, split, got 'cut'"),
        ({"blok": 3}, "task.blok: unknown key; did you mean block?"),
        ({"block": 4000}, "recipe: the task has rows of 4002 tokens; model.max_length is 2048"),
        ({"train": 3.5}, "task.train: expected str or array, got 3.5"),
        (
            {"share": 0.5},
            "task: share is 0.5 for each of validation and test; expected less than 1 in all, because training "
            "gets the rest",
        ),
    ],
)
def test_mistakes_in_a_recipe(folder: Path, task: dict[str, Any], line: str) -> None:
    with pytest.raises(InsertlmError) as caught:
        recipe(folder, **task)
    assert str(caught.value) == f"r.yaml: {line}"


def test_a_seed_chooses_among_all_documents(folder: Path) -> None:
    task = text_task(folder)
    assert not set(read(task, "train", count=50, seed=1)) <= set(read(task, "train", count=50))
