"""What every command takes. Nothing here is slow to import: help and mistakes are answered at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_args

from insertlm.core.errors import InsertlmError
from insertlm.evaluation.rubrics import RUBRICS
from insertlm.server.limits import Limits
from insertlm.text.detokenise import Detokeniser

__all__ = ["OVERRIDES", "parser"]

# The sections of a recipe that `--section.key value` may change.
OVERRIDES = {
    "train": ("task", "model", "family", "optim", "train", "decode"),
    "evaluate": ("decode",),
    "evaluate nll": ("decode",),
    "evaluate infilling": (),
    "evaluate judge": ("decode",),
    "evaluate frontier": ("decode",),
    "generate": ("decode",),
    "infill": ("decode",),
    "infill set": ("decode",),
    "data": (),
    "data infilling": (),
    "export": (),
    "lm-eval": (),
    "solve": (),
    "serve": (),
    "plot": ("decode",),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without argparse's usage."""
        raise InsertlmError(message)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            shown = text if len(text) < 40 else f"{text[:39]}…"
            bound = f"at least {least}" if number < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number of {bound}, got {shown!r}")
        return number

    return parse


_count, _seed = _whole(1, 10**9), _whole(0, (1 << 62) - 1)


def _folder(text: str) -> Path:
    if not text:  # a variable that is not set
        raise argparse.ArgumentTypeError("expected a folder, got an empty name")
    return Path(text)


def _one_of(*known: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {text!r}")
        return text

    return parse


def _sweep(text: str) -> tuple[str, list[str]]:
    key, _, values = text.partition("=")
    if not key or not all(listed := values.split(",")):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE,VALUE,… such as temperature=0.6,0.8,1, got {text!r}")
    return key.removeprefix("decode."), listed


_split, _over = _one_of("train", "validation", "test"), _one_of("minutes", "steps")


def parser() -> argparse.ArgumentParser:
    whole = _Parser(prog="insertlm", description="Train and run insertion language models.", allow_abbrev=False)
    whole.add_argument("--version", action="store_true", help="print the version")
    subparsers = whole.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for add in (
        _add_train,
        _add_evaluate,
        *_TEXT_EVALUATIONS,
        _add_generate,
        _add_infill,
        _add_data,
        _add_data_infilling,
        _add_export,
        _add_lm_eval,
        _add_solve,
        _add_serve,
        _add_plot,
    ):
        add(subparsers)
    return whole


def _add(subparsers: Any, name: str, summary: str, epilog: str = "", function: str = "") -> _Parser:
    """A command, carried out by the function of commands.py that has its name or the one given."""
    about = f"{summary[0].upper()}{summary[1:]}."
    command: _Parser = subparsers.add_parser(name, help=summary, description=about, epilog=epilog, allow_abbrev=False)
    command.set_defaults(function=function or name)
    return command


_MODEL_HELP = "run folder, export, Hub id or bundled model (default: the bundled {})"
_WRITER, _FILLER = _MODEL_HELP.format("star-hard-mini"), _MODEL_HELP.format("stories-mini")


def _add_model(command: _Parser) -> None:
    command.add_argument("model", nargs="?", metavar="MODEL", help=_WRITER)


def _add_device(command: _Parser) -> None:
    command.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")


_DECODE_NOTE = "--decode.KEY VALUE changes how it decodes, e.g. --decode.temperature 0.8 --decode.position_top_k 0"


def _add_train(subparsers: Any) -> None:
    note = "--SECTION.KEY VALUE changes the recipe, e.g. --train.steps 200 --model.width 64. Run it again to resume."
    command = _add(subparsers, "train", "train a model from a recipe", note)
    command.add_argument("recipe", type=Path, metavar="RECIPE", help="such as recipes/star_hard/ilm.yaml")
    command.add_argument(
        "--run", type=_folder, metavar="DIR", help="run folder (default: runs/FOLDER-NAME of the recipe)"
    )
    _add_device(command)


def _add_evaluate(subparsers: Any) -> None:
    note = f"{_DECODE_NOTE}. For texts: insertlm evaluate nll, infilling, judge or frontier"
    command = _add(subparsers, "evaluate", "measure the accuracy of a model", note)
    command.add_argument("model", metavar="RUN", help="run folder or bundled model")
    command.add_argument("--split", type=_split, default="test", help="train, validation or test (default)")
    command.add_argument("--count", type=_count, metavar="N", help="examples (default: all of the split)")
    command.add_argument("--batch-size", type=_count, default=500, metavar="N", help="sequences at once (default: 500)")
    command.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSON (default: in RUN, by split and settings; none if bundled)",
    )
    _add_device(command)


def _add_results(command: _Parser, default: str) -> None:
    command.add_argument("--label", metavar="NAME", help="in tables and pictures (default: name of the file or run)")
    command.add_argument(
        "--out", type=Path, metavar="FILE", help=f"JSON (default: {default}); a journal lies beside it"
    )
    _add_device(command)


def _add_texts(command: _Parser) -> None:
    command.add_argument(
        "source", metavar="FILE|RUN", help="texts, .txt or .jsonl (.xz, .gz, .zst), or a run that writes them"
    )
    command.add_argument("--field", default="text", metavar="NAME", help="of a .jsonl file's objects (default: text)")
    command.add_argument("--count", type=_count, metavar="N", help="texts (default: all of a file; 100 from a run)")
    command.add_argument("--seed", type=_seed, default=0, metavar="N", help="of a run's writing (default: 0)")


def _add_evaluator(command: _Parser) -> None:
    about = "Hugging Face name, folder or .gguf file of a causal model (default: meta-llama/Llama-3.2-3B, the paper's)"
    command.add_argument("--evaluator", default="meta-llama/Llama-3.2-3B", metavar="MODEL", help=about)
    command.add_argument(
        "--bos", metavar="TOKEN", help="what every text is scored behind (default: the evaluator's BOS)"
    )


def _add_evaluate_nll(subparsers: Any) -> None:
    note = f"Run it again to resume. For a run, {_DECODE_NOTE}"
    summary = "measure NLL, entropy and length of texts under a language model"
    command = _add(subparsers, "evaluate nll", summary, note, "evaluate_nll")
    _add_texts(command)
    _add_evaluator(command)
    command.add_argument("--data", type=Path, metavar="FILE", help="texts to compare with, measured in the same way")
    _add_results(command, "NAME-nll-MODEL.json")


def _add_evaluate_infilling(subparsers: Any) -> None:
    summary = "measure filled-in texts against the truth and against the input"
    command = _add(subparsers, "evaluate infilling", summary, "Run it again to resume.", "evaluate_infilling")
    about = "JSONL of pieces, removed, text and output (.xz, .gz, .zst)"
    command.add_argument("source", type=Path, metavar="FILE", help=about)
    command.add_argument("--count", type=_count, metavar="N", help="texts (default: all)")
    _add_evaluator(command)
    _add_results(command, "NAME-infilling-MODEL.json")


def _add_evaluate_judge(subparsers: Any) -> None:
    note = f"Run it again to resume. A key for the endpoint: OPENAI_API_KEY. For a run, {_DECODE_NOTE}"
    command = _add(subparsers, "evaluate judge", "let a language model judge texts", note, "evaluate_judge")
    _add_texts(command)
    default = "prometheus-eval/prometheus-7b-v2.0"
    about = f"the judge: Hugging Face name, folder or .gguf file, or its name at the endpoint (default: {default})"
    command.add_argument("--model", dest="judge", default=default, metavar="MODEL", help=about)
    command.add_argument(
        "--endpoint", metavar="URL", help="ask there, e.g. http://localhost:8000/v1, as one asks OpenAI"
    )
    about = f"{', '.join(RUBRICS)}; give it several times for several (default: all)"
    command.add_argument(
        "--rubric", dest="rubrics", action="append", type=_one_of(*RUBRICS), metavar="NAME", help=about
    )
    _add_results(command, "NAME-judge-MODEL.json")


def _add_evaluate_frontier(subparsers: Any) -> None:
    summary = "measure NLL against entropy over ways of decoding"
    note = "Run it again to resume. --decode.KEY VALUE holds for all points."
    command = _add(subparsers, "evaluate frontier", summary, note, "evaluate_frontier")
    command.add_argument("source", metavar="RUN", help="run folder or bundled model that writes texts")
    about = "values of a decode key, e.g. temperature=0.6,0.8,1 (the default); several of these: all combinations"
    command.add_argument("--sweep", dest="sweeps", action="append", type=_sweep, metavar="KEY=V,V,…", help=about)
    command.add_argument("--count", type=_count, default=100, metavar="N", help="texts a point (default: 100)")
    command.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the writing (default: 0)")
    command.add_argument("--data", type=Path, metavar="FILE", help="texts to compare with: a point of their own")
    _add_evaluator(command)
    _add_results(command, "NAME-frontier-MODEL.json")


_TEXT_EVALUATIONS = (_add_evaluate_nll, _add_evaluate_infilling, _add_evaluate_judge, _add_evaluate_frontier)


def _add_generate(subparsers: Any) -> None:
    command = _add(subparsers, "generate", "write sequences and show how they came about", _DECODE_NOTE)
    _add_model(command)
    command.add_argument("--prompt", metavar="TEXT", help='edges, then source and goal: "52>35 35>50 … : 52 50"')
    command.add_argument("--count", type=_count, metavar="N", help="without --prompt: fresh random graphs (default: 5)")
    command.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of the graphs and of sampling (default: 0)"
    )
    command.add_argument("--show", action="store_true", help="show how every sequence was written, not only the first")
    command.add_argument("--json", action="store_true", help="print one JSON object per sequence instead")
    _add_device(command)


def _add_infill(subparsers: Any) -> None:
    note = f"A backslash before an underscore makes it a plain one. {_DECODE_NOTE}"
    command = _add(subparsers, "infill", "fill in the blanks of a text", note)
    command.add_argument("text", metavar="TEXT", help='such as "The conference, ___ was postponed."; - reads it')
    command.add_argument("--samples", type=_count, default=1, metavar="N", help="texts to write (default: 1)")
    command.add_argument("--anywhere", action="store_true", help="let the model insert outside of the blanks too")
    command.add_argument("--ban", action="append", default=[], metavar="WORD", help="must not be written; repeatable")
    command.add_argument("--require", action="append", default=[], metavar="WORD", help="must be written; repeatable")
    command.add_argument("--show", action="store_true", help="show the order in which tokens came")
    command.add_argument("--json", action="store_true", help="print one JSON object per text instead")
    of_set = _add(subparsers, "infill set", "fill in the blanks of many texts", _DECODE_NOTE, "infill_set")
    of_set.add_argument("set", type=Path, metavar="SET", help="JSONL file of `insertlm data infilling`")
    of_set.add_argument("--count", type=_count, metavar="N", help="texts (default: all)")
    of_set.add_argument(
        "--true-lengths", action="store_true", help="as many tokens as were removed: what an mdm needs to know"
    )
    of_set.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSONL file to write")
    for each in (command, of_set):
        each.add_argument("--model", metavar="MODEL", help=_FILLER)
        each.add_argument("--seed", type=_seed, default=0, metavar="N", help="of sampling (default: 0)")
        each.add_argument("--min", type=_whole(0, 10**6), metavar="N", help="least tokens of a blank (default: 1)")
        each.add_argument(
            "--max", type=_whole(0, 10**6), metavar="N", help="most tokens of a blank (default: no limit)"
        )
        _add_device(each)


def _add_data(subparsers: Any) -> None:
    note = "insertlm data tokenizer FILES makes a vocabulary (byte-level BPE) from text files."
    command = _add(subparsers, "data", "print examples of a task, or write them as JSONL", note)
    command.add_argument("name", metavar="NAME", help="star-easy, star-medium, star-hard, zebra or tokenizer")
    files = "tokenizer: .txt or .jsonl, also with .gz, .xz or .zst"
    command.add_argument("files", nargs="*", default=[], metavar="FILE", help=files)
    command.add_argument(
        "--size", type=_whole(1, 10**7), default=8192, metavar="N", help="tokenizer: of it (default: 8192)"
    )
    command.add_argument("--count", type=_count, default=3, metavar="N", help="examples (default: 3)")
    command.add_argument("--seed", type=_seed, default=1, metavar="N", help="of the examples (default: 1)")
    command.add_argument("--split", type=_split, default="test", help="train, validation or test (default)")
    command.add_argument("--out", type=Path, metavar="FILE", help="write them as JSONL")


def _add_export(subparsers: Any) -> None:
    note = "--push takes the token of `hf auth login`, or of HF_TOKEN."
    command = _add(subparsers, "export", "write a model as a folder that transformers reads", note)
    command.add_argument("model", metavar="RUN", help="run folder, bundled model or Hub id; an ilm trained on text")
    command.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="to write: new, or an earlier export")
    command.add_argument("--push", metavar="OWNER/NAME", help="upload it to the Hugging Face Hub, as one commit")
    command.add_argument("--private", action="store_true", help="if --push makes the repository: only for you")


def _add_lm_eval(subparsers: Any) -> None:
    """For the list of commands alone: main.py hands its arguments to lm_eval unread."""
    subparsers.add_parser(
        "lm-eval", help="run lm-evaluation-harness, which then knows --model insertlm", add_help=False
    )


def _add_solve(subparsers: Any) -> None:
    note = "A clue reads like `left-of LHS c 2 2 RHS c 2 1 CLUE_END`; `insertlm data zebra` prints some."
    command = _add(subparsers, "solve", "solve a zebra puzzle by deduction, or say what is wrong with it", note)
    command.add_argument("file", type=Path, metavar="FILE", help="its clues; - reads them from standard input")


def _add_serve(subparsers: Any) -> None:
    note = "A key can also be given as the environment variable INSERTLM_API_KEY. See docs/serving.md."
    command = _add(subparsers, "serve", "serve models over HTTP", note)
    about = "run folders, exports, Hub ids or bundled models (default: all bundled ones)"
    command.add_argument("models", nargs="*", metavar="MODEL", help=about)
    command.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1, this machine alone)")
    command.add_argument("--port", type=_whole(0, 65535), default=8000, metavar="N", help="(default: 8000; 0: any)")
    command.add_argument("--api-key", metavar="KEY", help="what clients must send (default: nothing)")
    for limit in fields(Limits):
        about = f"{limit.metadata['about']} (default: {limit.default})"
        command.add_argument(f"--max-{limit.name}", type=_count, default=limit.default, metavar="N", help=about)
    _add_device(command)


def _add_data_infilling(subparsers: Any) -> None:
    command = _add(subparsers, "data infilling", "take texts apart for infilling", function="data_infilling")
    command.add_argument(
        "kind",
        type=_one_of("single", "several", "middle"),
        metavar="KIND",
        help="single, several: about 20 %% of the words, as one or several segments; middle: the middle sentence",
    )
    command.add_argument("file", type=Path, metavar="FILE", help="texts, .txt or .jsonl (.xz, .gz, .zst)")
    command.add_argument("--field", default="text", metavar="NAME", help="of a .jsonl file's objects (default: text)")
    command.add_argument(
        "--detokenise",
        type=_one_of(*get_args(Detokeniser)),
        default="none",
        metavar="NAME",
        help="lm1b: join the tokens of the One Billion Word Benchmark to plain text first (default: none)",
    )
    command.add_argument("--count", type=_count, metavar="N", help="texts (default: all that can be taken apart)")
    command.add_argument(
        "--seed", type=_seed, default=0, metavar="N", help="of the choice of texts and segments (default: 0)"
    )
    command.add_argument("--out", type=Path, required=True, metavar="SET", help="JSONL file to write")


def _add_plot(subparsers: Any) -> None:
    plot = _add(subparsers, "plot", "draw pictures (.png, .svg or .pdf)")
    pictures = plot.add_subparsers(dest="picture", metavar="PICTURE", title="pictures", required=True)
    order = _add(pictures, "trajectory", "draw the order in which tokens came", _DECODE_NOTE, "plot_trajectory")
    order.add_argument("models", nargs="*", metavar="MODEL", help=f"{_WRITER}; several: a panel each")
    order.add_argument("--count", type=_count, default=10, metavar="N", help="sequences (default: 10)")
    graph = _add(pictures, "graph", "draw a star graph with its path", _DECODE_NOTE, "plot_graph")
    graph.add_argument("name", nargs="?", metavar="NAME", help="star-easy, star-medium or star-hard (default)")
    graph.add_argument("--model", help="draw a graph of this model's task, with the path the model writes")
    puzzle = _add(pictures, "puzzle", "draw a zebra puzzle as a model solves it", _DECODE_NOTE, "plot_puzzle")
    puzzle.add_argument("model", metavar="RUN", help="run folder of a model of zebra puzzles")
    for picture in (order, graph, puzzle):
        picture.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the examples (default: 0)")
        _add_device(picture)
    curves = _add(pictures, "training", "draw validation accuracy over training", function="plot_training")
    curves.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folder; a line each, or for several in stages"
    )
    curves.add_argument(
        "--over", type=_over, default="minutes", metavar="AXIS", help="minutes of training (default) or steps"
    )
    frontier = _add(pictures, "frontier", "draw NLL against entropy", function="plot_frontier")
    timing = _add(pictures, "time", "draw NLL against the time of writing", function="plot_time")
    judged = _add(pictures, "judge", "draw the scores of a judge", function="plot_judge")
    solved = _add(pictures, "accuracy", "draw the accuracy of models on a task", function="plot_accuracy")
    for picture in (curves, frontier, timing, judged, solved):
        picture.set_defaults(sections=())  # nothing is decoded
    sources = ((frontier, "frontier"), (timing, "frontier"), (judged, "judge"), (solved, "RUN"))
    for picture, source in sources:
        about = f"JSON of insertlm evaluate {source}; a model or way of decoding each"
        picture.add_argument("files", nargs="+", type=Path, metavar="FILE", help=about)
    for name, picture in pictures.choices.items():
        out = f"{name}.png"
        picture.add_argument("--out", type=Path, default=Path(out), metavar="FILE", help=f"picture (default: {out})")
