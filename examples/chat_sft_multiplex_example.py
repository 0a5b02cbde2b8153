"""Fine-tune on ARC and GSM8K with one loader; the loss counts the answers only.

    penstock fetch arc && penstock fetch gsm8k
    python examples/chat_sft_multiplex_example.py

Without the files, or with --made-up, it uses made-up sums instead. The model is a toy; the loop is
that of any script for supervised fine-tuning.
"""

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

import torch

from penstock import Chat
from penstock.catalog import ARCDataLoader, GSM8KDataLoader
from penstock.errors import SourceError
from penstock.integrations.multiplex import create_multiplex_dataloader, print_dataloader_stats
from penstock.integrations.sft import SFTCollate, sft_data_generator

Pairs = list[tuple[str, list[dict[str, Any]]]]


def load_sets(data: Path) -> Pairs:
    """Both sets, from the directory where `penstock fetch` stores them."""
    return [
        ("arc_easy", ARCDataLoader("ARC-Easy", "train", data / "arc").load_data()),
        ("gsm8k", GSM8KDataLoader("train", data / "gsm8k").load_data()),
    ]


def made_up_sets() -> Pairs:
    """Made-up conversations about sums and doubled numbers."""
    sums = [conversation(f"What is {i} + 1?", f"It is {i + 1}.") for i in range(400)]
    doubles = [conversation(f"Double {i}.", f"{2 * i}") for i in range(100)]
    return [("sums", sums), ("doubles", doubles)]


def conversation(question: str, answer: str) -> dict[str, Any]:
    """One example, with the messages of a conversation as the real sets have them."""
    roles = [("user", question), ("assistant", answer)]
    return {"messages": [{"role": role, "content": content} for role, content in roles]}


def show(chat: Chat, example: dict[str, Any]) -> None:
    """Print the text of one conversation, with the trained parts in brackets."""
    rendered = chat.render(example)
    text, done = "", 0
    for start, stop in rendered.trained:
        text += rendered.text[done:start] + "[[" + rendered.text[start:stop] + "]]"
        done = stop
    print(f"Rendered: {text + rendered.text[done:]!r}")
    print(f"{int(rendered.loss.sum())} of {len(rendered)} tokens are trained on")


def train(batches: Any, vocab_size: int, steps: int) -> None:
    """The usual training loop, with a model of one layer."""
    torch.manual_seed(17)
    model = torch.nn.Sequential(torch.nn.Embedding(vocab_size, 16), torch.nn.Linear(16, vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for inputs, targets in itertools.islice(batches, steps):
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"Loss over {len(losses)} steps: {losses[0]:.2f} to {losses[-1]:.2f}")


def main() -> None:
    """Train on both sets, then run the replacement for a hand-written generator."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--made-up", action="store_true")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    try:
        sets = made_up_sets() if options.made_up else load_sets(options.data)
    except SourceError as error:
        print(f"{error}\nUsing made-up questions instead.")
        sets = made_up_sets()

    chat = Chat("nanochat", "gpt2", add_tokens="auto")
    show(chat, sets[0][1][0])
    loader = create_multiplex_dataloader(
        sets,
        batch_size=options.batch_size,
        num_workers=options.num_workers,
        collate_fn=SFTCollate(chat, max_length=1024),
        drop_last=True,
    )
    print_dataloader_stats(loader)
    train(loader, chat.tokenizer.vocab_size, options.steps)

    # A generator of endless batches, for scripts that read a single set.
    batches = sft_data_generator(sets[0][1], options.batch_size, chat, max_length=1024)
    begin, rows = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.5:
        inputs, _targets = next(batches)
        rows += len(inputs)
    print(
        f"The generator yields {rows / (time.perf_counter() - begin):,.0f} conversations per second"
    )


if __name__ == "__main__":
    main()
