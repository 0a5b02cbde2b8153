"""A batch is shown as a table in notebooks, and is a dict everywhere else."""

import copy
import io
import pickle

import pytest
import torch
from torch.utils import _pytree
from torch.utils.data import DataLoader, default_collate

import penstock as ps
from penstock.loader import BatchFormat


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    return ps.build(ps.Texts(["so much depends upon " * 40]), folder / "s", tokenizer="bytes")


@pytest.fixture
def loader(store):
    return ps.Loader(ps.Windows(store, 16), 2, prefetch=0)


@pytest.fixture
def batch(loader):
    return loader[0]


def plain(batch):
    return {"inputs": batch["inputs"], "targets": batch["targets"]}


def same(one, other):
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_a_notebook_shows_names_shapes_dtypes_and_first_values(loader):
    html = loader[0]._repr_html_()

    assert next(iter(loader))._repr_html_() == html
    assert "<td>inputs</td><td>2 x 16</td><td>int64</td><td>" in html
    first = " ".join(str(each) for each in loader[0]["inputs"][0, :12].tolist())
    assert f"<td>{first} …</td>" in html
    assert "a batch on cpu" in html


def test_nothing_in_the_table_is_markup(batch):
    batch["<script>"] = torch.zeros(2, 0)

    assert "<script" not in batch._repr_html_()
    assert "&lt;script&gt;" in batch._repr_html_()


@pytest.mark.parametrize("format", ["hf", "narrow", BatchFormat(ids=True)])
def test_every_format_of_named_fields_is_shown(loader, format):
    rows = ps.Windows(loader.plan.sources["data"].stream, 16, stride=15)
    batch = ps.Loader(rows, 2, format=format)[0]

    assert all(f"<td>{name}</td>" in batch._repr_html_() for name in batch)
    assert type(ps.Loader(rows, 2, format="tuple")[0]) is tuple


def test_a_packed_batch_for_a_model_also_shows_what_is_no_tensor(store):
    batch = ps.Loader(ps.Packs(store, 16), 2, format="hf")[0]
    moved = _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), batch)

    assert "<td>use_cache</td><td></td><td>bool</td><td>False</td>" in batch._repr_html_()
    assert type(moved) is type(batch)
    assert moved["use_cache"] is False
    assert moved["labels"].device.type == "meta"


def test_it_is_a_dict_and_equal_to_one(batch):
    assert isinstance(batch, dict)
    assert batch == plain(batch)
    assert repr(batch) == repr(plain(batch))
    assert (lambda inputs, targets: (inputs, targets))(**batch) == tuple(batch.values())
    assert same({**batch}, batch)
    assert type(batch | {}) is dict


def test_copies_are_batches(batch):
    for made in (copy.copy(batch), copy.deepcopy(batch)):
        assert type(made) is type(batch)
        assert same(made, batch)
    assert copy.deepcopy(batch)["inputs"].data_ptr() != batch["inputs"].data_ptr()


def test_it_is_saved_and_pickled_as_a_class_that_torch_loads_safely(batch):
    file = io.BytesIO()
    torch.save({"batch": batch}, file)
    file.seek(0)

    assert same(torch.load(file, weights_only=True)["batch"], batch)
    assert same(pickle.loads(pickle.dumps(batch)), batch)


def test_collate_functions_take_it(batch):
    made = default_collate([batch, batch])

    assert made["inputs"].shape == (2, 2, 16)
    assert same(next(iter(DataLoader([batch], batch_size=None))), batch)


@pytest.mark.gpu
def test_it_is_pinned(batch):
    (made,) = DataLoader([batch], batch_size=None, pin_memory=True)

    assert same(made, batch)
    assert made["inputs"].is_pinned()


def test_workers_of_a_dataloader_send_it(loader):
    made = [each for each, _ in zip(loader.as_dataloader(num_workers=1), range(3), strict=False)]

    assert len(made) == 3
    assert all(same(each, loader[step]) for step, each in enumerate(made))
    assert "<table>" in made[0]._repr_html_()


def test_torch_maps_functions_over_its_tensors(batch):
    made = _pytree.tree_map(lambda tensor: tensor + 1, {"a": [batch]})["a"][0]

    assert type(made) is type(batch)
    assert torch.equal(made["targets"], batch["targets"] + 1)
    paths = [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(batch)[0]]
    assert paths == ["['inputs']", "['targets']"]


def test_compiled_functions_take_it(batch):
    def sums(batch):
        return {name: tensor.sum() for name, tensor in batch.items()}

    # torch 2.6 compiles a loop over the items of a batch in more than one graph.
    fullgraph = not torch.__version__.startswith("2.6.")
    compiled = torch.compile(sums, backend="eager", fullgraph=fullgraph)

    assert same(compiled(batch), sums(plain(batch)))


def test_ddp_moves_its_tensors(batch):
    from torch.distributed.utils import _recursive_to

    ((made,),) = _recursive_to([batch], torch.device("cpu"), False)
    assert same(made, batch)


def test_accelerate_moves_its_tensors(batch):
    operations = pytest.importorskip("accelerate.utils.operations")
    made = operations.send_to_device(batch, "meta")

    assert [str(each.device) for each in made.values()] == ["meta", "meta"]
    assert operations.find_batch_size(batch) == 2
    assert same(operations.concatenate([batch, batch]), default_cat(batch))


def default_cat(batch):
    return {name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}


def test_lightning_moves_its_tensors(batch):
    apply = pytest.importorskip("lightning.fabric.utilities.apply_func")
    made = apply.move_data_to_device(batch, torch.device("meta"))

    assert list(made) == list(batch)
    assert [str(each.device) for each in made.values()] == ["meta", "meta"]


def test_a_model_of_transformers_takes_it(loader):
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    rows = loader.plan.sources["data"]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=257, n_layer=1, n_head=1, n_embd=8))
    batch = ps.Loader(ps.Windows(rows.stream, 16, stride=15), 2, format="hf")[0]

    assert model(**batch).loss.isfinite()
