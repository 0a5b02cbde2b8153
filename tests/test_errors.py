"""The tree of errors, and which builtin error each one also is."""

import inspect
import pickle
import re

import pytest

import penstock as ps
from penstock import errors
from penstock.catalog import fetch
from penstock.chat.template import load_template
from penstock.integrations.pytorch import TextDataset, create_dataloaders
from penstock.preprocess import preprocess
from penstock.recipe import read_recipe
from penstock.rows.tokens import open_stream

CLASSES = {
    name: each
    for name, each in vars(errors).items()
    if inspect.isclass(each) and issubclass(each, errors.PenstockError)
}


def test_the_tree_in_the_docstring_names_every_error_with_its_parent_and_builtin():
    parents = ["PenstockError"]
    drawn = {"PenstockError"}
    for line in errors.__doc__.splitlines():
        if found := re.match(r"    ([│ ]*)[├└]── (\w+) +\((\w+)\)", line):
            depth = len(found[1]) // 4 + 1
            each = CLASSES[found[2]]
            assert errors.__dict__[parents[depth - 1]] in each.__bases__, line
            assert found[3] in [base.__name__ for base in each.__mro__], line
            parents[depth:] = [found[2]]
            drawn.add(found[2])

    assert drawn == set(CLASSES)


@pytest.mark.parametrize(
    ("family", "open_path"),
    [
        (errors.SourceError, lambda path: ps.build(path, "store")),
        (errors.SourceError, lambda path: ps.build(f"{path}*", "store")),
        (errors.SourceError, lambda path: ps.stream(path, "store")),
        (errors.SourceError, lambda path: preprocess(path, "out.bin")),
        (errors.SourceError, lambda path: fetch("tinyshakespeare", "data", source=path)),
        (errors.SourceError, lambda path: TextDataset(path, cache_dir=".")),
        (errors.SourceError, lambda path: create_dataloaders(f"{path}.txt", path, "gpt2")),
        (errors.StoreError, ps.TokenStore),
        (errors.StoreError, ps.verify),
        (errors.StoreError, lambda path: ps.Windows(path, 8)),
        (errors.StoreError, lambda path: ps.Packs(path, 8)),
        (errors.StoreError, lambda path: ps.ArrayFile(f"{path}.npy")),
        (errors.StoreError, lambda path: open_stream(f"{path}.bin")),
        (errors.RecipeError, read_recipe),
        (errors.TokenizerError, lambda path: ps.load_tokenizer(f"{path}.json")),
        (errors.TokenizerError, lambda path: ps.load_tokenizer("mine/tokenizer.json")),
        (errors.TemplateError, lambda path: load_template(f"{path}.jinja")),
    ],
)
def test_a_missing_file_is_also_a_file_not_found_error(family, open_path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(FileNotFoundError, match=r"nowhere|mine/tokenizer\.json") as raised:
        open_path(str(tmp_path / "nowhere"))

    assert isinstance(raised.value, family)
    # Errors of worker processes are pickled.
    copied = pickle.loads(pickle.dumps(raised.value))
    assert type(copied) is type(raised.value)
    assert str(copied) == str(raised.value)


def test_a_directory_without_its_file_is_also_a_file_not_found_error(tmp_path):
    with pytest.raises(errors.MissingStoreError, match=r"has no penstock\.json, so it is not a"):
        ps.TokenStore(tmp_path)
    with pytest.raises(errors.MissingTokenizerError, match=r"has no tokenizer\.json in it"):
        ps.load_tokenizer(str(tmp_path))


def test_a_missing_part_of_a_store_is_also_a_file_not_found_error(tmp_path):
    store = ps.build(ps.Texts(["a b c"]), tmp_path / "store", tokenizer="bytes")
    next(store.path.glob("*.tokens*")).unlink()

    with pytest.raises(FileNotFoundError, match=r"tokens\S* is missing"):
        ps.TokenStore(store.path).document(0)
    with pytest.raises(FileNotFoundError, match=r"tokens\S* is missing"):
        ps.verify(store.path)
