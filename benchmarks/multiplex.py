"""Compare `create_multiplex_dataloader` with the usual generator of fine-tuning scripts.

    python benchmarks/multiplex.py [--examples 100000] [--render] [--workers 2] [--json FILE]

The generator is single-threaded: it shuffles a list of (set, number) pairs of all examples, reads
each example in a loop, collects a batch and collates it. Both read one epoch of sets in memory.
The time includes all set-up before the first batch. Workers are used only with --workers. There
are four collate functions:

    nothing         a list of the examples; those of penstock have the names of their datasets
    one field       a list of the questions
    dict of lists   all fields, for penstock with the names of the datasets: its default
    rendering       (--render) ChatML, GPT-2 tokens, loss mask and padding; both return the same

Figures are examples per second: medians of alternating repetitions, with the spread.
"""

import argparse
import json
import random
import statistics
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from measure import alternate, machine, spread

from penstock.integrations.multiplex import create_multiplex_dataloader

SHARES = {"arc": 0.222, "gsm8k": 0.773, "mmlu": 0.005}
BATCH = 32


class Task:
    """A set of examples, or a slice of it, as in many hand-written scripts."""

    def __init__(self, items, start=0, stop=None, step=1):
        self.items, self.start, self.stop, self.step = items, start, stop, step

    def __len__(self):
        stop = len(self.items) if self.stop is None else self.stop
        return (stop - self.start + self.step - 1) // self.step

    def __getitem__(self, index):
        assert isinstance(index, int)
        return self.items[self.start + index * self.step]


class Mixture:
    """All examples of several sets, shuffled once."""

    def __init__(self, tasks):
        self.tasks = tasks
        self.index_map = []
        for number, task in enumerate(tasks):
            for index in range(len(task)):
                self.index_map.append((number, index))
        random.Random(42).shuffle(self.index_map)

    def __len__(self):
        return len(self.index_map)

    def __getitem__(self, index):
        number, inside = self.index_map[index]
        return self.tasks[number][inside]


def generator(dataset, batch_size, render, collate, rank=0, world_size=1):
    """Yield endless batches."""
    batch = []
    while True:
        for index in range(rank, len(dataset), world_size):
            batch.append(render(dataset[index]))
            if len(batch) == batch_size:
                yield collate(batch)
                batch = []


def by_hand(sets, render, collate):
    """Read one epoch of the generator, without a last batch that is not full."""
    dataset = Mixture([Task(examples) for _, examples in sets])
    batches = generator(dataset, BATCH, render, collate)
    for _ in range(len(dataset) // BATCH):
        next(batches)


def ours(sets, **options):
    """Read one epoch of the loader, without a last batch that is not full."""
    for _ in create_multiplex_dataloader(sets, batch_size=BATCH, drop_last=True, **options):
        pass


def same(value):
    return value


def questions(batch):
    return [example["question"] for example in batch]


def dict_of_lists(batch):
    return {key: [example[key] for example in batch] for key in batch[0]}


class HandRendering:
    """Renders one conversation at a time: text, tokens with offsets, and the mask from these."""

    def __init__(self):
        from tokenizers import Tokenizer

        from penstock.tokenize.definition import find_definition

        definition = find_definition("gpt2")
        self.tokenizer = Tokenizer.from_str(definition.text)
        self.tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        self.pad = definition.token_id("<|endoftext|>")

    def render(self, example):
        text, spans = "", []
        for message in example["messages"]:
            text += f"<|im_start|>{message['role']}\n"
            begin = len(text)
            text += f"{message['content']}<|im_end|>"
            if message["role"] == "assistant":
                spans.append((begin, len(text)))
            text += "\n"
        encoded = self.tokenizer.encode(text)
        mask = [
            any(begin < end_at and at < end for begin, end in spans)
            for at, end_at in encoded.offsets
        ]
        return encoded.ids, mask

    def collate(self, batch):
        width = max(len(ids) for ids, _ in batch) - 1
        inputs = torch.full((len(batch), width), self.pad, dtype=torch.long)
        targets = torch.full((len(batch), width), -1, dtype=torch.long)
        for row, (ids, mask) in enumerate(batch):
            tokens = torch.tensor(ids, dtype=torch.long)
            inputs[row, : len(ids) - 1] = tokens[:-1]
            trained = torch.tensor(mask[1:])
            targets[row, : len(ids) - 1][trained] = tokens[1:][trained]
        return inputs, targets


def made_up(num_examples):
    """Random text with the proportions and lengths of ARC, GSM8K and MMLU."""
    rng = np.random.default_rng(17)
    letters = np.array(list("etaoinshrdlucmfwypvbgkqjxz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(5_000)]

    def sentence(length):
        return " ".join(words[i] for i in rng.integers(0, len(words), length))

    def example():
        question, answer = sentence(45), sentence(50)
        return {
            "question": question,
            "choices": [],
            "answer": answer[:5],
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ],
        }

    return [
        (name, [example() for _ in range(round(num_examples * share))])
        for name, share in SHARES.items()
    ]


def rendering_cases(sets, workers):
    """The generator with the usual tokenizer, and the loader with penstock's."""
    from penstock import Chat
    from penstock.integrations.sft import SFTCollate

    hand, chat = HandRendering(), SFTCollate(Chat("chatml", "gpt2", add_tokens="auto"))
    few = [example for _, examples in sets for example in examples[:20]]
    for mine, theirs in zip(chat(few), hand.collate([hand.render(e) for e in few]), strict=True):
        assert torch.equal(mine, theirs), "the two return different tensors"
    cases = {
        "by hand": lambda: by_hand(sets, hand.render, hand.collate),
        "penstock": lambda: ours(sets, collate_fn=chat),
    }
    if workers:
        cases[f"penstock, {workers} workers"] = lambda: ours(
            sets, collate_fn=chat, num_workers=workers
        )
    return cases


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=10_350)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sets = made_up(options.examples)
    num_examples = sum(len(examples) for _, examples in sets) // BATCH * BATCH
    print(f"{num_examples:,} examples, batches of {BATCH}; {machine()}", flush=True)
    races = {
        "nothing": {
            "by hand": lambda: by_hand(sets, same, same),
            "penstock": lambda: ours(sets, collate_fn=same),
            "penstock, uniform": lambda: ours(sets, collate_fn=same, sampling_strategy="uniform"),
        },
        "one field": {
            "by hand": lambda: by_hand(sets, same, questions),
            "penstock": lambda: ours(sets, collate_fn=questions),
        },
        "dict of lists": {
            "by hand": lambda: by_hand(sets, same, dict_of_lists),
            "penstock": lambda: ours(sets),
        },
    }
    if options.render:
        if not find_spec("penstock.chat"):
            parser.error("--render needs penstock.chat")
        races["rendering"] = rendering_cases(sets, options.workers)
    figures = {"machine": machine(), "examples": num_examples}
    for name, cases in races.items():
        for case in cases.values():
            case()  # imports and caches should not be measured
        result = {
            case: [num_examples / seconds for seconds in each]
            for case, each in alternate(cases, options.repetitions).items()
        }
        figures[name] = result
        slow = statistics.median(result["by hand"])
        print(f"{name}, thousand examples per second:")
        for case, speeds in result.items():
            ratio = statistics.median(speeds) / slow
            print(f"  {case:<20} {spread([s / 1e3 for s in speeds])}   {ratio:.2f}x", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
