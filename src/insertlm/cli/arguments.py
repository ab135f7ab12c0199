"""The arguments of every command. Quick to import, so that help and mistakes are answered at once."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from insertlm.cli.parsing import LENGTHS, Parser, folder, one_of, pattern, sweep, whole
from insertlm.evaluation.rubrics import RUBRICS
from insertlm.server.limits import Limits
from insertlm.text.detokenise import Detokeniser

__all__ = ["OVERRIDES", "parser"]

# The sections of a recipe that `--section.key value` may change, by command.
OVERRIDES = {
    "train": ("task", "model", "family", "optim", "train", "decode"),
    "evaluate": ("decode",),
    "evaluate nll": ("decode",),
    "evaluate likelihood": (),
    "evaluate infilling": ("decode",),
    "evaluate judge": ("decode",),
    "evaluate frontier": ("decode",),
    "generate": ("decode",),
    "infill": ("decode",),
    "infill set": ("decode",),
    "data": (),
    "data infilling": (),
    "models": (),
    "info": (),
    "compare": (),
    "export": (),
    "lm-eval": (),  # main.py passes its arguments on unread
    "solve": (),
    "serve": (),
    "plot": ("decode",),
}

# Parts of help texts that several commands share.
_MODEL = "run folder, exported folder, Hub id or bundled model (default: the bundled {})"
_WRITER, _FILLER = _MODEL.format("star-hard-mini"), _MODEL.format("english")
_TEXTS = "file of texts, .txt or .jsonl, also with .gz, .xz or .zst"
_FIELD = "field of a .jsonl file that holds the text"
_DECODE = "--decode.KEY VALUE changes a decoding setting, e.g. --decode.temperature 0.8 --decode.position_top_k 0."
_RESUME = "Run a stopped command again, and it goes on where it was."


def parser() -> argparse.ArgumentParser:
    insertlm = Parser(prog="insertlm", description="Train and run insertion language models.", allow_abbrev=False)
    insertlm.flag("--version", "print the version")
    subparsers = insertlm.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for add in (
        _add_train,
        _add_evaluate,
        _add_evaluate_nll,
        _add_evaluate_likelihood,
        _add_evaluate_infilling,
        _add_evaluate_judge,
        _add_evaluate_frontier,
        _add_generate,
        _add_infill,
        _add_infill_set,
        _add_data,
        _add_data_infilling,
        _add_models,
        _add_info,
        _add_compare,
        _add_export,
        _add_lm_eval,
        _add_solve,
        _add_serve,
        _add_plot,
    ):
        add(subparsers)
    return insertlm


def _add(subparsers: Any, name: str, summary: str, epilog: str = "", function: str = "") -> Parser:
    """A command. The function of commands.py that has its name, with _ for a space, carries it out."""
    about = f"{summary[0].upper()}{summary[1:]}."
    command: Parser = subparsers.add_parser(name, help=summary, description=about, epilog=epilog, allow_abbrev=False)
    command.set_defaults(function=function or name.replace(" ", "_"))
    return command


# --- Training and evaluation


def _add_train(subparsers: Any) -> None:
    note = "--SECTION.KEY VALUE changes a key of the recipe, e.g. --train.steps 200 --model.width 64."
    command = _add(subparsers, "train", "train a model from a recipe", f"{note} {_RESUME}")
    command.file("recipe", "YAML file, such as recipes/star_hard/ilm.yaml", metavar="RECIPE")
    about = "run folder to write (default: runs/FOLDER-NAME, after the folder and name of the recipe)"
    command.add_argument("--run", type=folder, metavar="DIR", help=about)
    command.device()


def _add_evaluate(subparsers: Any) -> None:
    note = f"{_DECODE} To evaluate texts: insertlm evaluate nll, likelihood, infilling, judge or frontier."
    command = _add(
        subparsers, "evaluate", "measure a model on its task: accuracy or, of text, likelihood and fills", note
    )
    command.add_argument("model", metavar="RUN", help="run folder or bundled model")
    command.split()
    command.number("--count", "number of examples (default: the whole split; of text 100)")
    command.number("--batch-size", "sequences written at once", 500)
    command.file("--out", "JSON file to write (default: in RUN, named after split and settings; none if bundled)")
    command.checkpoint()
    command.device()


def _add_results(command: Parser, default: str) -> None:
    command.add_argument("--label", metavar="NAME", help="name in tables and plots (default: name of the file or run)")
    command.file("--out", f"JSON file to write, with a journal beside it (default: {default})")
    command.device()


def _add_texts(command: Parser) -> None:
    command.add_argument("source", metavar="FILE|RUN", help=f"{_TEXTS}, or a run that writes the texts")
    command.option("--field", _FIELD, "text", metavar="NAME")
    command.number("--count", "number of texts (default: all of a file; 100 from a run)")
    command.seed("the texts that a run writes")


def _add_evaluator(command: Parser, more: str = "") -> None:
    about = f"causal model that scores the texts: Hugging Face name, folder or .gguf file{more}"
    command.option("--evaluator", about, "meta-llama/Llama-3.2-3B", metavar="MODEL")
    command.add_argument("--bos", metavar="TOKEN", help="token put before every text (default: the evaluator's BOS)")
    command.flag("--bf16", "on a CPU, let the evaluator compute in bfloat16: faster, and not the same for every model")


def _add_evaluate_nll(subparsers: Any) -> None:
    summary = "measure NLL, entropy and length of texts under a language model"
    command = _add(subparsers, "evaluate nll", summary, f"{_RESUME} For a run, {_DECODE}")
    _add_texts(command)
    _add_evaluator(command)
    command.file("--data", "texts to compare with, measured the same way")
    _add_results(command, "NAME-nll-MODEL.json")


def _add_evaluate_likelihood(subparsers: Any) -> None:
    command = _add(subparsers, "evaluate likelihood", "measure how probable texts are to a model of ours", _RESUME)
    command.add_argument("source", metavar="MODEL", help="run folder, exported folder, Hub id or bundled model")
    command.file("--data", f"{_TEXTS} (default: examples of the model's own task)")
    command.option("--field", _FIELD, "text", metavar="NAME")
    command.split()
    command.number("--count", "number of texts (default: all of a file; of a split the recipe's number)")
    about = "ilm: most tokens of which all 2^N states are summed up; longer texts get a lower bound"
    command.number("--exact", about, 12, whole(0, 16))
    command.number(
        "--orders", "of a lower bound: random orders, which make its standard error smaller", 8, whole(2, 10**6)
    )
    command.checkpoint()
    _add_results(command, "MODEL-likelihood.json")


def _add_evaluate_infilling(subparsers: Any) -> None:
    summary = "compare filled-in texts with the original texts and with the input"
    command = _add(subparsers, "evaluate infilling", summary, f"{_RESUME} With --model, {_DECODE}")
    about = "JSONL file of insertlm infill set or, with --model, of insertlm data infilling; also with .gz, .xz or .zst"
    command.file("source", about, metavar="SET")
    about = "fill in the texts with this model: run folder, exported folder, Hub id or bundled model"
    command.add_argument("--model", metavar="MODEL", help=about)
    command.flag("--true-lengths", "with --model: write as many tokens as were removed, which an mdm must be told")
    about = "with --model: write as many as were removed from another set, drawn at random, which no text is told"
    command.file("--guess-lengths", about, metavar="SET")
    command.number("--tries", "with --guess-lengths: of so many drawn lengths keep what is likeliest to the model", 1)
    command.number("--batch-size", "with --model: texts filled in at once", 64)
    command.number("--count", "number of texts (default: all)")
    command.seed("sampling")
    _add_evaluator(command, ", or none to do without")
    about = (
        "earlier result of this command for the same texts, of a model that was told the lengths: show the gap to it"
    )
    command.file("--told-lengths", about, metavar="JSON")
    about = "and one of a model that guessed them: show how much of the way between the two is left behind"
    command.file("--guessed-lengths", about, metavar="JSON")
    _add_results(command, "SET-infilling-EVALUATOR.json, with --model SET-MODEL-…")


def _add_evaluate_judge(subparsers: Any) -> None:
    note = f"{_RESUME} OPENAI_API_KEY holds the key of the endpoint. For a run, {_DECODE}"
    command = _add(subparsers, "evaluate judge", "let a language model score texts from 1 to 5", note)
    _add_texts(command)
    about = "the judge: Hugging Face name, folder, .gguf file or, with --endpoint, its name there"
    command.option("--model", about, "prometheus-eval/prometheus-7b-v2.0", dest="judge", metavar="MODEL")
    about = "ask an OpenAI-compatible server, e.g. http://localhost:8000/v1"
    command.add_argument("--endpoint", metavar="URL", help=about)
    about = f"{', '.join(RUBRICS)}; repeatable (default: all of them)"
    rubric = one_of(*RUBRICS)
    command.add_argument("--rubric", dest="rubrics", action="append", type=rubric, metavar="NAME", help=about)
    _add_results(command, "NAME-judge-MODEL.json")


def _add_evaluate_frontier(subparsers: Any) -> None:
    note = f"{_RESUME} --decode.KEY VALUE changes a setting of all points."
    command = _add(subparsers, "evaluate frontier", "measure NLL and entropy over decoding settings", note)
    command.add_argument("source", metavar="RUN", help="run folder or bundled model that writes texts")
    about = "values of a decode key (default: temperature=0.6,0.8,1); repeatable, for all combinations"
    command.add_argument("--sweep", dest="sweeps", action="append", type=sweep, metavar="KEY=V,V,…", help=about)
    command.number("--count", "texts per point", 100)
    command.seed("the texts")
    command.file("--data", "real texts, which become a point of their own")
    _add_evaluator(command)
    _add_results(command, "NAME-frontier-MODEL.json")


# --- Writing


def _add_generate(subparsers: Any) -> None:
    command = _add(subparsers, "generate", "write sequences and show how each was written", _DECODE)
    command.add_argument("model", nargs="?", metavar="MODEL", help=_WRITER)
    about = 'for a star graph its edges, source and goal: "52>35 35>50 … : 52 50"'
    command.add_argument("--prompt", metavar="TEXT", help=about)
    command.number("--count", "number of new random prompts, without --prompt (default: 5)")
    command.seed("prompts and sampling")
    command.flag("--show", "show every sequence step by step, not only the first")
    command.flag("--json", "print one JSON object per sequence instead")
    command.checkpoint()
    command.device()


def _add_infill(subparsers: Any) -> None:
    note = "___ is a blank, and so is {name}; it may say more: {name:3-8 words}, {name:about 5 words}, "
    note += "{name:up to 9 tokens}, {name|one|two}, {name:/regular expression/}. \\_ and \\{ are plain. "
    note += f"Write -- before a TEXT that begins with a dash. {_DECODE}"
    command = _add(subparsers, "infill", "fill in the blanks of a text", note)
    about = 'such as "The conference, ___ was postponed."; - reads standard input'
    command.add_argument("text", metavar="TEXT", help=about)
    command.number("--samples", "number of texts to write", 1)
    command.flag("--anywhere", "also insert outside the blanks")
    for name, about in (("--ban", "word that must not be written"), ("--require", "word that must be written")):
        command.add_argument(name, action="append", default=[], metavar="WORD", help=f"{about}; repeatable")
    command.flag("--show", "show step by step what is written into the blanks, with a few words around them")
    command.flag("--json", "print one JSON object per text instead")
    _add_filler(command)


def _add_infill_set(subparsers: Any) -> None:
    command = _add(subparsers, "infill set", "fill in the blanks of many texts", _DECODE)
    command.file("set", "JSONL file of insertlm data infilling", metavar="SET")
    command.number("--count", "number of texts (default: all)")
    command.flag("--true-lengths", "write as many tokens as were removed, which an mdm must be told")
    command.file("--out", "JSONL file to write", required=True)
    _add_filler(command)


def _add_filler(command: Parser) -> None:
    command.add_argument("--model", metavar="MODEL", help=_FILLER)
    command.seed("sampling")
    each = "; or a number for each: 3,,5"
    command.option("--min", f"fewest tokens of a blank, 0: it may stay empty (default: 1){each}", **LENGTHS)
    command.option("--max", f"most tokens of a blank (default: no limit){each}", **LENGTHS)
    about = f"about how many words belong into a blank, for models that take hints{each}"
    command.option("--words", about, **LENGTHS)
    command.device()


# --- Data and puzzles


def _add_data(subparsers: Any) -> None:
    note = "insertlm data tokenizer FILE… trains a byte-level BPE tokenizer on text files."
    command = _add(subparsers, "data", "print examples of a task, or write them as JSONL", note)
    command.add_argument("name", metavar="NAME", help="star-easy, star-medium, star-hard, zebra, sudoku or tokenizer")
    command.add_argument("files", nargs="*", default=[], metavar="FILE", help=f"tokenizer: {_TEXTS}")
    command.number("--size", "tokenizer: size of the vocabulary", 8192, whole(1, 10**7))
    command.number("--count", "number of examples", 3)
    command.seed("the examples", 1)
    command.split()
    command.file("--out", "file to write: JSONL, or for tokenizer JSON (default: tokenizer.json)")


def _add_data_infilling(subparsers: Any) -> None:
    command = _add(subparsers, "data infilling", "remove parts of texts, for insertlm infill set")
    kind = one_of("single", "several", "middle", "third", "middle-three", "phrase", "sentence")
    about = (
        "single or several: remove about 20 %% of the words, in so many segments; middle: the middle sentence; "
        "third or middle-three: of five sentences; phrase: 1 to 12 words; sentence: any between two others"
    )
    command.add_argument("kind", type=kind, metavar="KIND", help=about)
    command.file("file", _TEXTS)
    command.option("--field", _FIELD, "text", metavar="NAME")
    about = "lm1b: first join the tokens of the One Billion Word Benchmark to plain text"
    command.option("--detokenise", about, "none", type=one_of(*get_args(Detokeniser)), metavar="NAME")
    command.number("--excerpts", "cut the texts into excerpts of whole sentences, of at most so many words")
    for name, which in (("--only", "only texts"), ("--without", "no texts")):
        about = f"{which} of which a field of the .jsonl file is like this, with * for anything; repeatable"
        command.add_argument(name, action="append", default=[], type=pattern, metavar="FIELD=PATTERN", help=about)
    command.number("--count", "number of texts (default: all from which a part can be removed)")
    command.seed("the choice of texts and segments")
    command.file("--out", "JSONL file to write", required=True, metavar="SET")


def _add_solve(subparsers: Any) -> None:
    note = (
        "A clue reads like `left-of LHS c 2 2 RHS c 2 1 CLUE_END`; a sudoku has 81 cells, `.` for an empty one. "
        "`insertlm data zebra` and `insertlm data sudoku` print some."
    )
    command = _add(subparsers, "solve", "solve a zebra puzzle or a sudoku, or say what is wrong with it", note)
    command.file("file", "file of clues or of a grid; - reads standard input")


# --- Which models there are


def _add_models(subparsers: Any) -> None:
    command = _add(subparsers, "models", "list the bundled models and those of a folder")
    command.add_argument(
        "folder",
        nargs="?",
        type=folder,
        default=Path("runs"),
        metavar="FOLDER",
        help="folder of run folders (default: runs)",
    )
    command.flag("--json", "print a JSON list instead")


def _add_info(subparsers: Any) -> None:
    command = _add(subparsers, "info", "say what a model is, what it can do and what it was trained on")
    command.add_argument("model", metavar="MODEL", help="run folder, exported folder, Hub id or bundled model")
    command.flag("--json", "print a JSON object instead")


def _add_compare(subparsers: Any) -> None:
    note = "Evaluations are the files that insertlm evaluate RUN has written into the run folders."
    command = _add(subparsers, "compare", "show runs side by side, with their last validation and evaluations", note)
    command.add_argument("runs", nargs="+", metavar="RUN", help="run folder")
    command.flag("--json", "print a JSON list instead")


# --- Using models elsewhere


def _add_export(subparsers: Any) -> None:
    note = (
        "The folder holds the weights, their hashes, the tokenizer, the recipe, a model card and the model's code. "
        "Whoever loads it with AutoModel.from_pretrained(FOLDER, trust_remote_code=True) needs torch and transformers, "
        "but not insertlm, to fill in texts; insertlm reads it too. --push uses the token of `hf auth login` or of "
        "HF_TOKEN."
    )
    command = _add(subparsers, "export", "write a model as a folder that transformers can load", note)
    about = "model of text, of any family but mdm: run folder, exported folder, Hub id or bundled model"
    command.add_argument("model", metavar="RUN", help=about)
    command.checkpoint()
    about = "folder to write: a new one, or an earlier export to replace"
    command.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help=about)
    about = "upload the folder to the Hugging Face Hub as one commit"
    command.add_argument("--push", metavar="OWNER/NAME", help=about)
    command.flag("--private", "with --push: if the repository is new, make it private")


def _add_lm_eval(subparsers: Any) -> None:
    """For the list of commands only: main.py passes the arguments on to lm_eval."""
    subparsers.add_parser("lm-eval", help="run lm-evaluation-harness with --model insertlm", add_help=False)


def _add_serve(subparsers: Any) -> None:
    note = "The environment variable INSERTLM_API_KEY sets the key, too. See docs/serving.md."
    command = _add(subparsers, "serve", "serve models over HTTP", note)
    about = "run folders, exported folders, Hub ids or bundled models (default: all bundled ones)"
    command.add_argument("models", nargs="*", metavar="MODEL", help=about)
    command.option("--host", "address to listen on; by default only this machine can reach it", "127.0.0.1")
    about = "name by which clients reach it, beside localhost and --host; repeatable, * for any (see docs/serving.md)"
    command.add_argument("--allowed-host", dest="allowed_hosts", action="append", metavar="NAME", help=about)
    command.number("--port", "port to listen on, 0 for any free one", 8000, whole(0, 65535))
    command.add_argument("--api-key", metavar="KEY", help="key that clients must send (default: none)")
    for limit in fields(Limits):
        command.number(f"--max-{limit.name}", f"most {limit.metadata['about']}", limit.default)
    command.device()


# --- Plots


def _add_plot(subparsers: Any) -> None:
    plot = _add(subparsers, "plot", "draw a plot (.png, .svg or .pdf)")
    plots = plot.add_subparsers(dest="plot", metavar="PLOT", title="plots", required=True)

    order = _add(plots, "trajectory", "draw the order in which tokens were inserted", _DECODE, "plot_trajectory")
    order.add_argument("models", nargs="*", metavar="MODEL", help=f"{_WRITER}; a panel for each")
    order.number("--count", "number of sequences", 10)
    graph = _add(plots, "graph", "draw a star graph with its path", _DECODE, "plot_graph")
    graph.add_argument("name", nargs="?", metavar="NAME", help="star-easy, star-medium or star-hard (default)")
    graph.add_argument("--model", help="draw a graph of this model's task with the path that the model writes")
    puzzle = _add(plots, "puzzle", "draw a zebra puzzle as a model solves it", _DECODE, "plot_puzzle")
    puzzle.add_argument("model", metavar="RUN", help="run folder of a model of zebra puzzles")
    for each in (order, graph, puzzle):
        each.seed("the examples")
        each.device()

    curves = _add(plots, "training", "draw accuracy, or of text the losses, over training", function="plot_training")
    about = "run folder; runs that were trained in stages share a line"
    curves.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=about)
    over = one_of("time", "steps")
    curves.option("--over", "x axis: time of training or steps", "time", type=over, metavar="AXIS")
    curves.set_defaults(sections=())  # it decodes nothing, so there is nothing to override

    results = (
        ("frontier", "draw NLL against entropy", "evaluate frontier"),
        ("time", "draw NLL against the time that writing took", "evaluate frontier"),
        ("judge", "draw the scores of a judge", "evaluate judge"),
        ("accuracy", "draw the accuracy of models on a task", "evaluate RUN"),
    )
    for name, summary, source in results:
        command = _add(plots, name, summary, function=f"plot_{name}")
        about = f"JSON file of insertlm {source}, one per model or setting"
        command.add_argument("files", nargs="+", type=Path, metavar="FILE", help=about)
        command.set_defaults(sections=())
    for name, command in plots.choices.items():
        command.option("--out", "file to write", Path(f"{name}.png"), type=Path, metavar="FILE")
