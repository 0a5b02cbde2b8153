"""Train a small GPT-2 on a text file with FSDP2, as torchtitan does. Run it again to resume.

    torchrun --nproc-per-node 2 examples/loop_fsdp2.py input.txt --steps 200

Weights and the state of the optimizer are sharded over a `DeviceMesh`, which the loader takes too.
All processes write the checkpoint, and the resumed run may have another number of them: the rows of
each step are the same.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock as ps
from penstock.train import GPT, ModelConfig


def load(directory: Path, model: GPT, optimizer: torch.optim.Optimizer, loader: ps.Loader) -> None:
    """Load a checkpoint; each process reads its share of the weights."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "data": loader.state_dict()}
    dcp.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    loader.load_state_dict(state["data"])


def save(directory: Path, model: GPT, optimizer: torch.optim.Optimizer, loader: ps.Loader) -> None:
    """Save a checkpoint. A kill while it is written leaves no directory of its name."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "data": loader.state_dict()}
    partial = directory.with_name("partial")
    dcp.save(state, checkpoint_id=partial)
    if dist.get_rank() == 0:
        partial.rename(directory)


def main() -> None:
    """Train, and print the mean loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/fsdp2"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--tokenizer", default="gpt2")
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
    first = dist.get_rank() == 0
    if first:  # one process tokenizes, and the others open the store
        ps.build(options.text, options.out / "store", tokenizer=options.tokenizer)
    dist.barrier()
    store = ps.TokenStore(options.out / "store")
    loader = ps.Loader(
        ps.Windows(store, length=64),
        global_batch_size=8,
        seed=17,
        steps=options.steps,
        mesh=mesh,
        device=device,
    )

    torch.manual_seed(0)  # all processes make the same weights, and keep a share of them
    model = GPT(ModelConfig(layers=2, heads=2, width=64, length=64, vocab_size=store.vocab_size))
    model.to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    saved = sorted(options.out.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    done = int(saved[-1].name.split("-")[1]) if saved else 0
    if saved:
        load(saved[-1], model, optimizer, loader)

    for step, batch in enumerate(loader, start=done + 1):
        loss = model(batch["inputs"], batch["targets"]) / batch["targets"].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh.size()
        dist.all_reduce(mean)
        if first:
            print(f"step {step}: loss {mean.item():.4f}", flush=True)
        if step % options.save_every == 0 or step == options.steps:
            save(options.out / f"step-{step}", model, optimizer, loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
