"""Advice in messages can be followed: the arguments, functions and commands that they name exist.

Every string of the package that is no docstring is taken for a message. It may name

    penstock build --max-bad    a command and its options: the command must have them
    build(…, max_bad=…)         a function and its arguments: the function must have them
    max_bad=0.1, max_bad        an argument of a function that the text names, such as
                                `penstock.build`; otherwise of every function that reaches the text
    --max-bad                   an option of a command that the text names; otherwise of every
                                command that reaches the text

REACHED_FROM says through which functions and commands a user reaches the text of a module. A value
that a message repeats, such as `max_bad={max_bad}` in an f-string, was given by the user. So it is
enough that one of these functions has the argument.
"""

import ast
import inspect
import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path

from typer.main import get_command

import penstock
from penstock.cli.app import app

PACKAGE = Path(penstock.__file__).parent
PUBLIC = json.loads(Path(__file__).with_name("public_names.json").read_text(encoding="utf-8"))
COMMANDS = {f"penstock {name}": each for name, each in get_command(app).commands.items()}
GROUP = COMMANDS.pop("penstock tokenizer")
COMMANDS |= {f"penstock tokenizer {name}": each for name, each in GROUP.commands.items()}

MODULES = ["LLMDataModule", "LocalOpenWebTextDataModule"]
DATALOADERS = ["create_dataloaders", "create_text_dataloaders"]
DATASETS = ["TextDataset", "TransformerDataset", *DATALOADERS]
# What reads text files, and what builds stores. Most of it has few of the arguments of `build`.
READERS = ["build", "stream", "train_tokenizer", "check", "preprocess", *MODULES]
READERS += ["penstock build", "penstock check", "penstock train", "penstock tokenizer train"]
BUILDERS = ["build", "stream", "preprocess", "build_stores", "build_dataset", *MODULES, *DATASETS]
BUILDERS += ["penstock build", "penstock train", "penstock fetch"]
GIVES_TOKENIZER = ["load_tokenizer", "build", "stream", "penstock build"]
# By module, package, or "module:function" for a part of a module. Text that is not listed here is
# reached through the public function or class around it.
REACHED_FROM = {
    "catalog": ["fetch", "LLMDataModule", "penstock fetch"],
    "catalog.fetch:_train_ratio": ["fetch", "penstock fetch"],  # nothing else gives a split
    "catalog.question_sets": ["ARCDataLoader", "GSM8KDataLoader", "MMLUDataLoader"],
    "chat": ["Chat", "render", "penstock build"],
    "check": ["check", "penstock check"],
    "cli.build": ["penstock build"],
    "cli.decode": ["penstock decode"],
    "cli.fetch": ["penstock fetch"],
    "cli.inspect": ["penstock inspect"],
    "cli.report": ["penstock report"],
    "cli.when": ["penstock when"],
    "cli.fetch:_next": ["penstock build"],  # pieces of that command
    "cli.token_files": ["penstock info", "penstock decode", "penstock verify"],
    "formats": ["open_tokens", "penstock info", "penstock decode", "penstock verify"],
    "formats.export": ["export_tokens", "penstock export"],
    "formats.imports": ["import_tokens", "penstock import"],
    "inspect": ["penstock inspect", "penstock when"],
    "integrations.batch_size": MODULES,
    "integrations.batches": [*MODULES, "StepLoader", "RowsTrainer"],
    "integrations.hf_datasets": ["LLMDataModule", "build_dataset"],
    "integrations.lightning": MODULES,
    "integrations.lightning.sides": ["LLMDataModule"],
    "integrations.lightning.base:ResumableDataModule.setup": ["LLMDataModule.setup"],
    # Only this module can lack a side, or cuts rows.
    "integrations.lightning.base:ResumableDataModule.val_dataloader": ["LLMDataModule"],
    "integrations.lightning.base:truncation": ["LLMDataModule"],
    "integrations.multiplex": ["create_multiplex_dataloader", "MultiplexDataset"],
    "integrations.multiplex.loader": ["create_multiplex_dataloader"],
    "integrations.multiplex.run": ["create_multiplex_dataloader"],
    "integrations.multiplex.run:MultiplexRun.set_epoch": ["MultiplexDataLoader.set_epoch"],
    "integrations.pytorch": DATASETS,
    "integrations.pytorch.batches": ["pad_collate"],
    "integrations.pytorch.loaders": DATALOADERS,
    "integrations.pytorch.samples": ["TransformerDataset", "create_dataloaders"],
    "integrations.stores": [*MODULES, *DATASETS],
    "integrations.stores:_given_store": MODULES,
    "integrations.stores:stream_of": MODULES,
    "loader": ["Loader"],
    "loader.dataloader": ["create_multiplex_dataloader", *DATALOADERS],
    "loader.dataloader:as_dataloader": ["as_dataloader", "Loader"],
    "order": ["Plan"],
    "order.arguments:read_continuation": ["Plan.continued"],
    "order.steps": ["Loader"],
    "preprocess:main": ["python -m penstock.preprocess"],
    "recipe": ["penstock train"],
    "rows.pieces": ["Packs", "Documents"],
    "sources": READERS,
    "store": BUILDERS,
    # Nothing else gives these arguments.
    "store.chats:chat_stage": ["build"],
    "store.chats:columns_of": ["build", "penstock build"],
    "store.existing:_refuse_append": ["build", "penstock build"],
    "store.existing:_refuse_other_split": ["build", "penstock build", "penstock train"],
    "options": ["build", "penstock build"],
    "store.memory": ["build", "penstock build"],
    "store.part": ["build", "penstock build"],
    "store.processes": ["build", "penstock build"],
    "store.reader": ["Chat"],
    "streaming": ["stream"],
    "tokenize": [*BUILDERS, *GIVES_TOKENIZER, "check", "Chat", "penstock check"],
    "tokenize.tokenizer": GIVES_TOKENIZER,
    "tokenize.tokenizer:_from_object": ["load_tokenizer"],
    "tokenize.tokenizer:tokenizer_of": ["TokenStore.decode", "Loader.explain", "penstock decode"],
    "tokenize.tokenizer:_find": ["TokenStore.decode", "Loader.explain", "penstock decode"],
    "tokenize.train": ["train_tokenizer", "penstock tokenizer train"],
    "train": ["penstock train"],
    "transforms.fill_in_the_middle": ["FillInTheMiddle"],
    "transforms.transform:_checked": ["Transformed"],
    "transforms.mask": ["MaskTokens", "begins_word"],
}
# What also counts as an argument: of `**options`, of an object with settings, of a recipe.
TAKES_ALSO = {
    "render": ["Chat"],
    "check": ["CheckSettings", "ReadSettings"],
    "build_dataset": ["build"],
    "LLMDataModule": ["CommonArguments"],
    "LocalOpenWebTextDataModule": ["CommonArguments"],
    "create_dataloaders": ["_Options"],
    "create_text_dataloaders": ["_Options"],
    "Loader": ["BatchFormat"],
    "train_tokenizer": ["ReadSettings"],
    "penstock train": ["DataConfig", "TrainingConfig", "OptimizationConfig"],
}
# Functions and arguments of Lightning, transformers and torch.
FOREIGN = {"Trainer", "per_device_eval_batch_size", "attn_implementation", "mesh_dim_names"}
FOREIGN |= {"overfit_batches"}
# Names of fields in batches and in a tokenizer.json, and an attribute of rows.
FIELDS = {
    "input_ids",
    "labels",
    "position_ids",
    "single_word",
    "normalized",
    "dropout",
    "part_rows",
}
# Words that follow the name of the package in a sentence.
VERBS = {"cannot", "does", "keeps", "reads", "renders", "that", "to"}

CALL = re.compile(r"((?:\w+\.)*\w+)\(([^()]*(?:=|…)[^()]*)\)")
ARGUMENT = re.compile(r"(?<![\w.{-])([a-z][a-z_]+)=(\{\})?")
WORD = re.compile(r"(?<!attribute )(?<![\w.{/-])[a-z]+(?:_[a-z]+)+(?![\w=(]|\.\w)")
COMMAND = re.compile(r"(?:python -m )?penstock (?:tokenizer )?[a-z]+|python -m penstock\.\w+")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def object_of(dotted):
    module, _, name = f"penstock.{dotted}".rpartition(".")
    return getattr(import_module(module), name)


def named_objects():
    """Dotted names of the functions and classes that a message can name, by their last part."""
    names = {}
    for package, exported in PUBLIC.items():
        for name in exported:
            dotted = f"{package}.{name}".removeprefix("penstock.")
            if inspect.isclass(object_of(dotted)) or inspect.isfunction(object_of(dotted)):
                names[name] = dotted
    others = {
        "integrations.huggingface": ["RowItems", "RowsTrainer", "StepLoader", "build_dataset"],
        "integrations.lightning.base": ["CommonArguments"],
        "integrations.pytorch.loaders": ["_Options"],
        "integrations.sft": ["SFTBatches", "SFTCollate"],
        "preprocess": ["preprocess"],
        "recipe": ["DataConfig"],
    }
    for module, some in others.items():
        names |= {name: f"{module}.{name}" for name in some}
    return names


NAMES = named_objects()


@cache
def arguments(name):
    """The arguments of a function or class, or the settings of a command."""
    if name in COMMANDS:
        own = {each.name for each in COMMANDS[name].params}
    elif name.startswith("python -m"):
        own = set()
    else:
        first, _, method = name.partition(".")
        each = object_of(NAMES[first])
        each = getattr(each, method) if method else each
        is_typed_dict = hasattr(each, "__total__")
        own = set(each.__annotations__ if is_typed_dict else inspect.signature(each).parameters)
    return own.union(*(arguments(each) for each in TAKES_ALSO.get(name, [])))


@cache
def options(command):
    """The options of a command of penstock, or of a module that is a program."""
    if command in COMMANDS:
        params = COMMANDS[command].params
        return {"--help"} | {flag for each in params for flag in (*each.opts, *each.secondary_opts)}
    path = PACKAGE / f"{command.rpartition('.')[2]}.py"
    return set(re.findall(r'"(--\w+)"', path.read_text(encoding="utf-8")))


def text_of(node):
    """The text of a string in the source; what an f-string inserts is `{}`."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    return None


def strings(node, inside=()):
    """The strings below a node that are no docstrings: the names around each, line and text."""
    for child in ast.iter_child_nodes(node):
        is_docstring = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        text = text_of(child)
        if text is not None:
            yield inside, child.lineno, text
        elif not is_docstring:
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            yield from strings(child, (*inside, child.name) if named else inside)


def reached_from(module, inside):
    """What reaches a text by REACHED_FROM; None if nothing is listed."""
    parents = [module.rsplit(".", depth)[0] for depth in range(3)]
    known = [f"{module}:{'.'.join(inside)}", *parents]
    return next((REACHED_FROM[each] for each in known if each in REACHED_FROM), None)


def own_arguments(inside):
    """The arguments of the public class, and of its public method or function, around a text."""
    if not inside or inside[0] not in NAMES:
        return set()
    own, each = arguments(inside[0]), object_of(NAMES[inside[0]])
    method = getattr(each, inside[1], None) if len(inside) > 1 else None
    if inspect.isfunction(method) and not inside[1].startswith("_"):
        own = own | set(inspect.signature(method).parameters)
    return own


def named_functions(text):
    """Functions and classes that a text names, and what is wrong with the calls in it."""
    functions = [each for each in re.findall(r"penstock\.(\w+)", text) if each in NAMES]
    functions += [each for each in re.findall(r"\b[A-Z]\w+", text) if each in NAMES]
    wrong = []
    for name, given in CALL.findall(text):
        path = name.removeprefix("penstock.").split(".")
        if path[0] in FOREIGN:
            continue
        if path[0] not in NAMES:
            wrong.append(f"there is no {name}()")
            continue
        known = arguments(path[0])
        if len(path) > 1:
            method = getattr(object_of(NAMES[path[0]]), path[1])
            known = set(inspect.signature(method).parameters)
        functions.append(path[0])
        asked = [argument for argument, _ in ARGUMENT.findall(given)]
        wrong += [f"{name}() has no {each}=" for each in asked if each not in known]
    return functions, wrong


def named_commands(text):
    """Commands that a text names, and what is wrong with them."""
    found = [each for each in COMMAND.findall(text) if each.split()[1] not in VERBS]
    wrong = [
        f"there is no command {each}"
        for each in found
        if each not in COMMANDS and not each.startswith("python -m")
    ]
    return [each for each in found if each not in wrong], wrong


def problems(module, inside, text):
    """What is wrong with the advice of a text."""
    functions, wrong = named_functions(text)
    commands, wrong_commands = named_commands(text)
    wrong += wrong_commands
    # The function and the command take the same settings.
    functions += ["build"] * ("penstock build" in commands)
    commands += ["penstock build"] * ("build" in functions)
    reached, own, rest = reached_from(module, inside), own_arguments(inside), CALL.sub("", text)

    for option in OPTION.findall(rest):
        entries = [each for each in reached or [] if " " in each]
        lacking = [each for each in entries if option not in options(each)]
        if not any(option in options(each) for each in commands) and (lacking or not entries):
            wrong.append(f"{option} is not an option of {', '.join(lacking) or 'a command'}")

    asked = ARGUMENT.findall(rest) + [
        (word, "") for word in WORD.findall(rest) if word in ARGUMENTS
    ]
    for name, repeated in asked:
        if name in own | FIELDS | FOREIGN or any(name in arguments(each) for each in functions):
            continue
        # A command is advised by its option, which is checked above.
        entries = [each for each in reached or [] if not (OPTION.search(rest) and " " in each)]
        lacking = [each for each in entries if name not in arguments(each)]
        if not reached or (len(lacking) == len(entries) if repeated else lacking):
            wrong.append(f"{name}= is not an argument of {', '.join(lacking) or inside}")
    return wrong


ARGUMENTS = set().union(*map(arguments, NAMES))
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def test_what_a_message_names_exists_at_the_place_it_is_raised_from():
    wrong = []
    for path in FILES:
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for inside, line, text in strings(ast.parse(path.read_text(encoding="utf-8"))):
            # A single word is a key, an option of a parser, or an argument that is passed on.
            is_list = not inside and re.fullmatch(r"[\w ]+", text)
            is_text = " " in text.strip() and not is_list and not re.search(r"<\w+ |stroke=", text)
            if is_text:
                found = problems(module, inside, text)
                wrong += [f"{path}:{line}: {each}\n    {text}" for each in found]

    assert not wrong, "\n".join(wrong)


def test_the_table_of_what_reaches_a_message_names_existing_modules_and_functions():
    for place, entries in REACHED_FROM.items():
        module, _, name = place.partition(":")
        inside = import_module(f"penstock.{module}")
        for part in filter(None, name.split(".")):
            inside = getattr(inside, part)
        assert all(arguments(each) or options(each) for each in entries)


def test_advice_that_cannot_be_followed_is_found():
    bad = {
        "Raise max_bad.": "max_bad= is not an argument of preprocess",
        "Use engine=auto.": "engine= is not an argument of build",
        "Use penstock.stream(…, append=True).": "stream() has no append=",
        "Run: penstock mend": "there is no command penstock mend",
        "Run: penstock build --mend": "--mend is not an option of penstock build",
        "Use --max-bad.": "--max-bad is not an option of penstock train, penstock fetch",
    }
    for text, start in bad.items():
        assert any(start in each for each in problems("store.workers", (), text)), text
    for text in (
        "max_bad={}",
        "Use max_bad= (--max-bad) of penstock.build.",
        "penstock reads UTF-8.",
    ):
        assert not problems("store.workers", (), text)
