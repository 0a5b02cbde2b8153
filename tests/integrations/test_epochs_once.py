"""An epoch holds each row once, through every loader that has epochs; ranks take equal steps.

The sizes are awkward: rows that do not divide by the batch, batches that do not divide by the
ranks. The oracle counts rows.
"""

import json
from collections import Counter
from itertools import islice, product
from random import Random

import pytest
import torch

from penstock import Documents, Packs, Texts, Windows, build
from penstock.errors import PlanError
from penstock.integrations.batches import EpochCuts
from penstock.integrations.multiplex import create_multiplex_dataloader
from penstock.integrations.pytorch import create_dataloaders, create_text_dataloaders
from penstock.testing import assert_resumable

pytest.importorskip("lightning", reason="needs penstock[lightning]")

from penstock.integrations.huggingface import StepLoader
from penstock.integrations.lightning import LLMDataModule, LocalOpenWebTextDataModule

# Rows of one token each are told apart by it: 61 characters, so 61 rows.
LETTERS = "".join(map(chr, range(33, 94)))


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """A store of documents that are one letter and its end each."""
    return build(Texts(list(LETTERS)), tmp_path_factory.mktemp("letters") / "s", tokenizer="bytes")


def trained(batch):
    """The first ids of the rows of a batch that have a label."""
    return batch["input_ids"][(batch["labels"] != -100).any(1), 0].tolist()


def epochs_of(ranks, epochs):
    """The rows of each epoch on all ranks, and the steps of each rank; shapes must agree."""
    found = []
    for _ in range(epochs):
        taken = [list(loader) for loader in ranks]
        assert len({len(batches) for batches in taken}) == 1
        assert {len(batches) for batches in taken} == {len(loader) for loader in ranks}
        for step in zip(*taken, strict=True):
            assert len({batch["input_ids"].shape for batch in step}) == 1
            assert all(trained(batch) for batch in step)  # a rank without a label has no loss
        found.append([row for step in zip(*taken, strict=True) for b in step for row in trained(b)])
    return found


class SomeRows(Documents):
    """The first documents of a store."""

    def __init__(self, store, num_rows):
        super().__init__(store, 4)
        self._num_rows = num_rows

    def __len__(self):
        return self._num_rows

    @property
    def digest(self):
        return f"{super().digest} {self._num_rows}"


AWKWARD = [(10, 4, 1), (10, 3, 1), (61, 8, 1), (10, 2, 2), (11, 2, 2), (17, 2, 4), (9, 2, 4)]


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "world_size", "workers"),
    [*((*sizes, 0) for sizes in AWKWARD), (10, 4, 1, 2), (61, 8, 1, 2)],
)
def test_a_step_loader_gives_every_row_once_an_epoch(
    letters, num_rows, batch_size, world_size, workers
):
    """10 rows in batches of 4 repeated two of them in the second epoch before this was written."""
    rows = SomeRows(letters, num_rows)
    ranks = [
        StepLoader(rows, batch_size, rank=rank, world_size=world_size, num_workers=workers)
        for rank in range(world_size)
    ]
    epochs = epochs_of(ranks, 4)

    assert [sorted(epoch) for epoch in epochs] == [list(range(33, 33 + num_rows))] * 4
    assert len({tuple(epoch) for epoch in epochs}) == 4
    for rank in ranks:
        rank.set_epoch(2)
    assert epochs_of(ranks, 1) == [epochs[2]]


@pytest.mark.parametrize(("num_rows", "world_size"), [(10, 4), (7, 2), (61, 8)])
def test_with_one_row_a_step_fewer_rows_than_ranks_are_left_out(letters, num_rows, world_size):
    rows = SomeRows(letters, num_rows)
    ranks = [StepLoader(rows, 1, rank=rank, world_size=world_size) for rank in range(world_size)]
    epochs = epochs_of(ranks, 12)

    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) == num_rows - num_rows % world_size
    assert len({row for epoch in epochs for row in epoch}) == num_rows  # not the same every time


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_step_loader_resumes_at_every_step_of_two_epochs(letters, drop_last):
    def make(rank, world_size):
        rows = SomeRows(letters, 27)
        topology = {"rank": rank, "world_size": world_size}
        return RealRows(StepLoader(rows, 12 // world_size, drop_last=drop_last, **topology))

    # On up to 3 ranks: 4 would be left 3 rows, and cut the last two steps elsewhere.
    assert_resumable(make, world_sizes=(1, 2, 3))


class RealRows:
    """A loader without the rows that fill up a batch, which only some ranks have."""

    def __init__(self, loader):
        self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict
        self._loader = loader

    def __iter__(self):
        for batch in self._loader:
            real = (batch["labels"] != -100).any(1)
            yield {name: values[real] for name, values in batch.items()}


@pytest.mark.parametrize(
    ("kind", "length", "size"), [(Windows, 7, 14), (Packs, 4, 4), (Documents, 4, 8)]
)
@pytest.mark.parametrize("labels", ["same", "shifted"])
@pytest.mark.filterwarnings('ignore:format="hf" leaves out')
def test_rows_that_fill_up_have_no_labels_in_any_format(letters, kind, length, size, labels):
    # Windows whose stride is given stay as they are; others would overlap for labels="same".
    rows = kind(letters, length, stride=length) if kind is Windows else kind(letters, length)
    assert len(rows) % size in (3, 5)  # of which one rank has one fewer
    ranks = [
        StepLoader(rows, size // 2, rank=rank, world_size=2, labels=labels) for rank in range(2)
    ]
    last = [list(loader)[-1] for loader in ranks]
    filled = [int((batch["labels"] == -100).all(1).sum()) for batch in last]

    assert last[0]["input_ids"].shape == last[1]["input_ids"].shape
    assert sum(filled) == 1
    assert sum(len(b["labels"]) for b in last) - 1 == len(rows) % size


def files(tmp_path, lines):
    path = tmp_path / "lines.txt"
    path.write_text("".join(f"{letter}\n" for letter in lines))
    return path


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "workers"),
    [
        *((10, 4, 0), (61, 8, 0), (13, 5, 0), (12, 4, 0), (10, 4, 2)),
        # The sizes of an epoch do not reach the processes, which get row numbers.
        *(
            pytest.param(*each, 2, marks=pytest.mark.torture)
            for each in ((61, 8), (13, 5), (12, 4))
        ),
    ],
)
def test_a_data_module_gives_every_row_once_an_epoch(tmp_path, num_rows, batch_size, workers):
    text = files(tmp_path, LETTERS[:num_rows])

    def module(**options):
        settings = {"batch_size": batch_size, "num_workers": workers, "data": {"train": text}}
        made = LLMDataModule("bytes", **settings, **options)
        made.setup("fit")
        return made

    made = module()
    loader = made.train_dataloader()
    epochs, states = [], []
    for _ in range(3):
        epochs.append([row for batch in loader for row in batch["input_ids"][:, 0].tolist()])
        states.append(json.loads(json.dumps(made.state_dict())))

    assert [sorted(epoch) for epoch in epochs] == [list(range(33, 33 + num_rows))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [state["data"]["position"] for state in states] == [num_rows, 2 * num_rows, 3 * num_rows]
    for steps in range(len(loader)):
        # Stopped in the second epoch, and resumed in a fresh module: its rest, then the third.
        stopped = module()
        stopped.load_state_dict(states[0])
        taken = list(islice(stopped.train_dataloader(), steps))
        resumed = module()
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        again = resumed.train_dataloader()
        rest, then = ([row for b in again for row in b["input_ids"][:, 0].tolist()] for _ in "ab")
        assert [row for b in taken for row in b["input_ids"][:, 0].tolist()] + rest == epochs[1]
        assert then == epochs[2]
        if workers:
            return  # the same steps, made elsewhere


@pytest.mark.parametrize("options", [{}, {"streaming": False}, {"streaming": False, "workers": 2}])
def test_local_text_gives_every_row_once_an_epoch(tmp_path, options):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} is {number * number}\n" for number in range(97)))
    made = LocalOpenWebTextDataModule(
        *(text, text),
        max_length=16,
        batch_size=8,
        num_workers=options.get("workers", 0),
        streaming=options.get("streaming", True),
        tokenizer="bytes",
    )
    made.prepare_data()
    made.setup("fit")
    loader = made.train_dataloader()
    epochs = [
        [tuple(row) for batch in loader for row in batch["input_ids"].tolist()] for _ in range(3)
    ]
    everything = [tuple(row) for b in made.val_dataloader() for row in b["input_ids"].tolist()]
    made.teardown("fit")

    assert len(everything) % 8
    assert [Counter(epoch) for epoch in epochs] == [Counter(everything)] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("batch_size", "world_size"), [(4, 1), (4, 2), (7, 2), (5, 1)])
def test_a_multiplex_epoch_has_every_example_once(batch_size, world_size, drop_last, shuffle):
    datasets = [("a", [{"n": n} for n in range(23)]), ("b", [{"n": n} for n in range(50, 64)])]
    ranks = [
        create_multiplex_dataloader(
            datasets, batch_size, shuffle, drop_last=drop_last, rank=rank, world_size=world_size
        )
        for rank in range(world_size)
    ]
    for _ in range(3):
        taken = [list(loader) for loader in ranks]
        seen = [number for batches in taken for batch in batches for number in batch["n"]]
        assert len({len(batches) for batches in taken}) == 1
        assert len(set(seen)) == len(seen)
        rest = 37 % (batch_size * world_size) if drop_last else 0
        assert len(seen) == 37 - rest


@pytest.mark.parametrize("create", [create_text_dataloaders, create_dataloaders])
@pytest.mark.parametrize(
    ("num_windows", "batch_size", "world_size"),
    [(35, 1, 3), (141, 4, 3), (141, 4, 2), (7, 2, 5), (25, 8, 3), (24, 4, 3), (9, 4, 2)],
)
def test_validation_takes_equal_steps_on_all_ranks(
    tmp_path, create, num_windows, batch_size, world_size
):
    """[12, 12, 11] steps before this was written: the third rank would have hung the others."""
    train, text = tmp_path / "train.txt", tmp_path / "text.txt"
    train.write_text("x" * 200)
    text.write_text("".join(map(chr, range(200, 200 + num_windows + 2))))
    named = {"seq_length" if create is create_dataloaders else "sequence_length": 2}
    taken = []
    for rank in range(world_size):
        _, loader = create(
            *(train, text),
            tokenizer=Characters(),
            batch_size=batch_size,
            cache_dir=tmp_path,
            rank=rank,
            world_size=world_size,
            **named,
        )
        taken.append([tuple(b.values()) if isinstance(b, dict) else b for b in loader])
        assert len(loader) == len(taken[-1])

    assert len({len(batches) for batches in taken}) == 1
    for step in zip(*taken, strict=True):
        assert len({inputs.shape for inputs, _ in step}) == 1
    windows = [
        inputs[0].item()
        for batches in taken
        for batch in batches
        for inputs, labels in zip(*batch, strict=True)
        if (labels != -100).any()
    ]
    assert sorted(windows) == list(range(200, 200 + num_windows))
    for batches in taken:
        for inputs, labels in batches:
            filled = (labels == -100).any(1)
            assert (labels[filled] == -100).all()
            assert (inputs[filled] == 0).all()
            assert batch_size == 1 or not filled.all()


def module_loaders(made):
    made.setup("fit")
    return made.train_dataloader(), made.val_dataloader()


# Each makes both loaders of two files, in batches of four rows of two tokens.
PAIRS = {
    "create_dataloaders": lambda train, val: create_dataloaders(train, val, "bytes", 4, 2),
    "create_text_dataloaders": lambda train, val: create_text_dataloaders(
        train, val, 4, 2, tokenizer="bytes"
    ),
    "LLMDataModule": lambda train, val: module_loaders(
        LLMDataModule("bytes", 4, 2, num_workers=0, data={"train": train, "val": val})
    ),
    "LocalOpenWebTextDataModule": lambda train, val: module_loaders(
        LocalOpenWebTextDataModule(
            train, val, max_length=2, batch_size=4, num_workers=0, tokenizer="bytes"
        )
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_short_last_batches_in_validation_loaders_and_an_error_in_training(name, tmp_path):
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("".join(f"line {number}\n" for number in range(42)))
    short.write_text("abc\n")

    def sizes(loader):
        return [len(b[0] if isinstance(b, tuple) else b["labels"]) for b in loader]

    few, many = (sizes(PAIRS[name](long, val)[1]) for val in (short, long))
    assert len(few) == 1
    assert few[0] < 4  # fewer rows than a batch
    assert many == [4] * (len(many) - 1) + many[-1:]
    with pytest.raises(PlanError, match="takes 4"):
        list(PAIRS[name](short, long)[0])


class Characters:
    """A tokenizer: a character an id."""

    vocab_size = 1_000

    def encode(self, text):
        return [ord(letter) for letter in text]


def naive_steps(epoch_rows, batch, ranks, drop_last):
    """The steps of an epoch, one by one, from what a step must be."""
    sizes = [batch] * (epoch_rows // batch)
    rest = epoch_rows % batch
    if rest and not drop_last:
        sizes.append(rest)
        missing = ranks - rest
        if missing > 0:
            if batch == ranks or len(sizes) == 1:
                sizes.pop()  # no step can give a row up
            else:
                sizes[-2:] = [sizes[-2] - missing, ranks]
    return sizes


def check_cuts(random):
    ranks = random.choice([1, 1, 2, 3, 4, 8])
    batch = ranks * random.choice([1, 1, 2, 3, 5])
    epoch_rows = random.randint(batch, 6 * batch + random.randint(0, batch))
    drop_last = random.random() < 0.3
    cuts = EpochCuts(epoch_rows, batch, ranks, drop_last)
    sizes = naive_steps(epoch_rows, batch, ranks, drop_last)
    starts = []
    for epoch, (step, size) in product(range(3), enumerate(sizes)):
        starts.append((epoch * epoch_rows + sum(sizes[:step]), size, step))
    assert cuts.num_steps(epoch_rows) == len(sizes)
    for place, (position, size, step) in enumerate(starts):
        assert cuts.begin(position) == position
        assert cuts.rows(position) == size
        assert cuts.step_at(position) == step
        assert {sizes[step + more] for more in range(cuts.num_alike(position))} == {size}
        shares = [cuts.share(position, size, rank) for rank in range(ranks)]
        assert [at for first, stop, _ in shares for at in range(first, stop)] == list(
            range(position, position + size)
        )
        assert {each for _, _, each in shares} == {max(stop - first for first, stop, _ in shares)}
        assert min(stop - first for first, stop, _ in shares) >= 1
        further = random.randint(0, len(starts) - place - 1)
        assert cuts.begin(cuts.after(position, further)) == starts[place + further][0]


def test_steps_of_random_epochs_are_those_of_a_list():
    random = Random(5)
    for _ in range(3_000):
        check_cuts(random)


@pytest.mark.torture
@pytest.mark.timeout(3_600)
def test_steps_of_very_many_random_epochs_are_those_of_a_list():
    random = Random(6)
    for _ in range(300_000):
        check_cuts(random)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_a_trainer_that_wants_fewer_batches_gets_them_across_the_end_of_an_epoch(tmp_path):
    """The real Trainer of Lightning: nothing is left out, and every epoch has its batches."""
    import lightning.pytorch as pl

    seen = []

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def training_step(self, batch, _):
            seen.append((self.current_epoch, batch["input_ids"][:, 0].tolist()))
            return self.weight * batch["input_ids"].sum()

    def train(epochs, **options):
        seen.clear()
        module = LLMDataModule(
            "bytes", 4, num_workers=0, data={"train": files(tmp_path, LETTERS[:22])}
        )
        trainer = pl.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            default_root_dir=tmp_path,
            **options,
        )
        trainer.fit(Model(), datamodule=module)
        return list(seen)

    whole = train(2)
    assert [epoch for epoch, _ in whole] == [0] * 6 + [1] * 6
    for epoch in range(2):
        rows = [row for number, batch in whole if number == epoch for row in batch]
        assert sorted(rows) == list(range(33, 55))
    limited = train(3, limit_train_batches=4)
    assert [epoch for epoch, _ in limited] == [0] * 4 + [1] * 4 + [2] * 4
    assert [rows for _, rows in limited] == [rows for _, rows in whole]


@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_trainer_of_transformers_sees_every_row_once_an_epoch(letters, tmp_path):
    """22 rows in steps of 4; stopped in the second epoch, and resumed by its own count."""
    transformers = pytest.importorskip("transformers", reason="needs penstock[hf]")
    from penstock.integrations.huggingface import RowsTrainer

    class Trainer(RowsTrainer, transformers.Trainer):
        def training_step(self, model, inputs, *rest):
            seen.append((int(self.state.epoch), inputs["input_ids"][:, 0].tolist()))
            return super().training_step(model, inputs, *rest)

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 8:
                control.should_save = control.should_training_stop = True

    def train(folder, *, stop=False, resume=None):
        seen.clear()
        config = transformers.GPT2Config(vocab_size=257, n_positions=8, n_embd=8, n_layer=1)
        args = transformers.TrainingArguments(
            str(tmp_path / folder),
            num_train_epochs=3,
            per_device_train_batch_size=4,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        config.n_head = 2
        trainer = Trainer(
            model=transformers.GPT2LMHeadModel(config),
            args=args,
            train_rows=SomeRows(letters, 22),
            callbacks=[Stop()] if stop else [],
        )
        trainer.train(resume_from_checkpoint=resume)
        return list(seen)

    seen = []
    whole = train("whole")
    before = train("stopped", stop=True)
    after = train("stopped", resume=str(tmp_path / "stopped" / "checkpoint-8"))
    epochs = [
        [row for number, rows in whole if number == each for row in rows] for each in (0, 1, 2)
    ]

    assert [sorted(epoch) for epoch in epochs] == [list(range(33, 55))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len(before) == 8
    assert before + after == whole
