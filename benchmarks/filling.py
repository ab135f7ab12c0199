"""How fast does a filler fill in blanks? A text with two blanks, as tokens per second, and the time until a sentence of
20 words with one blank is answered.

python benchmarks/filling.py --threads 2 --halved --model english          # a model by name or folder
python benchmarks/filling.py --threads 2 --halved --preset smollm2-135m    # a fresh one with as many words as that has
python benchmarks/filling.py --preset mini --texts 1024 --in-step

The texts are random words, and blanks get exactly as many tokens as are missing, so that no model ends them sooner. The
times are those of the writer alone: no text is tokenised.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import msgspec
import torch
from common import report

from insertlm.families.fill import FillConfig, Filler
from insertlm.inference.settings import Bounds, DecodeConfig, Prompt
from insertlm.model import choose_device, load, prepare
from insertlm.nn.spec import PRESETS, ModelConfig
from insertlm.text.tokenizers import Specials, WordTokenizer

SENTENCE = 26  # tokens of 20 words
ANSWER = 6  # tokens of the blank in a sentence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="a name or folder, as `insertlm infill` takes it")
    model.add_argument("--preset", choices=sorted(PRESETS))
    parser.add_argument("--vocabulary", type=int, default=49152, help="of a fresh model")
    parser.add_argument("--tokens", type=int, default=60, help="of the text with two blanks, half of them missing")
    parser.add_argument("--texts", type=int, default=1, help="filled in at once")
    parser.add_argument("--in-step", action="store_true", help="a token in each blank at a time")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--device", help="cpu or cuda (default: cuda if there is a GPU)")
    parser.add_argument("--halved", action="store_true", help="bfloat16 on a CPU, too; on a GPU it is always used")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = choose_device(arguments.device)
    family = _filler(arguments, device)
    settings = DecodeConfig(temperature=0.7, top_p=0.9, max_steps=2 * arguments.tokens + 100)
    settings = msgspec.structs.replace(settings, parallel=0 if arguments.in_step else 1)
    missing = arguments.tokens // 2
    given = arguments.tokens - missing
    wanted = {given // 3: missing // 2, 2 * given // 3: missing - missing // 2}
    text = [_prompt(family, given, wanted, seed) for seed in range(arguments.texts)]
    sentence = [_prompt(family, SENTENCE - ANSWER, {SENTENCE // 3: ANSWER}, 0)]
    seconds, answer = _seconds(family, text, settings), _seconds(family, sentence, settings)
    report(
        "filling",
        device,
        model=arguments.model or arguments.preset,
        texts=arguments.texts,
        tokens=arguments.tokens,
        written=missing * arguments.texts,
        in_step=arguments.in_step,
        precision="bfloat16" if arguments.halved or device.type == "cuda" else "float32",
        threads=torch.get_num_threads(),
        seconds=round(seconds, 3),
        tokens_per_second=round(missing * arguments.texts / seconds, 1),
        sentence_seconds=round(answer, 3),
    )


def _filler(arguments: argparse.Namespace, device: torch.device) -> Filler:
    if arguments.model:
        family = load(arguments.model, str(device), halved=arguments.halved).family
        assert isinstance(family, Filler), "expected a filler"
        return family
    words = WordTokenizer(tuple(map(str, range(arguments.vocabulary - len(Specials._fields)))))
    family = FillConfig().build(ModelConfig(**PRESETS[arguments.preset]), words)
    prepare(family, device, arguments.halved)
    return family


def _prompt(family: Filler, given: int, wanted: dict[int, int], seed: int) -> Prompt:
    """wanted: by gap, how many tokens it gets"""
    writable = family.writable.tolist()
    start = random.Random(seed).choices(writable, k=given)
    bounds = {gap: Bounds(count, count) for gap, count in wanted.items()}
    return Prompt([], seed, start, frozenset(wanted), bounds)


def _seconds(family: Filler, prompts: list[Prompt], settings: DecodeConfig) -> float:
    times = []
    for _ in range(4):
        started = time.perf_counter()
        family.decode(prompts, settings)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])  # the first call initialises libraries


if __name__ == "__main__":
    main()
