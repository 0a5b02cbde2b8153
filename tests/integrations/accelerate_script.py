"""One of two processes that train under accelerate; writes the rows of each step on both.

    python accelerate_script.py STORE FOLDER      with RANK, WORLD_SIZE and MASTER_PORT set

Two epochs, with a checkpoint of accelerate's in the middle of the first; then what comes after
the checkpoint, once by the loader's own state and once by accelerate's skipping.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches

from penstock import Windows
from penstock.integrations.huggingface import StepLoader

SAVED = 3


def main():
    store, folder = sys.argv[1:]
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    rows = Windows(store, 17)

    def make():
        ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
        return StepLoader(rows, 4, **ranks)

    def seen(batches):
        """The rows of all ranks, without those that fill up the end of an epoch."""
        found = []
        for batch in batches:
            rows, labels = (accelerator.gather(batch[name]) for name in ("input_ids", "labels"))
            found.append(rows[(labels != -100).any(1)].tolist())
        return found

    model = torch.nn.Embedding(300, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = make()
    model, optimizer, loader = accelerator.prepare(model, optimizer, made)
    assert loader is made
    accelerator.register_for_checkpointing(loader)
    whole = []
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(batch["input_ids"]).sum())
            optimizer.step()
            optimizer.zero_grad()
            whole += seen([batch])
            if len(whole) == SAVED:
                accelerator.save_state(str(Path(folder) / "saved"))
    accelerator.load_state(str(Path(folder) / "saved"))
    resumed = [step for _ in range(2) for step in seen(loader)]
    skipped = make()
    skipped.set_epoch(1)
    told = {
        "whole": whole,
        "resumed": resumed,
        "skipped": seen(skip_first_batches(skipped, SAVED)),
        "weights": accelerator.unwrap_model(model).weight.sum().item(),
    }
    name = f"rank{accelerator.process_index}.json"
    (Path(folder) / name).write_text(json.dumps(told))
    # gloo's thread frees the tensors of the last `gather` after it has finished, and needs the GIL
    # for that. The end of the process group waits for this thread, with the GIL. A barrier takes
    # longer than the thread needs; without it one run in three never ended on a busy machine.
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
