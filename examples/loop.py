"""Train a small GPT-2 on a text file. Stop it at any time, and run it again to resume.

    python examples/loop.py input.txt --steps 200

The loop reads `penstock.Loader` directly. The state of the loader is a small JSON object that is
saved beside the model. The resumed run reads the rows that come next, also with another batch size.
"""

import argparse
from pathlib import Path

import torch

import penstock as ps
from penstock.train import GPT, ModelConfig


def main() -> None:
    """Train, and print the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/loop"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--tokenizer", default="gpt2")
    options = parser.parse_args()

    # Tokenizes the file once. The next call finds the store and returns at once.
    store = ps.build(options.text, options.out / "store", tokenizer=options.tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = ps.Loader(
        ps.Windows(store, length=64), batch_size=8, seed=17, steps=options.steps, device=device
    )
    torch.manual_seed(0)
    model = GPT(ModelConfig(layers=2, heads=2, width=64, length=64, vocab_size=store.vocab_size))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    checkpoint, done = options.out / "checkpoint.pt", 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        done = saved["step"]

    for step, batch in enumerate(loader, start=done + 1):
        loss = model(batch["inputs"], batch["targets"]) / batch["targets"].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
        if step % options.save_every == 0 or step == options.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"data": loader.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)  # a kill leaves the old or the new


if __name__ == "__main__":
    main()
