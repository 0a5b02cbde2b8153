"""A small model sees packed documents as it sees them alone.

In double precision on the CPU the outputs agree to 1e-12: the same numbers are summed, in
another order. `pytest -m gpu --noconftest` needs NumPy and torch alone.
"""

import hashlib
from itertools import pairwise
from pathlib import Path

import made_store
import numpy as np
import pytest
import torch
import xxhash
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import penstock as ps
from penstock.disk import header
from penstock.store.manifest import PartRecord, part_file

LENGTH = 128
VOCABULARY = 211


def write_store(place, documents):
    """A store of one part, here and not in a fixture, so that this file stands alone."""
    place = Path(place)
    place.mkdir(parents=True)
    arrays = {
        "tokens": np.concatenate(documents).astype("<u2"),
        "bounds": np.cumsum([len(each) for each in documents]).astype("<u8"),
        "origin": np.zeros((len(documents), 2), "<u8"),
    }
    files = {}
    for kind, array in arrays.items():
        data = header(array.dtype, array.shape) + array.tobytes()
        (place / part_file(0, kind)).write_bytes(data)
        files[kind] = (len(data), xxhash.xxh3_128(data).hexdigest())
    record = PartRecord(0, len(documents), len(arrays["tokens"]), files)
    digest = hashlib.sha256(b"made").hexdigest()
    tokenizer = {"name": "made", "digest": digest, "canary": digest, "vocab_size": VOCABULARY}
    tokenizer |= {"eos_id": None, "bos_id": None, "special_tokens": "text"}
    rejects = {"bytes": 0, "xxh3_128": xxhash.xxh3_128().hexdigest(), "reasons": {}}
    inputs = [{"name": "a.txt", "bytes": 1, "format": "text", "compression": None}]
    done = {"slices": 1, "counts": {}, "rejects": rejects, "reading": {}, "inputs": inputs}
    contents = {"format": "penstock-store", "dtype": "uint16", "tokenizer": tokenizer}
    contents |= {"eos_id": None, "bos_id": None, "split": None, "side": None}
    contents |= {"counts": {"documents": len(documents), "tokens": record.num_tokens}}
    made_store.write(place, {**contents, "builds": [done]}, [record])
    return place


@pytest.fixture(scope="module")
def documents():
    generator = np.random.default_rng(5)
    sizes = generator.lognormal(3.3, 0.9, 60).astype(int).clip(1, LENGTH)
    return [generator.integers(0, VOCABULARY, size) for size in sizes]


@pytest.fixture(scope="module")
def store(documents, tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("attention") / "store", documents)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.heads_in, self.heads_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden, attend):
        rows, length, width = hidden.shape
        parts = self.heads_in(self.norms[0](hidden)).chunk(3, dim=2)
        shaped = [each.view(rows, length, self.heads, -1).transpose(1, 2) for each in parts]
        mixed = attend(*shaped).transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + self.heads_out(mixed)
        return hidden + self.down(functional.gelu(self.up(self.norms[1](hidden))))


class SmallGPT(nn.Module):
    def __init__(self, width=64, heads=4, layers=3):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, ids, position_ids, attend):
        hidden = self.tokens(ids) + self.positions(position_ids)
        for block in self.blocks:
            hidden = block(hidden, attend)
        return self.out(hidden)


def block_mask(document_ids):
    """Whether each place may look at each: earlier, and of the same document."""
    same = document_ids[:, :, None] == document_ids[:, None, :]
    return (same & torch.ones_like(same[0]).tril()).unsqueeze(1)


def by_mask(document_ids):
    mask = block_mask(document_ids)
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_flex(document_ids, attention):
    rows, length = document_ids.shape

    def same_document(row, _, query, key):
        return (query >= key) & (document_ids[row, query] == document_ids[row, key])

    mask = create_block_mask(same_document, rows, None, length, length, document_ids.device)
    return lambda q, k, v: attention(q, k, v, block_mask=mask)


def outputs_packed(model, store, attend_by, device="cpu"):
    """The output for every document, by its tokens, and the mean loss of all targets."""
    packs = ps.Packs(store, LENGTH)
    loader = ps.Loader(packs, 4, epochs=1, drop_last=False, seed=1, device=device)
    found, losses, count = {}, 0.0, 0
    for batch in loader:
        ids = batch["document_ids"]
        logits = model(batch["inputs"], batch["position_ids"], attend_by(ids))
        loss = functional.cross_entropy(
            logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum"
        )
        losses, count = losses + loss, count + int((batch["targets"] != -100).sum())
        for row in range(len(ids)):
            for number in range(int(ids[row].max()) + 1):
                chosen = ids[row] == number
                found[tuple(batch["inputs"][row][chosen].tolist())] = logits[row][chosen]
    return found, losses / count


def outputs_alone(model, documents, device="cpu"):
    found, losses, count = {}, 0.0, 0
    for document in documents:
        ids = torch.tensor(document, device=device)[None]

        def causal(q, k, v):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        logits = model(ids, torch.arange(ids.shape[1], device=device)[None], causal)
        losses += functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
        count += ids.shape[1] - 1
        found[tuple(document.tolist())] = logits[0]
    return found, losses / count


def differences(model, store, documents, attend_by, device="cpu"):
    """The largest difference of any output, and of the loss."""
    with torch.no_grad():
        packed, packed_loss = outputs_packed(model, store, attend_by, device)
        alone, alone_loss = outputs_alone(model, documents, device)
    assert set(alone) <= set(packed)
    largest = max(float((packed[key] - values).abs().max()) for key, values in alone.items())
    return largest, abs(float(packed_loss - alone_loss))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return SmallGPT().double()


def test_packed_outputs_equal_those_of_documents_alone(model, store, documents):
    largest, loss = differences(model, store, documents, by_mask)

    assert largest < 1e-12
    assert loss < 1e-12


def test_without_the_mask_they_do_not(model, store, documents):
    """So the test above can fail: attention that crosses documents gives another result."""

    def across(document_ids):
        return by_mask(torch.zeros_like(document_ids))

    assert differences(model, store, documents, across)[0] > 1e-3


def test_positions_matter_to_it_too(model, store, documents):
    class Shifted(nn.Module):
        def forward(self, ids, position_ids, attend):
            columns = torch.arange(ids.shape[1], device=ids.device)[None].expand_as(ids)
            return model(ids, columns, attend)

    assert differences(Shifted(), store, documents, by_mask)[0] > 1e-3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_document_ids_agrees(store, documents):
    torch.manual_seed(0)
    single = SmallGPT().float()
    largest, loss = differences(single, store, documents, lambda ids: by_flex(ids, flex_attention))

    assert largest < 1e-4
    assert loss < 1e-5


@pytest.mark.parametrize("end_to_end", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_of_hugging_face_tell_documents_by_their_positions(
    store, documents, attention, end_to_end
):
    """Without a cache, which the batches switch off; with one they look across documents.

    They take the softmax in single precision, so outputs agree to 1e-6.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        attn_implementation=attention,
    )
    model = transformers.LlamaForCausalLM(settings).double().eval()
    packed = {}
    with torch.no_grad():
        for batch in ps.Loader(ps.Packs(store, LENGTH), 4, epochs=1, drop_last=False, format="hf"):
            if end_to_end:
                tensors = {name: batch[name].reshape(1, -1) for name in list(batch)[:3]}
                batch = {**tensors, "use_cache": False}
            ids, places = batch["input_ids"].flatten(), batch["position_ids"].flatten()
            logits = model(**batch).logits.flatten(0, 1)
            edges = [*torch.nonzero(places == 0).flatten().tolist(), len(ids)]
            for low, high in pairwise(edges):
                packed[tuple(ids[low:high].tolist())] = logits[low:high]
        for document in documents:
            alone = model(input_ids=torch.tensor(document)[None], use_cache=False).logits[0]
            assert (packed[tuple(document.tolist())] - alone).abs().max() < 1e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_flex_attention_on_the_device_agrees(store, documents):
    torch.manual_seed(0)
    # 16 places a head is the least that the kernel takes; 32 here.
    on_device = SmallGPT(width=128).float().cuda()
    compiled = torch.compile(flex_attention)
    largest, loss = differences(
        on_device, store, documents, lambda ids: by_flex(ids, compiled), device="cuda"
    )

    # The kernel rounds products to TF32: ten bits.
    assert largest < 2e-2
    assert loss < 2e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("format", ["dict", "hf"])
def test_batches_on_the_device_equal_those_on_the_host(store, format):
    for rows in (
        ps.Packs(store, 32),
        ps.Documents(store, 32),
        ps.Documents(store, 32, side="left"),
    ):
        options = {"epochs": 2, "drop_last": False, "seed": 3, "format": format}
        on_device = iter(ps.Loader(rows, 8, device="cuda", **options))
        for right in ps.Loader(rows, 8, **options):
            found = next(on_device)
            assert list(found) == list(right)
            for name, values in right.items():
                assert found[name].dtype == values.dtype
                assert torch.equal(found[name].cpu(), values)
        assert next(on_device, None) is None
