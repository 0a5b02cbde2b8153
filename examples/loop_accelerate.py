"""Train a small GPT-2 on a text file with accelerate. Run it again to resume.

    accelerate launch examples/loop_accelerate.py input.txt --steps 200

`StepLoader` reads only the rows of its process, so `accelerator.prepare` returns it unchanged.
`save_state` and `load_state` also save and load the position of the loader.
"""

import argparse
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from accelerate import Accelerator

import penstock as ps
from penstock.integrations.huggingface import StepLoader
from penstock.train import GPT, ModelConfig


def main() -> None:
    """Train, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--tokenizer", default="gpt2")
    options = parser.parse_args()

    accelerator = Accelerator()
    # One process tokenizes the file, and the others find the store.
    with accelerator.main_process_first():
        store = ps.build(options.text, options.out / "store", tokenizer=options.tokenizer)
    loader = StepLoader(
        ps.Windows(store, length=64),
        8,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        seed=17,
        labels="shifted",  # GPT of penstock does not shift them
    )
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=2, heads=2, width=64, length=64, vocab_size=store.vocab_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(loader)

    # Finished checkpoints have their last name: a kill while one is written leaves the one before.
    saved = sorted(options.out.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    done = int(saved[-1].name.split("-")[1]) if saved else 0
    if saved:
        accelerator.load_state(str(saved[-1]))

    epochs = chain.from_iterable(repeat(loader))  # each epoch in a new order
    for step, batch in enumerate(islice(epochs, options.steps - done), start=done + 1):
        inputs, labels = (batch[name].to(accelerator.device) for name in ("input_ids", "labels"))
        loss = model(inputs, labels) / labels.numel()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.4f}")
        if step % options.save_every == 0 or step == options.steps:
            accelerator.save_state(str(options.out / "partial"))
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (options.out / "partial").rename(options.out / f"step-{step}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
