r"""The documents that describe the faces, run as they stand: only their imports are changed.

The documents lie beside the repository and are read when the tests run; nothing of them is
kept here. Each block of the one on multiplexing is one of these:

    script      Python, run in full; names that it leaves to its reader are given
    arguments   fragments such as `num_workers=8,`: given to create_multiplex_dataloader
    signature   the parameters and defaults of a function: compared with ours
    output      what a call prints: compared with what ours prints
    sketch      index arithmetic with `...` in it, which is no Python: compared with ours
    replaced    the generator that is done without, cut short: its parameters are compared
    shell       commands: what they run is here under a name of its own
    drawing     boxes and arrows, which say nothing that could be run
"""

import ast
import inspect
import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.catalog import ARCDataLoader, GSM8KDataLoader, MMLUDataLoader
from penstock.chat.chat import Chat
from penstock.integrations import multiplex, pytorch
from penstock.integrations.hf_format import hf_tokenizer
from penstock.integrations.multiplex import MultiplexDataLoader, create_multiplex_dataloader
from penstock.integrations.sft import SFTCollate, sft_data_generator

ROOT = Path(__file__).parents[2]
MODULES = {
    "dataloaders.multiplex_dataloader": "penstock.integrations.multiplex",
    "dataloaders.arc_dataloader": "penstock.catalog",
    "dataloaders.gsm8k_dataloader": "penstock.catalog",
    "dataloaders.mmlu_dataloader": "penstock.catalog",
}
COMMANDS = {
    "test_multiplex.py": "tests/integrations/multiplex/test_multiplex.py",
    "multiplex_example.py": "examples/multiplex_example.py",
    "chat_sft_multiplex_example.py": "examples/chat_sft_multiplex_example.py",
    "multiplex_dataloader.py": "examples/multiplex_example.py",
}
PARAMETERS = inspect.signature(create_multiplex_dataloader).parameters

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.* argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


def blocks(title):
    """The language and the code of every block of the document that begins with `title`."""
    for path in sorted((ROOT.parent / "shared").glob("*/*.txt")):
        text = path.read_text(encoding="utf-8")
        if text.partition("\n")[0].strip("# ") == title:
            return re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    pytest.skip(f"the document {title!r} is not beside the repository")


@pytest.fixture(scope="module")
def multiplexing():
    """The blocks of the document on multiplexing, by kind."""
    found = {}
    for language, code in blocks("Multiplex DataLoader for PyTorch"):
        found.setdefault(kind_of(language, code), []).append(code)
    return found


def kind_of(language, code):
    if language == "bash":
        return "shell"
    if language != "python":
        return "output" if code.startswith("=") else "drawing"
    if fragments(code):
        return "arguments"
    if code.startswith("create_multiplex_dataloader("):
        return "signature"
    try:
        ast.parse(code)
    except SyntaxError:
        return "sketch" if "index_map = [" in code else "replaced"
    return "script"


def fragments(code):
    """Keyword arguments, a dict for each paragraph or line that holds some; [] for other code."""
    found = []
    for paragraph in re.split(r"\n\s*\n", code):
        lines = [line for line in paragraph.splitlines() if not line.startswith("#")]
        whole = keywords("\n".join(lines))
        found += [keywords(line) for line in lines] if whole is None else [whole]
    return [] if None in found else [each for each in found if each]


def keywords(text):
    """What `text` gives as arguments of a call, if it is nothing else."""
    try:
        call = ast.parse(f"f(\n{text}\n)", mode="eval").body
        given = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError):
        return None
    return given if not call.args and set(given) <= set(PARAMETERS) - {"datasets"} else None


def run(code, given):
    """The names that a script leaves behind; its imports from `dataloaders` are ours."""
    ours = re.sub(
        r"(?m)^from (dataloaders\.\w+) import", lambda m: f"from {MODULES[m[1]]} import", code
    )
    names = dict(given)
    exec(compile(ours, "<document>", "exec"), names)
    return names


class Model(torch.nn.Module):
    """One weight: a prediction of inputs alone, a loss with targets."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, inputs, targets=None):
        guessed = inputs.float() * self.weight
        return guessed if targets is None else (guessed - targets).square().mean()


@pytest.fixture
def given(data, tmp_path, monkeypatch):
    """What the document leaves to its reader: data where the readers look, a model, a tokenizer."""
    monkeypatch.chdir(tmp_path)
    for name, source in {
        "arc/ARC-Easy-Train.jsonl": "arc/genmc_arc_easy_train.jsonl",
        "arc/ARC-Challenge-Train.jsonl": "arc/genmc_arc_challenge_train.jsonl",
        "gsm8k/train.jsonl": "gsm8k/train.jsonl",
        "mmlu/test/abstract_algebra_test.csv": "mmlu/test/abstract_algebra_test.csv",
    }.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with (data / source).open(encoding="utf-8", newline="") as lines:
            path.write_text("".join(islice(lines, 60)), encoding="utf-8", newline="")

    def rows(number):
        return [{"text": f"example {i}", "label": i % 3} for i in range(number)]

    tokenizer = hf_tokenizer("gpt2")
    tokenizer.pad_token = tokenizer.eos_token
    model = Model()
    datasets = [("first", rows(90)), ("second", rows(30))]
    readers = (ARCDataLoader, GSM8KDataLoader, MMLUDataLoader)
    return {
        **{reader.__name__: reader for reader in readers},
        "create_multiplex_dataloader": create_multiplex_dataloader,
        "torch": torch,
        "tokenizer": tokenizer,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-12),
        "criterion": torch.nn.MSELoss(),
        "prepare_inputs": lambda batch: torch.tensor([[len(each)] for each in batch["question"]]),
        "prepare_targets": lambda batch: torch.ones(len(batch["answer"]), 1),
        "your_collate_fn": SFTCollate(Chat("chatml", "gpt2", add_tokens="auto")),
        "device_batch_size": 16,
        "datasets": datasets,
        "dataloader": create_multiplex_dataloader(datasets),
        "arc_data": ARCDataLoader("ARC-Easy").load_data(),
        "arc_easy_data": ARCDataLoader("ARC-Easy").load_data(),
        "arc_challenge_data": ARCDataLoader("ARC-Challenge").load_data(),
        "gsm8k_data": GSM8KDataLoader().load_data(),
        "mmlu_data": MMLUDataLoader("abstract_algebra", "test").load_data(),
        **{f"{name}_data": rows(100) for name in ("small", "source", "easy")},
        **{f"{name}_data": rows(300) for name in ("large", "target", "hard")},
    }


def test_every_block_of_the_document_is_accounted_for(multiplexing):
    assert {kind: len(codes) for kind, codes in multiplexing.items()} == {
        "script": 17,
        "arguments": 9,
        "signature": 1,
        "output": 1,
        "sketch": 1,
        "replaced": 1,
        "shell": 3,
        "drawing": 1,
    }


def asked(code):
    """By the name it is assigned to, the literal arguments of each loader that a script makes."""
    found = {}
    for node in ast.walk(ast.parse(code)):
        call = node.value if isinstance(node, ast.Assign) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "create_multiplex_dataloader":
            literal = [
                (each.arg, ast.literal_eval(each.value))
                for each in call.keywords
                if each.arg not in ("datasets", "collate_fn", "batch_size")
            ]
            found[node.targets[0].id] = dict(literal)
    return found


def shares(options, sizes):
    """What the document promises of each dataset, in percent."""
    weights = options.get("sampling_weights")
    if weights is None:
        weights = [1] * len(sizes) if options.get("sampling_strategy") == "uniform" else sizes
    return [100 * weight / sum(weights) for weight in weights]


def check(loader, options):
    """Compare a loader with the arguments that it was given, as far as they are known."""
    stats = multiplex.get_dataset_stats(loader)["datasets"]
    told = [each["sampling_percentage"] for each in stats]
    assert told == pytest.approx(shares(options, [each["size"] for each in stats]))
    ahead = 2 if loader.num_workers else None  # PyTorch's own default
    assert loader.prefetch_factor == options.get("prefetch_factor", ahead)
    for name in ("num_workers", "pin_memory", "persistent_workers", "drop_last"):
        assert getattr(loader, name) == options.get(name, PARAMETERS[name].default)


def test_every_script_runs_and_its_loaders_are_what_it_asks_for(multiplexing, given, capsys):
    made = []
    for code in multiplexing["script"]:
        names = run(code, given)
        made += [(names[name], options) for name, options in asked(code).items()]
    for loader, options in made:
        assert isinstance(loader, MultiplexDataLoader)
        check(loader, options)
        assert len(next(iter(loader)))

    assert len(made) == 15
    assert given["model"].weight.grad is not None
    shown = capsys.readouterr().out.splitlines()
    sizes = Counter(line for line in shown if line.startswith("Batch size:"))
    assert sizes == {"Batch size: 8": 18, "Batch size: 6": 1}
    assert shown.count("Multiplex DataLoader Statistics") == 2


def test_every_fragment_is_taken_as_arguments(multiplexing, given):
    listed = [each for code in multiplexing["arguments"] for each in fragments(code)]
    for options in listed:
        check(create_multiplex_dataloader(given["datasets"], **options), options)

    assert len(listed) == 13
    assert sum("num_workers" in each for each in listed) == 9


def test_the_signature_is_that_of_the_document(multiplexing):
    (code,) = multiplexing["signature"]
    (told,) = ast.parse(f"def {code.rstrip()}: ...").body
    names = [each.arg for each in told.args.args]
    defaults = [ast.literal_eval(each) for each in told.args.defaults]
    ours = [each for each in PARAMETERS.values() if each.kind is each.POSITIONAL_OR_KEYWORD]

    assert [each.name for each in ours] == names
    assert [each.default for each in ours[1:]] == defaults
    assert ours[0].default is inspect.Parameter.empty


def test_the_table_is_that_of_the_document(multiplexing, capsys):
    sizes = {"arc": 2_300, "gsm8k": 8_000, "mmlu": 50}
    pairs = [(name, [{"n": n} for n in range(size)]) for name, size in sizes.items()]
    multiplex.print_dataloader_stats(create_multiplex_dataloader(pairs))

    assert [capsys.readouterr().out] == multiplexing["output"]


def test_the_index_map_holds_what_the_document_sketches(multiplexing):
    (code,) = multiplexing["sketch"]
    sketched = ast.literal_eval(re.search(r"index_map = (\[.*?\n\])", code, re.DOTALL)[1])
    pairs = [("a", [{"n": n} for n in range(100)]), ("b", [{"n": n} for n in range(50)])]
    found = sorted(multiplex.MultiplexDataset(pairs).index_map)

    assert {pair for pair in sketched if pair is not ...} < set(found)
    assert (found[0], found[-1]) == (sketched[0], sketched[-1])
    assert len(found) == len(set(found)) == 150


def test_the_generator_that_is_replaced_and_the_commands_are_here(multiplexing):
    (code,) = multiplexing["replaced"]
    name, told = re.match(r"def (\w+)\((.*?)\):", code).groups()
    assert name == sft_data_generator.__name__
    assert list(inspect.signature(sft_data_generator).parameters)[:2] == told.split(", ")

    commands = set(re.findall(r"python3 (\w+\.py)", "\n".join(multiplexing["shell"])))
    assert commands == set(COMMANDS)
    assert all((ROOT / path).is_file() for path in COMMANDS.values())


@pytest.fixture
def by_hand():
    """The names of the document on hand-written loaders, after its three definitions."""
    codes = [code for language, code in blocks("Understanding Data Loading in PyTorch") if language]
    names = {}
    for code in codes[:3]:
        exec(compile(code, "<document>", "exec"), names)
    return SimpleNamespace(names=names, usage=codes[3], num_blocks=len(codes))


TEXTS = ["To be, or not to be.", "", " that is\n\nthe question ", "é\u2028naïve"] * 8


@pytest.mark.parametrize("is_jsonl", [True, False])
def test_items_are_those_of_the_documents_own_class(by_hand, letters, write, is_jsonl):
    path = write("a.jsonl", TEXTS) if is_jsonl else write("a.txt", "\r\n\n\n".join(TEXTS) + "\n")
    theirs = by_hand.names["TransformerDataset"](path, letters, 16, is_jsonl)
    ours = pytorch.TransformerDataset(path, letters, 16, is_jsonl)

    assert len(ours) == len(theirs) > 300
    assert ours.samples == theirs.samples
    for mine, other in zip(ours, theirs, strict=False):
        assert list(mine) == list(other)
        assert all(torch.equal(mine[key], other[key]) for key in other)


def test_the_documents_functions_run_on_our_classes(by_hand, letters, write, capsys):
    names = by_hand.names
    names["TransformerDataset"] = pytorch.TransformerDataset
    path = write("a.jsonl", TEXTS)
    for loader in names["create_dataloaders"](path, path, letters, seq_length=16):
        names["test_dataloader"](loader)
        told = capsys.readouterr().out
        pytorch.test_dataloader(loader)
        ours = capsys.readouterr().out.splitlines(keepends=True)

        assert told.count("alignment check: True") == 3
        assert "".join(line for line in ours if not line.startswith("  Labels:")) == told
    theirs = inspect.signature(names["create_dataloaders"]).parameters.values()
    ours = inspect.signature(pytorch.create_dataloaders).parameters.values()
    assert [(each.name, each.default) for each in theirs] == [
        (each.name, each.default) for each in islice(ours, 6)
    ]


def test_the_usage_loop_runs_as_it_stands(by_hand, letters, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "processed").mkdir(parents=True)
    for name in ("train", "validation"):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
        (tmp_path / "data" / "processed" / f"{name}.jsonl").write_text(lines)
    given = {
        "YourTokenizer": SimpleNamespace(load=lambda path: letters),
        "create_dataloaders": pytorch.create_dataloaders,
        "num_epochs": 2,
        "device": "cpu",
    }
    names = run(by_hand.usage, given)

    assert by_hand.num_blocks == 4
    assert names["inputs"].shape == names["labels"].shape == (16, 128)
    assert torch.equal(names["inputs"][:, 1:], names["labels"][:, :-1])
    assert names["train_loader"].num_workers == 4
    assert names["epoch"] == 1
