"""Races of training recipes on one GPU, each for the same time: held-out loss against seconds.

    python benchmarks/race.py prepare DATA      text of this machine, a vocabulary of it, stores
    python benchmarks/race.py speed --length 512 --vocabulary 32000     tokens/s of the model
    python benchmarks/race.py run DATA --seeds 0 1 --json race.json
    python benchmarks/race.py chart race.json --svg race.svg            the table and the curves

The entries are the CS336 baseline's shape, a plain GPT-2 124M with AdamW, the recipe of an earlier
revision, and today's recipe `openwebtext-h100`. An entry "new: NAME" is today's recipe with
one ingredient taken out.

Each run is a process of `penstock.train` with `max_minutes`, or with `--steps`. Its seconds begin
after its packages are imported and its stores are opened, so loading, compilation and validations
count. `--warm` first fills torch's compilation cache, which all runs share. `--cold` gives each run
an empty one. The next process imports its packages while the one before trains, and waits for a
lock, so that only one uses the GPU. `--before SRC` is the source directory of the earlier revision:
git worktree add OLD REVISION, then OLD/src. The JSON file is written after each run.
"""

import argparse
import fcntl
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "src/penstock/recipes" / "openwebtext-h100.toml"
LENGTH, ROWS, VOCABULARY = 512, 64, 32_000
MICRO_TOKENS = 65_536  # of a micro-batch, as batch_size="auto" chooses on an H200
PEAK = 989e12  # bf16 operations per second of an H100 or H200
_NEW = tomllib.loads(RECIPE.read_text())
_PLAIN = {"optimizer": "adamw", "warmup_steps": 100, "weight_decay": 0.1, "floor": 0.0}


def plain(rate):
    """GPT-2 124M as it was published, with AdamW."""
    return {"size": "124M"}, {**_PLAIN, "learning_rate": rate}


def new(model=None, **optimization):
    """The recipe with some settings changed."""
    return {**_NEW["model"], **(model or {})}, {**_NEW["optimization"], **optimization}


# The name of each entry, its tables [model] and [optimization].
ENTRIES = {
    # SwiGLU of width 1,344 has as many weights as the MLP of width 2,048 here.
    "cs336": (
        {
            "size": "124M",
            "layers": 4,
            "heads": 16,
            "width": 512,
            "positions": "rotary",
            "norm": "rms",
            "bias": False,
            "tied": False,
        },
        {**_PLAIN, "learning_rate": 1e-3},
    ),
    "gpt2 1e-3": plain(1e-3),
    "gpt2 2e-3": plain(2e-3),
    "gpt2 4e-3": plain(4e-3),
    "before": (
        {"size": "124M", "positions": "rotary", "qk_norm": True, "activation": "relu2"},
        dict(_NEW["optimization"]),
    ),
    "new": new(),
    "new: learned positions": new({"positions": "learned"}),
    "new: no norm of queries and keys": new({"qk_norm": False}),
    "new: GELU": new({"activation": "gelu"}),
    "new: 12 heads": new({"heads": 12}),
    "new: layer norm": new({"norm": "layer"}),
    "new: biases": new({"bias": True}),
    "new: no zero_init": new({"zero_init": False}),
    "new: AdamW at 2e-3": new(optimizer="adamw", learning_rate=2e-3),
    "new: untied": new({"tied": False}),
}


def toml(tables):
    """Tables of strings, numbers, booleans and lists as TOML."""
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )


def recipe(data, entry, seed, output, **training):
    """Write the recipe of a run and return its path."""
    model, optimization = ENTRIES[entry]
    tables = {
        "data": {
            "train": str(data / "stores/train"),
            "val": str(data / "stores/val"),
            "length": LENGTH,
            "seed": seed,
        },
        "model": model,
        "optimization": optimization,
        "training": {
            "batch_size": ROWS,
            "precision": "bfloat16",
            "compile": True,
            "val_every": 75,
            "val_rows": 512,
            "save_every": 1_000_000,
            "seed": seed,
            **training,
        },
    }
    path = output.with_suffix(".toml")
    path.write_text(f"output = {json.dumps(str(output))}\n" + toml(tables))
    return path


def prepare(options):
    """Write the text, train a vocabulary on a part of it, and build the stores."""
    import corpus

    import penstock as ps
    from penstock.tokenize import train_tokenizer

    data, start = options.data, time.perf_counter()
    data.mkdir(parents=True, exist_ok=True)
    text, tokenizer = data / "corpus.txt", data / "tokenizer.json"
    total = 0
    with text.open("w", encoding="utf-8", newline="") as file:
        for document in corpus.repeated(corpus.documents(options.roots or corpus.ROOTS)):
            file.write(document + corpus.SEPARATOR)
            total += len(document.encode())
            if total >= options.bytes:
                break
    print(f"text: {time.perf_counter() - start:.0f} s", flush=True)
    train_tokenizer(
        text, tokenizer, vocab_size=VOCABULARY, max_bytes=options.vocabulary_bytes, overwrite=True
    )
    print(f"vocabulary: {time.perf_counter() - start:.0f} s", flush=True)
    # By their digests, so that equal documents are on one side.
    ps.build(text, data / "stores", tokenizer=str(tokenizer), split="hash:0.02", overwrite=True)
    for side in ("train", "val"):
        store = ps.TokenStore(data / "stores" / side)
        print(f"{side}: {store.num_tokens:,} tokens", flush=True)
    print(f"stores: {time.perf_counter() - start:.0f} s", flush=True)


def one(options):
    """Train one entry as soon as no other process uses the GPU."""
    import torch

    from penstock.recipe import read_recipe
    from penstock.train import RunReport, train
    from penstock.train.command import open_job

    begun, missing = 0.0, []

    def note(logged):
        # The clock of the earlier revision starts after its model is loaded.
        if isinstance(logged, RunReport) and not missing:
            missing.append(time.perf_counter() - begun - logged.progress.seconds)
            print(f"missing: {missing[0]:.3f} s", flush=True)

    job = open_job(read_recipe(options.recipe, {}), lambda _: None)
    torch.zeros(1, device=options.device)
    with options.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH if options.shared else fcntl.LOCK_EX)
        print("started", flush=True)
        begun = time.perf_counter()
        train(job, device=options.device, log=note)


def start(options, entry, seed, output, *, shared, **training):
    """Start a process that trains an entry."""
    path = recipe(options.data, entry, seed, output, **training)
    environment = dict(os.environ, PYTHONPATH=os.environ.get("PYTHONPATH", str(ROOT / "src")))
    if entry == "before" and options.before:
        others = environment["PYTHONPATH"].split(os.pathsep)[1:]
        environment["PYTHONPATH"] = os.pathsep.join([str(options.before), *others])
    if options.cold:
        environment["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(dir=options.output)
    command = [sys.executable, __file__, "one", str(path), "--lock", str(options.data / "gpu.lock")]
    command += ["--device", options.device, *(["--shared"] if shared else [])]
    with output.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def warm(options):
    """Compile the models of all entries, a few at a time."""
    begun, waiting, running = time.perf_counter(), list(dict.fromkeys(options.entries)), []
    while waiting or running:
        running = [each for each in running if each.poll() is None]
        while waiting and len(running) < options.together:
            output = options.output / f"warm-{len(waiting)}"
            shutil.rmtree(output, ignore_errors=True)
            running.append(start(options, waiting.pop(0), 0, output, shared=True, steps=2))
        time.sleep(0.1)
    print(f"compiled: {time.perf_counter() - begun:.0f} s", flush=True)


def run(options):
    """Run all entries with all seeds, and print the results."""
    options.output.mkdir(parents=True, exist_ok=True)
    if options.warm:
        warm(options)
    runs = [(entry, seed) for seed in options.seeds for entry in options.entries]
    found = json.loads(options.json.read_text()) if options.json.exists() else []
    processes = []
    for number, (entry, seed) in enumerate(runs):
        if number:  # the process before this one has the lock
            log = processes[-1][2].with_suffix(".log")
            while "started" not in log.read_text() and processes[-1][3].poll() is None:
                time.sleep(0.05)
        # At most two: one that trains, and one that waits for it.
        if number > 1:
            found += [finished(*processes[number - 2], options)]
            options.json.write_text(json.dumps(found))
        output = options.output / f"{number:02d}"
        shutil.rmtree(output, ignore_errors=True)
        end = {"steps": options.steps} if options.steps else {"max_minutes": options.seconds / 60}
        process = start(options, entry, seed, output, shared=False, **end)
        processes.append((entry, seed, output, process))
    for each in processes[max(0, len(processes) - 2) :]:
        found += [finished(*each, options)]
        options.json.write_text(json.dumps(found))
    table(found)


def finished(entry, seed, output, process, options):
    """Wait for a run and return its losses."""
    process.wait()
    path = output / "metrics.jsonl"
    if process.returncode or not path.exists():
        print(f"{entry}, seed {seed}: failed", output.with_suffix(".log").read_text()[-800:])
        return {"entry": entry, "seed": seed, "end": ending(options), "points": []}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    validations = [each for each in lines if each["kind"] == "val"]
    missing = float(re.search(r"missing: (\S+)", output.with_suffix(".log").read_text())[1])
    points = [(each["seconds"] + missing, each["val_loss"]) for each in validations]
    steps = [each for each in lines if each["kind"] == "step"]
    speed = statistics.median(each["tokens_per_second"] for each in steps[20:] or steps)
    shutil.rmtree(output)
    result = {
        "entry": entry,
        "seed": seed,
        "end": ending(options),
        "start_up": points[0][0],
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
        "tokens_per_second": speed,
        "points": points,
    }
    print(f"{entry}, seed {seed}: {points[-1][1]:.4f} after {points[-1][0]:.0f} s", flush=True)
    return result


def ending(options):
    """When the runs end, for the tables."""
    return f"{options.steps:,} steps" if options.steps else f"{options.seconds:.0f} s"


def reached(points, loss):
    """When a run first had a loss, interpolated between two validations; None if never."""
    for (before, high), (after, low) in itertools.pairwise(points):
        if low <= loss < high:
            return before + (after - before) * (high - loss) / (high - low)
    return None


def table(found):
    """Print the final losses, and when "new" reached those of the other entries."""
    finals = {}
    for each in found:
        if each["points"]:
            finals.setdefault((each["entry"], each["end"]), []).append(each)
    for (entry, end), runs in finals.items():
        losses = [each["points"][-1][1] for each in runs]
        speed = statistics.median(each["tokens_per_second"] for each in runs)
        print(
            f"{entry:<34} {end:>9}: loss {statistics.mean(losses):.4f} "
            f"({', '.join(f'{each:.4f}' for each in losses)}), "
            f"{statistics.mean(each['points'][-1][0] for each in runs):.1f} s, "
            f"{runs[0]['steps']:,} steps, {speed:,.0f} tokens/s"
        )
    for (entry, end), runs in finals.items():
        if not entry.startswith("new") and ("new", end) in finals:
            goal = statistics.mean(each["points"][-1][1] for each in runs)
            total = statistics.mean(each["points"][-1][0] for each in runs)
            times = [reached(each["points"], goal) for each in finals["new", end]]
            shares = [f"{each / total:.2f}" if each else "never" for each in times]
            print(f'{end}: "new" has the loss of "{entry}" after {", ".join(shares)} of its time')


def chart(options):
    """Print the table of all runs, and draw the curves of those that end alike."""
    from penstock.charts import LINE, draw, series

    found = [each for path in options.json for each in json.loads(path.read_text())]
    table(found)
    found = [each for each in found if each["points"] and each["end"] == options.end]
    names = list(dict.fromkeys(each["entry"] for each in found))

    def paint(axes):
        for each in found:
            number = names.index(each["entry"])
            label = each["entry"] if each["seed"] == found[0]["seed"] else None
            seconds, losses = zip(*each["points"], strict=True)
            axes[0].plot(seconds, losses, color=series(number), lw=1.4, label=label)
        axes[0].grid(axis="y", color=LINE, lw=0.6)
        axes[0].set(xlabel="seconds", ylabel="held-out loss", ylim=(options.low, options.high))
        axes[0].legend(loc="upper right")

    title = f"{options.end} each, {len({each['seed'] for each in found})} seeds"
    options.svg.write_text(draw(paint, size=(720, 400), title=title, in_file=True))


def speed(options):
    """Tokens per second of the recipe's model: with the optimizer, and without.

    Steps of two micro-batches, and of as many as a step of the recipe has: half a million tokens.
    """
    import torch

    from penstock.train import Learner, OptimizationConfig, TrainingConfig, TrainingJob, World
    from penstock.train.config import model_config

    torch.set_float32_matmul_precision("high")
    if options.autotune:
        torch._inductor.config.max_autotune = True
    if options.cudnn:
        torch.backends.cuda.enable_flash_sdp(False)
    tables = dict(ENTRIES[options.entry][0])
    size = tables.pop("size")
    model = model_config(size, length=options.length, vocab_size=options.vocabulary, **tables)
    settings = {**ENTRIES[options.entry][1]}
    job = TrainingJob(
        plan=None,
        val=None,
        model=model,
        training=TrainingConfig(steps=1, batch_size=1, precision="bfloat16", compile=True),
        optimization=OptimizationConfig(**settings),
        output=Path("unused"),
    )
    learner = Learner(job, World(0, 1, torch.device(options.device)))
    learner.start()
    rows = MICRO_TOKENS // options.length
    tokens = torch.randint(options.vocabulary, (rows, options.length), device=options.device)

    def step(micro, optimize):
        parts = [[tokens, tokens, None, None]] * micro
        learner.compute_gradients(parts, torch.tensor(tokens.numel() * micro))
        if optimize:
            learner.optimizers.step(0.1)
        learner.optimizers.zero_grad()

    for each in (True, True, False):
        step(1, each)
    speeds = {each: [] for each in itertools.product(options.micro, (True, False))}
    with options.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(options.repetitions):
            for (micro, optimize), times in speeds.items():
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(options.micro_batches // micro):
                    step(micro, optimize)
                torch.cuda.synchronize()
                total = tokens.numel() * options.micro_batches
                times.append(total / (time.perf_counter() - start))
    for (micro, optimize), times in speeds.items():
        middle = statistics.median(times)
        what = "with the optimizer" if optimize else "without the optimizer"
        print(
            f"{options.entry}, {micro} x {rows} x {options.length}, {options.vocabulary:,} ids"
            f"{', autotune' if options.autotune else ''}{', cuDNN' if options.cudnn else ''}, "
            f"{what}: {middle:,.0f} tokens/s ({min(times):,.0f} to {max(times):,.0f}), "
            f"{model.flops_per_token * middle / PEAK:.1%} of peak",
            flush=True,
        )
    if options.profile:
        kernels(lambda: step(options.micro[-1], optimize=True))


def kernels(step, steps=2):
    """Print how long each kernel takes in a step, and how long none runs."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    # Besides kernels, the GPU's events are spans of named code, which contain kernels.
    spans = ("Optimizer.", "ProfilerStep", "##", "Compiled", "Inductor")
    times, intervals = {}, []
    for event in found.events():
        named = any(each in event.name for each in spans)
        if event.device_type == DeviceType.CUDA and not named:
            times.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1000 / steps)
            intervals.append((event.time_range.start, event.time_range.end))
    total = (max(end for _, end in intervals) - min(intervals)[0]) / 1000 / steps
    idle = total - sum(map(sum, times.values()))
    print(f"{total:9.2f} ms a step; {idle:.2f} ms without a kernel")
    for name, each in sorted(times.items(), key=lambda item: -sum(item[1])):
        print(f"{sum(each):9.2f} ms {sum(each) / total:6.1%} {len(each) // steps:5d} x {name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    commands = parser.add_subparsers(required=True)
    add = commands.add_parser("prepare")
    add.set_defaults(action=prepare)
    add.add_argument("data", type=Path)
    add.add_argument("--bytes", type=int, default=600_000_000)
    add.add_argument("--vocabulary-bytes", type=int, default=100_000_000)
    add.add_argument("--roots", nargs="+")
    add = commands.add_parser("one")
    add.set_defaults(action=one)
    add.add_argument("recipe")
    add.add_argument("--lock", type=Path, required=True)
    add.add_argument("--shared", action="store_true")
    add.add_argument("--device", default="cuda")
    add = commands.add_parser("run")
    add.set_defaults(action=run)
    add.add_argument("data", type=Path)
    add.add_argument("--entries", nargs="+", default=["cs336", "gpt2 2e-3", "before", "new"])
    add.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    add.add_argument("--seconds", type=float, default=90)
    add.add_argument("--steps", type=int, help="end after these steps, not after --seconds")
    add.add_argument("--before", type=Path)
    add.add_argument("--warm", action="store_true")
    add.add_argument("--cold", action="store_true")
    add.add_argument("--together", type=int, default=5, help="models to compile at a time")
    add.add_argument("--output", type=Path, default=Path("runs/race"))
    add.add_argument("--json", type=Path, required=True)
    add.add_argument("--device", default="cuda")
    add = commands.add_parser("chart")
    add.set_defaults(action=chart)
    add.add_argument("json", type=Path, nargs="+")
    add.add_argument("--svg", type=Path, required=True)
    add.add_argument("--end", default="90 s", help="which runs: those that end like this")
    add.add_argument("--low", type=float)
    add.add_argument("--high", type=float)
    add = commands.add_parser("speed")
    add.set_defaults(action=speed)
    add.add_argument("--entry", choices=list(ENTRIES), default="new")
    add.add_argument("--length", type=int, default=1024)
    add.add_argument("--micro", type=int, nargs="+", default=[2, 8], help="micro-batches of a step")
    add.add_argument("--vocabulary", type=int, default=50_257)
    add.add_argument("--micro-batches", type=int, default=16, help="in a repetition")
    add.add_argument("--repetitions", type=int, default=5)
    add.add_argument("--autotune", action="store_true")
    add.add_argument("--cudnn", action="store_true")
    add.add_argument("--profile", action="store_true", help="print the time of each kernel")
    add.add_argument("--lock", type=Path, default=Path("/tmp/race-speed.lock"))
    add.add_argument("--device", default="cuda")
    options = parser.parse_args()
    options.action(options)


if __name__ == "__main__":
    main()
