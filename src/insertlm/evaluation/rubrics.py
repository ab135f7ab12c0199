"""The questions for a judge: six rubrics in the direct-assessment format that Prometheus 2 was trained on.

The order of the parts, their headings and the ending `[RESULT] n` are from that format; the wording is our own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["RUBRICS", "SYSTEM", "Rubric", "parse_score", "prompt"]

SYSTEM = (
    "You are a fair judge. You give clear and objective feedback on the criterion you are asked about, and you hold "
    "every text to the same absolute standard."
)
INSTRUCTION = "Write a short English text. You are free to choose what it is about."


class Rubric(NamedTuple):
    """question: what is judged   levels: descriptions of texts that deserve 1, 2, 3, 4 and 5"""

    question: str
    levels: tuple[str, str, str, str, str]


RUBRICS = {
    "coherence": Rubric(
        "Does the text hold together, each sentence following sensibly from those before it?",
        (
            "The sentences have nothing to do with each other; no thread can be found.",
            "A few neighbouring sentences belong together, but the text as a whole leads nowhere.",
            "There is a thread, but it breaks several times and the reader must guess at the links.",
            "The text follows one thread with a small jump or two that do not disturb the reader.",
            "Every sentence follows from those before it, and the text forms one whole from start to end.",
        ),
    ),
    "consistency": Rubric(
        "Do the facts within the text agree: people, objects, places, times and what happens to them?",
        (
            "The text contradicts itself throughout; its facts change from sentence to sentence.",
            "There are several plain contradictions, such as people or objects that change without reason.",
            "There is one plain contradiction, or a few details that do not fit together.",
            "All facts of weight agree; at most one small detail is doubtful.",
            "Everything the text says fits together, down to the details.",
        ),
    ),
    "fluency": Rubric(
        "Does the text read as if a skilled writer had written it, with natural words in a natural order?",
        (
            "It is hardly readable: words follow each other without making phrases.",
            "Most sentences are awkward, and the reader stumbles again and again.",
            "It can be read, but a number of phrases are unnatural.",
            "It reads well, with one or two phrases that a skilled writer would change.",
            "It reads smoothly and naturally from the first word to the last.",
        ),
    ),
    "spelling accuracy": Rubric(
        "Are the words of the text spelled correctly?",
        (
            "So many words are misspelled or do not exist that the text is hard to understand.",
            "Misspelled words are frequent and distract from what is said.",
            "Several words are misspelled, but the meaning stays clear.",
            "One or two words are misspelled.",
            "Every word is spelled correctly.",
        ),
    ),
    "grammaticality": Rubric(
        "Do the sentences of the text follow the rules of English grammar?",
        (
            "Hardly any sentence is grammatical.",
            "Most sentences contain a mistake of grammar.",
            "Some sentences contain mistakes, such as a wrong tense or form, while others are correct.",
            "Almost all sentences are correct; a mistake or two are slight.",
            "All sentences are correct.",
        ),
    ),
    "non-redundancy": Rubric(
        "Is the text free of needless repetition of words, sentences and ideas?",
        (
            "The text says the same thing over and over.",
            "Large parts repeat what was said before.",
            "Some sentences or phrases are repeated without need.",
            "There is very little repetition, and it hardly disturbs.",
            "Nothing is repeated without need; every sentence adds something.",
        ),
    ),
}


def prompt(text: str, rubric: Rubric) -> str:
    """The question about one text, to be sent after SYSTEM."""
    levels = "\n".join(f"Score {score}: {level}" for score, level in enumerate(rubric.levels, start=1))
    return f"""###Task Description:
You are given an instruction, a response to it, and a score rubric that describes one criterion.
1. Write detailed feedback on the quality of the response by this rubric alone, not in general.
2. After the feedback, give a score, a whole number from 1 to 5, that the rubric supports.
3. Your answer must look like this: "Feedback: (your feedback on the criterion) [RESULT] (a whole number from 1 to 5)"
4. Write nothing before, after or besides that.

###The instruction to evaluate:
{INSTRUCTION}

###Response to evaluate:
{text}

###Score Rubrics:
[{rubric.question}]
{levels}

###Feedback: """


def parse_score(answer: str) -> int | None:
    """The score after the last [RESULT]; None if no number from 1 to 5 is there."""
    _, found, rest = answer.rpartition("[RESULT]")
    match = re.match(r"\W{0,4}([1-5])(?![\d]|[.,]\d)", rest)
    return int(match[1]) if found and match else None
